"""The commands that plan and simulate: no GPU, no torch, no Ray."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from braid.jobs.output import check_output
from braid.jobs.usage import AsJson, Overrides, example
from braid.scheduling.text.json_text import json_text

if TYPE_CHECKING:
    from braid.scheduling.plan.decide import Outcome
    from braid.scheduling.trace.batches import Batch

Reference = Annotated[
    str, typer.Argument(help="A run's YAML file or a model preset (braid presets).", metavar="CONFIG|MODEL")
]
ClusterOfPlan = Annotated[
    str | None, typer.Option(help="Cluster preset or YAML file (default: the plan's).", metavar="PRESET|FILE")
]
Cluster = Annotated[str, typer.Option(help="Cluster preset, or YAML file.", metavar="PRESET|FILE")]
Nodes = Annotated[int | None, typer.Option(help="Another number of nodes than the preset's.", min=1)]
ProfileFile = Annotated[Path | None, typer.Option(help="Measured costs: profile.json.")]
Svg = Annotated[Path | None, typer.Option(help="Also draw an SVG to this file.")]


def plan(
    config: Reference,
    cluster: Cluster = "h100",
    nodes: Nodes = None,
    profile: ProfileFile = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan (YAML) to this file.")] = None,
    svg: Svg = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the best layout, schedule and pairing of a job on a cluster."""
    from braid.jobs.planning import view, work
    from braid.jobs.planning.searching import searching

    check_output("--output", output)
    check_output("--svg", svg)
    job = work.request(config, overrides, cluster, nodes, profile)
    with searching(quiet=as_json) as tell:
        made = work.make_plan(job, tell)
    if output is not None:
        work.write_file(output, made.to_yaml(), "--output")
    if svg is not None:
        _draw(work.simulate_plan(made, job.cluster, None, job.profile), svg)
    if as_json:
        typer.echo(json_text(view.plan_json(made)))
    else:
        view.show_plan(Console(), made, job.cluster)


def simulate(
    config: Annotated[
        str,
        typer.Argument(
            help="A run's YAML file, a plan or a model preset (braid presets).", metavar="CONFIG|PLAN|MODEL"
        ),
    ],
    cluster: ClusterOfPlan = None,
    nodes: Nodes = None,
    schedule: Annotated[
        str | None, typer.Option(help="Another schedule on the same layout.", metavar="SCHEDULE[:PIPELINE]")
    ] = None,
    profile: ProfileFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the spans: .json for Perfetto, .arrows for compare.", metavar="FILE"),
    ] = None,
    svg: Svg = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one step of a configuration or a plan."""
    from braid.jobs.planning import view, work

    check_output("--trace", trace)
    check_output("--svg", svg)
    outcome = _outcome(config, cluster, nodes, schedule, profile, overrides)
    if trace is not None:
        from braid.dashboards.perfetto import perfetto_trace
        from braid.scheduling.trace.batches import SUFFIX, batches_of, encode_all

        spans = batches_of(outcome.simulation.spans())
        work.write_file(
            trace, encode_all(spans) if trace.suffix == SUFFIX else perfetto_trace(spans), "--trace"
        )
    if svg is not None:
        _draw(outcome, svg)
    if as_json:
        typer.echo(json_text(view.simulation_json(outcome)))
    else:
        view.show_simulation(Console(), outcome)


def _outcome(
    reference: str,
    cluster: str | None,
    nodes: int | None,
    schedule: str | None = None,
    profile: Path | None = None,
    overrides: list[str] | None = None,
) -> "Outcome":
    from braid.actors.config import ConfigError
    from braid.jobs.planning import work
    from braid.scheduling.cost.profile import read_profile
    from braid.scheduling.plan.plan import read_plan

    if work.is_plan(reference):
        if overrides:
            raise ConfigError("--set changes configurations; edit the plan's YAML instead")
        plan = read_plan(Path(reference))
        costs = None if profile is None else read_profile(profile)
        spec = work.cluster_of(plan, cluster, nodes)
        return work.simulate_plan(plan, spec, schedule, costs)
    job = work.request(reference, overrides, cluster or "h100", nodes, profile)
    return work.simulate_request(job, schedule)


def _draw(outcome: "Outcome", path: Path) -> None:
    """Two pictures: the pipeline, and beside it (``-pair``) a paired block."""
    from braid.jobs.planning import work
    from braid.scheduling.cost.picture import pair_svg, paired_run, pipeline_svg

    setting = outcome.setting
    title = f"{setting.title}: {setting.layout.describe()}, {setting.micro_batches} micro-batches (simulated)"
    work.write_file(path, pipeline_svg(outcome.simulation, title), "--svg")
    run = paired_run(outcome.simulation)
    if run is not None:
        beside = path.with_name(f"{path.stem}-pair{path.suffix}")
        title = f"{setting.title}: a paired block (simulated)"
        work.write_file(beside, pair_svg(outcome.simulation, run, title), "--svg")


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan that `braid plan --output` wrote.", metavar="PLAN")],
    cluster: ClusterOfPlan = None,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Why a plan is as it is, what the runners-up cost, and what would help most."""
    from braid.jobs.planning import view, work
    from braid.jobs.planning.searching import searching
    from braid.scheduling.plan.explain import explain as answer
    from braid.scheduling.plan.plan import read_plan

    made = read_plan(plan)
    spec = work.cluster_of(made, cluster, nodes)
    with searching(quiet=as_json) as tell:
        explanation = answer(made, spec, tell)
    if as_json:
        typer.echo(json_text(view.explanation_json(explanation)))
    else:
        view.show_explanation(Console(), explanation)


