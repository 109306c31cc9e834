"""A rank's buckets: sums and gathers that linked code requests, and the global norm of gradients."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.run.streams import Streams, Transfer
from braid.actors.stage.state.bucket import Bucket, buckets_of, joined, shards_in_order
from braid.actors.stage.state.parameters import StageParameter
from braid.actors.stage.state.shards import Shard
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.schedule.buckets import BucketKey
from braid.scheduling.schedule.operations import Gather, Reduce, name_of
from braid.scheduling.trace.spans import Label


class RankBuckets:
    """Holds a rank's parameters, and sums of gradients that are at least fp32."""

    def __init__(
        self,
        parameters: Sequence[StageParameter],
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        *,
        deterministic: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """``deterministic``: sums of fp32 gradients are stored in float64, where they are exact if the terms
        of an element lie within a factor of about 2^25; then neither the order of summation nor the number of
        data-parallel ranks changes the sums (docs/design.md, The runtime). This doubles the memory of
        gradients. ``reduce_dtype``: dtype to which gradients are rounded before ranks sum them."""
        self.mesh, self._streams, self._recorder = mesh, streams, recorder
        self._reduce_dtype = reduce_dtype
        self.buckets = buckets_of(parameters, mesh.place)
        frozen = buckets_of(parameters, mesh.place, trained=False, cut=mesh.layout.zero > 2)
        self.frozen = shards_in_order(frozen, parameters)
        """What this rank holds of the parameters that are not trained: all, with ZeRO 3 its shards."""
        self._frozen = [bucket for bucket in frozen if bucket.ways > 1]
        for bucket in self._frozen:
            bucket.hold(mesh.layout.zero, exact=deterministic)
        cut = [bucket for bucket in self.buckets if bucket.ways > 1]
        for bucket in cut:
            bucket.hold(mesh.layout.zero, exact=deterministic)
        uncut = [bucket for bucket in self.buckets if bucket.ways == 1]
        self._all = [*joined(uncut, exact=deterministic), *cut]
        """Buckets that together cover all memory once, as few as possible."""
        self.shards = shards_in_order(self.buckets, parameters)
        """The shards that this rank updates."""
        self.cut = bool(cut)
        """Whether ranks share the update (ZeRO), so that buckets are cut into shards."""
        self.device, self.dtype = parameters[0].tensor.device, parameters[0].tensor.dtype
        self._norm = _GlobalNorm(self.shards, mesh, self.device)
        self._pending: dict[Reduce | Gather, list[tuple[Label, Transfer]]] = {}
        self._labels: dict[tuple[Reduce | Gather, int], Label] = {}

    @property
    def passing(self) -> list[Tensor]:
        """Tensors that exist during a part of a step only: gathered parameters, gradients, rounded copies."""
        every = dict.fromkeys((*self._all, *self.buckets, *self._frozen))
        return [tensor for bucket in every for tensor in bucket.passing]

    # -- requests of linked code -----------------------------------------------------------------------------

    def allocate(self, reduce: Reduce) -> None:
        """Allocate zeroed memory for a bucket's gradients, to which operators add next (ZeRO 2 and 3)."""
        for bucket in self._of(reduce):
            bucket.gradients.make(zeros=True)

    def release(self, gather: Gather) -> None:
        """Free all of a bucket's parameters except this rank's shard (ZeRO 3)."""
        for bucket in self._of(gather):
            assert bucket.parameters is not None
            bucket.parameters.release()

    def start(self, what: Reduce | Gather) -> None:
        """Begin to sum gradients or their squares over an axis, or to gather parameters.

        A gather that the previous step began is only given a new begin, in this step's record.
        """
        if isinstance(what, Gather) and what in self._pending:
            for _, transfer in self._pending[what]:
                transfer.begin = self._recorder.mark() or transfer.begin
            return
        pending = self._pending[what] = []
        along = what.axis if what.move is None else str(what.move.factor)
        for moved, launch in self._launches(what, along):
            label = self._label(what, along, moved)
            transfer = self._streams.start(label.stream, launch, awaited_next=False, lane="data")
            pending.append((label, transfer))
            if isinstance(what, Reduce):  # a gather belongs to the step that waits for it
                self._recorder.transfer(label, None, transfer)

    def _launches(self, what: Reduce | Gather, along: str) -> Iterator[tuple[Tensor, Launch]]:
        """Yield (sent tensor, launch) for each bucket; ``along``: name of the line of ranks."""
        line = self.mesh.line(along)
        if what.chunk is None:
            yield self._norm.squares, line.all_reduce(self._norm.squares)
        for bucket in self._of(what):
            if isinstance(what, Gather):
                launch = bucket.gather(line, what.move)
                yield launch.result, launch
            else:
                scatters = self.mesh.place.mesh.shares_along(what.axis)
                yield bucket.sum(what.axis, line, what.move, scatters=scatters, dtype=self._reduce_dtype)

    def wait(self, what: Reduce | Gather) -> None:
        for label, transfer in self._pending.pop(what, ()):
            if isinstance(what, Gather):
                self._recorder.transfer(label, None, transfer)
            self._streams.wait(transfer)
            transfer.take()
        last = what.move is None or what.move.last
        if isinstance(what, Reduce) and last and self.mesh.place.mesh.shares_along(what.axis):
            for bucket in self._of(what):
                bucket.keep_sums()

    def settle(self) -> None:
        """Wait for all gathers under way, before parameters change from outside or are no longer needed."""
        for what in list(self._pending):
            if isinstance(what, Gather):
                self.wait(what)

    def _of(self, what: Reduce | Gather) -> list[Bucket]:
        """Return the buckets that a sum or gather covers: one bucket, or all of a chunk that use its axis."""
        buckets = self._all
        if what.bucket is not None:
            shared = (*self.buckets, *(self._frozen if isinstance(what, Gather) else ()))
            buckets = [bucket for bucket in shared if bucket.key[1] == what.bucket]
        return [bucket for bucket in buckets if bucket.key[0] == what.chunk and what.axis in bucket.axes]

    def _label(self, what: Reduce | Gather, along: str, moved: Tensor) -> Label:
        key = what, moved.numel()
        if key not in self._labels:
            self._labels[key] = Label(
                operator=name_of(what),
                stream=self.mesh.stream(along),
                axis=along,
                bytes=moved.nbytes,
                shapes=str(moved.numel()),
            )
        return self._labels[key]

    # -- the update ------------------------------------------------------------------------------------------

    def square(self) -> None:
        """Square and add up this rank's gradients, by parameter; sums over axes follow."""
        self._norm.square()

    def norm(self) -> Tensor:
        """Return the global gradient norm after all sums, each parameter counted once; 0-dim float64."""
        return self._norm.squares.sum().sqrt()

    def scale(self, factor: float, key: BucketKey | None = None) -> None:
        """Multiply this rank's sums of gradients: of one bucket, or of all if ``key`` is None."""
        for bucket in self._with_key(key):
            bucket.gradients.shard.mul_(factor)

    def zero(self, key: BucketKey | None = None) -> None:
        """Set the gradients of one bucket, or of all buckets if ``key`` is None, to 0."""
        for bucket in self._with_key(key):
            bucket.clear()

    def _with_key(self, key: BucketKey | None) -> list[Bucket]:
        return self._all if key is None else [bucket for bucket in self.buckets if bucket.key == key]


class _GlobalNorm:
    """Sums squares per global parameter, then over the parameters in one fixed order, so that layouts that
    compute the same gradients bit for bit also clip them by the same factor."""

    def __init__(self, shards: Sequence[Shard], mesh: Mesh, device: torch.device) -> None:
        first_stage = mesh.position["pp"] == 0
        # Along sharded factors shards differ; along factors that cut neither parameters nor optimizer states
        # ranks hold the same shards, and each computes the whole sum.
        cut = {*mesh.place.mesh.cut}.difference(mesh.place.mesh.sharded)
        counted = [
            shard
            for shard, p in ((shard, shard.parameter) for shard in shards)
            if not mesh.place.differs(cut.intersection(p.summed_over(mesh.place.mesh)))
            and (first_stage or not p.shared)
            and not p.sign_rate
        ]
        pieces = [(piece.source.name, shard, piece) for shard in counted for piece in shard.slices]
        names = _all_names([name for name, _, _ in pieces], mesh)
        self._views = [piece.of_local(shard.gradient) for _, shard, piece in pieces]
        positions = {name: index for index, name in enumerate(names)}
        self._index = torch.tensor([positions[name] for name, _, _ in pieces], device=device)
        self.squares = torch.zeros(len(names), dtype=torch.float64, device=device)

    def square(self) -> None:
        squares = self.squares.zero_()
        if self._views:
            norms = torch.stack(torch._foreach_norm(self._views)).to(torch.float64)
            squares.index_add_(0, self._index, norms * norms)


def _all_names(names_here: list[str], mesh: Mesh) -> list[str]:
    """Return the names of the parameters of all ranks, sorted."""
    if mesh.place.mesh.ranks == 1:
        return sorted(set(names_here))
    assert mesh.groups is not None
    return sorted({name for names in mesh.groups.gather(names_here) for name in names})
