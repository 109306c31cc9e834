"""Pipelines that postpone weight gradients, over the folded model: DualPipeV and ZB-V."""

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
    """Return the DualPipeV pipeline (DeepSeek 2025): paired blocks in the middle of the step, and postponed
    weight gradients towards its begin and end.

    A stage has two chunks. Raises `ValueError` if there are fewer micro-batches than 2p.
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
    """Builds the blocks of one DualPipeV stage. Of its two chunks, 0 is nearer to the model's start, 1 to its
    end."""

    def __init__(self, stages: int, stage: int, micro_batches: int) -> None:
        self._p, self._r, self._m = stages, stage, micro_batches
        self._chunks = (stage, 2 * stages - 1 - stage)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._waiting: list[Pass] = []
        self._order: list[Block] = []

    def order(self) -> list[Block]:
        """Return the stage's blocks in order, built in the eight phases of DualPipeV."""
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
            if n == 0 and r == p - 1:  # no gradient is back that the forward pass could wait for
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(behind):
            self._backward(1)
            self._pair(1, 0)
        # The next phase postpones weight gradients from its middle on: other stages wait for input gradients.
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
        pass_ = self._next_backward(which)
        if split:
            self._waiting.append(pass_)
            pass_ = backward_pass(pass_.micro_batch, pass_.chunk, PassKind.INPUT)
        self._order += alone(pass_)

    def _weights(self) -> None:
        if self._waiting:
            pass_ = self._waiting.pop(0)
            self._order += alone(backward_pass(pass_.micro_batch, pass_.chunk, PassKind.WEIGHT))

    def _pair(self, forward: int, backward: int) -> None:
        self._order.append(Block((self._next_forward(forward), self._next_backward(backward))))


def zero_bubble_v(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return the zero-bubble pipeline of the folded model (ZB-V, Qi et al. 2024), built by a greedy rule.

    Forward, input gradients and weight gradients take a slot each. A free stage prefers input gradients, then
    forward passes of the later chunk, then of the earlier chunk if it has room, then weight gradients. At
    most p micro-batches are alive on a stage, as in 1F1B.
    """
    assert layout.folded
    return _ZeroBubble(layout, micro_batches).order()


class _ZeroBubble:
    """Builds the zero-bubble pipeline: chooses what each stage runs, time slot by time slot."""

    def __init__(self, layout: ParallelLayout, micro_batches: int) -> None:
        self._layout, self._m = layout, micro_batches
        self._orders: list[list[Pass]] = [[] for _ in range(layout.pp)]
        self._ends: dict[Pass, int] = {}
        self._waiting: list[list[Pass]] = [[] for _ in range(layout.pp)]
        self._alive = [0] * layout.pp
        self._next = {(chunk, direction): 0 for chunk in range(layout.chunks) for direction in Direction}

    def order(self) -> BlockOrder:
        """Return the blocks of every stage, after choosing passes until all have run."""
        remaining = 3 * self._m * self._layout.chunks
        slot = 0
        while remaining:
            for stage, pass_ in enumerate([self._choose(stage, slot) for stage in range(self._layout.pp)]):
                if pass_ is not None:
                    self._orders[stage].append(pass_)
                    self._ends[pass_] = slot + 1
                    remaining -= 1
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

    def _ready(self, pass_: Pass, slot: int) -> bool:
        """Return whether all passes that ``pass_`` depends on have ended by the given time slot."""
        needed = [] if pass_.forward else [forward_pass(pass_.micro_batch, pass_.chunk)]
        if (before := pass_.before(self._layout)) is not None:
            again = backward_pass(pass_.micro_batch, before.chunk, PassKind.INPUT)
            needed.append(before if pass_.forward else again)
        return all(self._ends.get(needed_pass, slot + 1) <= slot for needed_pass in needed)
