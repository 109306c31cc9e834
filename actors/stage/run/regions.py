"""Positions of the rows of a piece in a larger value: regions of partitions, as blocks of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from braid.scheduling.mesh.partition import DimRanks, Region, bounds

Run = tuple[int, int, int]
"""A run of consecutive ranks: its begin in the larger value, its begin in the piece, its length."""


@dataclass(frozen=True)
class Rows:
    """Positions of the rows (and columns) of region ``wanted`` in a tensor that holds region ``held``."""

    held: Region
    wanted: Region
    own: tuple[int, ...]
    """This rank's position along every dimension of the mesh."""

    @property
    def all_of_it(self) -> bool:
        """Whether the tensor holds exactly the wanted rows and columns."""
        return (self.held.spans, self.held.rows) == (self.wanted.spans, self.wanted.rows) and not self._cut

    @property
    def _cut(self) -> bool:
        return self.held.columns != self.wanted.columns

    def take(self, x: Tensor) -> Tensor:
        """Return the wanted of the held rows (rows, ...), contiguous: a view of x if possible."""
        if self.all_of_it:
            return x
        blocks = list(self._blocks(x, self.held.ranks))
        if len(blocks) == 1:
            (source, _), *_ = blocks
            block = self._columns(self._by_rank(x, self.held)[source])
            return block.reshape(-1, *block.shape[len(self.own) + 1 :])
        rows = sum(prod(s.stop - s.start for s in target) for _, target in blocks)
        columns = self._columns(x)
        y = torch.empty((rows, *columns.shape[1:]), dtype=x.dtype, device=x.device)
        for source, target in blocks:
            self._by_rank(y, self.wanted)[target] = self._columns(self._by_rank(x, self.held)[source])
        return y

    def place(self, whole: Tensor, part: Tensor) -> None:
        """Copy ``part``, the wanted rows, to their positions in ``whole``, the tensor of the held region."""
        for target, source in self._blocks(whole, self.held.ranks):
            self._columns(self._by_rank(whole, self.held)[target]).copy_(
                self._by_rank(part, self.wanted)[source]
            )

    def whole_for(self, part: Tensor, rows: int, columns: int) -> Tensor:
        """Return a new uninitialised tensor for the held region, with ``rows`` rows."""
        rest = part.shape[1:] if not self._cut else (columns,)
        return torch.empty((rows, *rest), dtype=part.dtype, device=part.device)

    def _by_rank(self, x: Tensor, region: Region) -> Tensor:
        """Return a view of x as [ranks along every dimension of the mesh, rows of a rank, ...]."""
        counts = [span.of(size) for span, size in zip(region.spans, region.mesh, strict=True)]
        return x.view(*counts, x.shape[0] // prod(counts), *x.shape[1:])

    def _columns(self, x: Tensor) -> Tensor:
        if not self._cut:
            return x
        begin, end = bounds(self.wanted.columns, x.shape[-1])
        return x[..., begin:end]

    def _blocks(self, x: Tensor, ranks: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield every block as slices: of the held region's tensor, of the wanted rows' tensor."""
        each = x.shape[0] // ranks
        first, end = (0, each) if self.held.rows == self.wanted.rows else bounds(self.wanted.rows, each)
        dims = [
            list(_runs(_positions(held, size, position), _positions(wanted, size, position)))
            for held, wanted, size, position in zip(
                self.held.spans, self.wanted.spans, self.held.mesh, self.own, strict=True
            )
        ]
        for runs in product(*dims):
            source = (*(slice(at, at + count) for at, _, count in runs), slice(first, end))
            target = (*(slice(at, at + count) for _, at, count in runs), slice(0, end - first))
            yield source, target


def _positions(span: DimRanks, size: int, own: int) -> list[int]:
    match span:
        case DimRanks.ALL:
            return list(range(size))
        case DimRanks.OWN:
            return [own]
        case DimRanks.OTHERS:
            return [index for index in range(size) if index != own]


def _runs(held: Sequence[int], wanted: Sequence[int]) -> Iterator[Run]:
    """Yield the longest runs of ranks that are consecutive in both lists."""
    begin = 0
    at = [held.index(rank) for rank in wanted]
    for number in range(1, len(at) + 1):
        if number == len(at) or at[number] != at[number - 1] + 1:
            yield at[begin], begin, number - begin
            begin = number
