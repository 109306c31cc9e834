"""Shards: the elements of a parameter that a rank updates.

Without ZeRO a rank updates all elements of its parameters; with ZeRO it updates an equal share of every
bucket, whose ends need not be ends of tensors. Checkpoints and copies hold a shard as boxes of global
tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from braid.actors.stage.state.parameters import ParameterSlice, StageParameter


@dataclass(kw_only=True, eq=False)
class Shard:
    """Elements ``begin`` to ``end`` of one flattened parameter, which this rank updates."""

    parameter: StageParameter
    begin: int
    end: int
    slices: tuple[ParameterSlice, ...]
    """Boxes of global tensors; their ``begin`` counts from the shard's first element."""
    gradient: Tensor = field(init=False)
    """View of the shard's elements in the gradient sum; set once the bucket has memory."""

    def __post_init__(self) -> None:
        parameter = self.parameter.tensor
        self.tensor = parameter if self.whole else parameter.view(-1)[self.begin : self.end]
        """View of the shard's elements in the parameter."""

    @property
    def whole(self) -> bool:
        """Whether the shard is all of the parameter."""
        return self.end - self.begin == self.parameter.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape if the shard is all of the parameter, else a 1-dim shape."""
        return self.parameter.shape if self.whole else torch.Size([self.end - self.begin])


def shard_of(parameter: StageParameter, begin: int, end: int) -> Shard:
    """Return the shard that holds elements ``begin`` to ``end`` of a flattened parameter."""
    return Shard(
        parameter=parameter, begin=begin, end=end, slices=tuple(_within(parameter.slices, begin, end))
    )


def _within(slices: Sequence[ParameterSlice], first: int, last: int) -> Iterator[ParameterSlice]:
    """Yield the boxes of ``slices`` in elements ``first`` to ``last`` of a flat parameter."""
    for piece in slices:
        low, high = max(first, piece.begin), min(last, piece.begin + prod(piece.sizes))
        if low == first and high == last == low + prod(piece.sizes):
            yield replace(piece, begin=0)
        elif low < high:
            at = low - first
            for offsets, sizes in boxes_of_range(piece.sizes, low - piece.begin, high - piece.begin):
                global_offsets = tuple(a + b for a, b in zip(piece.offsets, offsets, strict=True))
                yield replace(piece, offsets=global_offsets, sizes=sizes, begin=at)
                at += prod(sizes)


def boxes_of_range(
    sizes: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of boxes that, in order, are elements ``begin`` to ``end`` of a flattened box.

    Per dimension there are at most two boxes, and one more in all: the end of a row, whole rows, the
    beginning of a row.
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
