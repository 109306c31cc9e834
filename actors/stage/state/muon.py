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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
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


class MatrixPart(NamedTuple):
    """A box of a matrix: the part that is contiguous in one rank's master."""

    bucket: BucketKey
    name: str
    """Name of the global tensor."""
    leading: tuple[int, ...]
    """Position of the matrix in the global tensor: the expert, or nothing."""
    shape: tuple[int, int]
    """Shape of the whole matrix."""
    row: int
    column: int
    rows: int
    columns: int

    @property
    def matrix(self) -> tuple[BucketKey, str, tuple[int, ...]]:
        """What tells matrices apart; sorted, it gives their order."""
        return self.bucket, self.name, self.leading

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the whole matrix, a view."""
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]


@dataclass(frozen=True)
class HeldMatrices:
    """A master that holds parts of matrices, with its momentum, and the shard that it belongs to."""

    master: Tensor
    momentum: Tensor
    shard: Shard


class Held(NamedTuple):
    """A part that this rank holds: the number of the master, and the part's first element there."""

    master: int
    begin: int
    part: MatrixPart


@dataclass(frozen=True)
class _Round:
    """Matrices that are exchanged together."""

    masters: tuple[int, ...]
    """Numbers of this rank's masters that hold parts of them."""
    sent: tuple[Held, ...]
    """This rank's parts, by owner."""
    extents: Extents
    owned: tuple[tuple[MatrixPart, ...], ...]
    """Of every matrix that this rank owns, the parts of all ranks."""
    places: tuple[tuple[int, ...], ...]
    """The first elements of these parts in what arrives here."""


