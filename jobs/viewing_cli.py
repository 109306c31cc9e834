"""Commands that look at a run; one that goes on is read as far as it is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from braid.actors.config import ConfigError
from braid.actors.controller.manifest import write_durably
from braid.jobs.output import check_output
from braid.jobs.usage import RunFolder

if TYPE_CHECKING:
    from braid.dashboards.trace_folder import TraceFolder


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
    traces = TraceFolder(run / "trace", keep=1 << 30)
    traces.refresh()
    chosen = _steps(steps, traces)
    try:
        write_durably(output, perfetto_trace([one for step in chosen for one in traces.step(step - 1)]))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
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
    text = report_html(run)
    picture = None
    if svg is not None:
        traces = TraceFolder(run / "trace")
        traces.refresh()
        picture = timeline_svg({f"step {traces.newest + 1}": (traces, traces.newest)})
    try:
        write_durably(output, text)
        if svg is not None and picture is not None:
            write_durably(svg, picture)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    typer.echo(f"report of {run}: {output}" + (f", {svg}" if svg else ""))


def _steps(text: str | None, traces: "TraceFolder") -> list[int]:
    """The steps that ``--steps`` names, of those that there are (numbers from 1)."""
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
