"""Extensions that a user may add to public PyTorch: other collectives under DTensor, two threads under
DualPipeV."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork, _register_work
from torch.distributed.distributed_c10d import _resolve_process_group

from braid.kernels.collectives.messages import MessageLine
from braid.kernels.collectives.primitives import Launch

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action, _PipelineContext

BACKWARD_THREAD = "backward"
"""Prefix of the name of a rank's second thread."""


class MessageCollectives:
    """While an instance lives, a group's all-gathers and reduce-scatters on CPU use Braid's messages instead
    of gloo.

    gloo builds reduce-scatter on all-reduce, which moves twice the bytes. A fair comparison of overlap on CPU
    needs both sides to move the same bytes: with this class, DTensor's functional collectives
    (``torch.distributed._functional_collectives``) send what Braid sends, and nothing else changes. Sums are
    in rank order; on two ranks they are bit-identical to gloo's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Replace the collectives of ``group``; all its ranks must call this together."""
        self._ranks = dist.get_process_group_ranks(group)
        upward = dist.new_group(self._ranks, use_local_synchronization=True)
        assert upward is not None
        line = MessageLine(group, upward)
        self.calls = 0
        """Number of collectives so far."""

        def reduce_scatter(x: Tensor, reduce_op: str, group_size: int, group: Any) -> Tensor:
            assert reduce_op == "sum", reduce_op
            return self._issued(line.reduce_scatter(x), group)

        self._library = torch.library.Library("_c10d_functional", "IMPL")
        self._library.impl(
            "all_gather_into_tensor", lambda x, _, group: self._issued(line.all_gather(x), group), "CPU"
        )
        self._library.impl("reduce_scatter_tensor", reduce_scatter, "CPU")

    def _issued(self, launch: Launch, group: Any) -> Tensor:
        """Start a collective; its result must be awaited (``wait_tensor``)."""
        asked = group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
        assert dist.get_process_group_ranks(asked) == self._ranks, "a collective of other ranks"
        work = launch.issue()

        def wait(timeout: timedelta) -> bool:
            work.wait()
            if launch.finish is not None:
                launch.finish()
            return True

        _register_work(launch.result, PythonCallbackWork(wait))
        self.calls += 1
        return launch.result


class ThreadedOverlap:
    """Runs the halves of DualPipeV's overlapped actions at once: forward here, backward in a second thread.

    An action pairs a forward pass of one of the rank's stages with a backward pass of its other stage, of
    different micro-batches, so they share neither gradients nor buffers. Each half does what the runtime of
    ``torch.distributed.pipelining`` does for that action alone; sends and receives stay with the runtime.
    """

    def __init__(self) -> None:
        self._other = ThreadPoolExecutor(1, thread_name_prefix=BACKWARD_THREAD)

    def __call__(self, action: "_Action", ctx: "_PipelineContext") -> None:
        """Run both halves of ``action`` at the same time."""
        assert action.sub_actions is not None
        forward, backward = action.sub_actions
        pending = self._other.submit(self._backward, backward, ctx)
        try:
            self._forward(forward, ctx)
        finally:
            pending.result()

    def _forward(self, action: "_Action", ctx: Any) -> None:
        schedule, index, number = ctx.schedule_ref, action.stage_index, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}
        if index > 0 and index - 1 not in stages:
            for work in schedule.fwd_recv_ops.pop((index, number)):
                work.wait()
        output = stages[index].forward_one_chunk(number, ctx.arg_mbs[number], save_forward_output=False)
        schedule._maybe_compute_loss(stages[index], output, ctx.target_mbs, number)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, number)

    def _backward(self, action: "_Action", ctx: Any) -> None:
        schedule, index, number = ctx.schedule_ref, action.stage_index, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}
        if not stages[index].is_last and index + 1 not in stages:
            for work in schedule.bwd_recv_ops.pop((index, number)):
                work.wait()
        schedule.backward_counter[index] += 1
        last = schedule.backward_counter[index] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stages[index], number)
        stages[index].backward_one_chunk(number, loss=loss, last_backward=last)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stages[index].get_local_bwd_output(number), number)
