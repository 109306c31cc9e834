"""Commands that plan and simulate, without GPU, torch and Ray; and commands that show or measure a run's
schedule and costs."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from braid.jobs.output import answer, check_outputs, print_or_write, say, write_output
from braid.jobs.usage import AsJson, ConfigFile, Launcher, Overrides, read_config

if TYPE_CHECKING:
    from braid.scheduling.plan.decide import Outcome
    from braid.scheduling.trace.batches import Batch

Reference = Annotated[
    str, typer.Argument(help="A run's YAML file or a model preset (braid presets).", metavar="CONFIG|MODEL")
]
ClusterOfPlan = Annotated[
    str | None,
    typer.Option(help="Preset or YAML file (default: the plan's, or h100).", metavar="PRESET|FILE"),
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

    check_outputs(output=output, svg=svg)
    job = work.request(config, overrides, cluster, nodes, profile)
    with _searching() as tell:
        made = work.make_plan(job, tell)
    write_output("output", output, made.to_yaml())
    if svg is not None:
        _draw(work.simulate_plan(made, job.cluster, None, job.profile), svg)
    answer(as_json, lambda: view.plan_json(made), lambda: view.show_plan(Console(), made, job.cluster))


@contextmanager
def _searching() -> Iterator[Callable[[str], None]]:
    """Yield a function to which a search within the block reports what it is doing, and show that in a
    terminal."""
    with Console(stderr=True).status("searching") as status:
        yield lambda what: status.update(f"searching: {what}")


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

    check_outputs(trace=trace, svg=svg)
    outcome = work.simulated(config, cluster, nodes, schedule, profile, overrides)
    if trace is not None:
        from braid.dashboards.perfetto import perfetto_trace
        from braid.scheduling.trace.batches import SUFFIX, batches_of, encode_all

        spans = batches_of(outcome.simulation.spans())
        write_output("trace", trace, encode_all(spans) if trace.suffix == SUFFIX else perfetto_trace(spans))
    if svg is not None:
        _draw(outcome, svg)
    answer(as_json, lambda: view.simulation_json(outcome), lambda: view.show_simulation(Console(), outcome))


def _draw(outcome: "Outcome", path: Path) -> None:
    """Draw two pictures: the pipeline, and in a second file (``-pair``) a paired block."""
    from braid.scheduling.cost.picture import pair_svg, paired_run, pipeline_svg

    setting = outcome.setting
    title = f"{setting.title}: {setting.layout.describe()}, {setting.micro_batches} micro-batches (simulated)"
    write_output("svg", path, pipeline_svg(outcome.simulation, title))
    run = paired_run(outcome.simulation)
    if run is not None:
        beside = path.with_name(f"{path.stem}-pair{path.suffix}")
        title = f"{setting.title}: a paired block (simulated)"
        write_output("svg", beside, pair_svg(outcome.simulation, run, title))


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan that `braid plan --output` wrote.", metavar="PLAN")],
    cluster: ClusterOfPlan = None,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Why a plan is as it is, what the runners-up cost, and what would help most."""
    from braid.jobs.planning import view, work
    from braid.scheduling.plan.explain import explain as explained
    from braid.scheduling.plan.plan import read_plan

    made = read_plan(plan)
    spec = work.cluster_of(made, cluster, nodes)
    with _searching() as tell:
        explanation = explained(made, spec, tell)
    content = view.explanation_json(explanation)
    answer(as_json, lambda: content, lambda: view.show_explanation(Console(), explanation))


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
    from braid.actors.config import ConfigError
    from braid.jobs.planning import view, work

    if _is_trace(first) and _is_trace(second):
        from braid.scheduling.trace.compare import compare_traces

        compared = compare_traces(_trace(Path(first)), _trace(Path(second)))
        told = partial(view.show_traces, Console(), first, second, compared)
        answer(as_json, lambda: asdict(compared), told)
        return
    if _is_trace(first) or _is_trace(second):
        raise ConfigError(f"{first} and {second}: a trace is compared only with a trace, such as runs/NAME")
    outcomes = {name: work.simulated(name, cluster, nodes) for name in (first, second)}
    a, b = (view.simulation_json(outcomes[name]) for name in (first, second))
    content = {"a": a, "b": b, "speedup": a["step_seconds"] / b["step_seconds"]}
    told = partial(view.show_comparison, Console(), first, outcomes[first], second, outcomes[second])
    answer(as_json, lambda: content, told)


def _is_trace(reference: str) -> bool:
    return reference.endswith((".arrows", ".json")) or Path(reference).is_dir()


def _trace(path: Path) -> "list[Batch]":
    """Read the spans of a file, or of a run's newest step."""
    from braid.dashboards.trace_folder import TraceFolder
    from braid.scheduling.trace.batches import read_batches

    if not path.is_dir():
        return read_batches(path)
    folder = TraceFolder.of_run(path, keep=1)
    return folder.step(folder.newest)


def presets(as_json: AsJson = False) -> None:
    """List the clusters and models that are known by name, with their sources."""
    from braid.jobs.planning import view

    answer(as_json, view.presets_json, lambda: view.show_presets(Console()))


def schedule(
    config: ConfigFile,
    overrides: Overrides = None,
    show: Annotated[bool, typer.Option("--show", help="Draw the grid instead of printing the text.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the text to this file.")] = None,
) -> None:
    """Print a run's schedule as text, draw it, or write it to a file for overlap.schedule_file."""
    from braid.jobs.data.tokenizer import tokenizer_of
    from braid.jobs.planning import pictures, work
    from braid.scheduling.schedule.text import write

    resolved = work.with_plan(read_config(config, overrides))
    check_outputs(output=output)
    made = work.known_schedule(resolved, resolved.check(tokenizer_of(resolved).vocabulary))
    if output is not None or not show:
        print_or_write(output, write(made))
    if show:
        pictures.show_schedule(Console(), made)


def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    launcher: Launcher = None,
    output: Annotated[Path | None, typer.Option(help="Also write the profile to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the heat map to this file.")] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Measure even if that was done before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a run's operators alone and beside communication, with its shapes, ranks and links."""
    from braid.actors.config.paths import anchored
    from braid.actors.controller.profiling import find_or_measure
    from braid.jobs.cluster.session import launcher_of
    from braid.jobs.data.tokenizer import tokenizer_of
    from braid.jobs.planning.pictures import svg_map, terminal_map
    from braid.jobs.training.refusals import check_place_of_ranks
    from braid.scheduling.cost.effectiveness import effectiveness

    check_outputs(output=output, svg=svg)
    resolved = anchored(read_config(config, overrides, launcher), Path.cwd())
    shape = resolved.check(tokenizer_of(resolved).vocabulary)
    check_place_of_ranks(resolved, shape)
    with launcher_of(resolved) as (starts, _):
        starts.check(resolved.layout().ranks)
        found = find_or_measure(resolved, shape, starts, anew=anew)
    if found.trouble:
        typer.echo(f"braid: {found.trouble}", err=True)
    text, heat = found.profile.to_json(), effectiveness(found.profile)
    write_output("output", output, text)
    if svg is not None:
        write_output("svg", svg, svg_map(heat))

    def show() -> None:
        console = Console()
        if heat.columns:
            console.print(terminal_map(heat))
        else:
            console.print("this layout has no communication inside layers: nothing to overlap there")
        measured = f"measured in {found.seconds:.0f} s"
        how = "measured before; --anew measures again" if found.reused else measured
        say(console, f"profile {found.path} ({how})")

    answer(as_json, lambda: json.loads(text), show)