def compare(
    first: Annotated[str, typer.Argument(help="A plan, configuration, preset or trace.", metavar="A")],
    second: Annotated[str, typer.Argument(help="What to compare it with.", metavar="B")],
    cluster: ClusterOfPlan = None,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Set two plans or configurations side by side, simulated; or two traces, operator by operator.

    A trace is a run's directory (its newest step) or a file: runs/NAME/trace/predicted.arrows, or that of
    simulate --trace.
    """
    from braid.jobs.planning import view

    if _is_trace(first) and _is_trace(second):
        from braid.scheduling.trace.compare import compare_traces

        compared = compare_traces(_trace(Path(first)), _trace(Path(second)))
        if as_json:
            typer.echo(json_text(asdict(compared)))
        else:
            view.show_traces(Console(), first, second, compared)
        return
    outcomes = {name: _outcome(name, cluster, nodes) for name in (first, second)}
    if as_json:
        a, b = (view.simulation_json(outcomes[name]) for name in (first, second))
        typer.echo(json_text({"a": a, "b": b, "speedup": a["step_seconds"] / b["step_seconds"]}))
    else:
        view.show_comparison(Console(), first, outcomes[first], second, outcomes[second])


def _is_trace(reference: str) -> bool:
    return reference.endswith((".arrows", ".json")) or Path(reference).is_dir()


def _trace(path: Path) -> "list[Batch]":
    """The spans of a file, or of a run's newest step."""
    from braid.dashboards.trace_folder import TraceFolder
    from braid.scheduling.trace.batches import read_batches

    if not path.is_dir():
        return read_batches(path)
    folder = TraceFolder.of_run(path, keep=1)
    return folder.step(folder.newest)


def presets(as_json: AsJson = False) -> None:
    """List the clusters and models that are known by name, with their sources."""
    from braid.jobs.planning import view

    if as_json:
        typer.echo(json_text(view.presets_json()))
    else:
        view.show_presets(Console())


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command, call in (
        (plan, "plan llama-3.1-8b --cluster h100 --nodes 8 --output plan.yaml"),
        (simulate, "simulate plan.yaml --schedule megatron"),
        (explain, "explain plan.yaml"),
        (compare, "compare plan.yaml other.yaml"),
        (presets, "presets"),
    ):
        app.command(epilog=example(call))(command)
