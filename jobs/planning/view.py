"""Plans, simulations and presets for the terminal and as JSON."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.scheduling.cost.engine import BlockRun
from braid.scheduling.cost.picture import moving, pair_text, paired_run
from braid.scheduling.cost.simulate import Numbers
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.model.presets.library import (
    cluster_names,
    cluster_preset,
    model_names,
    model_preset,
    model_source,
)
from braid.scheduling.plan.decide import ALIKE, Outcome
from braid.scheduling.plan.explain import Explanation
from braid.scheduling.plan.plan import Plan
from braid.scheduling.text.records import to_mapping
from braid.scheduling.trace import figures
from braid.scheduling.trace.compare import TraceComparison

GIB = 2**30
_HELPS = 0.005
"""So much more tokens per second, at least, is help."""
_STYLES = {"F": "white on dodger_blue2", "B": "black on green3", "L": "black on dark_sea_green2", "": ""}


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan, its score and the runners-up."""
    content = to_mapping(plan)
    return {"plan": content, "score": content["score"], "runners_up": content["runners_up"]}


def simulation_json(outcome: Outcome) -> dict[str, Any]:
    """The numbers of a simulated step, and what was simulated."""
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
    """An explanation as plain data."""
    return {
        "plan": to_mapping(explanation.plan),
        "numbers": simulation_json(explanation.outcome),
        "ideal_overlap_seconds": explanation.ideal_overlap_seconds,
        "what_if": [vars(answer) for answer in explanation.what_if],
    }


def show_plan(console: Console, plan: Plan, cluster: ClusterSpec) -> None:
    """The decisions, the score, the runners-up, and what is not executed of it."""
    setting = plan.setting
    title = f"plan for {cluster.gpus:,} GPUs of {cluster.name}"
    table = Table(show_header=False, title=title, title_justify="left")
    model, workload = setting.model, setting.workload
    table.add_row(
        "model",
        f"{model.family}, {model.parameters() / 1e9:.2f} B parameters: {model.layers} layers, hidden "
        f"{model.hidden}, {model.sequence:,} tokens; {setting.dtype}",
    )
    tokens = workload.global_batch * model.sequence
    table.add_row("batch", f"{workload.global_batch:,} samples, {tokens:,} tokens a step")
    table.add_row("layout", setting.layout.describe())
    samples = f"{workload.micro_batch} sample{'s' if workload.micro_batch > 1 else ''}"
    batches = f"{setting.micro_batches} micro-batches of {samples} of {model.sequence:,} tokens"
    table.add_row("schedule", f"{_schedule(setting)}, {batches}")
    table.add_row("recompute", setting.recompute)
    if plan.pairing is not None:
        note = plan.pairing
        table.add_row(
            "pairing",
            f"{note.method}: {note.ns / 1e6:.2f} ms a layer (serial {note.serial_ns / 1e6:.2f}, "
            f"{note.runner_up} {note.runner_up_ns / 1e6:.2f}, "
            f"busiest stream {note.lower_bound_ns / 1e6:.2f})",
        )
    score = plan.score
    table.add_row(
        "simulated step",
        f"{score.step_seconds:.3f} s, {score.tokens_per_second:,.0f} tokens/s, MFU {score.mfu:.1%}, "
        f"hidden {figures.share(score.hidden_fraction, 1)}, bubble {figures.share(score.bubble_fraction, 1)}",
    )
    if plan.usual:
        table.add_row("usual way", usual_line(plan))
    table.add_row("memory", f"{score.peak_bytes / GIB:.1f} of {cluster.usable_bytes / GIB:.1f} GiB usable")
    table.add_row("costs", plan.profile)
    if plan.not_executed:
        table.add_row("not executed yet", f"`braid train` does not have {', '.join(plan.not_executed)}")
    for partition in setting.partitions:
        table.add_row("partition", str(partition))
    console.print(table)
    _show_runners_up(console, plan)


def usual_line(plan: Plan) -> str:
    """What the usual schedules take with the same degrees, and what the plan gains over the best of them."""
    best, *others = plan.usual
    gain = best.step_seconds / plan.score.step_seconds - 1
    shown = (best, *(one for one in others if one.schedule == "megatron"))
    times = ", ".join(f"{one.schedule} {one.step_seconds:.3f} s" for one in shown)
    if gain < ALIKE:
        less = f"{gain:.1%} faster than {best.schedule}, less than the simulator can tell ({ALIKE:.0%})"
        return f"{times}; the plan is {less}: overlap beyond that gains nothing here"
    return f"{times}; the plan is {gain:.1%} faster than {best.schedule}"


def _schedule(setting: Setting) -> str:
    """Its name and, where it is one of several, the pipeline that was taken."""
    several = len(setting.kind.pipelines) > 1 or setting.pipeline in setting.kind.more
    return setting.schedule + (f" ({setting.pipeline})" if several else "")


