"""Sweeps over linked code and tracks which registers are alive and which operators have run.

Memory reads bytes from it, validation the first operation that cannot run. Operations that stretches share
are swept once for each state of their frames.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.schedule.buckets import SHARDED, flat_elements, share_elements, share_ways
from braid.scheduling.schedule.code import Code, Frame, Stretch
from braid.scheduling.schedule.operations import (
    Allocate,
    Compute,
    Gather,
    Hand,
    Loss,
    Message,
    Node,
    Operation,
    Pass,
    PassKind,
    Receive,
    Reduce,
    Release,
    Send,
    Start,
    Wait,
)
from braid.scheduling.schedule.schedule import Side

FrameKey = tuple[int, int]
"""Identifies a frame: (micro-batch, chunk)."""


class FrameState(NamedTuple):
    """Bit masks of a frame: registers that hold a value, operators that have run, transfers that have
    started."""

    live: int = 0
    done: int = 0
    started: int = 0


@dataclass(frozen=True)
class Swept:
    """Change of memory by a stretch, in bytes relative to the memory before it: the peak, and at its end."""

    most: int
    change: int


class CodeError(ValueError):
    """Error that an operation cannot run at its position in the code; ``pass_``: the pass that it is of."""

    def __init__(self, cause: str, pass_: Pass | None = None) -> None:
        super().__init__(cause)
        self.pass_ = pass_


@dataclass
class Sweep:
    """Sweep over the stretches of a stage, with the states of all frames and the bytes held so far.

    ``width``: bytes per activation element; ``rounded_width``: bytes per element of the rounded copies in
    which gradients are sent, 0 if gradients are not rounded.
    """

    code: Code
    width: int = 2
    rounded_width: int = 0
    states: dict[FrameKey, FrameState] = field(default_factory=dict)
    held_bytes: int = 0
    _swept: dict[tuple[object, ...], tuple[Swept, tuple[FrameState, ...]]] = field(default_factory=dict)
    _sizes: dict[Frame, tuple[int, ...]] = field(default_factory=dict)

    def run(self, stretch: Stretch) -> Swept:
        """Advance over the next stretch and return its change of memory; raise `CodeError` if an operation
        cannot run."""
        keys = [(pass_.micro_batch, pass_.chunk) for pass_ in stretch.passes]
        before = tuple(self.states.get(key, _NEW) for key in keys)
        start = (_course(stretch.operations), stretch.frames, before)
        if start not in self._swept:
            self._swept[start] = self._sweep(stretch, before)
        swept, after = self._swept[start]
        self.states.update(zip(keys, after, strict=True))
        self.held_bytes += swept.change
        return swept

    def step_by_step(self, stretch: Stretch) -> Iterator[tuple[Operation, int]]:
        """Advance over the next stretch; yield each operation with the bytes held just before it frees
        registers."""
        keys = [(pass_.micro_batch, pass_.chunk) for pass_ in stretch.passes]
        run = _StretchSweep(self, stretch, tuple(self.states.get(key, _NEW) for key in keys))
        for operation in stretch.operations:
            run.operation(operation)
            yield operation, self.held_bytes + run.before_free
        self.states.update(zip(keys, run.after(), strict=True))
        self.held_bytes += run.bytes

    def _sweep(
        self, stretch: Stretch, before: tuple[FrameState, ...]
    ) -> tuple[Swept, tuple[FrameState, ...]]:
        run = _StretchSweep(self, stretch, before)
        for operation in stretch.operations:
            run.operation(operation)
        return Swept(run.most, run.bytes), run.after()

    def whole_bytes(self, what: Gather | Reduce) -> int:
        """Return the bytes of a bucket's whole parameters or gradients if ranks keep only shards, else 0."""
        gathers, layout = isinstance(what, Gather), self.code.layout
        if what.bucket is None or what.axis not in SHARDED or layout.zero < (3 if gathers else 2):
            return 0
        assert what.chunk is not None
        spec = self.code.buckets.of(what.chunk)[what.bucket]
        counts = spec.shared(layout) if gathers else (spec.parameters,)
        elements = sum(self._summed_elements(what.axis, parameters) for parameters in counts)
        return elements * (self.width if gathers else max(4, self.width))

    def rounded_bytes(self, what: Gather | Reduce) -> int:
        """Return the bytes of the rounded copies of gradients that a sum sends; 0 if nothing is rounded."""
        if not isinstance(what, Reduce) or what.chunk is None or not self.rounded_width:
            return 0
        buckets = self.code.buckets.of(what.chunk)
        summed = buckets if what.bucket is None else (buckets[what.bucket],)
        return self.rounded_width * sum(self._summed_elements(what.axis, spec.parameters) for spec in summed)

    def _summed_elements(self, axis: str, parameters: Parameters) -> int:
        """Return the number of gradient elements per rank that a bucket's sum over ``axis`` covers.

        ``parameters``: the bucket's parameters.
        """
        layout, total = self.code.layout, 0
        shares = axis == "replica" or (layout.zero > 1 and axis == "ends")
        for axes, count in flat_elements(layout, parameters).items():
            if axis in axes or axis == "replica":
                ways = share_ways(layout, axes)
                total += share_elements(count, ways) * (1 if shares else ways)
        return total

    def sizes(self, frame: Frame) -> tuple[int, ...]:
        """Return the bytes of memory of each register of a frame; 0 for registers that the executor fills."""
        if frame not in self._sizes:
            provided = {register for all_ in frame.constants.values() for register in all_}
            self._sizes[frame] = tuple(
                0
                if frame.owners[register] in provided
                else frame.values[frame.owners[register]].bytes(self.width)
                for register in range(len(frame.names))
            )
        return self._sizes[frame]


