"""DTensor's collectives as Braid's messages between pairs of ranks, in place of gloo's.

gloo builds reduce-scatter on all-reduce, which moves twice the bytes. A comparison with Braid on CPU that is
about overlap needs both sides to move the same: with this, gathers and scatters of the peer send what Braid's
send (`braid.kernels.collectives.messages`), and nothing else of it changes.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork, _register_work
from torch.distributed.distributed_c10d import _resolve_process_group

from braid.kernels.collectives.messages import MessageLine
from braid.kernels.collectives.primitives import Launch


class MessageCollectives:
    """While it lives, all-gathers and reduce-scatters of this process on CPU are messages.

    They are those of one group: functional collectives (``torch.distributed._functional_collectives``), as
    DTensor calls them. Sums are in rank order; on two ranks they have the bits of gloo's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` call it together."""
        self._ranks = dist.get_process_group_ranks(group)
        upward = dist.new_group(self._ranks, use_local_synchronization=True)
        assert upward is not None
        self._line = MessageLine(group, upward)
        self.calls = 0
        """Collectives so far."""
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        self._library.impl("all_gather_into_tensor", self._all_gather, "CPU")
        self._library.impl("reduce_scatter_tensor", self._reduce_scatter, "CPU")

    def _all_gather(self, x: Tensor, group_size: int, group: Any) -> Tensor:
        self._check(group)
        return self._issue(self._line.all_gather(x))

    def _reduce_scatter(self, x: Tensor, reduce_op: str, group_size: int, group: Any) -> Tensor:
        self._check(group)
        assert reduce_op == "sum", reduce_op
        return self._issue(self._line.reduce_scatter(x))

    def _check(self, group: Any) -> None:
        own = group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
        assert dist.get_process_group_ranks(own) == self._ranks, "a collective of other ranks"

    def _issue(self, launch: Launch) -> Tensor:
        """Start a collective; whoever needs its result waits for it (``wait_tensor``)."""
        work = launch.issue()

        def wait(timeout: timedelta) -> bool:
            work.wait()
            if launch.finish is not None:
                launch.finish()
            return True

        _register_work(launch.result, PythonCallbackWork(wait))
        self.calls += 1
        return launch.result
