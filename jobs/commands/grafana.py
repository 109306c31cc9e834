"""``braid grafana``: the dashboards, pushed to a server or written as files."""

from pathlib import Path
from typing import Annotated

import typer

from braid.jobs.usage import Commands, example

grafana = typer.Typer(
    cls=Commands,
    epilog=example("grafana export dashboards"),
    help="Bring the dashboards Overlap and Training into Grafana.",
    no_args_is_help=True,
)

Folder = Annotated[str, typer.Option("--folder", help="Title of the folder in Grafana.")]


@grafana.command(epilog=example("grafana push --url http://127.0.0.1:3000"))
def push(
    url: Annotated[str, typer.Option(help="Grafana's address, such as http://127.0.0.1:3000.")],
    token_file: Annotated[
        Path | None, typer.Option(help="File with a service account's token (default: GRAFANA_TOKEN).")
    ] = None,
    folder: Folder = "Braid",
    prometheus_url: Annotated[
        str | None, typer.Option(help="Prometheus as Grafana reaches it; default: leave data sources alone.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 10.0,
) -> None:
    """Create or update folder, data source and dashboards on a Grafana server; again changes nothing."""
    from braid.dashboards.grafana.push import Server, read_token

    Server(url, read_token(token_file), timeout_seconds=timeout).push(folder, prometheus_url, typer.echo)


@grafana.command(epilog=example("grafana export dashboards"))
def export(
    directory: Annotated[Path, typer.Argument(help="Folder for the files.", metavar="DIR")],
    folder: Folder = "Braid",
    prometheus_url: Annotated[
        str, typer.Option(help="Prometheus as Grafana reaches it.")
    ] = "http://127.0.0.1:9090",
) -> None:
    """Write dashboards, data source and rules as files that Grafana and Prometheus read."""
    from braid.dashboards.grafana import export as write

    for path in write(directory, prometheus_url, folder):
        typer.echo(path)
