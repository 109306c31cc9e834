"""``braid drill``: break a run in every way there is, and see whether it comes out as if nothing had been."""

from typing import Annotated

import typer
from rich.console import Console

from braid.jobs.output import ExitCode, answer
from braid.jobs.usage import AsJson, ConfigFile, Launcher, Overrides, read_config


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
    ranks then run on two emulated hosts of this machine. Faults of nodes come without other faults, and need
    cluster.launcher=ray and elastic.max_ranks: the ranks then run on a Ray cluster of one-CPU nodes that is
    started here for them.
    Exit code 1 if a loss, parameter or sample differs.
    """
    from braid.jobs.drill.plan import KINDS, check_faults, possible_faults

    console = Console(stderr=as_json)
    if listing:
        for name, fault in KINDS.items():
            needs = f" ({fault.needs})" if fault.needs else ""
            console.print(f"[bold]{name:16}[/bold] {fault.text}{needs}", highlight=False)
        return
    resolved = read_config(config, overrides, launcher)
    kinds = [name.strip() for name in faults.split(",")] if faults is not None else possible_faults(resolved)
    check_faults(resolved, kinds)
    from braid.jobs.drill.command import DrillError
    from braid.jobs.drill.report import show
    from braid.jobs.drill.runner import Drill

    def tell(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    made = Drill(resolved, kinds, count=count, seed=seed, progress=tell)
    try:
        report = made.run()
    except DrillError as error:
        console.print(f"[red]the drill failed:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(ExitCode.FAILURE) from None
    answer(as_json, report.as_json, lambda: show(console, report))
    if not report.passed:
        raise typer.Exit(ExitCode.FAILURE)
