"""``braid drill``: break a run in every way there is, and see whether it comes out as if nothing had been."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from braid.actors.config import load_config
from braid.jobs.drill.plan import KINDS, NEED_ROOT

if TYPE_CHECKING:
    from braid.jobs.drill.report import Report

_FAILED = 1


def drill(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="CONFIG")],
    faults: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: all that this user can make. --list names them."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Order, steps, ranks and places of the faults follow from it.")
    ] = 0,
    count: Annotated[int, typer.Option(help="How often each fault comes.", min=1)] = 1,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="ray or processes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the faults and end.")] = False,
) -> None:
    """Break a run in every way there is, and compare it with the undisturbed one.

    Trains twice under runs/NAME-drill-SEED, without and with faults. Faults of hosts and links need root: the
    ranks then run on two emulated hosts of this machine. Exit code 1 if a loss, parameter or sample differs.
    """
    console = Console(stderr=as_json)
    if listing:
        for name, text in KINDS.items():
            console.print(
                f"[bold]{name:16}[/bold] {text}{' (root)' if name in NEED_ROOT else ''}", highlight=False
            )
        return
    from braid.jobs.drill.runner import Drill, DrillError, possible_faults

    resolved = load_config(
        config, [*(overrides or []), *([f"cluster.launcher={launcher}"] if launcher else [])]
    )
    kinds = [name.strip() for name in faults.split(",")] if faults is not None else possible_faults(resolved)
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
        typer.echo(json.dumps(report.as_json()))
    else:
        show(console, report)
    if not report.passed:
        raise typer.Exit(_FAILED)


def show(console: Console, report: "Report") -> None:
    """The table of a drill."""
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
    for one in report.outcomes:
        detected = "" if one.detected_after is None else f"{one.detected_after:.2f} s"
        recovered = "" if one.recovered_after is None else f"{one.recovered_after:.2f} s"
        lost = "" if one.detected_after is None else str(one.steps_lost)
        table.add_row(one.fault.name, detected, recovered, lost, one.restored_from or "no rank failed")
    console.print(table)
    for what, same in (
        ("losses", report.identical_losses),
        ("final parameters", report.identical_parameters),
        ("samples of every step", report.identical_samples),
    ):
        verdict = "[green]identical, bit for bit[/green]" if same else "[red]DIFFERENT[/red]"
        console.print(f"{what}: {verdict}", highlight=False)
    for when, held in zip(("before the first fault", "after the last fault"), report.held, strict=True):
        console.print(
            f"{when}: {held.processes} processes, {held.threads} threads, {held.files} files ({held.sockets} "
            f"sockets), {held.resident_bytes / 2**20:.0f} MiB",
            highlight=False,
        )
    if not report.identical_losses:
        console.print(f"largest relative difference of a loss: {report.largest_difference:.2e}")
