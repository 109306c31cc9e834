"""Where the rows of a piece lie in what holds them: regions of partitions, as blocks of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from braid.scheduling.mesh.partition import DimRanks, Region, bounds

Run = tuple[int, int, int]
"""Of ranks that follow each other: where they begin in what holds them, and in the piece; how many."""


@dataclass(frozen=True)
class Rows:
    """How the rows (and columns) of a region lie in a tensor that has those of another, ``held``."""

    held: Region
    wanted: Region
    own: tuple[int, ...]
    """This rank's place on every dim of the mesh."""

    @property
    def all_of_it(self) -> bool:
        """Whether there is nothing else."""
        return (self.held.spans, self.held.rows) == (self.wanted.spans, self.wanted.rows) and not self._cut

    @property
    def _cut(self) -> bool:
        return self.held.columns != self.wanted.columns

    def take(self, x: Tensor) -> Tensor:
        """The wanted rows, side by side: (held rows, ...) -> (wanted rows, ...); a view where that can be."""
        if self.all_of_it:
            return x
        blocks = list(self._blocks(x, self.held.ranks))
        if len(blocks) == 1:
            (there, _), *_ = blocks
            found = self._columns(self._by_rank(x, self.held)[there])
            return found.reshape(-1, *found.shape[len(self.own) + 1 :])
        rows = sum(prod(s.stop - s.start for s in here) for _, here in blocks)
        columns = self._columns(x)
        y = torch.empty((rows, *columns.shape[1:]), dtype=x.dtype, device=x.device)
        for there, here in blocks:
            self._by_rank(y, self.wanted)[here] = self._columns(self._by_rank(x, self.held)[there])
        return y

    def place(self, whole: Tensor, part: Tensor) -> None:
        """Copy the wanted rows to where they belong in the tensor that holds them."""
        for there, here in self._blocks(whole, self.held.ranks):
            self._columns(self._by_rank(whole, self.held)[there]).copy_(
                self._by_rank(part, self.wanted)[here]
            )

    def whole_for(self, part: Tensor, rows: int, columns: int) -> Tensor:
        """Room for the tensor that holds them, of ``rows`` rows; not initialised."""
        rest = part.shape[1:] if not self._cut else (columns,)
        return torch.empty((rows, *rest), dtype=part.dtype, device=part.device)

    def _by_rank(self, x: Tensor, region: Region) -> Tensor:
        """As [ranks along every dim of the mesh, rows of a rank, ...], a view."""
        counts = [span.of(size) for span, size in zip(region.spans, region.mesh, strict=True)]
        return x.view(*counts, x.shape[0] // prod(counts), *x.shape[1:])

    def _columns(self, x: Tensor) -> Tensor:
        if not self._cut:
            return x
        begin, end = bounds(self.wanted.columns, x.shape[-1])
        return x[..., begin:end]

    def _blocks(self, x: Tensor, ranks: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Slices of what is held, and of the wanted rows."""
        each = x.shape[0] // ranks
        first, end = (0, each) if self.held.rows == self.wanted.rows else bounds(self.wanted.rows, each)
        dims = [
            list(_runs(_places(held, size, own), _places(wanted, size, own)))
            for held, wanted, size, own in zip(
                self.held.spans, self.wanted.spans, self.held.mesh, self.own, strict=True
            )
        ]
        for runs in product(*dims):
            there = (*(slice(at, at + count) for at, _, count in runs), slice(first, end))
            here = (*(slice(at, at + count) for _, at, count in runs), slice(0, end - first))
            yield there, here


def _places(span: DimRanks, size: int, own: int) -> list[int]:
    match span:
        case DimRanks.ALL:
            return list(range(size))
        case DimRanks.OWN:
            return [own]
        case DimRanks.OTHERS:
            return [place for place in range(size) if place != own]


def _runs(held: Sequence[int], wanted: Sequence[int]) -> Iterator[Run]:
    """Neighbours in both."""
    begin = 0
    at = [held.index(place) for place in wanted]
    for number in range(1, len(at) + 1):
        if number == len(at) or at[number] != at[number - 1] + 1:
            yield at[begin], begin, number - begin
            begin = number
