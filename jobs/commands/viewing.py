"""Commands that show a run, on a page, as a trace or as a report; also while it goes on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from braid.actors.config import ConfigError
from braid.actors.controller.state.manifest import write_durably
from braid.jobs.output import check_output
from braid.jobs.usage import RunFolder

if TYPE_CHECKING:
    from braid.dashboards.trace_folder import TraceFolder


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

    def announce(url: str) -> None:
        typer.echo(f"showing {run} (Ctrl-C ends it) on {url}")

    token = None if token_file is None else read_token(token_file)
    serve(run, host, port, token, announce, [metrics_route(run)])


def trace(
    run: RunFolder,
    output: Annotated[Path, typer.Option(help="Where the trace goes.")] = Path("trace.json"),
    steps: Annotated[
        str | None, typer.Option(help="A step or a range such as 5-8 (default: the last one).")
    ] = None,
) -> None:
    """Write steps of a run as a trace for Perfetto or chrome://tracing."""
    from braid.dashboards.perfetto import perfetto_trace
    from braid.dashboards.trace_folder import TraceFolder

    check_output("--output", output)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no run; give a directory such as runs/NAME")
    traces = TraceFolder.of_run(run, keep=1 << 30)
    chosen = _steps(steps, traces)
    text = perfetto_trace([batch for step in chosen for batch in traces.step(step - 1)])
    _write({output: text})
    shown = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
    typer.echo(f"{shown} of {run}, {len(traces.ranks)} ranks: {output} (open it at https://ui.perfetto.dev)")


def report(
    run: RunFolder,
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("report.html"),
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the timeline of the last step to this file.")
    ] = None,
) -> None:
    """Write a run as one self-contained HTML file: the live page, for mails and archives."""
    from braid.dashboards.report import report_html
    from braid.dashboards.timeline_picture import timeline_svg
    from braid.dashboards.trace_folder import TraceFolder

    check_output("--output", output)
    check_output("--svg", svg)
    files = {output: report_html(run)}
    if svg is not None:
        traces = TraceFolder.of_run(run, keep=1)
        files[svg] = timeline_svg({f"step {traces.newest + 1}": (traces, traces.newest)})
    _write(files)
    typer.echo(f"report of {run}: {', '.join(map(str, files))}")


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        try:
            write_durably(path, text)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def _steps(text: str | None, traces: "TraceFolder") -> list[int]:
    """The steps that ``--steps`` names and that have spans (numbers from 1)."""
    if text is None:
        return [traces.newest + 1]
    first, _, last = text.partition("-")
    try:
        wanted = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"--steps {text!r} must be a step or a range, such as 5 or 5-8") from None
    newest, known = traces.newest + 1, [step + 1 for step in traces.steps]
    chosen = [step for step in known if step in wanted]
    if not chosen:
        raise ConfigError(f"--steps {text}: spans are kept of steps {known[0]} to {newest}")
    return chosen