_NEW = FrameState()


def _course(operations: tuple[Operation, ...]) -> object:
    """Return a key that is equal for lists that change frames alike, as do messages of all micro-batches."""
    if len(operations) == 1 and isinstance(only := operations[0], Start | Wait):
        match only.what:
            case Send(moved) | Receive(moved) as message:
                kinds = type(only), type(message), moved.kind, moved.chunk
                return *kinds, only.reads, only.writes, only.frees
    return id(operations)


def _begins(what: Gather | Reduce) -> bool:
    """Return whether a transfer is unsplit or the first stage of a split one."""
    return what.move is None or what.move.number == 0


def _ends(what: Gather | Reduce) -> bool:
    """Return whether a transfer is unsplit or the last stage of a split one."""
    return what.move is None or what.move.last


@dataclass(frozen=True)
class History:
    """Result of a sweep over one stage: peak bytes during each instruction, the first operation that cannot
    run (position and error, or None), and the final states of the frames."""

    during: tuple[int, ...]
    fault: tuple[int, CodeError] | None
    states: Mapping[FrameKey, FrameState]


@lru_cache(maxsize=1)
def histories(code: Code, width: int, rounded_width: int) -> tuple[History, ...]:
    """Sweep over all stages of the code and return their histories.

    ``width``, ``rounded_width``: bytes per activation element and per rounded gradient (`Sweep`).
    """
    sweep, result = Sweep(code, width, rounded_width), []
    for stretches in code.stages:
        sweep.states, sweep.held_bytes = {}, 0
        during, fault = [], None
        for position, stretch in enumerate(stretches):
            before = sweep.held_bytes
            try:
                during.append(before + sweep.run(stretch).most)
            except CodeError as error:
                fault = position, error
                break
        result.append(History(tuple(during), fault, sweep.states))
    return tuple(result)


