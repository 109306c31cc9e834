"""Commands that show a run, also while it trains: a page, a trace, a report, logs of its ranks; and `braid
grafana`, which brings the dashboards Overlap and Training into Grafana."""

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from braid.actors.config import ConfigError
from braid.actors.stage.rank.log import FOLDER, log_file, put_aside
from braid.dashboards.run_files import is_under_way
from braid.jobs.output import check_outputs, write_output
from braid.jobs.usage import RunFolder, example, group

Folder = Annotated[str, typer.Option("--folder", help="Title of the folder in Grafana.")]

_LOOK_SECONDS = 0.3

grafana = group("Bring the dashboards Overlap and Training into Grafana.", "grafana export dashboards")


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

    check_outputs(output=output)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no run; give a directory such as runs/NAME")
    traces = TraceFolder.of_run(run, keep=1 << 30)
    known, newest = [step + 1 for step in traces.steps], traces.newest + 1
    first, _, last = (steps or str(newest)).partition("-")
    try:
        wanted = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"--steps {steps!r} must be a step or a range, such as 5 or 5-8") from None
    if not (chosen := [step for step in known if step in wanted]):
        raise ConfigError(f"--steps {steps}: spans are kept of steps {known[0]} to {newest}")
    text = perfetto_trace([batch for step in chosen for batch in traces.step(step - 1)])
    write_output("output", output, text)
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

    check_outputs(output=output, svg=svg)
    html = report_html(run)
    if svg is not None:
        traces = TraceFolder.of_run(run, keep=1)
        write_output("svg", svg, timeline_svg({f"step {traces.newest + 1}": (traces, traces.newest)}))
    write_output("output", output, html)
    typer.echo(f"report of {run}: {output}" + (f", {svg}" if svg else ""))


def logs(
    run: RunFolder,
    rank: Annotated[int | None, typer.Option(help="Of this rank only.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Show what the ranks of a run wrote: warnings, traces, errors of NCCL and gloo."""
    if not (run / "config.yaml").is_file() and not (run / FOLDER).is_dir():
        raise ConfigError(f"{run} holds no run; give a directory such as runs/NAME")
    if not (known := _known(run)):
        raise ConfigError(f"{run / FOLDER} holds no logs: no rank of this run could write any there")
    if rank is not None and rank not in known:
        raise ConfigError(f"--rank {rank}: {run} has logs of ranks {', '.join(map(str, known))}")
    _show_all(run, rank, follow)


def _known(run: Path) -> list[int]:
    names = [re.fullmatch(r"rank-(\d+)\.log", path.name) for path in (run / FOLDER).glob("*")]
    return sorted(int(name[1]) for name in names if name)


def _show_all(run: Path, rank: int | None, follow: bool) -> None:
    """Print existing log lines; with ``follow``, also new lines until the run has ended, each once it is
    whole."""
    shown: dict[int, int] = {}  # bytes of each file, by its inode, as a log is put aside or replaced
    while True:
        over = not follow or not is_under_way(run)
        for number in _known(run) if rank is None else [rank]:
            log = log_file(run, number)
            for path in (put_aside(log), log):
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    begin = shown.get(status.st_ino, 0)
                    file.seek(position := begin if begin <= status.st_size else 0)
                    for line in file:
                        if not (over or line.endswith(b"\n")):
                            break
                        print(f"rank {number} | {line.decode(errors='replace').rstrip()}")
                        position += len(line)
                    shown[status.st_ino] = position
        sys.stdout.flush()
        if over:
            return
        time.sleep(_LOOK_SECONDS)


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
