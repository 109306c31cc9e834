"""What a rank needs: parameters, gradients, optimizer, activations; and the FLOPs of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from braid.scheduling.operators import Graph, Part
from braid.scheduling.schedule import Block, Direction, Program, Receive, Schedule, Send, WaitSend
from braid.scheduling.spec import ModelShape, ParallelLayout

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes one rank of a pipeline stage needs, by what they hold."""

    stage: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Saved activations, and messages until they are waited for or used, when most are held."""
    working_bytes: int
    """What the operators of one pass through one part hand each other and nobody saves, when that is most."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.working_bytes
        )


def stage_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Parameters on the fullest tensor-parallel rank of a stage."""
    norm = shape.hidden * (2 if shape.biases else 1)
    per_layer = replace(shape, layers=2).parameters() - replace(shape, layers=1).parameters()
    replicated = 2 * norm + (2 * shape.hidden if shape.biases else 0) + shape.hidden * shape.experts
    experts = shape.experts * shape.hidden * shape.ffn * 3
    dense = per_layer - replicated - experts
    layer = dense // layout.tp + experts // (layout.tp * layout.ep) + replicated
    table = -(-shape.vocabulary // layout.tp) * shape.hidden
    chunks = layout.chunks_of(stage)
    total = sum(len(layout.layers_of(chunk, shape.layers)) for chunk in chunks) * layer
    embeds = sum(layout.is_first(chunk) for chunk in chunks)
    heads = sum(layout.is_last(chunk) for chunk in chunks)
    total += embeds * (table + (shape.sequence * shape.hidden if shape.family == "gpt" else 0))
    shared = min(embeds, heads) if shape.tied_head else 0
    return total + heads * norm + (heads - shared) * table


def rank_memory(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    dtype: str,
    stage: int,
) -> RankMemory:
    """Memory of a rank of ``stage`` under a schedule, with AdamW and whole optimizer states."""
    width = DTYPE_BYTES[dtype]
    parameters = stage_parameters(shape, layout, stage)
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    held = {chunk: _chunk_parts(chunk, layout, shape, parts) for chunk in layout.chunks_of(stage)}
    return RankMemory(
        stage=stage,
        parameter_bytes=parameters * width,
        gradient_bytes=parameters * main,
        optimizer_bytes=masters + 2 * parameters * main,
        activation_bytes=_peak_activations(schedule, stage, held, width),
        working_bytes=max(
            peak_working_bytes(part, schedule.programs[part.name, direction], direction, width)
            for chunk in held.values()
            for part in chunk
            for direction in Direction
        ),
    )


def _chunk_parts(
    chunk: int, layout: ParallelLayout, shape: ModelShape, parts: Mapping[str, Part]
) -> list[Part]:
    """The parts of a chunk in the order of the forward pass."""
    layers = [parts["layer"]] * len(layout.layers_of(chunk, shape.layers))
    first = [parts["embedding"]] if layout.is_first(chunk) else []
    last = [parts["head"]] if layout.is_last(chunk) else []
    return first + layers + last


def _peak_activations(schedule: Schedule, stage: int, held: Mapping[int, list[Part]], width: int) -> int:
    """Saved values and messages when most are held, walking the stage's instructions in order."""
    saved = {chunk: sum(part.saved_bytes(width) for part in parts) for chunk, parts in held.items()}
    layer = next(part for parts in held.values() for part in parts if part.name == "layer")
    message = layer.values[layer.output].bytes(width)
    received: set[Block] = set()
    now = peak = 0
    for instruction in schedule.stages[stage]:
        match instruction:
            case Send():
                now += message
            case WaitSend():
                now -= message
            case Receive(block):
                received.add(block)
                now += message
            case Block(direction, _, chunk):
                now += saved[chunk] if direction is Direction.FORWARD else -saved[chunk]
                now -= message if instruction in received else 0
        peak = max(peak, now)
    return peak


def peak_working_bytes(part: Part, program: Program, direction: Direction, width: int) -> int:
    """Most bytes that one pass through a part holds beside what is saved; activations take ``width`` each.

    A value is there from its operator's (for a collective: its start's) turn to its last reader's. What
    kernels take while they run comes on top.
    """
    graph = part.forward if direction is Direction.FORWARD else part.backward
    lives = _lives(part, graph, program)
    for name in (*part.saved(), *part.constants):
        lives.pop(name, None)
    return max(
        sum(part.values[name].bytes(width) for name, (first, last) in lives.items() if first <= now <= last)
        for now in range(len(program))
    )


def _lives(part: Part, graph: Graph, program: Program) -> dict[str, tuple[int, int]]:
    """First and last position in a program at which a value's memory is needed."""
    handed_on = {part.output, *(f"d.{name}" for name in part.inputs)}
    lives: dict[str, tuple[int, int]] = {}
    for position, action in enumerate(program):
        operator = graph.named(action.operator)
        for name in (*operator.reads, *operator.writes):
            owner = part.values[name].alias_of or name
            first, last = lives.get(owner, (position, position))
            lives[owner] = first, max(last, len(program) if name in handed_on else position)
    return lives


def model_flops(shape: ModelShape, tokens: int) -> int:
    """FLOPs of a training step over ``tokens`` tokens, without recomputation: 3 x the forward pass.

    Matrix multiplications with weights, logits and causal attention count; the rest does not.
    """
    qkv = shape.query_width + 2 * shape.kv_width
    mlp = shape.ffn * (3 if shape.gated else 2) * max(1, shape.top_k) + shape.experts
    weights = shape.layers * shape.hidden * (qkv + shape.query_width + mlp) + shape.hidden * shape.vocabulary
    attention = shape.layers * shape.sequence * shape.query_width
    return 3 * tokens * (2 * weights + 2 * attention)
