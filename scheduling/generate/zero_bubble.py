"""Pipelines that put weight gradients off, over the folded model: DualPipeV and ZB-V."""

from braid.scheduling.generate.pipelines import (
    BlockOrder,
    alone,
    backward_pass,
    changing_strands,
    forward_pass,
)
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.operations import Direction, Pass, PassKind
from braid.scheduling.schedule.schedule import Block


def dual_pipe_v(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """DualPipeV (DeepSeek 2025): paired blocks in the middle, weight gradients put off at the ends.

    Two chunks a stage; `ValueError` for fewer micro-batches than 2p.
    """
    assert layout.folded
    p = layout.pp
    if micro_batches < 2 * p:
        raise ValueError(
            f"overlap.schedule=dualpipev and overlap.pipeline=v need 2 micro-batches a replica for each of "
            f"parallel.pp={p} stages, train.global_batch and train.micro_batch give {micro_batches}; "
            f"make them give {2 * p} or more, or use overlap.schedule=braid"
        )
    return changing_strands([_DualPipeStage(p, stage, micro_batches).order() for stage in range(p)], p)


class _DualPipeStage:
    """One stage of DualPipeV. Of its chunks, 0 is the one nearer to the model's start, 1 to its end."""

    def __init__(self, stages: int, stage: int, micro_batches: int) -> None:
        self._p, self._r, self._m = stages, stage, micro_batches
        self._chunks = (stage, 2 * stages - 1 - stage)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._waiting: list[Pass] = []
        self._order: list[Block] = []

    def order(self) -> list[Block]:
        """The eight phases of the schedule."""
        p, r, m = self._p, self._r, self._m
        behind = p - r - 1
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(r + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, split=True)
            self._weights()
            self._forward(1)
        for n in range(m - 2 * p + r + 1):
            if n == 0 and r == p - 1:  # nothing comes back yet that the first forward pass could wait for
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(behind):
            self._backward(1)
            self._pair(1, 0)
        # From its middle on, the next phase puts weight gradients off: the stages behind wait for inputs'.
        half = (r + 1) // 2
        for n in range(r + 1):
            self._backward(1, split=n > half or (n == half and r % 2 == 1))
            self._backward(0, split=n >= half)
        for _ in range(behind):
            self._weights()
            self._backward(0, split=True)
        while self._waiting:
            self._weights()
        return self._order

    def _next_forward(self, which: int) -> Pass:
        self._forwards[which] += 1
        return forward_pass(self._forwards[which] - 1, self._chunks[which])

    def _next_backward(self, which: int) -> Pass:
        self._backwards[which] += 1
        return backward_pass(self._backwards[which] - 1, self._chunks[which])

    def _forward(self, which: int) -> None:
        self._order += alone(self._next_forward(which))

    def _backward(self, which: int, *, split: bool = False) -> None:
        one = self._next_backward(which)
        if split:
            self._waiting.append(one)
            one = backward_pass(one.micro_batch, one.chunk, PassKind.INPUT)
        self._order += alone(one)

    def _weights(self) -> None:
        if self._waiting:
            one = self._waiting.pop(0)
            self._order += alone(backward_pass(one.micro_batch, one.chunk, PassKind.WEIGHT))

    def _pair(self, forward: int, backward: int) -> None:
        self._order.append(Block((self._next_forward(forward), self._next_backward(backward))))


def zero_bubble_v(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Zero bubble over the folded model (ZB-V, Qi et al. 2024), by a greedy rule on unit times.

    Forward, input gradients and weight gradients take a slot each. A free stage prefers input gradients, then
    forward passes of the later chunk, then of the earlier one if it has room, then weight gradients. At most
    p micro-batches are alive on a stage, which is the memory of 1F1B.
    """
    assert layout.folded
    return _ZeroBubble(layout, micro_batches).order()


class _ZeroBubble:
    """All stages, slot by slot."""

    def __init__(self, layout: ParallelLayout, micro_batches: int) -> None:
        self._layout, self._m = layout, micro_batches
        self._orders: list[list[Pass]] = [[] for _ in range(layout.pp)]
        self._ends: dict[Pass, int] = {}
        self._waiting: list[list[Pass]] = [[] for _ in range(layout.pp)]
        self._alive = [0] * layout.pp
        self._next = {(chunk, direction): 0 for chunk in range(layout.chunks) for direction in Direction}

    def order(self) -> BlockOrder:
        """The blocks of every stage."""
        left = 3 * self._m * self._layout.chunks
        slot = 0
        while left:
            for stage, one in enumerate([self._choose(stage, slot) for stage in range(self._layout.pp)]):
                if one is not None:
                    self._orders[stage].append(one)
                    self._ends[one] = slot + 1
                    left -= 1
            slot += 1
        return tuple(tuple(alone(*order)) for order in self._orders)

    def _choose(self, stage: int, slot: int) -> Pass | None:
        early, late = self._layout.chunks_of(stage)
        for chunk in (late, early):
            m = self._next[chunk, Direction.BACKWARD]
            inputs = backward_pass(m, chunk, PassKind.INPUT)
            if m < self._m and self._ready(inputs, slot):
                self._next[chunk, Direction.BACKWARD] += 1
                self._waiting[stage].append(backward_pass(m, chunk, PassKind.WEIGHT))
                return inputs
        for chunk in (late, early):
            m = self._next[chunk, Direction.FORWARD]
            ahead = forward_pass(m, chunk)
            has_room = chunk == late or self._alive[stage] < self._layout.pp
            if m < self._m and has_room and self._ready(ahead, slot):
                self._next[chunk, Direction.FORWARD] += 1
                self._alive[stage] += chunk == early
                return ahead
        if not self._waiting[stage]:
            return None
        weights = self._waiting[stage].pop(0)
        self._alive[stage] -= weights.chunk == early
        return weights

    def _ready(self, one: Pass, slot: int) -> bool:
        """Whether what a pass needs has ended by a slot."""
        needed = [] if one.forward else [forward_pass(one.micro_batch, one.chunk)]
        if (before := one.before(self._layout)) is not None:
            again = backward_pass(one.micro_batch, before.chunk, PassKind.INPUT)
            needed.append(before if one.forward else again)
        return all(self._ends.get(other, slot + 1) <= slot for other in needed)
