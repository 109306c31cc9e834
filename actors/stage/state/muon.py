"""Muon: steps along orthogonal matrices, each of which one rank computes whole.

Muon (https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest orthogonal
matrix, so that, unlike AdamW, it needs the whole matrix at once. Ranks keep the momentum where they keep
AdamW's moments: as the slices that tp, ep and ZeRO give them. For an update every matrix (q, k, v, gate, up,
one expert's down projection) has an *owner* among the ranks that hold parts of it. The ranks send their
parts of the momentum to the owners, in bf16, to which Muon rounds it anyway; the owners orthogonalise, and
send the parts of the result back, also in bf16. Every rank then updates its own elements.

All matrices of a stage are updated together, in rounds of bounded memory, when the gradients have been
clipped: before the update of the first bucket, after the last transfer of the step, and before the gathers
of the next step. The exchange has a process group of its own (the ranks of a stage and replica), so that
gathers which another bucket has under way cannot be taken for it. The order of the exchanges is the same on
all ranks, as it follows from the names of the matrices.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod, sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.state.shards import Shard
from braid.kernels.collectives.primitives import Extents, Line
from braid.scheduling.schedule.buckets import BucketKey

ADAMW_RMS: Final = 0.2
"""Root mean square of AdamW's usual steps. Steps are scaled to it, so that AdamW's learning rate and weight
decay suit Muon (`adjust_lr_fn="match_rms_adamw"` of `torch.optim.Muon`, arXiv:2502.16982, equation 4)."""

ROUND_ELEMENTS: Final = 1 << 26
"""Number of elements per rank that one round exchanges at most, unless one bucket has more."""


MatrixKey = tuple[BucketKey, str, tuple[int, ...]]
"""What tells matrices apart, and gives their order: `MatrixPart.bucket`, ``name`` and ``leading``."""


class MatrixPart(NamedTuple):
    """A box of a matrix: the part that is contiguous in one rank's master."""

    bucket: BucketKey
    name: str
    leading: tuple[int, ...]
    """Position of the matrix in the global tensor: the expert, or nothing."""
    shape: tuple[int, ...]
    row: int
    column: int
    rows: int
    columns: int

    @property
    def matrix(self) -> MatrixKey:
        return self.bucket, self.name, self.leading

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the whole matrix, a view."""
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]

    def at(self, flat: Tensor, place: int) -> Tensor:
        """Return this part, which begins at ``place`` in a 1-dim tensor, as a box, a view."""
        return flat[place : place + self.elements].view(self.rows, self.columns)


class HeldMatrices(NamedTuple):
    """A master that holds parts of matrices, with its momentum, and the shard that it belongs to."""

    master: Tensor
    momentum: Tensor
    shard: Shard


class HeldPart(NamedTuple):
    """A part that this rank holds: the number of the master, and the part's first element there."""

    master: int
    begin: int
    part: MatrixPart


@dataclass(frozen=True)
class _Round:
    """Matrices that are exchanged together."""

    sent: tuple[HeldPart, ...]
    """This rank's parts, by owner."""
    extents: Extents
    owned: tuple[tuple[tuple[MatrixPart, int], ...], ...]
    """Of every matrix that this rank owns, the parts of all ranks, each with its first element in what
    arrives."""


