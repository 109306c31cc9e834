"""The command that shows a run, running or past, on a page."""

from pathlib import Path
from typing import Annotated

import typer

from braid.jobs.usage import RunFolder


def dashboard(
    run: RunFolder,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that readers must give; needed beyond loopback.")
    ] = None,
) -> None:
    """Show a run on a page: timeline, overlap, loss, ranks, plan; while it trains or afterwards."""
    from braid.dashboards.metrics_feed import metrics_route
    from braid.dashboards.server import read_token, serve

    token = None if token_file is None else read_token(token_file)

    def announce(url: str) -> None:
        typer.echo(f"showing {run} (Ctrl-C ends it) on {url}")

    serve(run, host, port, token, announce, [metrics_route(run)])
