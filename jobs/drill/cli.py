"""``braid drill``: break a run in every way there is, and see whether it comes out as if nothing had been."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from braid.actors.config import load_config
from braid.jobs.usage import AsJson, ConfigFile, Launcher, Overrides
from braid.scheduling.text.json_text import json_text

if TYPE_CHECKING:
    from braid.jobs.drill.report import Report

_FAILED = 1


def drill(
    config: ConfigFile,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; one that is named twice comes twice. Default: all that can be made here. "
            "--list names them."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Order, steps, ranks and places of the faults follow from it.")
    ] = 0,
    count: Annotated[int, typer.Option(help="How often each fault comes.", min=1)] = 1,
    overrides: Overrides = None,
    launcher: Launcher = None,
    as_json: AsJson = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the faults and end.")] = False,
) -> None:
    """Break a run in every way that --list names, and compare it with the undisturbed one.

    Trains twice under runs/NAME-drill-SEED, without and with faults. Faults of hosts and links need root: the
    ranks then run on two emulated hosts of this machine. Faults of nodes need cluster.launcher=ray and
    elastic.max_ranks: the ranks then run on a Ray cluster of one-CPU nodes that is started here for them.
    Exit code 1 if a loss, parameter or sample differs; with faults of nodes, losses may differ by 2e-5 where
    other numbers of ranks add up in another order.
    """
    from braid.jobs.drill.plan import KINDS, NEED_ROOT, NODE_FAULTS, check_faults, possible_faults

    console = Console(stderr=as_json)
    if listing:
        for name, fault in KINDS.items():
            needs = " (root)" if name in NEED_ROOT else " (Ray, elastic)" if name in NODE_FAULTS else ""
            console.print(f"[bold]{name:16}[/bold] {fault.text}{needs}", highlight=False)
        return
    resolved = load_config(
        config, [*(overrides or []), *([f"cluster.launcher={launcher}"] if launcher else [])]
    )
    kinds = [name.strip() for name in faults.split(",")] if faults is not None else possible_faults(resolved)
    check_faults(resolved, kinds)
    from braid.jobs.drill.command import DrillError
    from braid.jobs.drill.runner import Drill

    made = Drill(
        resolved,
        kinds,
        count=count,
        seed=seed,
        progress=lambda text: console.print(text, highlight=False, soft_wrap=True),
    )
    try:
        report = made.run()
    except DrillError as error:
        console.print(f"[red]the drill failed:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(_FAILED) from None
    if as_json:
        typer.echo(json_text(report.as_json()))
    else:
        show(console, report)
    if not report.passed:
        raise typer.Exit(_FAILED)


def show(console: Console, report: "Report") -> None:
    """The table of faults, and whether the run came out as asked."""
    where = "this machine"
    if report.emulated_hosts:
        where = "gloo, two emulated hosts"
    elif report.emulated_nodes:
        where = "gloo, emulated nodes on one machine"
    table = Table(title=f"Fault drill ({where})", title_justify="left")
    table.add_column("fault", no_wrap=True)
    for name in ("detected after", "recovered after", "steps lost"):
        table.add_column(name, justify="right")
    table.add_column("restored from", no_wrap=True)
    for outcome in report.outcomes:
        detected = "" if outcome.detected_after is None else f"{outcome.detected_after:.2f} s"
        recovered = "" if outcome.recovered_after is None else f"{outcome.recovered_after:.2f} s"
        lost = "" if outcome.detected_after is None else str(outcome.steps_lost)
        table.add_row(
            outcome.fault.name, detected, recovered, lost, outcome.restored_from or "no rank failed"
        )
    console.print(table)
    allowed = report.allowed_difference
    if allowed:
        console.print(
            f"asked: the samples of every step, and losses within {allowed:g}, as other numbers of ranks add "
            f"up in another order (train.deterministic_reduction asks for the same bits)",
            highlight=False,
        )
    close = f"within {allowed:g}" if 0 < allowed >= report.largest_difference else ""
    for what, same, enough in (
        ("losses", report.identical_losses, close),
        ("final parameters", report.identical_parameters, "not the same bits" if allowed else ""),
        ("samples of every step", report.identical_samples, ""),
    ):
        verdict = f"[green]{enough}[/green]" if enough else "[red]DIFFERENT[/red]"
        if same:
            verdict = "[green]identical, bit for bit[/green]"
        console.print(f"{what}: {verdict}", highlight=False)
    lost = f"{report.most_lost}; a checkpoint every {report.interval}"
    color = "green" if report.most_lost <= report.interval else "yellow"
    console.print(f"steps lost by one fault, at most: [{color}]{lost}[/{color}]", highlight=False)
    for when, held in zip(("before the first fault", "after the last fault"), report.held, strict=False):
        console.print(
            f"{when}: {held.processes} processes, {held.threads} threads, {held.files} files ({held.sockets} "
            f"sockets), {held.resident_bytes / 2**20:.0f} MiB",
            highlight=False,
        )
    if not report.identical_losses:
        console.print(f"largest relative difference of a loss: {report.largest_difference:.2e}")