def _show_runners_up(console: Console, plan: Plan) -> None:
    """Numbered; why each was not taken stands below, where there is room for it."""
    if not plan.runners_up:
        return
    table = _narrow("runners-up (simulated)", ("", "layout", "schedule"), ("s/step", "GiB"))
    notes = Table.grid(padding=(0, 2))
    for number, other in enumerate(plan.runners_up, 1):
        memory = f"{other.peak_bytes / GIB:.1f}"
        table.add_row(str(number), other.layout, other.schedule, f"{other.step_seconds:.3f}", memory)
        why = f"{other.reason} (micro-batch {other.micro_batch}, recompute {other.recompute})"
        notes.add_row(f"  {number}", why)
    console.print(table, notes)


def _narrow(title: str, texts: Sequence[str], numbers: Sequence[str], **more: Any) -> Table:
    """A table whose cells are never broken; with few and short ones it fits in 80 columns."""
    table = Table(title=title, title_justify="left", **more)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


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
)


def _add_rows(table: Table, columns: list[Numbers]) -> None:
    for label, name, write in _ROWS:
        table.add_row(label, *("-" if getattr(n, name) is None else write(getattr(n, name)) for n in columns))
    table.add_row("peak GiB", *(f"{n.peak_bytes / GIB:.1f}" for n in columns))
    for level in ("intra", "inter"):
        uses = [getattr(n, level) for n in columns]
        table.add_row(
            f"{level}-node a GPU", *(f"{use.bytes_per_gpu / 1e9:.2f} GB, {use.seconds:.3f} s" for use in uses)
        )


def show_simulation(console: Console, outcome: Outcome) -> None:
    """The numbers, the start of the pipeline and a paired block."""
    setting = outcome.setting
    console.print(
        f"{_schedule(setting)}, {setting.layout.describe()} (simulated; {outcome.bench.profile.told})"
    )
    table = Table(show_header=False)
    _add_rows(table, [outcome.numbers])
    console.print(table)
    if outcome.missing_bytes:
        console.print(
            f"does not fit: needs {outcome.missing_bytes / GIB:.1f} GiB more than a GPU can use",
            style="bold red",
        )
    _show_pipeline(console, outcome)
    _show_pair(console, outcome)


def show_comparison(console: Console, first: str, a: Outcome, second: str, b: Outcome) -> None:
    """Two simulated steps side by side."""
    table = Table(title="simulated", title_justify="left")
    for name in ("", f"A: {first}", f"B: {second}"):
        table.add_column(name)
    table.add_row("schedule", *(_schedule(outcome.setting) for outcome in (a, b)))
    table.add_row("layout", *(outcome.setting.layout.describe() for outcome in (a, b)))
    _add_rows(table, [a.numbers, b.numbers])
    console.print(table)
    console.print(f"B is {a.numbers.step_seconds / b.numbers.step_seconds:.3f} times as fast as A")


def _show_pipeline(console: Console, outcome: Outcome, stages: int = 16) -> None:
    """The first blocks over time, in as many columns as the terminal has."""
    simulation = outcome.simulation
    width = max(60, min(console.width, 200) - 10)
    blocks = [run for rank in simulation.ranks for run in rank.blocks]
    longest = max(run.course.duration for run in blocks)
    # A block wants room for its label, as F12B34; what does not fit stays out of the picture.
    window = min(simulation.step_ns, longest * width / 8)
    scale = width / window
    console.print(
        f"the first {window / 1e9:.3f} s of {simulation.step_ns / 1e9:.3f} s: F forward (blue), B backward "
        f"(green), F and B paired (yellow; * where there is no room), with the numbers of micro-batches"
    )
    for rank in simulation.ranks[:stages]:
        line = Text(f"stage {rank.number:<2} ")
        column = 0
        for run in rank.blocks:
            first, last = round(run.start * scale), round((run.start + run.course.duration) * scale)
            if first >= width:
                break
            last = min(last, width)
            if last <= max(first, column):
                continue
            line.append("·" * (first - column), style="dim")
            line.append(*_block_cell(run, last - max(first, column)))
            column = last
        line.append("·" * (width - column), style="dim")
        console.print(line, soft_wrap=True)
    if len(simulation.ranks) > stages:
        console.print(f"... and {len(simulation.ranks) - stages} more stages")


def _block_cell(run: BlockRun, room: int) -> tuple[str, str]:
    """Text and style of a block that takes ``room`` columns, the last one a gap."""
    passes = moving(run)
    letters = "".join(one.kind.value for one in passes)
    style = "black on gold3" if len(passes) > 1 else _STYLES.get(letters, _STYLES["B"])
    mark = letters if len(passes) == 1 else "*"
    if room == 1:
        return mark, style
    texts = "".join(f"{one.kind.value}{one.micro_batch}" for one in passes), letters, mark
    shown = next(text for text in texts if len(text) < room)
    return shown.center(room - 1) + "▏", style


