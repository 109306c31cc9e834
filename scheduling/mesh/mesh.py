"""Ranks as coordinates along named factors, and groups of ranks as sets of factors (docs/design.md, Mesh)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

Position = Mapping[str, int]
"""A rank's coordinate along every factor."""


@dataclass(frozen=True)
class MeshShape:
    """Factors with their sizes, outermost first; the coordinate along the last factor changes fastest.

    A group is a set of factors: it holds the ranks that differ along these factors and along no other.
    """

    factors: tuple[tuple[str, int], ...]
    cut: tuple[str, ...] = ()
    """Factors over which parameters are cut."""
    sharded: tuple[str, ...] = ()
    """Further factors over which optimizer states are cut, in equal shares of a rank's parameters (ZeRO).

    Ranks that differ only along other factors hold the same state (hybrid sharding: along ``replica``).
    """
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Axes that are not one factor of the same name, the largest first. ``dp``, over which the gradients of
    most parameters are summed, includes the factors of ``cp``; ``ep`` and ``edp`` are parts of ``dp``."""

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of every factor, by name."""
        return dict(self.factors)

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @cached_property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """The factors of every axis over which transfers go, by axis; axes of one rank are left out."""
        inside = {name for _, factors in self.joined for name in factors}
        single = (name for name in self.sizes if name not in inside)
        named = {axis: self.factors_of(axis) for axis in (*single, *dict(self.joined))}
        return {axis: factors for axis, factors in named.items() if self.size(factors) > 1}

    def factors_of(self, axis: str) -> tuple[str, ...]:
        """Return the factors that an axis consists of."""
        return dict(self.joined).get(axis, (axis,))

    def axes_over(self, factors: Collection[str]) -> tuple[str, ...]:
        """Return the axes that together make up ``factors``, innermost first."""
        axes = []
        for name, _ in reversed(self.factors):
            if name in factors:
                whole = (
                    axis for axis, members in self.joined if name in members and self._all(members, factors)
                )
                axes.append(next(whole, name))
        return tuple(dict.fromkeys(axes))

    def _all(self, members: Collection[str], factors: Collection[str]) -> bool:
        """Tell whether all members of more than one rank are among the factors."""
        return all(name in factors for name in members if self.sizes[name] > 1)

    def shares_along(self, axis: str) -> bool:
        """Tell whether ranks along an axis each keep a share of the gradient sums over it (ZeRO)."""
        return axis in ("dp", "edp") and bool(self.sharded)

    def size(self, group: Collection[str]) -> int:
        """Return the number of ranks in a group."""
        return prod(self.sizes[name] for name in group)

    def position(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along every factor."""
        coordinates = {}
        for name, size in reversed(self.factors):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def rank_at(self, position: Position) -> int:
        """Return the rank at a position; inverse of `position`."""
        rank = 0
        for name, size in self.factors:
            rank = rank * size + position[name]
        return rank

    def index(self, position: Position, group: Collection[str]) -> int:
        """Return the index of a position's rank among the ranks of its group, in ascending order of ranks."""
        index = 0
        for name, size in self.factors:
            if name in group:
                index = index * size + position[name]
        return index

    def members(self, position: Position, group: Collection[str]) -> list[int]:
        """Return the ranks of the group that a position belongs to, in ascending order."""
        ranges = [range(size) if name in group else (position[name],) for name, size in self.factors]
        names = self.sizes.keys()
        return [self.rank_at(dict(zip(names, coordinates, strict=True))) for coordinates in product(*ranges)]

    def holders(self, rank: int) -> list[int]:
        """Return the ranks that hold the same slices of the state as ``rank``, itself included."""
        return self.members(self.position(rank), self.sizes.keys() - {*self.cut, *self.sharded})

    def groups(self, group: Collection[str]) -> list[list[int]]:
        """Return all groups over a set of factors, as lists of ranks."""
        ranges = [(0,) if name in group else range(size) for name, size in self.factors]
        names = self.sizes.keys()
        return [
            self.members(dict(zip(names, coordinates, strict=True)), group)
            for coordinates in product(*ranges)
        ]


def training_mesh(
    *,
    pp: int,
    replicas: int,
    dp: int,
    cp: int,
    ep: int,
    tp: int,
    sharded: bool,
    degrees: Sequence[int] = (),
) -> MeshShape:
    """Build the mesh of a training run: a factor for each axis, and ``replica`` under hybrid sharding.

    ``ep`` takes the innermost ranks of ``dp`` x ``cp``, which splits ``dp`` or ``cp`` into two factors if
    need be. ``degrees``: tensor-parallel degrees below ``tp``, ascending. Their layers are cut over the
    innermost ranks of ``tp`` (axis `tensor_axis`); ranks with the same slices of them form the axis `beyond`.
    """
    tensor = _tensor_factors(tp, degrees)
    inside = {degree: tuple(name for name, _, up_to in tensor if up_to <= degree) for degree in degrees}
    of_layers = [(tensor_axis(degree), inside[degree]) for degree in degrees]
    of_layers += [(beyond(d), tuple(n for n, _, _ in tensor if n not in inside[d])) for d in degrees if d > 1]
    inner = max(1, ep // cp), min(ep, cp)
    of_dp, of_cp = _factored("dp", dp, inner[0]), _factored("cp", cp, inner[1])
    experts = tuple(factors[-1][0] for factors, size in zip((of_dp, of_cp), inner, strict=True) if size > 1)
    names = tuple(name for name, _ in (*of_dp, *of_cp))
    replica = [("replica", replicas)] if replicas > 1 else []
    return MeshShape(
        (("pp", pp), *replica, *of_dp, *of_cp, *((name, size) for name, size, _ in tensor)),
        cut=("pp", *(name for name, _, _ in tensor), *experts),
        sharded=names if sharded else (),
        joined=(
            ("dp", names),
            ("cp", tuple(name for name, _ in of_cp)),
            ("ep", experts),
            ("edp", tuple(name for name in names if name not in experts)),
            *([("tp", tuple(name for name, _, _ in tensor)), *of_layers] if degrees else []),
        ),
    )


def tensor_axis(degree: int) -> str:
    """Return the axis over which layers with a tensor-parallel ``degree`` of their own are cut."""
    return f"tp{degree}"


def beyond(degree: int) -> str:
    """Return the axis of the ranks of ``tp`` with the same slices of layers of ``degree`` and other
    samples."""
    return "tp" if degree == 1 else f"tp_beyond_{degree}"


def is_tensor(axis: str) -> bool:
    """Tell whether an axis is ``tp`` or a part of it."""
    return axis.startswith("tp")


def _tensor_factors(tp: int, degrees: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return the factors of ``tp``, outermost first: (name, size, product of the sizes up to this one)."""
    if not degrees:
        return [("tp", tp, tp)]
    factors, before = [], 1
    for degree in (*degrees, tp):
        if degree > before:
            factors.append((f"tp_to_{degree}", degree // before, degree))
        before = degree
    return factors[::-1]


def _factored(axis: str, size: int, inner: int) -> list[tuple[str, int]]:
    """Return an axis as one factor, or as two where ``inner`` of its ranks form a group of their own."""
    if inner in (1, size):
        return [(axis, size)]
    return [(f"{axis}_outer", size // inner), (f"{axis}_inner", inner)]


def sub_groups(mesh: tuple[int, ...], dim: int) -> list[list[int]]:
    """Return the groups of ranks that differ only in their index along ``dim`` of a mesh of unnamed
    factors."""
    stride = prod(mesh[dim + 1 :])
    starts = [rank for rank in range(prod(mesh)) if rank // stride % mesh[dim] == 0]
    return [[start + index * stride for index in range(mesh[dim])] for start in starts]


def place_in(mesh: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Return the coordinates of rank ``index`` along every dimension of a mesh of unnamed factors."""
    coordinates = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))
