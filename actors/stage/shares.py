"""What a rank updates of its parameters: all of them, or with ZeRO an equal share of every bucket.

A bucket is some parameters one behind the other in flat memory. Where states are sharded
(`MeshShape.sharded`), the ranks that share a bucket's parameters cut it into as many equal shares, whatever
tensors lie at the borders: sums of gradients then leave every rank its share, and gathers bring the others,
without moving anything. Checkpoints and copies hold shares as boxes of global tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import torch
from torch import Tensor

from braid.actors.stage.parameters import ParameterSlice, Place, StageParameter
from braid.scheduling.buckets import share_elements
from braid.scheduling.mesh import MeshShape


@dataclass(kw_only=True, eq=False)
class Share:
    """What a rank updates of one parameter: elements ``begin`` to ``end`` of it as a flat tensor."""

    parameter: StageParameter
    begin: int
    end: int
    slices: tuple[ParameterSlice, ...]
    """Of global tensors; they begin at elements of the share."""

    def __post_init__(self) -> None:
        self.tensor = self.of(self.parameter.tensor)
        """Its elements of the parameter."""
        self._gradient: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """Its elements of the gradient's sum."""
        assert self._gradient is not None, f"no gradient is kept of {self.slices[0].source.name}"
        return self._gradient

    @gradient.setter
    def gradient(self, total: Tensor) -> None:
        self._gradient = total

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.end - self.begin == self.parameter.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """The parameter's, or flat."""
        return self.parameter.shape if self.whole else torch.Size([self.end - self.begin])

    def of(self, tensor: Tensor) -> Tensor:
        """The share of a tensor like the parameter, a view."""
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketPlan:
    """Parameters that lie one behind the other, and what of them this rank updates."""

    chunk: int
    bucket: int | None
    """Of the chunk, where the memory has no others'; None: of several buckets."""
    axes: tuple[str, ...]
    """Over which gradients are summed."""
    members: tuple[StageParameter, ...]
    ways: int = 1
    """Ranks that it is cut over, and this rank's number among them."""
    index: int = 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where every member begins, and where the last one ends."""
        found = [0]
        for member in self.members:
            found.append(found[-1] + member.shape.numel())
        return tuple(found)

    @property
    def elements(self) -> int:
        """Of the flat memory: of all members, and what makes shares equal."""
        return self.ways * self.share_elements

    @property
    def share_elements(self) -> int:
        """Of each rank's share."""
        return share_elements(self.offsets[-1], self.ways)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's share of the flat memory, a view."""
        return flat[self.index * self.share_elements :][: self.share_elements]

    def lay(self, flat: Tensor) -> Iterator[tuple[StageParameter, Tensor]]:
        """Every member with its part of the flat memory, a view of its shape."""
        for member, (begin, end) in zip(self.members, pairwise(self.offsets), strict=True):
            yield member, flat[begin:end].view(member.shape)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """What this rank updates, in the order of the members."""
        return tuple(share for _, share in self._shares)

    @cached_property
    def _shares(self) -> tuple[tuple[int, Share], ...]:
        """With the elements of the own share at which they begin."""
        low = self.index * self.share_elements
        high = low + self.share_elements
        found = []
        for member, (begin, end) in zip(self.members, pairwise(self.offsets), strict=True):
            first, last = max(begin, low) - begin, min(end, high) - begin
            if first < last:
                slices = tuple(_within(member.slices, first, last))
                share = Share(parameter=member, begin=first, end=last, slices=slices)
                found.append((begin + first - low, share))
        return tuple(found)

    def lay_shares(self, own: Tensor) -> Iterator[tuple[Share, Tensor]]:
        """What this rank updates, with its part of this rank's share of a flat memory, a view."""
        for begin, share in self._shares:
            yield share, own[begin : begin + share.end - share.begin].view(share.shape)


def _within(slices: Sequence[ParameterSlice], first: int, last: int) -> Iterator[ParameterSlice]:
    """Of a local parameter's slices, what its elements ``first`` to ``last`` have, as boxes."""
    for piece in slices:
        low, high = max(first, piece.begin), min(last, piece.begin + prod(piece.sizes))
        if low == first and high == last == low + prod(piece.sizes):
            yield replace(piece, begin=0)
        elif low < high:
            at = low - first
            for offsets, sizes in boxes_of_range(piece.sizes, low - piece.begin, high - piece.begin):
                place = tuple(a + b for a, b in zip(piece.offsets, offsets, strict=True))
                yield replace(piece, offsets=place, sizes=sizes, begin=at)
                at += prod(sizes)


def boxes_of_range(
    sizes: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``begin`` to ``end`` of a box as a flat tensor, as boxes in order: offsets and sizes.

    At most two for every dim and one: the rest of a row, whole rows, the begin of a row.
    """
    if len(sizes) <= 1:
        if begin < end:
            yield ((begin,), (end - begin,)) if sizes else ((), ())
        return
    row = prod(sizes[1:])
    while begin < end:
        number, within = divmod(begin, row)
        if within or end - begin < row:
            stop = min(end - number * row, row)
            for offsets, extents in boxes_of_range(sizes[1:], within, stop):
                yield (number, *offsets), (1, *extents)
            begin = number * row + stop
        else:
            rows = (end - begin) // row
            yield (number, *[0] * (len(sizes) - 1)), (rows, *sizes[1:])
            begin += rows * row


def bucket_plans(
    parameters: Sequence[StageParameter], place: Place, bucket_bytes: int = 0
) -> list[BucketPlan]:
    """The buckets of a rank's parameters: of one chunk each, summed over the same axes.

    Those that are cut over ranks hold one bucket of the chunk, others not much more than ``bucket_bytes``.
    What a rank updates does not depend on it.
    """
    sharded = place.mesh.sharded

    def kind(p: StageParameter) -> tuple[int, int, tuple[str, ...], int]:
        axes = _axes(p, place.mesh)
        return p.chunk, len(axes), axes, p.bucket if sharded else 0

    # A bucket's are one behind the other also where the model has them in another order (shared experts).
    ordered = sorted(parameters, key=lambda p: (*kind(p), p.bucket))
    plans = []
    for (chunk, _, axes, bucket), group in groupby(ordered, key=kind):
        if not sharded:
            plans += [
                BucketPlan(chunk=chunk, bucket=None, axes=axes, members=tuple(members))
                for members in _bounded(group, bucket_bytes)
            ]
            continue
        members = tuple(group)
        factors = [name for name in sharded if name in members[0].summed_over(place.mesh)]
        ways, index = place.mesh.size(factors), place.index(factors)
        plans.append(
            BucketPlan(chunk=chunk, bucket=bucket, axes=axes, members=members, ways=ways, index=index)
        )
    return plans


def updated_by(plans: Sequence[BucketPlan], parameters: Sequence[StageParameter]) -> list[Share]:
    """What a rank updates of its parameters, in their order."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return sorted((one for plan in plans for one in plan.shares), key=lambda one: places[id(one.parameter)])


def _axes(parameter: StageParameter, mesh: MeshShape) -> tuple[str, ...]:
    """What a parameter's gradient is summed over: axes, and stages that hold it too (`gradient_axes`)."""
    return (*mesh.axes_over(parameter.summed_over(mesh)), *("ends",) * parameter.shared)


def _bounded(parameters: Iterator[StageParameter], limit: int) -> Iterator[list[StageParameter]]:
    bucket: list[StageParameter] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.shape.numel() * main_gradient_dtype(parameter.tensor.dtype).itemsize
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    yield bucket


def main_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of parameters of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
