"""``braid bench``: measurements, as ratios within one run."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from braid.actors.config import ConfigError
from braid.jobs.usage import AsJson, Commands, example
from braid.scheduling.text.json_text import json_text

if TYPE_CHECKING:
    from braid.jobs.bench.overlap_case import OverlapCase

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
    from braid.jobs.bench.cases import CASES
    from braid.jobs.bench.training import run, show

    console = Console(stderr=True)
    result = run(
        rounds=rounds,
        steps=steps,
        threads=threads,
        launcher_case=CASES[0] if ray else None,
        progress=lambda text: console.print(text, highlight=False),
    )
    if as_json:
        typer.echo(json_text(result.as_json()))
    else:
        show(Console(), result)


def _check_overlap(case: "OverlapCase", names: Sequence[str]) -> None:
    """`ConfigError` for what does not go together."""
    from braid.jobs.bench.overlap_case import FILLED, LAYOUTS, ZERO
    from braid.scheduling.generate.named import ScheduleName
    from braid.scheduling.text.suggestions import must_be_one_of

    if case.layout not in LAYOUTS:
        raise ConfigError(f"--layout {case.layout!r} {must_be_one_of(case.layout, tuple(LAYOUTS))}")
    if case.mbit is not None and case.alpha is not None:
        raise ConfigError("--link-mbit and --alpha exclude each other: alpha is set by the rate")
    if case.inside_mbit is not None and case.layout not in FILLED:
        raise ConfigError(
            f"--inside-mbit needs a layout with several ranks on a host ({', '.join(FILLED)}), "
            f"not {case.layout}"
        )
    if case.route_evenly and "ep" not in LAYOUTS[case.layout]:
        raise ConfigError(
            f"--route-evenly needs a layout with experts, such as --layout ep2, not {case.layout}"
        )
    for name in names:
        text = name.partition(" ")[0]
        if text in ZERO and "dp" in LAYOUTS[case.layout]:
            continue
        try:
            ScheduleName.parse(text)
        except ValueError as error:
            raise ConfigError(f"--schedules: {error}") from None


@bench.command("overlap", epilog=example("bench overlap --layout tp2 --alpha 0.36"))
def bench_overlap(
    layout: Annotated[
        str,
        typer.Option(
            help="tp2, tp4, pp2, tp2pp2, dp2, dp4, tp2dp2, pp2dp2, cp2, cp2tp2, ep2, ep2tp2, mixed2, mixed4"
        ),
    ] = "tp2",
    zero: Annotated[int, typer.Option(help="parallel.zero of the schedules.", min=0, max=3)] = 0,
    shards: Annotated[int, typer.Option(help="parallel.shards of the schedules.", min=0)] = 0,
    context: Annotated[
        Literal["all_gather", "ring"], typer.Option(help="parallel.context of the schedules.")
    ] = "all_gather",
    recompute: Annotated[
        Literal["none", "selective", "full", "fine"],
        typer.Option(help="train.recompute; of full, oases and braid make fine, as Oases does."),
    ] = "none",
    hidden: Annotated[int, typer.Option(help="Width of the model.", min=64)] = 1024,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.", min=16)] = 512,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step, in each replica.", min=1)] = 16,
    mbit: Annotated[float | None, typer.Option("--link-mbit", help="Rate of the link.", min=1)] = None,
    inside_mbit: Annotated[
        float | None,
        typer.Option(help="Rate of links inside hosts, of tp4, dp4, tp2dp2, cp2tp2, ep2tp2, mixed4.", min=1),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Set the rate so that communication has this share.", min=0.02, max=0.95),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(help="Comma-separated, as megatron,braid:eager_w (default: all of that layout's)."),
    ] = None,
    route_evenly: Annotated[
        bool,
        typer.Option(
            "--route-evenly", help="Tokens visit experts in turn: a balanced load, for the peers too."
        ),
    ] = False,
    memory_slack: Annotated[
        float | None, typer.Option(help="overlap.memory_slack of the schedules.", min=0.0)
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="cluster.memory_gb, within which degrees of layers are planned.")
    ] = None,
    ffn: Annotated[int | None, typer.Option(help="model.ffn (default: the family's).", min=1)] = None,
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
    asked = dict(locals())
    from braid.jobs.bench import overlap, overlap_case, overlap_rows
    from braid.jobs.drill.hosts import HostsError

    named = {
        field.name: asked[field.name] for field in fields(overlap_case.OverlapCase) if field.name in asked
    }
    case = overlap_case.OverlapCase(**named)
    names = schedules.split(",") if schedules else None
    _check_overlap(case, names or ())
    if drawn:
        if layout not in overlap_case.MIXED:
            raise ConfigError(f"--drawn needs --layout {' or '.join(overlap_case.MIXED)}, not {layout}")
        names = [
            name for schedule in names or ["oases"] for name in overlap_case.drawn(schedule, case, drawn)
        ]
    console = Console(stderr=True)
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
            progress=lambda text: console.print(text, highlight=False),
        )
    except HostsError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        typer.echo(json_text(result.as_json()))
    else:
        overlap_rows.show(Console(width=max(Console().width, 140)), result)