class MatrixUpdates:
    """Updates the matrices of one rank; all ranks of a stage and replica call `update` together."""

    def __init__(
        self,
        mesh: Mesh,
        held: Sequence[HeldMatrices],
        device: torch.device,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """Make the group of the exchange; all ranks of the run call this together."""
        self._held, self._momentum, self._weight_decay = held, momentum, weight_decay
        self._nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._line: Line | None = None
        shape = mesh.place.mesh
        factors = (*shape.factors_of("tp"), *shape.sharded)
        mine = [one for number, matrices in enumerate(held) for one in _parts_of(number, matrices.shard)]
        everyone, rank = [[one.part for one in mine]], 0
        if shape.size(factors) > 1:
            assert mesh.groups is not None
            self._line = mesh.groups.line("update", shape.groups(factors))
            assert self._line is not None
            self._line.warm_up()
            told = mesh.groups.gather([tuple(part) for part in everyone[0]])
            ranks = shape.members(mesh.position, factors)
            everyone = [[MatrixPart(*fields) for fields in told[other]] for other in ranks]
            rank = self._line.rank
        self._rounds = tuple(_round(run, mine, everyone, rank) for run in _runs_of_buckets(everyone))

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Update all matrices. ``factor``: the factor that clips the gradients."""
        for now in self._rounds:
            masters = dict.fromkeys(one.master for one in now.sent)
            directions = {number: self._direction(self._held[number], factor) for number in masters}
            sent = [directions[one.master][one.begin :][: one.part.elements] for one in now.sent]
            arrived = self._exchange(torch.cat([self._nothing, *sent]), now.extents)
            for parts in now.owned:
                whole = arrived.new_empty(parts[0][0].shape)
                for part, place in parts:
                    part.of(whole).copy_(part.at(arrived, place))
                descent = orthogonal_descent(whole)
                for part, place in parts:
                    part.at(arrived, place).copy_(part.of(descent))
            returned = self._exchange(arrived, now.extents.back)
            for number in masters:
                self._held[number].master.mul_(1 - lr * self._weight_decay)
            place = 0
            for number, begin, part in now.sent:
                target = part.at(self._held[number].master.view(-1), begin)
                target.add_(part.at(returned, place), alpha=lr * ADAMW_RMS * sqrt(max(part.shape)))
                place += part.elements

    def _direction(self, held: HeldMatrices, factor: float) -> Tensor:
        """Add the gradient to the momentum; return Nesterov's direction, flat, in bf16."""
        gradient = held.shard.gradient if factor == 1.0 else held.shard.gradient * factor
        gradient = gradient.to(held.master.dtype)
        held.momentum.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(held.momentum, self._momentum).view(-1).to(torch.bfloat16)

    def _exchange(self, x: Tensor, extents: Extents) -> Tensor:
        if self._line is None:
            return x
        launch = self._line.all_to_all(x, extents)
        launch.issue().wait()
        if launch.finish is not None:
            launch.finish()
        return launch.result


def orthogonal_descent(direction: Tensor) -> Tensor:
    """Return the orthogonal matrix against which a step along ``direction`` (bf16, 2-dim, overwritten) goes:
    the negative of Muon's.

    `torch.optim.Muon` computes it, as the first step from 0 without momentum. torch's factor for tall
    matrices is divided out.
    """
    rows, columns = direction.shape
    step = nn.Parameter(torch.zeros_like(direction))
    step.grad = direction
    lr = 1 / sqrt(max(1, rows / columns))
    torch.optim.Muon([step], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return step.detach()


def _parts_of(number: int, shard: Shard) -> Iterator[HeldPart]:
    """Yield the parts of matrices that a shard holds. ``number``: number of its master."""
    key = shard.parameter.chunk, shard.parameter.bucket
    for piece in (piece for piece in shard.slices if 0 not in piece.sizes):
        *leading, rows, columns = piece.sizes
        shape, (row, column) = piece.source.shape[-2:], piece.offsets[-2:]
        ranges = [range(at, at + size) for at, size in zip(piece.offsets, leading, strict=False)]
        for count, index in enumerate(product(*ranges)):
            part = MatrixPart(key, piece.source.name, index, shape, row, column, rows, columns)
            yield HeldPart(number, piece.begin + count * part.elements, part)


def _runs_of_buckets(everyone: Sequence[Sequence[MatrixPart]]) -> Iterator[set[BucketKey]]:
    """Yield the buckets of every round. ``everyone``: the parts of all ranks of the exchange."""
    elements: Counter[BucketKey] = Counter()
    for part in chain(*everyone):
        elements[part.bucket] += part.elements
    run: set[BucketKey] = set()
    for bucket in sorted(elements):
        if run and sum(elements[key] for key in (*run, bucket)) > ROUND_ELEMENTS * len(everyone):
            yield run
            run = set()
        run.add(bucket)
    if run:
        yield run


def _round(
    buckets: set[BucketKey], mine: Sequence[HeldPart], everyone: Sequence[Sequence[MatrixPart]], rank: int
) -> _Round:
    parts = [[part for part in held if part.bucket in buckets] for held in everyone]
    owners = owners_of(parts)

    def sizes(source: int) -> Counter[int]:
        """Numbers of elements that a rank sends to every owner."""
        sent: Counter[int] = Counter()
        for part in parts[source]:
            sent[owners[part.matrix]] += part.elements
        return sent

    owned: dict[MatrixKey, list[tuple[MatrixPart, int]]] = {}
    place = 0
    for part in (part for part in chain(*parts) if owners[part.matrix] == rank):
        owned.setdefault(part.matrix, []).append((part, place))
        place += part.elements
    here = [one for one in mine if one.part.bucket in buckets]
    ranks = range(len(everyone))
    return _Round(
        sent=tuple(sorted(here, key=lambda one: owners[one.part.matrix])),
        extents=Extents(
            tuple(sizes(rank)[other] for other in ranks), tuple(sizes(other)[rank] for other in ranks)
        ),
        owned=tuple(map(tuple, owned.values())),
    )


def owners_of(parts: Sequence[Sequence[MatrixPart]]) -> dict[MatrixKey, int]:
    """Return the owner of every matrix. ``parts``: those that each rank holds.

    The costliest matrix first, each goes to that of its holders which has least to do so far.
    """
    holders: dict[MatrixKey, set[int]] = {}
    costs: dict[MatrixKey, int] = {}
    for rank, held in enumerate(parts):
        for part in held:
            holders.setdefault(part.matrix, set()).add(rank)
            costs[part.matrix] = prod(part.shape) * min(part.shape)
    loads = [0] * len(parts)
    owners: dict[MatrixKey, int] = {}
    for matrix in sorted(costs, key=lambda one: (-costs[one], one)):
        owners[matrix] = owner = min(holders[matrix], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[matrix]
    return owners
