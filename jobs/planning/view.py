"""Shows plans, simulations, runs that are to begin, and presets, in the terminal and as JSON."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule, model_graphs
from braid.jobs.output import counted, facts_of, say, table_of
from braid.jobs.planning import pictures
from braid.scheduling.generate.lower import scheduled_parts
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.model.flops import model_flops
from braid.scheduling.model.presets.library import (
    cluster_names,
    cluster_preset,
    model_names,
    model_preset,
    model_source,
)
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import ALIKE, Outcome
from braid.scheduling.plan.explain import Explanation
from braid.scheduling.plan.plan import Plan
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import rank_memory
from braid.scheduling.text.records import to_mapping
from braid.scheduling.trace import figures
from braid.scheduling.trace.compare import TraceComparison

GIB = 2**30
_HELPS = 0.005
"""Least relative gain of tokens per second that counts as help."""


def plan_json(plan: Plan) -> dict[str, Any]:
    """Convert a plan with its score and the runners-up to JSON."""
    content = to_mapping(plan)
    return {"plan": content, "score": content["score"], "runners_up": content["runners_up"]}


def simulation_json(outcome: Outcome) -> dict[str, Any]:
    """Convert the numbers of a simulated step, and a description of what was simulated, to JSON."""
    setting = outcome.setting
    return {
        **outcome.numbers.as_json(),
        "simulated": True,
        "schedule": setting.schedule,
        "pipeline": setting.pipeline,
        "layout": setting.layout.describe(),
        "profile": outcome.bench.profile.told,
        "missing_bytes": outcome.missing_bytes,
        "fits": not outcome.missing_bytes,
    }


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Convert an explanation to plain data."""
    return {
        "plan": to_mapping(explanation.plan),
        "numbers": simulation_json(explanation.outcome),
        "ideal_overlap_seconds": explanation.ideal_overlap_seconds,
        "what_if": [vars(answer) for answer in explanation.what_if],
    }


def show_plan(console: Console, plan: Plan, cluster: ClusterSpec) -> None:
    """Print a plan's decisions, score and runners-up, and which of its decisions cannot be executed yet."""
    setting, score = plan.setting, plan.score
    model, workload = setting.model, setting.workload
    tokens = workload.global_batch * model.sequence
    batches = counted(setting.micro_batches, "micro-batch", "es")
    batches += f" of {counted(workload.micro_batch, 'sample')} of {model.sequence:,} tokens"
    facts = {
        "model": f"{model.family}, {model.parameters() / 1e9:.2f} B parameters{_trained(model)}: "
        f"{model.layers} layers, hidden {model.hidden}, {model.sequence:,} tokens; {setting.dtype}",
        "batch": f"{workload.global_batch:,} samples, {tokens:,} tokens a step",
        "layout": setting.layout.describe(),
        "schedule": f"{_schedule(setting)}, {batches}",
        "recompute": setting.recompute,
    }
    if (note := plan.pairing) is not None:
        facts["pairing"] = (
            f"{note.method}: {note.ns / 1e6:.2f} ms a layer (serial {note.serial_ns / 1e6:.2f}, "
            f"{note.runner_up} {note.runner_up_ns / 1e6:.2f}, "
            f"busiest stream {note.lower_bound_ns / 1e6:.2f})"
        )
    hidden, bubble = (figures.share(share, 1) for share in (score.hidden_fraction, score.bubble_fraction))
    facts["simulated step"] = (
        f"{score.step_seconds:.3f} s, {score.tokens_per_second:,.0f} tokens/s, MFU {score.mfu:.1%}, "
        f"hidden {hidden}, bubble {bubble}"
    )
    if plan.usual:
        facts["usual way"] = usual_line(plan)
    facts["memory"] = f"{score.peak_bytes / GIB:.1f} of {cluster.usable_bytes / GIB:.1f} GiB usable"
    facts["costs"] = plan.profile
    if plan.not_executed:
        facts["not executed yet"] = f"`braid train` does not have {', '.join(plan.not_executed)}"
    if setting.partitions:
        facts["partitions"] = "\n".join(map(str, setting.partitions))
    console.print(facts_of(facts, f"plan for {cluster.gpus:,} GPUs of {cluster.name}"))
    _show_runners_up(console, plan)


