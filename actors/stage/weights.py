"""Parameters of which every rank updates a share, and how the others' shares come to it (ZeRO)."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.shares import BucketPlan
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Launch, Line
from braid.kernels.collectives.stages import gather_stage
from braid.scheduling.buckets import BucketKey
from braid.scheduling.code import name_of
from braid.scheduling.schedule import Gather
from braid.scheduling.stages import Move
from braid.scheduling.trace import Label


class _Bucket:
    """A bucket's flat memory: this rank's share, and while it is there all of it, which parameters are views
    of."""

    @torch.no_grad()
    def __init__(self, plan: BucketPlan, *, lasting: bool) -> None:
        """``lasting``: all of it stays, and the share is a part of it."""
        like = plan.members[0].tensor
        self.plan, self.passes = plan, not lasting
        self._like = torch.empty(0, dtype=like.dtype, device=like.device)
        self.whole: Tensor | None = None
        self._brought: Tensor | None = None
        whole = torch.zeros(plan.elements, dtype=like.dtype, device=like.device)
        for member, view in plan.lay(whole):
            view.copy_(member.tensor)
            member.tensor.data = view
        self.own = plan.own(whole) if lasting else plan.own(whole).clone()
        for share, view in plan.lay_shares(self.own):
            share.tensor = view
        if lasting:
            self.whole = whole
        else:
            self.release()

    def make(self) -> Tensor:
        """All of it, to be filled."""
        if self.whole is None:
            self.whole = self._like.new_empty(self.plan.elements)
            for member, view in self.plan.lay(self.whole):
                member.tensor.data = view
        return self.whole

    def stage(self, move: Move, line: Line) -> Launch:
        """A stage of its gather, of what the one before has brought."""
        x, self._brought = self.own if self._brought is None else self._brought, None
        launch = gather_stage(line, x, move.outer, into=self.make() if move.last else None)
        if not move.last:
            self._brought = launch.result
        return launch

    def release(self) -> None:
        """Let go of all but the share."""
        self.whole = None
        for member in self.plan.members:
            member.tensor.data = self._like


class ShardedWeights:
    """The buckets that are cut over ranks: their parameters are views of flat memory from here on."""

    def __init__(self, plans: Sequence[BucketPlan], mesh: Mesh, streams: Streams, recorder: Recorder) -> None:
        self._mesh, self._streams, self._recorder = mesh, streams, recorder
        self._pending: dict[Gather, list[tuple[Label, Transfer]]] = {}
        self._buckets: dict[BucketKey, list[_Bucket]] = defaultdict(list)
        lasting = mesh.layout.zero < 3
        for plan in plans:
            if plan.ways > 1:
                assert plan.bucket is not None
                self._buckets[plan.chunk, plan.bucket].append(_Bucket(plan, lasting=lasting))

    def start(self, gather: Gather) -> None:
        """Begin to gather a bucket's parameters over an axis.

        What the step before has begun counts from now on.
        """
        if gather in self._pending:
            for _, transfer in self._pending[gather]:
                transfer.begin = self._recorder.mark() or transfer.begin
            return
        pending = self._pending[gather] = []
        for bucket in self._of(gather):
            along = gather.axis if gather.move is None else str(gather.move.factor)
            stream, whole = self._mesh.stream(along), bucket.make()
            if gather.move is None:
                launch = self._mesh.shared(gather.axis).all_gather(bucket.own, into=whole)
            else:
                launch = bucket.stage(gather.move, self._mesh.line(along))
            moved = launch.result
            label = Label(
                operator=name_of(gather),
                stream=stream,
                axis=along,
                bytes=moved.nbytes,
                shapes=str(moved.numel()),
            )
            transfer = self._streams.start(stream, launch, awaited_next=False, lane="data")
            pending.append((label, transfer))

    def wait(self, gather: Gather) -> None:
        """What is computed next may use them. A gather is of the step that waits for it."""
        for label, transfer in self._pending.pop(gather, ()):
            self._recorder.transfer(label, None, transfer)
            self._streams.wait(transfer)
            transfer.take()

    def settle(self) -> None:
        """Wait for all that has begun: parameters or shares change otherwise next, or nobody needs them."""
        for gather in list(self._pending):
            self.wait(gather)

    def release(self, gather: Gather) -> None:
        """Let go of all but this rank's share."""
        for bucket in self._of(gather):
            bucket.release()

    def _of(self, gather: Gather) -> list[_Bucket]:
        assert gather.bucket is not None
        found = self._buckets.get((gather.chunk, gather.bucket), ())
        return [one for one in found if gather.axis in one.plan.axes]

    @property
    def buckets(self) -> list[_Bucket]:
        """All of them."""
        return [one for own in self._buckets.values() for one in own]