class _StretchSweep:
    """State of a sweep within one stretch. Passes of one micro-batch in one chunk share their frame."""

    def __init__(self, sweep: Sweep, stretch: Stretch, before: Sequence[FrameState]) -> None:
        self._stretch, self._passes, self._frames = stretch, stretch.passes, stretch.frames
        self._layout = sweep.code.layout
        self._whole_bytes, self._rounded_bytes = sweep.whole_bytes, sweep.rounded_bytes
        keys = [(pass_.micro_batch, pass_.chunk) for pass_ in stretch.passes]
        self._frame_of = [keys.index(key) for key in keys]
        self._sizes = [sweep.sizes(frame) for frame in stretch.frames]
        self._live = [state.live for state in before]
        self._done = [state.done for state in before]
        self._started = [state.started for state in before]
        self.bytes = self.most = self.before_free = 0

    def after(self) -> tuple[FrameState, ...]:
        """Return the current state of each pass's frame, in the order of the stretch's passes."""
        return tuple(FrameState(self._live[n], self._done[n], self._started[n]) for n in self._frame_of)

    def operation(self, operation: Operation) -> None:
        """Apply one operation to the states and the memory; raise `CodeError` if it cannot run."""
        turn = operation.turn
        match operation:
            case Compute(Node() as node):
                self._needs(turn, node, node.needs | node.others)
                self._write(turn, operation.writes)
                self._done[self._frame_of[turn]] |= node.bit
            case Start(Node() as node):
                self._needs(turn, node, node.needs)
                self._begin(turn, node.bit, node.operator.name)
                self._write(turn, operation.writes)
            case Wait(Node() as node):
                self._needs(turn, node, node.others)
                self._end(turn, node.bit, node.operator.name)
                self._write(turn, operation.writes)
            case Start(Send() | Receive() as message):
                if isinstance(message, Send):
                    self._made(turn, message.moved.forward)
                self._begin(turn, self._arrival(turn, message), str(message))
                self._write(turn, operation.writes)
            case Wait(Send() | Receive() as message):
                self._end(turn, self._arrival(turn, message), str(message))
            case Hand(to=to, register=register):
                forward = self._passes[turn].forward
                self._made(turn, forward)
                self._free(turn, operation.frees)
                self._begin(turn, self._frames[turn].departure(forward), f"what {self._passes[turn]} makes")
                self._write(to, (register,))
                self._done[self._frame_of[to]] |= self._frames[to].arrival(forward)
                self.before_free = self.bytes
                return
            case Loss():
                self._made(turn, True)
            case Start(Gather() as what) | Allocate(what) if _begins(what):
                self.bytes += self._whole_bytes(what)
            case Start(Reduce() as what) if _begins(what):
                self.bytes += self._rounded_bytes(what)
            case Wait(Reduce() as what) | Release(what) if _ends(what):
                self.before_free = self.bytes
                self.bytes -= self._whole_bytes(what) + self._rounded_bytes(what)
                return
        self.before_free = self.bytes
        self.most = max(self.most, self.bytes)
        if operation.frees:
            self._free(turn, operation.frees)

    def _needs(self, turn: int, node: Node, needs: int) -> None:
        at = self._frame_of[turn]
        frame, done, pass_ = self._frames[turn], self._done[at], self._passes[turn]
        if done & node.bit:
            raise CodeError(f"{pass_} runs twice ({node.operator.name} has run)")
        missing = needs & ~done
        if missing & frame.arrival(pass_.forward):
            raise CodeError(_absent(pass_, self._layout), pass_)
        if missing:
            raise CodeError(_reason(frame, pass_, node, missing), pass_)

    def _arrival(self, turn: int, message: Message) -> int:
        """Return the bit that a message sets: departure if the stage sends it, arrival if it receives it."""
        frame, forward = self._frames[turn], message.moved.forward
        return frame.departure(forward) if isinstance(message, Send) else frame.arrival(forward)

    def _made(self, turn: int, forward: bool) -> None:
        if self._frames[turn].makers[not forward] & ~self._done[self._frame_of[turn]]:
            raise CodeError(f"{self._passes[turn]} has not run yet, its output cannot be handed on")

    def _begin(self, turn: int, bit: int, name: str) -> None:
        at = self._frame_of[turn]
        if self._started[at] & bit:
            raise CodeError(f"{name} is started twice")
        self._started[at] |= bit

    def _end(self, turn: int, bit: int, name: str) -> None:
        at = self._frame_of[turn]
        if not self._started[at] & bit:
            raise CodeError(f"{name} is not started")
        if self._done[at] & bit:
            raise CodeError(f"{name} is waited for twice")
        self._done[at] |= bit

    def _write(self, turn: int, registers: Sequence[int]) -> None:
        frame, at, sizes = self._frames[turn], self._frame_of[turn], self._sizes[turn]
        for register in registers:
            for memory in frame.memories[register]:
                if not self._live[at] & frame.holders[memory]:
                    self.bytes += sizes[memory]
            self._live[at] |= 1 << register

    def _free(self, turn: int, registers: Sequence[int]) -> None:
        frame, at, sizes = self._frames[turn], self._frame_of[turn], self._sizes[turn]
        for register in registers:
            if self._live[at] >> register & 1:
                self._live[at] &= ~(1 << register)
                for memory in frame.memories[register]:
                    if not self._live[at] & frame.holders[memory]:
                        self.bytes -= sizes[memory]


