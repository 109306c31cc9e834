"""DualPipeV's overlapped actions in two threads, as a user of torch.distributed.pipelining may write it."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action, _PipelineContext

BACKWARD_THREAD = "backward"
"""Begins the name of the second thread of a rank."""


class ThreadedOverlap:
    """Runs the halves of DualPipeV's overlapped actions at once: forward here, backward in a second thread.

    They are a forward pass of one of the rank's stages and a backward pass of the other, of different
    micro-batches, so they share neither gradients nor buffers. What each half does is what the runtime of
    ``torch.distributed.pipelining`` does for the action alone; sends and receives stay with the runtime.
    """

    def __init__(self) -> None:
        self._other = ThreadPoolExecutor(1, thread_name_prefix=BACKWARD_THREAD)

    def __call__(self, action: "_Action", ctx: "_PipelineContext") -> None:
        """Run both halves of ``action``."""
        assert action.sub_actions is not None
        forward, backward = action.sub_actions
        pending = self._other.submit(self._backward, backward, ctx)
        try:
            self._forward(forward, ctx)
        finally:
            pending.result()

    def _forward(self, action: "_Action", ctx: "_PipelineContext") -> None:
        schedule, stages, index, micro_batch = self._operands(action, ctx)
        if index > 0 and index - 1 not in stages:
            for work in schedule.fwd_recv_ops.pop((index, micro_batch)):
                work.wait()
        assert ctx.arg_mbs is not None
        arguments = ctx.arg_mbs[micro_batch]
        output = stages[index].forward_one_chunk(micro_batch, arguments, save_forward_output=False)
        schedule._maybe_compute_loss(stages[index], output, ctx.target_mbs, micro_batch)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, micro_batch)

    def _backward(self, action: "_Action", ctx: "_PipelineContext") -> None:
        schedule, stages, index, micro_batch = self._operands(action, ctx)
        if not stages[index].is_last and index + 1 not in stages:
            for work in schedule.bwd_recv_ops.pop((index, micro_batch)):
                work.wait()
        schedule.backward_counter[index] += 1
        last = schedule.backward_counter[index] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stages[index], micro_batch)
        stages[index].backward_one_chunk(micro_batch, loss=loss, last_backward=last)
        if index - 1 in stages:
            output = stages[index].get_local_bwd_output(micro_batch)
            stages[index - 1].set_local_bwd_input(output, micro_batch)

    @staticmethod
    def _operands(action: "_Action", ctx: "_PipelineContext") -> tuple[Any, dict[int, Any], int, int]:
        """The schedule, this rank's stages by index, and which stage and micro-batch an action means."""
        assert action.microbatch_index is not None
        schedule: Any = ctx.schedule_ref
        stages = {stage.stage_index: stage for stage in schedule._stages}
        return schedule, stages, action.stage_index, action.microbatch_index
