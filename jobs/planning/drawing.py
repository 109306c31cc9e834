"""Schedules and resolved configurations for the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule, model_graphs
from braid.scheduling.generate.lower import scheduled_parts
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.draw import grid, summary
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import model_flops, rank_memory
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Schedule

_STYLES = {
    "F": ("grey93 on blue", "grey93 on dodger_blue2"),
    "B": ("black on green3", "black on chartreuse3"),
    "FF": ("grey93 on blue3", "grey93 on blue3"),
    "BB": ("black on dark_sea_green4", "black on dark_sea_green4"),
}
_TOGETHER = "black on gold3"


def show_schedule(console: Console, schedule: Schedule) -> None:
    """The grid: stages downwards, time to the right; forward blue, backward green, by parity of the chunk."""
    console.print(summary(schedule), highlight=False, soft_wrap=True)
    for number, cells in enumerate(grid(schedule)):
        line = Text(f"stage {number} ")
        for text, block in cells:
            if block is None:
                line.append(text, style="dim")
                continue
            passes = [one for one in block.passes if one.kind is not PassKind.END]
            styles = _STYLES.get("".join(one.direction.value for one in passes), (_TOGETHER, _TOGETHER))
            line.append(text, style=styles[passes[0].chunk >= len(schedule.stages)])
        console.print(line, soft_wrap=True)


def show_dry_run(console: Console, config: Config, shape: ModelShape) -> None:
    """The resolved configuration, layout, memory per rank and FLOPs, without starting anything.

    A layer of the user's own is loaded, which runs its code.
    """
    console.print(config.to_yaml().rstrip(), highlight=False, markup=False, soft_wrap=True)
    if config.model.layer is not None:
        text = f"model.layer={config.model.layer!r} is loaded, and its code runs, also in a dry run"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if config.overlap.needs_profile:
        text = f"overlap.schedule={config.overlap.schedule} is decided by measured costs; shown is megatron"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        config = config.with_schedule("megatron")
    layout, workload = config.layout(), config.workload()
    schedule = build_schedule(config, shape)
    tokens = workload.global_batch * shape.sequence
    facts = Table(show_header=False, title="plan", title_justify="left")
    facts.add_row("model", f"{shape.family}, {shape.parameters() / 1e6:,.2f} M parameters")
    facts.add_row(
        "sizes",
        f"hidden {shape.hidden}, ffn {shape.ffn}, {shape.heads} heads, {shape.kv_heads} key-value heads, "
        f"head_dim {shape.head_dim}, vocabulary {shape.vocabulary}",
    )
    facts.add_row("layout", f"{layout.ranks} ranks: {layout.describe()}")
    facts.add_row(
        "batch", f"{workload.micro_batches(layout)} micro-batches a replica, {tokens:,} tokens a step"
    )
    facts.add_row("FLOPs", f"{model_flops(shape, tokens) / 1e12:.3f} TFLOP a step (without recomputation)")
    console.print(facts)
    kinds, train = config.sizes(shape).kinds, config.train
    graphs, unit_layers, partitions = model_graphs(config, shape), schedule.unit_layers, schedule.partitions
    parts = scheduled_parts(graphs, layout, kinds, unit_layers=unit_layers, partitions=partitions)
    code = link(schedule, layout, kinds, parts)
    memory = Table(title="memory per rank (MiB, estimated)", title_justify="left")
    for name in ("stage", "parameters", "gradients", "optimizer", "activations", "total"):
        memory.add_column(name, justify="right")
    for stage in range(layout.pp):
        rank = rank_memory(code, shape, train.dtype, stage, reduce_dtype=train.reduce_dtype)
        states = rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes
        sizes = (*states, rank.activation_bytes, rank.total_bytes)
        memory.add_row(str(stage), *(f"{size / 2**20:,.1f}" for size in sizes))
    console.print(memory)
    show_schedule(console, schedule)