def _show_pair(console: Console, outcome: Outcome) -> None:
    run = paired_run(outcome.simulation)
    if run is None:
        return
    width = max(40, min(console.width, 160) - 10)
    rows = pair_text(outcome.simulation, run, width)
    legend = "a paired block: F forward strand (blue), B backward strand (green)"
    if any(kind == "L" for _, pieces in rows for _, kind in pieces):
        legend += ", L (pale): what the layer or the block before has left"
    console.print(legend)
    for name, pieces in rows:
        line = Text(f"{name:<8} ")
        for text, kind in pieces:
            line.append(text, style=_STYLES[kind])
        console.print(line, soft_wrap=True)


def show_explanation(console: Console, explanation: Explanation) -> None:
    """Why, and what would help."""
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
    if helps:
        table = _narrow("what would help most", ("", "change"), ("s/step", "tokens/s"))
        notes = Table.grid(padding=(0, 2))
        for number, answer in enumerate(helps, 1):
            table.add_row(str(number), answer.change, f"{answer.step_seconds:.3f}", f"x {answer.speedup:.3f}")
            notes.add_row(f"  {number}", answer.layout)
        console.print(table, notes)
    if others := [f"{one.change} (x {one.speedup:.3f})" for one in explanation.what_if if one not in helps]:
        console.print(f"what does not help: {', '.join(others)}")


def show_traces(console: Console, first: str, second: str, compared: TraceComparison) -> None:
    """Two traces: their steps, and the operators that make the difference."""
    totals = _narrow(f"A {first}, B {second}", ("",), ("A", "B", "B / A"))
    steps = compared.first, compared.second
    for name in ("step", "compute", "communication"):
        a, b = (getattr(step, f"{name}_ns") for step in steps)
        totals.add_row(f"{name} ms", f"{a / 1e6:.2f}", f"{b / 1e6:.2f}", f"{b / a:.3f}" if a else "-")
    totals.add_row("hidden", *(f"{step.hidden_fraction:.1%}" for step in steps), "")
    console.print(totals)
    title = "operators, by what they add to the difference of a rank's step (all ms)"
    table = _narrow(title, ("operator",), ("times", "A", "B", "B / A", "adds"))
    for row in compared.operators:
        counts = dict.fromkeys((row.first_count, row.second_count))
        table.add_row(
            row.operator,
            " / ".join(map(str, counts)),
            f"{row.first_ns / 1e6:.3f}",
            f"{row.second_ns / 1e6:.3f}",
            f"{row.second_ns / row.first_ns:.2f}" if row.first_ns else "-",
            f"{row.difference_ns / 1e6:+.2f}",
        )
    console.print(table)


# -- presets -------------------------------------------------------------------------------------------------


def presets_json() -> dict[str, Any]:
    """All presets with their figures and sources."""
    return {
        "clusters": {name: to_mapping(cluster_preset(name)) for name in cluster_names()},
        "models": {
            name: {
                **to_mapping(model_preset(name)),
                "parameters": model_preset(name).parameters(),
                "source": model_source(name),
            }
            for name in model_names()
        },
    }


def show_presets(console: Console) -> None:
    """Clusters and models in two tables whose names are never cut; sources stand below, by number."""
    sources: dict[str, int] = {}

    def number_of(source: str) -> str:
        return f"[{sources.setdefault(source, len(sources) + 1)}]"

    plain: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    table = _narrow(
        "clusters (--cluster)", ("name", "GPUs"), ("TFLOP/s", "GB", "intra GB/s", "inter GB/s", ""), **plain
    )
    for name in cluster_names():
        c = cluster_preset(name)
        table.add_row(
            name,
            f"{c.nodes} x {c.gpus_per_node} {c.gpu.name}",
            f"{c.gpu.peak_flops_per_s / 1e12:g}",
            f"{c.gpu.memory_bytes / 1e9:g}",
            f"{c.intra.bytes_per_s / 1e9:g}",
            f"{c.inter.bytes_per_s / 1e9:g}" if c.inter else "-",
            Text(number_of(c.source)),
        )
    console.print(table)
    columns = ("parameters", "layers", "hidden", "sequence", "")
    table = _narrow("models", ("name", "family"), columns, **plain)
    for name in model_names():
        m = model_preset(name)
        sizes = (f"{m.parameters() / 1e9:.2f} B", str(m.layers), str(m.hidden), str(m.sequence))
        table.add_row(name, m.family, *sizes, Text(number_of(model_source(name))))
    console.print(table)
    grid = Table.grid(padding=(0, 1))
    for source, number in sources.items():
        grid.add_row(Text(f"[{number}]"), Text(source))
    console.print("sources; rates are of one GPU", grid)
