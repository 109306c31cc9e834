"""``braid bench``: measurements, reported as ratios within one run."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import wraps
from typing import Annotated, Any, Literal, get_origin

import typer
from rich.console import Console

from braid.actors.config import ConfigError
from braid.jobs.bench.overlap_case import MIXED, OverlapCase
from braid.jobs.usage import AsJson, Commands, example
from braid.scheduling.text.json_text import json_text

bench = typer.Typer(
    cls=Commands,
    epilog=example("bench overlap --layout tp2"),
    help="Compare Braid with plain PyTorch and its schedules with each other, as ratios within one run.",
    no_args_is_help=True,
)


@bench.command("training", epilog=example("bench training --rounds 3"))
def bench_training(
    rounds: Annotated[int, typer.Option(help="Rounds of each side.", min=1)] = 9,
    steps: Annotated[int, typer.Option(help="Steps in a round.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="Threads of a rank.", min=1)] = 1,
    as_json: AsJson = False,
    ray: Annotated[bool, typer.Option(help="Also compare Ray actors with plain processes.")] = True,
) -> None:
    """One rank against a plain PyTorch loop; Ray actors against plain processes."""
    from braid.jobs.bench import training

    result = training.run(rounds=rounds, steps=steps, threads=threads, ray=ray, progress=_say)
    if as_json:
        typer.echo(json_text(asdict(result)))
    else:
        training.show(Console(), result)


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False)


def _with_case(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that fields of `OverlapCase` become its options and replace its first argument."""
    signature = inspect.signature(command)
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=field.type
        )
        for field in fields(OverlapCase)
        if get_origin(field.type) is Annotated
    ]

    @wraps(command)
    def taking_options(**given: Any) -> None:
        named = {option.name: given.pop(option.name) for option in options if option.name in given}
        command(OverlapCase(**named), **given)

    parameters = [*options, *list(signature.parameters.values())[1:]]
    vars(taking_options)["__signature__"] = signature.replace(parameters=parameters)
    return taking_options


@bench.command("overlap", epilog=example("bench overlap --layout tp2 --alpha 0.36"))
@_with_case
def bench_overlap(
    case: OverlapCase,
    schedules: Annotated[
        str | None,
        typer.Option(help="Comma-separated, as megatron,braid:eager_w (default: all of that layout's)."),
    ] = None,
    drawn: Annotated[
        int, typer.Option(help="Of mixed2 and mixed4: compare so many random degrees of layers.", min=0)
    ] = 0,
    peers: Annotated[bool, typer.Option(help="Also measure what public torch offers.")] = True,
    rounds: Annotated[int, typer.Option(help="Alternating rounds.", min=1)] = 7,
    starts: Annotated[
        int, typer.Option(help="Start all ranks so often: equal ones may differ as long as they live.", min=1)
    ] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Ray actors on a two-node cluster.")] = False,
    spans_cost: Annotated[
        bool, typer.Option("--spans-cost", help="Also run the last schedule without recording spans.")
    ] = False,
    without: Annotated[
        Literal["partitions", "reorders", "early_sums"] | None,
        typer.Option(help="Also run braid without one of Centauri's tiers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A layout's schedules and the peers on two emulated hosts (needs root), alternating in one run."""
    names = schedules.split(",") if schedules else []
    case.check(names)
    if drawn and case.layout not in MIXED:
        raise ConfigError(f"--drawn needs --layout {' or '.join(MIXED)}, not {case.layout}")
    from braid.jobs.bench import overlap, overlap_rows
    from braid.jobs.drill.hosts import HostsError

    if drawn:
        names = [name for each in names or ["oases"] for name in overlap.drawn(each, case, drawn)]
    try:
        result = overlap.run(
            case,
            schedules=names,
            peers=peers,
            rounds=rounds,
            starts=starts,
            ray=ray,
            spans_cost=spans_cost,
            without=without,
            progress=_say,
        )
    except HostsError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        typer.echo(json_text(result.as_json()))
    else:
        overlap_rows.show(Console(width=max(Console().width, 140)), result)