def usual_line(plan: Plan) -> str:
    """Describe the step times of the usual schedules with the same degrees, and the plan's gain over the best
    of them."""
    best, *others = plan.usual
    gain = best.step_seconds / plan.score.step_seconds - 1
    shown = (best, *(one for one in others if one.schedule == "megatron"))
    times = ", ".join(f"{one.schedule} {one.step_seconds:.3f} s" for one in shown)
    if gain < ALIKE:
        less = f"{gain:.1%} faster than {best.schedule}, less than the simulator can tell ({ALIKE:.0%})"
        return f"{times}; the plan is {less}: overlap beyond that gains nothing here"
    return f"{times}; the plan is {gain:.1%} faster than {best.schedule}"


def _schedule(setting: Setting) -> str:
    """Return the schedule's name and, if it has several pipelines, the chosen one."""
    several = len(setting.kind.pipelines) > 1 or setting.pipeline in setting.kind.more
    return setting.schedule + (f" ({setting.pipeline})" if several else "")


def _show_runners_up(console: Console, plan: Plan) -> None:
    rows = []
    for other in plan.runners_up:
        numbers = f"{other.step_seconds:.3f}", f"{other.peak_bytes / GIB:.1f}"
        note = f"{other.reason} (micro-batch {other.micro_batch}, recompute {other.recompute})"
        rows.append((other.layout, other.schedule, *numbers, note))
    _show_numbered(console, "runners-up (simulated)", ("layout", "schedule"), ("s/step", "GiB"), rows)