def _absent(pass_: Pass, layout: ParallelLayout) -> str:
    """Return an error text that says why a pass lacks its input."""
    before = pass_.before(layout)
    assert before is not None
    source = layout.stage_of(before.chunk)
    if source == layout.stage_of(pass_.chunk):
        return f"its input comes from {before}, which has not run"
    return f"its input from stage {source} has not arrived (no RECV and WAIT before it)"


def _reason(frame: Frame, p: Pass, node: Node, missing: int) -> str:
    """Return an error text: which operator in the mask ``missing`` must run before ``node`` of pass ``p``."""
    ahead, name = _first(frame, missing)
    if ahead and not p.forward:
        return f"{name} of its forward pass has not run"
    hint = f" (does {p._replace(kind=PassKind.INPUT)} come first?)" if p.kind is PassKind.WEIGHT else ""
    side = Side(p.kind, node.unit)
    return f"program {side}: {node.operator.name} needs {name}, which is not done yet{hint}"


def _first(frame: Frame, bits: int) -> tuple[bool, str]:
    """Return, for the operator of the lowest set bit, whether it is in the forward graph, and its name."""
    lowest = (bits & -bits).bit_length() - 1
    return next((ahead, name) for (_, ahead, name), bit in frame.bits.items() if bit == lowest)


def unfinished(micro_batch: int, chunk: int, frame: Frame, state: FrameState) -> str | None:
    """Return an error text that names what a frame has left undone at the end of a step; None if it is
    complete."""
    passes = {
        True: Pass(PassKind.FORWARD, micro_batch, chunk),
        False: Pass(PassKind.BACKWARD, micro_batch, chunk),
    }
    if missing := frame.complete & ~state.done:
        ahead, name = _first(frame, missing)
        begun = state.started & missing & -missing
        return f"{name} of {passes[ahead]} {'is never waited for' if begun else 'never runs'}"
    for forward, pass_ in passes.items():
        register = frame.exit(forward)
        if register is not None and state.live >> register & 1:
            begun = state.started & frame.departure(forward)
            where = "waited for" if begun else "sent to the stage that needs it"
            return f"the {'send of the ' if begun else ''}output of {pass_} is never {where}"
    provided = {register for all_ in frame.constants.values() for register in all_}
    alive = [n for n in range(len(frame.names)) if state.live >> n & 1 and n not in provided]
    return (
        f"{frame.names[alive[0]]} of micro-batch {micro_batch}, chunk {chunk} is never let go"
        if alive
        else None
    )
