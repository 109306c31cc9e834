"""Parameters of which every rank updates a share, and how the others' shares come back (ZeRO)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.shares import BucketPlan
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.code import name_of
from braid.scheduling.schedule import Gather, Reduce
from braid.scheduling.trace import Label


class ShardedWeights:
    """The flat memory of buckets that are cut over ranks: their parameters are views of it from here on."""

    @torch.no_grad()
    def __init__(self, plans: Sequence[BucketPlan], mesh: Mesh, streams: Streams, recorder: Recorder) -> None:
        self._mesh, self._streams, self._recorder = mesh, streams, recorder
        self._pending: dict[Gather, list[Transfer]] = {}
        self._buckets: list[tuple[BucketPlan, Tensor, Tensor]] = []
        """With their memory, and this rank's share of it."""
        for plan in plans:
            if plan.ways > 1:
                like = plan.members[0].tensor
                flat = torch.zeros(plan.elements, dtype=like.dtype, device=like.device)
                for member, view in plan.lay(flat):
                    view.copy_(member.tensor)
                    member.tensor.data = view
                self._buckets.append((plan, flat, plan.own(flat)))

    def start(self, gather: Gather) -> None:
        """Begin to gather a part's parameters over an axis, in place."""
        pending = self._pending[gather] = []
        for plan, flat, own in self._buckets:
            if (plan.chunk, plan.part) != (gather.chunk, gather.part) or gather.axis not in plan.axes:
                continue
            stream = self._mesh.stream(gather.axis)
            label = Label(
                operator=name_of(gather), stream=stream, bytes=flat.nbytes, shapes=str(flat.numel())
            )
            launch = self._mesh.shared(gather.axis).all_gather(own, into=flat)
            transfer = self._streams.start(stream, launch, awaited_next=False, lane="data")
            self._recorder.transfer(label, None, transfer)
            pending.append(transfer)

    def wait(self, gather: Gather) -> None:
        """What is computed next may use them."""
        for transfer in self._pending.pop(gather):
            self._streams.wait(transfer)
            transfer.take()


class Gathering:
    """What passes without an update need of one (`braid.actors.stage.executor.Update`): parameters."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights = weights

    def start(self, transfer: Reduce | Gather) -> None:
        """Begin to gather."""
        assert isinstance(transfer, Gather)
        self._weights.start(transfer)

    def wait(self, transfer: Reduce | Gather) -> None:
        """Finish that."""
        assert isinstance(transfer, Gather)
        self._weights.wait(transfer)

    def norm(self) -> None:
        """There are no gradients."""

    def step(self) -> None:
        """There is no update."""