def _show_numbered(
    console: Console, title: str, texts: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows with numbers; print their last cells below the table, where there is room for them."""
    table, notes = table_of(title, ("", *texts), numbers), Table.grid(padding=(0, 2))
    for number, (*cells, note) in enumerate(rows, 1):
        table.add_row(str(number), *cells)
        notes.add_row(f"  {number}", note)
    if rows:
        console.print(table, notes)


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("s/step", "step_seconds", "{:.3f}".format),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
    ("MFU", "mfu", partial(figures.share, places=1)),
    ("communication hidden", "hidden_fraction", partial(figures.share, places=1)),
    ("communication s", "communication_seconds", "{:.3f}".format),
    ("exposed s", "exposed_seconds", "{:.3f}".format),
    ("slowdown s", "slowdown_seconds", partial(figures.lost, write="{:.3f}".format)),
    ("launch gap s", "launch_gap_seconds", "{:.3f}".format),
    ("bubble", "bubble_fraction", partial(figures.share, places=1)),
    ("peak GiB", "peak_bytes", lambda peak: f"{peak / GIB:.1f}"),
)


def _steps(
    outcomes: Sequence[Outcome], *rows: tuple[str, ...], columns: Sequence[str] = (), **look: Any
) -> Table:
    """Make a table of simulated steps side by side, below some given rows."""
    table, steps = Table(*columns, title_justify="left", **look), [one.numbers for one in outcomes]
    for row in rows:
        table.add_row(*row)
    for label, name, write in _ROWS:
        values = [getattr(numbers, name) for numbers in steps]
        table.add_row(label, *("-" if value is None else write(value) for value in values))
    for level in ("intra", "inter"):
        uses = [getattr(numbers, level) for numbers in steps]
        shown = (f"{use.bytes_per_gpu / 1e9:.2f} GB, {use.seconds:.3f} s" for use in uses)
        table.add_row(f"{level}-node a GPU", *shown)
    return table


def show_simulation(console: Console, outcome: Outcome) -> None:
    """Print the numbers, the start of the pipeline and a paired block."""
    setting = outcome.setting
    console.print(
        f"{_schedule(setting)}, {setting.layout.describe()} (simulated; {outcome.bench.profile.told})"
    )
    console.print(_steps([outcome], show_header=False))
    if outcome.missing_bytes:
        missing = f"{outcome.missing_bytes / GIB:.1f} GiB more than a GPU can use"
        console.print(f"does not fit: needs {missing}", style="bold red")


def show_comparison(console: Console, first: str, a: Outcome, second: str, b: Outcome) -> None:
    """Print two simulated steps side by side."""
    both, names = (a, b), ["", f"A: {first}", f"B: {second}"]
    schedules = ("schedule", *(_schedule(outcome.setting) for outcome in both))
    layouts = ("layout", *(outcome.setting.layout.describe() for outcome in both))
    console.print(_steps(both, schedules, layouts, title="simulated", columns=names))
    console.print(f"B is {a.numbers.step_seconds / b.numbers.step_seconds:.3f} times as fast as A")


def show_explanation(console: Console, explanation: Explanation) -> None:
    """Print why a plan is as it is, and what would help."""
    plan, numbers = explanation.plan, explanation.outcome.numbers
    setting, slow = plan.setting, figures.lost(numbers.slowdown_seconds, "{:.3f} s".format)
    console.print(
        f"{setting.layout.describe()} under {_schedule(setting)}: {numbers.step_seconds:.3f} s a step "
        f"(simulated). {numbers.exposed_seconds:.3f} s of {numbers.communication_seconds:.3f} s "
        f"communication are exposed, {numbers.bubble_seconds:.3f} s are bubble, overlap slows compute by "
        f"{'nothing' if slow == 'none' else slow}. If all communication were hidden, a step would take "
        f"{explanation.ideal_overlap_seconds:.3f} s."
    )
    _show_runners_up(console, plan)
    if plan.pairing is not None:
        note = plan.pairing
        gain = note.runner_up_ns / note.ns - 1
        console.print(
            f"pairing: {note.method} at {note.ns / 1e6:.3f} ms a layer; the runner-up, {note.runner_up}, "
            f"would cost {gain:.1%} more; one after the other {note.serial_ns / note.ns - 1:.1%} more"
        )
    for partition in plan.setting.partitions:
        console.print(f"partition {partition}")
    if plan.not_executed:
        console.print(f"not executed yet: `braid train` does not have {', '.join(plan.not_executed)}")
    helps = [one for one in explanation.what_if if one.speedup >= 1 + _HELPS]
    rows = [(one.change, f"{one.step_seconds:.3f}", f"x {one.speedup:.3f}", one.layout) for one in helps]
    _show_numbered(console, "what would help most", ("change",), ("s/step", "tokens/s"), rows)
    if others := [f"{one.change} (x {one.speedup:.3f})" for one in explanation.what_if if one not in helps]:
        console.print(f"what does not help: {', '.join(others)}")


def show_traces(console: Console, first: str, second: str, compared: TraceComparison) -> None:
    """Print the step times of two traces, and the operators that differ most."""
    totals = table_of(f"A {first}, B {second}", ("",), ("A", "B", "B / A"))
    steps = compared.first, compared.second
    for name in ("step", "compute", "communication"):
        a, b = (getattr(step, f"{name}_ns") for step in steps)
        totals.add_row(f"{name} ms", f"{a / 1e6:.2f}", f"{b / 1e6:.2f}", f"{b / a:.3f}" if a else "-")
    totals.add_row("hidden", *(figures.share(step.hidden_fraction, 1) for step in steps), "")
    console.print(totals)
    title = "operators, by what they add to the difference of a rank's step (all ms)"
    table = table_of(title, ("operator",), ("times", "A", "B", "B / A", "adds"))
    for row in compared.operators:
        counts = " / ".join(map(str, dict.fromkeys((row.first_count, row.second_count))))
        times = f"{row.first_ns / 1e6:.3f}", f"{row.second_ns / 1e6:.3f}"
        ratio = f"{row.second_ns / row.first_ns:.2f}" if row.first_ns else "-"
        table.add_row(row.operator, counts, *times, ratio, f"{row.difference_ns / 1e6:+.2f}")
    console.print(table)


# -- a run ---------------------------------------------------------------------------------------------------


def show_dry_run(console: Console, config: Config, shape: ModelShape) -> None:
    """Print the resolved configuration, layout, memory per rank and FLOPs, without starting anything.

    A user-defined layer is loaded, which runs its code.
    """
    say(console, config.to_yaml().rstrip())
    if config.model.layer is not None:
        say(console, f"model.layer={config.model.layer!r} is loaded, and its code runs, also in a dry run")
    if config.overlap.needs_profile:
        decided = f"overlap.schedule={config.overlap.schedule} is decided by measured costs"
        say(console, f"{decided}; shown is megatron")
        config = config.with_schedule("megatron")
    layout, workload = config.layout(), config.workload()
    schedule = build_schedule(config, shape)
    tokens = workload.global_batch * shape.sequence
    facts = {
        "model": f"{shape.family}, {shape.parameters() / 1e6:,.2f} M parameters{_trained(shape)}",
        "sizes": f"hidden {shape.hidden}, ffn {shape.ffn}, {shape.heads} heads, {shape.kv_heads} key-value "
        f"heads, head_dim {shape.head_dim}, vocabulary {shape.vocabulary}",
        "layout": f"{layout.ranks} ranks: {layout.describe()}" if layout.ranks > 1 else layout.describe(),
        "batch": f"{counted(workload.micro_batches(layout), 'micro-batch', 'es')} a replica, {tokens:,} "
        f"tokens a step",
        "FLOPs": f"{model_flops(shape, tokens) / 1e12:.3g} TFLOP a step (without recomputation)",
    }
    console.print(facts_of(facts, "plan"))
    kinds, train = config.sizes(shape).kinds, config.train
    graphs, unit_layers, partitions = model_graphs(config, shape), schedule.unit_layers, schedule.partitions
    parts = scheduled_parts(graphs, layout, kinds, unit_layers=unit_layers, partitions=partitions)
    code = link(schedule, layout, kinds, parts)
    names = ("stage", "parameters", "gradients", "optimizer", "activations", "total")
    memory = table_of("memory per rank (MiB, estimated)", (), names)
    for stage in range(layout.pp):
        rank = rank_memory(
            code, shape, train.dtype, stage, reduce_dtype=train.reduce_dtype, states=train.states
        )
        states = rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes
        sizes = (*states, rank.activation_bytes, rank.total_bytes)
        memory.add_row(str(stage), *(f"{size / 2**20:,.1f}" for size in sizes))
    console.print(memory)
    pictures.show_schedule(console, schedule)


def _trained(shape: ModelShape) -> str:
    """Return the words on a model's adapters; empty if it has none."""
    count = shape.adapter_parameters()
    return f" and {count / 1e6:,.2f} M of adapters, which alone are trained" if count else ""


# -- presets -------------------------------------------------------------------------------------------------


def presets_json() -> dict[str, Any]:
    """Return all presets with their figures and sources."""
    models = {}
    for name in model_names():
        model = model_preset(name)
        told = {"parameters": model.parameters(), "source": model_source(name)}
        models[name] = {**to_mapping(model), **told}
    clusters = {name: to_mapping(cluster_preset(name)) for name in cluster_names()}
    return {"clusters": clusters, "models": models}


def show_presets(console: Console) -> None:
    """Print clusters and models in two tables whose names are never cut, and below them their sources."""
    plain: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    numbers = ("TFLOP/s", "GB", "intra GB/s", "inter GB/s")
    clusters = table_of("clusters (--cluster); rates are of one GPU", ("name", "GPUs"), numbers, **plain)
    for name in cluster_names():
        c = cluster_preset(name)
        rates = [c.gpu.peak_flops_per_s / 1e12, c.gpu.memory_bytes / 1e9, c.intra.bytes_per_s / 1e9]
        inter = f"{c.inter.bytes_per_s / 1e9:g}" if c.inter else "-"
        clusters.add_row(
            name, f"{c.nodes} x {c.gpus_per_node} {c.gpu.name}", *(f"{rate:g}" for rate in rates), inter
        )
    sizes = ("parameters", "layers", "hidden", "sequence")
    models = table_of("models", ("name", "family"), sizes, **plain)
    for name in model_names():
        m = model_preset(name)
        size = f"{m.parameters() / 1e9:.2f} B"
        models.add_row(name, m.family, size, str(m.layers), str(m.hidden), str(m.sequence))
    sources = defaultdict[str, list[str]](list)
    for name in (*cluster_names(), *model_names()):
        source = model_source(name) if name in model_names() else cluster_preset(name).source
        sources[source].append(name)
    named = {", ".join(names): Text(source) for source, names in sources.items()}
    console.print(clusters, models, facts_of(named, "sources", **plain))
