"""Gradient buffers in buckets, their reduction over the axes that share parameters, and their norm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.parameters import StageParameter
from braid.actors.stage.shares import BucketPlan, Share, bucket_plans, main_gradient_dtype, updated_by
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Launch
from braid.kernels.collectives.stages import gather_stage, scatter_stage, whole_shares
from braid.scheduling.buckets import BucketKey
from braid.scheduling.code import name_of
from braid.scheduling.operators import Kind
from braid.scheduling.schedule import Reduce
from braid.scheduling.stages import Move
from braid.scheduling.trace import Label


@dataclass(eq=False)
class _Bucket:
    """Gradients of some parameters of one chunk in one flat buffer, summed over some axes."""

    plan: BucketPlan
    share: Tensor
    """The sums that this rank updates parameters with."""
    buffer: Tensor | None
    """All of it, the share too; None where that is apart, and no gradients are added up (ZeRO 2)."""
    parts: Mapping[int, Tensor]
    """Of a buffer that stays, the elements of each bucket of the chunk."""

    @property
    def lasting(self) -> bool:
        """Whether the buffer stays."""
        return bool(self.parts)

    def whole(self) -> Tensor:
        """The buffer, which is there."""
        assert self.buffer is not None
        return self.buffer

    def allocate(self) -> None:
        """Make the buffer of one that does not stay."""
        self.buffer = self.share.new_zeros(self.plan.elements)
        for parameter, view in self.plan.lay(self.buffer):
            parameter.gradient = view

    def release(self) -> None:
        """Let go of the buffer."""
        self.buffer = None
        for parameter in self.plan.members:
            parameter.gradient = None


class GradientBuckets:
    """Owns all sums of gradients: fp32 for narrower parameters, else the parameter's dtype."""

    def __init__(
        self,
        parameters: list[StageParameter],
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        bucket_bytes: int,
        *,
        deterministic: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """``deterministic``: sums of fp32 gradients are kept in float64, where they are exact as long as the
        terms of an element lie within a factor of 2^25 or so; no order of summation then changes them, nor
        does the number of data-parallel ranks (docs/design.md, The runtime). Twice the memory of gradients.
        ``reduce_dtype``: ranks sum copies of gradients that are rounded to it.
        """
        self._deterministic, self._reduce_dtype = deterministic, reduce_dtype
        self.parameters = parameters
        self._streams = streams
        self._recorder = recorder
        self._mesh = mesh
        self._pending: dict[Reduce, list[Transfer]] = {}
        plans = bucket_plans(parameters, mesh.place, bucket_bytes)
        self.plans = plans
        self.buckets = [self._fill(plan) for plan in plans]
        self.shares = updated_by(plans, parameters)
        """What this rank updates."""
        self._labels: dict[tuple[Reduce, int], Label] = {}
        self._left: dict[tuple[Reduce, int], Tensor] = {}
        """What stages have left for the next ones."""
        self.rounded: dict[tuple[Reduce, int], Tensor] = {}
        """Copies of gradients that are on their way, by whole sums."""
        self._norm = _GlobalNorm(self.shares, mesh, parameters[0].tensor.device)

    def _fill(self, plan: BucketPlan) -> _Bucket:
        like = plan.members[0].tensor
        dtype = torch.float64 if self._deterministic else main_gradient_dtype(like.dtype)
        if plan.ways > 1 and self._mesh.layout.zero > 1:
            share = torch.zeros(plan.share_elements, dtype=dtype, device=like.device)
            bucket = _Bucket(plan, share, None, {})
        else:
            buffer = torch.zeros(plan.elements, dtype=dtype, device=like.device)
            for parameter, view in plan.lay(buffer):
                parameter.gradient = view
            begins: dict[int, int] = {}
            for parameter, begin in zip(plan.members, plan.offsets, strict=False):
                begins.setdefault(parameter.bucket, begin)
            ends = [*begins.values(), plan.elements][1:]
            parts = {n: buffer[at:end] for (n, at), end in zip(begins.items(), ends, strict=True)}
            bucket = _Bucket(plan, plan.own(buffer), buffer, parts)
        for own, view in plan.lay_shares(bucket.share):
            own.gradient = view
        return bucket

    def allocate(self, reduce: Reduce) -> None:
        """Make memory, all zeros, for the gradients of a bucket that are next added up (ZeRO 2)."""
        for bucket in self._of(reduce):
            if not bucket.lasting:
                bucket.allocate()

    def start(self, reduce: Reduce) -> None:
        """Begin to sum over an axis: gradients of a chunk or a bucket that are shared along it, or squares.

        Where every rank along the axis updates a share of a bucket, it gets the sums of that share.
        """
        pending = self._pending[reduce] = []
        dtype = self._reduce_dtype if reduce.chunk is not None else None
        for number, (buffer, share) in enumerate(self._summed(reduce)):
            if dtype is None or dtype == buffer.dtype:
                sent, launch = buffer, self._launch(reduce, number, buffer, share)
            else:
                sent, launch = self._launch_rounded(reduce, number, buffer, share, dtype)
            label = self._label(reduce, sent)
            transfer = self._streams.start(label.stream, launch, awaited_next=False, lane="data")
            self._recorder.transfer(label, None, transfer)
            pending.append(transfer)

    def _scatters(self, reduce: Reduce) -> bool:
        """Whether a sum leaves every rank its share, else all of it."""
        return reduce.chunk is not None and self._mesh.place.mesh.shares_along(reduce.axis)

    def _launch(self, reduce: Reduce, number: int, buffer: Tensor, share: Tensor) -> Launch:
        """A sum of a buffer in place, or into this rank's share of it; or a stage of that."""
        if reduce.move is not None:
            return self._stage((replace(reduce, move=None), number), reduce.move, buffer, share)
        line = self._mesh.shared(reduce.axis)
        return line.reduce_scatter(buffer, into=share) if self._scatters(reduce) else line.all_reduce(buffer)

    def _launch_rounded(
        self, reduce: Reduce, number: int, buffer: Tensor, share: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Launch]:
        """The same by a rounded copy, in which the sum then stands: it is made before the first stage, and
        what the last one leaves is put back."""
        key = replace(reduce, move=None), number
        if reduce.move is None or reduce.move.number == 0:
            self.rounded[key] = buffer.to(dtype)
        whole, target = self.rounded[key], buffer
        result = whole
        if self._scatters(reduce):
            line, target = self._mesh.shared(reduce.axis), share
            result = whole.chunk(line.size)[line.rank]  # its place in a buffer, too
        launch = self._launch(reduce, number, whole, result)
        if reduce.move is not None and not reduce.move.last:
            return whole, launch
        arrive = launch.finish

        def put_back() -> None:
            if arrive is not None:
                arrive()
            target.copy_(result)
            del self.rounded[key]

        return whole, replace(launch, finish=put_back)

    def _stage(self, key: tuple[Reduce, int], move: Move, buffer: Tensor, share: Tensor) -> Launch:
        """A stage of a sum, of what the one before it has left; the last one leaves the share of it."""
        line = self._mesh.line(str(move.factor))
        scatters = self._mesh.layout.zero > 0
        x = self._left.pop(key, None)
        if x is None:
            x = buffer if scatters else whole_shares(buffer, prod(move.factor.mesh))
        if move.kind is Kind.ALL_REDUCE:
            launch = line.all_reduce(x)
        elif move.kind is Kind.REDUCE_SCATTER:
            launch = scatter_stage(line, x, move.outer, into=share if move.last else None)
        else:
            fits = move.last and x.numel() * line.size == buffer.numel()
            launch = gather_stage(line, x, move.outer, into=buffer if fits else None)
            if move.last and not fits:
                arrived, finish = launch.result, launch.finish

                def put_back() -> None:
                    if finish is not None:
                        finish()
                    buffer.copy_(arrived[: buffer.numel()])

                return replace(launch, finish=put_back)
        if not move.last:
            self._left[key] = launch.result
        return launch

    def _of(self, reduce: Reduce) -> list[_Bucket]:
        """What a sum over an axis, or the memory for it, is about."""
        alike = [b for b in self.buckets if b.plan.chunk == reduce.chunk and reduce.axis in b.plan.axes]
        if reduce.bucket is None:
            return alike
        return [b for b in alike if reduce.bucket in b.parts or b.plan.bucket == reduce.bucket]

    def _summed(self, reduce: Reduce) -> Iterator[tuple[Tensor, Tensor]]:
        """What is summed, and this rank's share of it."""
        if reduce.chunk is None:
            yield self._norm.squares, self._norm.squares
        for bucket in self._of(reduce):
            if reduce.axis == "replica":
                yield bucket.share, bucket.share
            elif bucket.lasting:
                yield bucket.whole() if reduce.bucket is None else bucket.parts[reduce.bucket], bucket.share
            elif reduce.bucket is None:  # over stages, behind the sums over replicas
                yield bucket.share, bucket.share
            else:
                yield bucket.whole(), bucket.plan.own(bucket.whole())

    def _label(self, reduce: Reduce, buffer: Tensor) -> Label:
        key = reduce, buffer.numel()
        if key not in self._labels:
            along = reduce.axis if reduce.move is None else str(reduce.move.factor)
            stream = self._mesh.stream(along)
            self._labels[key] = Label(
                operator=name_of(reduce),
                stream=stream,
                axis=along,
                bytes=buffer.nbytes,
                shapes=str(buffer.numel()),
            )
        return self._labels[key]

    def wait(self, reduce: Reduce) -> None:
        """Finish what `start` began."""
        for transfer in self._pending.pop(reduce):
            self._streams.wait(transfer)
            transfer.take()
        if reduce.bucket is None or not self._mesh.place.mesh.shares_along(reduce.axis):
            return
        if reduce.move is not None and not reduce.move.last:
            return
        for bucket in self._of(reduce):
            if not bucket.lasting:
                bucket.share.add_(bucket.plan.own(bucket.whole()))
                bucket.release()

    def square(self) -> None:
        """Square and add up this rank's gradients, parameter by parameter; sums over axes follow."""
        self._norm.square()

    def norm(self) -> Tensor:
        """Global gradient norm, each parameter counted once, after all sums; 0-dim float64."""
        return self._norm.squares.sum().sqrt()

    def scale(self, factor: float, key: BucketKey | None = None) -> None:
        """Multiply the sums that this rank updates parameters with. ``key``: of a bucket in shares."""
        for bucket in self._alike(key):
            bucket.share.mul_(factor)

    def _alike(self, key: BucketKey | None) -> list[_Bucket]:
        if key is None:
            return self.buckets
        return [one for one in self.buckets if (one.plan.chunk, one.plan.bucket) == key]

    def zero(self, key: BucketKey | None = None) -> None:
        """Clear all gradients. ``key``: those of a bucket in shares."""
        for bucket in self._alike(key):
            if bucket.lasting:
                bucket.whole().zero_()
            else:
                bucket.share.zero_()
                bucket.release()


class _GlobalNorm:
    """Sums squares per global parameter, then over the parameters in one fixed order, so that layouts that
    compute the same gradients bit for bit also clip them by the same factor."""

    def __init__(self, shares: list[Share], mesh: Mesh, device: torch.device) -> None:
        first_stage = mesh.position["pp"] == 0
        # Ranks along all other factors hold the same, and each of them sums up everything; shares differ.
        cut = {*mesh.place.mesh.cut}.difference(mesh.place.mesh.sharded)
        counted = [
            share
            for share, p in ((share, share.parameter) for share in shares)
            if not mesh.place.differs(cut.intersection(p.summed_over(mesh.place.mesh)))
            and (first_stage or not p.shared)
            and not p.sign_rate
        ]
        pieces = [(piece.source.name, share, piece) for share in counted for piece in share.slices]
        names = _all_names([name for name, _, _ in pieces], mesh)
        self._views = [piece.of_local(share.gradient) for _, share, piece in pieces]
        places = {name: place for place, name in enumerate(names)}
        self._index = torch.tensor([places[name] for name, _, _ in pieces], device=device)
        self.squares = torch.zeros(len(names), dtype=torch.float64, device=device)

    def square(self) -> None:
        squares = self.squares.zero_()
        if self._views:
            norms = torch.stack(torch._foreach_norm(self._views)).to(torch.float64)
            squares.index_add_(0, self._index, norms * norms)


def _all_names(mine: list[str], mesh: Mesh) -> list[str]:
    ranks = mesh.place.mesh.ranks
    if ranks == 1:
        return sorted(set(mine))
    assert mesh.groups is not None
    return sorted({name for names in mesh.groups.gather(mine) for name in names})
