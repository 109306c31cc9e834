"""What a rank needs: parameters, gradients, optimizer, activations; and the FLOPs of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from braid.scheduling.fusion import chunk_runs, takes_up
from braid.scheduling.operators import Graph, Part, Pass
from braid.scheduling.schedule import (
    Action,
    Barrier,
    Block,
    Direction,
    Gradients,
    Late,
    Pair,
    PairProgram,
    Program,
    Receive,
    Schedule,
    Send,
    Side,
    Twins,
    WaitSend,
    is_late,
)
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


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters on the fullest rank of a tensor-parallel group."""

    dense: int
    """Shared by all data- and context-parallel ranks."""
    experts: int = 0
    """Shared by the data-parallel ranks that hold the same experts."""

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


def chunk_parameters(shape: ModelShape, layout: ParallelLayout, chunk: int) -> Parameters:
    """Parameters of one chunk; a tied head counts here, though it may share its table with the embedding."""
    norm = shape.hidden * (2 if shape.biases else 1)
    per_layer = replace(shape, layers=2).parameters() - replace(shape, layers=1).parameters()
    replicated = 2 * norm + (2 * shape.hidden if shape.biases else 0) + shape.hidden * shape.experts
    experts = shape.experts * shape.hidden * shape.ffn * 3
    layers = len(layout.layers_of(chunk, shape.layers))
    dense = layers * ((per_layer - replicated - experts) // layout.tp + replicated)
    table = -(-shape.vocabulary // layout.tp) * shape.hidden
    if layout.is_first(chunk):
        dense += table + (shape.sequence * shape.hidden if shape.family == "gpt" else 0)
    if layout.is_last(chunk):
        dense += norm + table
    return Parameters(dense=dense, experts=layers * experts // (layout.tp * layout.ep))


def stage_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Parameters on the fullest tensor-parallel rank of a stage."""
    chunks = layout.chunks_of(stage)
    total = sum(chunk_parameters(shape, layout, chunk).total for chunk in chunks)
    if shape.tied_head:
        shared = min(sum(map(layout.is_first, chunks)), sum(map(layout.is_last, chunks)))
        total -= shared * -(-shape.vocabulary // layout.tp) * shape.hidden
    return total


def rank_memory(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    dtype: str,
    stage: int,
    zero: int = 0,
    gradient_width: int | None = None,
) -> RankMemory:
    """Memory of a rank of ``stage`` under a schedule, with AdamW.

    gradient_width: bytes of a gradient; by default they are added up in at least single precision.

    zero: ZeRO stage; 1 cuts the optimizer's states over the ranks that share the parameters, 2 the gradients
    too, 3 the parameters too (one layer's worth more is gathered at a time).
    """
    width = DTYPE_BYTES[dtype]
    parameters = stage_parameters(shape, layout, stage)
    # The copies of a bidirectional pipeline are replicas: ZeRO cuts states over them too.
    shares = layout.dp * layout.cp * layout.copies
    states = state_bytes(parameters, width, shares, zero, gradient_width)
    held = _held(schedule, layout, shape, parts, stage)
    names = {part.name for chunk in held.values() for part in chunk}
    working = max(
        peak_working_bytes(parts[name], schedule.programs[name, direction], direction, width)
        for name in names
        for direction in Direction
    )
    return RankMemory(
        stage=stage,
        parameter_bytes=states[0],
        gradient_bytes=states[1],
        optimizer_bytes=states[2],
        activation_bytes=max(_activations(schedule, stage, held, width, working), default=0),
        working_bytes=working,
    )


def state_bytes(
    parameters: int, width: int, shares: int, zero: int, gradient_width: int | None = None
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states of a rank under a ZeRO stage."""
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    optimizer = masters + 2 * parameters * main
    cut = [shares if zero >= level else 1 for level in (3, 2, 1)]
    gradients = parameters * (gradient_width or main)
    return parameters * width // cut[0], gradients // cut[1], optimizer // cut[2]


def _held(
    schedule: Schedule, layout: ParallelLayout, shape: ModelShape, parts: Mapping[str, Part], stage: int
) -> dict[int, list[Part]]:
    """The parts or runs of every chunk of a stage in the order of the forward pass."""
    return {
        chunk: [parts[run.name] for run in chunk_runs(layout, shape.layers, chunk, schedule.fused)]
        for chunk in layout.chunks_of(stage)
    }


def message_bytes(parts: Mapping[str, Part], width: int) -> int:
    """Bytes of a message between stages: the input of any part that has one."""
    sizes = [part.values["x"].bytes(width) for part in parts.values() if "x" in part.inputs]
    return max(sizes, default=0)


def _activations(
    schedule: Schedule, stage: int, held: Mapping[int, list[Part]], width: int, working: int = 0
) -> list[int]:
    """Bytes of saved values and messages when most are held during each instruction of a stage, in order.

    Of a paired block also what it needs beyond the ``working`` bytes that are counted anyway.
    """
    saved = {chunk: sum(part.saved_bytes(width) for part in parts) for chunk, parts in held.items()}
    known = {part.name: part for parts in held.values() for part in parts}
    message = message_bytes(known, width)
    extra = max(
        (
            pair_extra_bytes(known[first], known[second], program, width) - working
            for (first, second), program in schedule.pairs.items()
            if first in known and second in known
        ),
        default=0,
    )
    extra = max(0, extra)
    ends = takes_up(schedule.programs)
    received: set[Block] = set()
    now = 0
    during = []

    def run(block: Block) -> int:
        """What a block adds; of a split backward pass the first half keeps what the second needs."""
        change = -message if block.travels and block.whole in received else 0
        if block.direction is Direction.FORWARD:
            return change + saved[block.chunk]
        owed = sum(_owed_bytes(part, width) for part in held[block.chunk])
        match block.gradients:
            case Gradients.INPUT:
                return change - saved[block.chunk] + owed
            case Gradients.WEIGHT:
                return change - owed
            case Gradients.BOTH:
                return change - saved[block.chunk]

    for instruction in schedule.stages[stage]:
        most = now
        match instruction:
            case Send():
                now += message
            case WaitSend():
                now -= message
            case Receive(block):
                received.add(block)
                now += message
            case Block():
                returns = instruction.direction is Direction.BACKWARD
                if returns and any(part.name in ends for part in held[instruction.chunk]):
                    most += extra  # what the paired block before may have left
                now += run(instruction)
            case Pair(forward, backward):
                # Layer by layer one of them takes while the other gives.
                most += extra
                now += run(forward) + run(backward)
            case Twins(first, second):
                most += working  # what two passes hand on instead of one
                now += run(first) + run(second)
        during.append(max(most, now))
    return during


def _owed_bytes(part: Part, width: int) -> int:
    """What a part's weight gradients read: kept between a split backward pass's two halves."""
    names = {n for op in part.backward.operators if op.phase is Pass.WEIGHT_GRADIENT for n in op.reads}
    owners = {part.values[name].alias_of or name for name in names} - set(part.constants)
    return sum(part.values[name].bytes(width) for name in owners)


def pair_extra_bytes(ahead: Part, behind: Part, program: PairProgram, width: int) -> int:
    """Most bytes that a paired program holds beyond what its backward part had saved when it began.

    Values of the forward side live from their writing on, saved ones to the end; saved values of the backward
    side live to their last reader; what late operators find lives from the begin (that of the part before)
    and to the end (that of this one).
    """
    actions = [action for action in program if not isinstance(action, Barrier)]
    end = len(actions)
    change = [0] * (end + 1)

    def live(part: Part, name: str, first: int, last: int) -> None:
        size = part.values[name].bytes(width)
        change[first] += size
        if last < end:
            change[last + 1] -= size

    def side(wanted: Side) -> list[Action]:
        return [a for a in actions if a.side is wanted]

    def owner(part: Part, name: str) -> str:
        return part.values[name].alias_of or name

    at = {id(action): position for position, action in enumerate(actions)}
    lasting = {owner(ahead, name) for name in ahead.saved()} - set(ahead.constants)
    for name, (first, last) in _spans(ahead, ahead.forward, side(Direction.FORWARD), at).items():
        live(ahead, name, 0 if name in ahead.inputs else first, end if name in lasting else last)
    late = [behind.backward.named(action.operator) for action in side(Late.BACKWARD)]
    made = {name for op in late for name in op.writes}
    kept = {owner(behind, name) for op in late for name in op.reads if name not in made}
    kept -= set(behind.constants)
    begin = {owner(behind, name) for name in behind.saved()} - set(behind.constants)
    if f"d.{behind.output}" in behind.values:
        begin.add(owner(behind, f"d.{behind.output}"))
    backward = _spans(behind, behind.backward, side(Direction.BACKWARD), at)
    # What only late operators read is touched by nothing here and there all the time.
    backward |= dict.fromkeys(kept - set(backward), (0, end))
    for name, (first, last) in backward.items():
        live(behind, name, 0 if name in begin else first, end if name in kept else last)
    for name, (first, last) in _spans(behind, behind.backward, side(Late.BACKWARD), at).items():
        live(behind, name, 0 if name in kept else first, last)
    peak = now = 0
    for delta in change[:-1]:
        now += delta
        peak = max(peak, now)
    return max(0, peak - behind.saved_bytes(width))


def _spans(
    part: Part, graph: Graph, actions: Sequence[Action], at: Mapping[int, int]
) -> dict[str, tuple[int, int]]:
    """First and last position (by ``at``) at which the memory of a value is touched by some actions."""
    spans: dict[str, tuple[int, int]] = {}
    for action in actions:
        operator = graph.named(action.operator)
        position = at[id(action)]
        for name in (*operator.reads, *operator.writes):
            owner = part.values[name].alias_of or name
            first, _ = spans.get(owner, (position, position))
            spans[owner] = first, position
    for name in set(part.constants) & set(spans):
        del spans[name]
    return spans


def peak_position(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    dtype: str,
    stage: int,
) -> int:
    """Position of the instruction of a stage during which most activations are held."""
    held = _held(schedule, layout, shape, parts, stage)
    during = _activations(schedule, stage, held, DTYPE_BYTES[dtype])
    return during.index(max(during)) if during else 0


def peak_working_bytes(part: Part, program: Program, direction: Direction, width: int) -> int:
    """Most bytes that one pass through a part holds beside what is saved; activations take ``width`` each.

    A value is there from its operator's (for a collective: its start's) turn to its last reader's. What
    kernels take while they run comes on top.
    """
    graph = part.forward if direction is Direction.FORWARD else part.backward
    program = tuple(action for action in program if not is_late(action))
    lives = _lives(part, graph, program)
    for name in (*part.saved(), *part.constants):
        lives.pop(name, None)
    at = (
        sum(part.values[name].bytes(width) for name, (first, last) in lives.items() if first <= now <= last)
        for now in range(len(program))
    )
    return max(at, default=0)


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
