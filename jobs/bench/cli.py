"""``braid bench``: measurements, reported as ratios within one run."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.console import Console

from braid.jobs.bench.overlap_case import LAYOUTS, OverlapCase
from braid.jobs.usage import AsJson, Overrides, example
from braid.scheduling.text.json_text import json_text

bench = typer.Typer(
    epilog=example("bench overlap --layout tp2"),
    help="Compare Braid with plain PyTorch and its schedules with each other, as ratios within one run.",
    no_args_is_help=True,
)


@bench.command("training", epilog=example("bench training --rounds 3"))
def bench_training(
    rounds: Annotated[int, typer.Option(help="Rounds of each side.", min=1)] = 9, as_json: AsJson = False
) -> None:
    """One rank against a plain PyTorch loop."""
    from braid.jobs.bench import training

    results = training.run(rounds=rounds, progress=_say)
    if as_json:
        typer.echo(json_text([asdict(result) for result in results]))
    else:
        training.show(Console(), results)


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False)


@bench.command("overlap", epilog=example("bench overlap --layout tp2 --alpha 0.36"))
def bench_overlap(
    layout: Annotated[str, typer.Option(help=", ".join(LAYOUTS))] = "tp2",
    schedules: Annotated[
        str | None,
        typer.Option(help="Comma-separated, as megatron,braid:eager_w (default: the layout's)."),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of the model.", min=64)] = 1024,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.", min=16)] = 512,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step, in each replica.", min=1)] = 16,
    link_mbit: Annotated[float | None, typer.Option(help="Rate of the link.", min=1)] = None,
    inside_mbit: Annotated[
        float | None, typer.Option(help="Rate of links inside hosts, where ranks share a host.", min=1)
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Set the rate so that communication has this share.", min=0.02, max=0.95),
    ] = None,
    route_evenly: Annotated[
        bool,
        typer.Option(
            "--route-evenly", help="Tokens visit experts in turn: a balanced load, for the peers too."
        ),
    ] = False,
    overrides: Overrides = None,
    peers: Annotated[bool, typer.Option(help="Also measure what public torch offers.")] = True,
    rounds: Annotated[int, typer.Option(help="Alternating rounds.", min=1)] = 7,
    without: Annotated[
        Literal["partitions", "reorders", "early_sums"] | None,
        typer.Option(help="Also run braid without one of Centauri's tiers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A layout's schedules and the peers on two emulated hosts (as root), alternating in one run.

    With --set train.recompute=full, oases and braid recompute without repeating a collective (fine).
    """
    case = OverlapCase(
        layout=layout,
        hidden=hidden,
        layers=layers,
        tokens=tokens,
        micro_batches=micro_batches,
        mbit=link_mbit,
        inside_mbit=inside_mbit,
        alpha=alpha,
        route_evenly=route_evenly,
        settings=tuple(overrides or ()),
    )
    names = schedules.split(",") if schedules else []
    case.check(names)
    from braid.jobs.bench import overlap, overlap_rows

    result = overlap.run(case, schedules=names, peers=peers, rounds=rounds, without=without, progress=_say)
    if as_json:
        typer.echo(json_text(asdict(result)))
    else:
        overlap_rows.show(Console(width=max(Console().width, 140)), result)
