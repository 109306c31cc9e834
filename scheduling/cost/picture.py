"""Draws a simulated step: the pipeline over time, and a paired block's strands on three streams."""

from dataclasses import dataclass

from braid.scheduling.cost.engine import BlockRun
from braid.scheduling.cost.simulate import Simulation
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.operations import Compute, Node, Pass, PassKind, Start, name_of
from braid.scheduling.text.pattern import is_layer
from braid.scheduling.trace.batches import batches_of
from braid.scheduling.trace.numbers import phases
from braid.scheduling.trace.svg import EXPOSED, MOVES, Bar, Row, rows_picture

_FILLS = {"F": "#4c8bf5", "B": "#3aa76d", "I": "#3aa76d", "W": "#a3c585", "L": "#c5e6d3"}
"""Colours of passes, and of the end of a backward pass that runs in a later block or layer (L)."""
_INKS = {"L": "#14532d"}
"""Colours of labels for which white would not be visible."""


def pipeline_rows(simulation: Simulation) -> list[Row]:
    """Return rows with every block of every stage; a paired block has two halves, the forward pass above."""
    batches = batches_of(simulation.spans())
    rows = []
    for rank, batch in zip(simulation.ranks, batches, strict=True):
        bars = []
        for run in rank.blocks:
            begin, end = run.start, run.start + run.course.duration
            passes = moving(run)
            for n, half in enumerate(passes):
                place = "" if len(passes) == 1 else "^_"[n > 0]
                bars.append(Bar(begin, end, str(half.micro_batch), _FILLS[half.kind.value], half=place))
        when = phases(batch)
        strips = [(MOVES, when.moving), (EXPOSED, when.exposed)]
        rows.append(Row(f"stage {rank.number}", bars, strips=strips))
    return rows


def moving(run: BlockRun) -> tuple[Pass, ...]:
    """Return the passes of a block, without the ends of earlier passes."""
    return tuple(part for part in run.stretch.block_passes if part.kind is not PassKind.END)


def paired_run(simulation: Simulation) -> BlockRun | None:
    """Return a block of a forward and a backward pass from the middle of the step, on the first stage with
    any; else None."""
    both = {PassKind.FORWARD, PassKind.BACKWARD}
    for rank in simulation.ranks:
        pairs = [run for run in rank.blocks if {part.kind for part in moving(run)} == both]
        if pairs:
            return pairs[len(pairs) // 2]
    return None


@dataclass(frozen=True)
class DrawnOperator:
    """An operator in the picture of a paired block; its times are shares of the picture's width."""

    stream: Stream
    begin: float
    end: float
    label: str
    kind: str
    """Letter F, B, or L for the end of a backward pass of an earlier layer or block."""


def pair_pieces(simulation: Simulation, run: BlockRun) -> tuple[list[DrawnOperator], float]:
    """Return the operators that a paired block runs from the begin of one pair of layers to the next, and the
    nanoseconds between.

    It is the first pair that runs the end of an earlier layer or block, else the second pair if there are
    two. Layers of a unit count as one.
    """
    tasks = [
        (executed, operation.what, run.stretch.passes[operation.turn])
        for executed in run.course.executed
        if isinstance(operation := executed.operation, Compute | Start)
        and isinstance(operation.what, Node)
        and is_layer(operation.what.operator.part)
    ]
    begun = [task for task in tasks if task[2].kind is not PassKind.END]
    rounds: dict[tuple[bool, int], int] = {}
    """Number of the layer's pair, by direction and the layer's position."""
    for forward in (True, False):
        places = {node.place for _, node, part in begun if part.forward is forward}
        ordered = sorted(places, reverse=not forward)
        rounds |= {(forward, place): number for number, place in enumerate(ordered)}
    starts: dict[int, float] = {}
    for executed, node, part in begun:
        pair = rounds[part.forward, node.place]
        starts[pair] = min(executed.start, starts.get(pair, executed.start))

    def pieces(pair: int) -> tuple[list[DrawnOperator], float]:
        begin = starts[pair]
        end = starts.get(pair + 1, max(executed.end for executed, _, _ in tasks))
        found = []
        for executed, node, part in tasks:
            if executed.start >= end or executed.end <= begin:
                continue
            late = executed.start >= begin and rounds.get((False, node.place), pair) < pair
            is_end = not part.forward and (late or part.kind is PassKind.END)
            kind = "F" if part.forward else "L" if is_end else "B"
            times = (min(max(time, begin), end) for time in (executed.start, executed.end))
            first, last = ((time - begin) / (end - begin) for time in times)
            label = f"L:{name_of(node)}" if is_end else name_of(node)
            found.append(DrawnOperator(executed.price.stream, first, last, label, kind))
        return found, end - begin

    pairs = [pieces(pair) for pair in range(1, len(starts))] or [pieces(0)]
    return next((pair for pair in pairs if any(piece.kind == "L" for piece in pair[0])), pairs[0])


def pair_svg(simulation: Simulation, run: BlockRun, title: str) -> str:
    """Draw a paired block as SVG: blue is the forward strand, green the backward strand, pale an earlier
    end."""
    pieces, ns = pair_pieces(simulation, run)
    note = "blue: forward strand, green: backward strand"
    if any(piece.kind == "L" for piece in pieces):
        note += ", pale with L: what the layer or the block before has left"
    bars: dict[Stream, list[Bar]] = {stream: [] for stream in Stream}
    for piece in pieces:
        ink = _INKS.get(piece.kind, "white")
        bar = Bar(piece.begin * ns, piece.end * ns, piece.label, _FILLS[piece.kind], ink)
        bars[piece.stream].append(bar)
    return rows_picture([Row(stream.value, row) for stream, row in bars.items()], ns, title, note)


def pipeline_svg(simulation: Simulation, title: str) -> str:
    """Draw the pipeline as SVG: stages downwards, time to the right; numbers are micro-batches."""
    note = (
        "blue: forward, green: backward (light: weight gradients), halves: paired blocks; below them, "
        "grey: communication, red: exposed, as high as it fills the time; simulated"
    )
    return rows_picture(pipeline_rows(simulation), simulation.step_ns, title, note)
