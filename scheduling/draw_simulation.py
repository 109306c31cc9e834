"""Pictures of a simulated step: the pipeline over time, and a paired block's strands on three streams."""

from dataclasses import dataclass

from braid.scheduling.operations import Compute, Node, Pass, PassKind, Start, name_of
from braid.scheduling.operators import Stream
from braid.scheduling.pattern import is_layer
from braid.scheduling.record_numbers import phases
from braid.scheduling.simulate import Simulation
from braid.scheduling.simulator.engine import BlockRun, Executed
from braid.scheduling.span_batches import batches_of
from braid.scheduling.svg import EXPOSED, MOVES, Bar, Row, rows_picture

_FILLS = {"F": "#4c8bf5", "B": "#3aa76d", "I": "#3aa76d", "W": "#a3c585", "L": "#c5e6d3"}
"""Of passes, and of the end that a backward pass has left (L)."""
_INKS = {"L": "#14532d"}
"""Where white would not show."""


def pipeline_rows(simulation: Simulation) -> list[Row]:
    """Every block of every stage; of a paired block both halves, the forward pass above."""
    batches = batches_of(simulation.spans())
    rows = []
    for rank, batch in zip(simulation.ranks, batches, strict=True):
        bars = []
        for run in rank.blocks:
            begin, end = run.start, run.start + run.course.duration
            passes = moving(run)
            for n, one in enumerate(passes):
                half = "" if len(passes) == 1 else "^_"[n > 0]
                bars.append(Bar(begin, end, str(one.micro_batch), _FILLS[one.kind.value], half=half))
        found = phases(batch.records, batch.labels)
        rows.append(
            Row(f"stage {rank.number}", bars, strips=[(MOVES, found.moving), (EXPOSED, found.exposed)])
        )
    return rows


def moving(run: BlockRun) -> tuple[Pass, ...]:
    """The passes of a block, without the ends that earlier ones left."""
    return tuple(one for one in run.stretch.block_passes if one.kind is not PassKind.END)


def paired_run(simulation: Simulation) -> BlockRun | None:
    """A block of a forward and a backward pass from the middle of the step, on the first stage with one."""
    both = {PassKind.FORWARD, PassKind.BACKWARD}
    for rank in simulation.ranks:
        pairs = [run for run in rank.blocks if {one.kind for one in moving(run)} == both]
        if pairs:
            return pairs[len(pairs) // 2]
    return None


@dataclass(frozen=True)
class Piece:
    """An operator in the picture of a paired block; times are shares of the picture's."""

    stream: Stream
    begin: float
    end: float
    label: str
    kind: str
    """F, B, or L for the end that a backward pass has left."""


def pair_pieces(simulation: Simulation, run: BlockRun) -> tuple[list[Piece], float]:
    """What a paired block executes from the begin of one pair of layers to the next, and nanoseconds between.

    It is the first pair that takes up what the one before has left, else the second where
    there is one. Layers of a unit count as one.
    """
    passes = run.stretch.passes
    nodes = [
        (e, e.operation.what, passes[e.operation.turn])
        for e in run.course.executed
        if isinstance(e.operation, Compute | Start) and isinstance(e.operation.what, Node)
    ]
    tasks = [(e, node, one) for e, node, one in nodes if is_layer(node.operator.part)]
    starts: dict[int, float] = {}
    rounds: dict[int, int] = {}
    for forward in (True, False):
        own = [(e, node) for e, node, one in tasks if one.forward is forward and one.kind is not PassKind.END]
        places = sorted({node.place for _, node in own}, reverse=not forward)
        for n, place in enumerate(places):
            first = min(e.start for e, node in own if node.place == place)
            starts[n] = min(first, starts.get(n, first))
            if not forward:
                rounds[place] = n

    def pieces(chosen: int) -> tuple[list[Piece], float]:
        begin = starts[chosen]
        end = starts.get(chosen + 1, max(e.end for e, _, _ in tasks))

        def kind(e: Executed, node: Node, one: Pass) -> str:
            if one.forward:
                return "F"
            left = e.start >= begin and rounds.get(node.place, chosen) < chosen
            return "L" if one.kind is PassKind.END or left else "B"

        found = []
        for e, node, one in tasks:
            if e.start < end and e.end > begin:
                what, name = kind(e, node, one), name_of(node)
                first, last = ((min(max(t, begin), end) - begin) / (end - begin) for t in (e.start, e.end))
                label = f"L:{name}" if what == "L" else name
                found.append(Piece(e.price.stream, first, last, label, what))
        return found, end - begin

    pairs = [pieces(n) for n in range(1, len(starts))] or [pieces(0)]
    return next((found for found in pairs if any(one.kind == "L" for one in found[0])), pairs[0])


def pair_text(
    simulation: Simulation, run: BlockRun, width: int = 100
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows for the terminal: a stream's name and its pieces (text, kind: F, B, L or blank).

    Every piece begins with the letter of its kind, so that it can be told without colours.
    """
    found, _ = pair_pieces(simulation, run)
    rows = []
    for stream in Stream:
        pieces: list[tuple[str, str]] = []
        column = 0
        for bar in sorted((one for one in found if one.stream is stream), key=lambda one: one.begin):
            first, last = round(bar.begin * width), round(bar.end * width)
            if last <= max(first, column):
                continue
            pieces.append((" " * (first - column), ""))
            room = last - max(first, column)
            label = bar.label if bar.kind == "L" else f"{bar.kind}:{bar.label}"
            pieces.append((label[: room - 1].ljust(room - 1) + "▏" if room > 1 else bar.kind, bar.kind))
            column = last
        rows.append((stream.value, pieces))
    return rows


def pair_svg(simulation: Simulation, run: BlockRun, title: str) -> str:
    """The paired block as SVG: blue is the forward strand, green the backward one, pale what it left."""
    found, ns = pair_pieces(simulation, run)
    note = "blue: forward strand, green: backward strand"
    if any(one.kind == "L" for one in found):
        note += ", pale with L: what the layer or the block before has left"

    def bar(one: Piece) -> Bar:
        return Bar(one.begin * ns, one.end * ns, one.label, _FILLS[one.kind], _INKS.get(one.kind, "white"))

    rows = [Row(stream.value, [bar(one) for one in found if one.stream is stream]) for stream in Stream]
    return rows_picture(rows, ns, title, note)


def pipeline_svg(simulation: Simulation, title: str) -> str:
    """The pipeline as SVG: stages downwards, time to the right; numbers are micro-batches."""
    note = (
        "blue: forward, green: backward (light: weight gradients), halves: paired blocks; below them, "
        "grey: communication, red: exposed, as high as it fills the time; simulated"
    )
    return rows_picture(pipeline_rows(simulation), simulation.step_ns, title, note)