class MatrixUpdates:
    """Updates the matrices of one rank; all ranks of a stage and replica call `update` together."""

    def __init__(
        self, mesh: Mesh, held: Sequence[HeldMatrices], momentum: float, weight_decay: float
    ) -> None:
        """Make the group of the exchange; all ranks of the run call this together."""
        self._held, self._momentum, self._weight_decay = tuple(held), momentum, weight_decay
        shape = mesh.place.mesh
        factors = (*shape.factors_of("tp"), *shape.sharded)
        mine = [one for number, matrices in enumerate(held) for one in _parts_of(number, matrices.shard)]
        everyone = [[one.part for one in mine]]
        self._line: Line | None = None
        if shape.size(factors) > 1:
            assert mesh.groups is not None
            self._line = mesh.groups.line("update", shape.groups(factors))
            assert self._line is not None
            self._line.warm_up()
            told = mesh.groups.gather([tuple(one.part) for one in mine])
            ranks = shape.members(mesh.position, factors)
            everyone = [[MatrixPart(*fields) for fields in told[rank]] for rank in ranks]
        self._rounds = tuple(_rounds(mine, everyone, 0 if self._line is None else self._line.rank))

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Update all matrices. ``factor``: the factor that clips the gradients."""
        for now in self._rounds:
            directions = self._nesterov(now, factor)
            sent = [directions[one.master][one.begin :][: one.part.elements] for one in now.sent]
            arrived = self._exchange(_joined(sent, self._held), now.extents)
            for parts, places in zip(now.owned, now.places, strict=True):
                whole = arrived.new_empty(parts[0].shape)
                for part, place in zip(parts, places, strict=True):
                    part.of(whole).copy_(arrived[place:][: part.elements].view(part.rows, part.columns))
                direction = orthogonal_descent(whole)
                for part, place in zip(parts, places, strict=True):
                    arrived[place:][: part.elements].view(part.rows, part.columns).copy_(part.of(direction))
            returned = self._exchange(arrived, now.extents.back)
            for number in now.masters:
                self._held[number].master.mul_(1 - lr * self._weight_decay)
            place = 0
            for one in now.sent:
                step = returned[place:][: one.part.elements]
                target = self._held[one.master].master.view(-1)[one.begin :][: one.part.elements]
                target.add_(step, alpha=lr * ADAMW_RMS * sqrt(max(one.part.shape)))
                place += one.part.elements

    def _nesterov(self, now: _Round, factor: float) -> dict[int, Tensor]:
        """Add the gradients to the momentum; return the directions of the masters, flat, in bf16."""
        directions = {}
        for number in now.masters:
            held = self._held[number]
            gradient = held.shard.gradient
            if factor != 1.0:
                gradient = gradient * factor
            gradient = gradient.to(held.master.dtype)
            held.momentum.lerp_(gradient, 1 - self._momentum)
            direction = gradient.lerp(held.momentum, self._momentum)
            directions[number] = direction.view(-1).to(torch.bfloat16)
        return directions

    def _exchange(self, x: Tensor, extents: Extents) -> Tensor:
        if self._line is None:
            return x
        launch = self._line.all_to_all(x, extents)
        launch.issue().wait()
        if launch.finish is not None:
            launch.finish()
        return launch.result


def _joined(parts: list[Tensor], held: Sequence[HeldMatrices]) -> Tensor:
    if parts:
        return torch.cat(parts)
    device = held[0].master.device if held else None
    return torch.empty(0, dtype=torch.bfloat16, device=device)


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


def _parts_of(number: int, shard: Shard) -> Iterator[Held]:
    """Yield the parts of matrices that a shard holds. ``number``: number of its master."""
    key = shard.parameter.chunk, shard.parameter.bucket
    for piece in shard.slices:
        *leading, rows, columns = piece.sizes
        shape = piece.source.shape[-2], piece.source.shape[-1]
        row, column = piece.offsets[-2:]
        ranges = [range(at, at + size) for at, size in zip(piece.offsets, leading, strict=False)]
        for count, index in enumerate(product(*ranges) if rows * columns else ()):
            part = MatrixPart(key, piece.source.name, index, shape, row, column, rows, columns)
            yield Held(number, piece.begin + count * part.elements, part)


def _rounds(mine: Sequence[Held], everyone: Sequence[Sequence[MatrixPart]], rank: int) -> Iterator[_Round]:
    """Yield the rounds of an update: runs of whole buckets. ``everyone``: the parts of all ranks of the
    exchange; ``rank``: number of this rank among them."""
    owned_elements: dict[BucketKey, int] = {}
    for part in (part for parts in everyone for part in parts):
        owned_elements[part.bucket] = owned_elements.get(part.bucket, 0) + part.elements
    run: set[BucketKey] = set()
    for bucket in sorted(owned_elements):
        if run and sum(map(owned_elements.__getitem__, (*run, bucket))) > ROUND_ELEMENTS * len(everyone):
            yield _round(run, mine, everyone, rank)
            run = set()
        run.add(bucket)
    if run:
        yield _round(run, mine, everyone, rank)


def _round(
    buckets: set[BucketKey], mine: Sequence[Held], everyone: Sequence[Sequence[MatrixPart]], rank: int
) -> _Round:
    parts = [[part for part in held if part.bucket in buckets] for held in everyone]
    owners = _owners(parts)
    here = [one for one in mine if one.part.bucket in buckets]
    ranks = range(len(everyone))

    def between(source: int, owner: int) -> list[MatrixPart]:
        return [part for part in parts[source] if owners[part.matrix] == owner]

    arriving: dict[object, list[tuple[MatrixPart, int]]] = {}
    at = 0
    for source in ranks:
        for part in between(source, rank):
            arriving.setdefault(part.matrix, []).append((part, at))
            at += part.elements
    return _Round(
        masters=tuple(dict.fromkeys(one.master for one in here)),
        sent=tuple(sorted(here, key=lambda one: owners[one.part.matrix])),
        extents=Extents(
            tuple(sum(part.elements for part in between(rank, other)) for other in ranks),
            tuple(sum(part.elements for part in between(other, rank)) for other in ranks),
        ),
        owned=tuple(tuple(part for part, _ in placed) for placed in arriving.values()),
        places=tuple(tuple(place for _, place in placed) for placed in arriving.values()),
    )


def _owners(parts: Sequence[Sequence[MatrixPart]]) -> dict[object, int]:
    """Return the owner of every matrix: the costliest matrix first, each goes to that of the ranks holding
    parts of it which has least to do so far."""
    holders: dict[tuple[BucketKey, str, tuple[int, ...]], set[int]] = {}
    costs: dict[tuple[BucketKey, str, tuple[int, ...]], int] = {}
    for rank, held in enumerate(parts):
        for part in held:
            holders.setdefault(part.matrix, set()).add(rank)
            costs[part.matrix] = prod(part.shape) * min(part.shape)
    loads = [0] * len(parts)
    owners: dict[object, int] = {}
    for matrix in sorted(costs, key=lambda one: (-costs[one], one)):
        owner = min(holders[matrix], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[matrix]
        owners[matrix] = owner
    return owners
