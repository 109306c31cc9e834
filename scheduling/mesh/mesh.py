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
    """Factors with their sizes, outermost first: along the last one, ranks are numbered one after the other.

    A group is a set of factors: the ranks that differ along these and along no other one.
    """

    factors: tuple[tuple[str, int], ...]
    cut: tuple[str, ...] = ()
    """Factors that parameters are cut over."""
    sharded: tuple[str, ...] = ()
    """Factors that optimizer states are cut over beside, in equal shares of a rank's parameters (ZeRO).

    Ranks that differ along none of both hold the same state (hybrid sharding: along ``replica``, too).
    """
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Axes that are other than one factor of their name, the largest first: ``dp``, over which gradients of
    most parameters are summed, is those of ``cp`` too, and ``ep`` and ``edp`` are parts of it."""

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size by factor."""
        return dict(self.factors)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @cached_property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """The factors of every axis over which transfers go: those of more than one rank."""
        inside = {name for _, factors in self.joined for name in factors}
        own = (name for name in self.sizes if name not in inside)
        named = {axis: self.factors_of(axis) for axis in (*own, *dict(self.joined))}
        return {axis: factors for axis, factors in named.items() if self.size(factors) > 1}

    def factors_of(self, axis: str) -> tuple[str, ...]:
        """The factors that an axis is."""
        return dict(self.joined).get(axis, (axis,))

    def axes_over(self, factors: Collection[str]) -> tuple[str, ...]:
        """The axes that together are some factors, innermost first."""
        found = []
        for name, _ in reversed(self.factors):
            if name in factors:
                whole = (
                    axis for axis, members in self.joined if name in members and self._all(members, factors)
                )
                found.append(next(whole, name))
        return tuple(dict.fromkeys(found))

    def _all(self, members: Collection[str], factors: Collection[str]) -> bool:
        """Whether all members of more than one rank are among the factors."""
        return all(name in factors for name in members if self.sizes[name] > 1)

    def shares_along(self, axis: str) -> bool:
        """Whether ranks along an axis have shares of the sums of gradients over it (ZeRO)."""
        return axis in ("dp", "edp") and bool(self.sharded)

    def size(self, group: Collection[str]) -> int:
        """Number of ranks in a group."""
        return prod(self.sizes[name] for name in group)

    def position(self, rank: int) -> dict[str, int]:
        """A rank's coordinates."""
        found = {}
        for name, size in reversed(self.factors):
            rank, found[name] = divmod(rank, size)
        return found

    def rank_at(self, position: Position) -> int:
        """The rank at a position; inverse of `position`."""
        rank = 0
        for name, size in self.factors:
            rank = rank * size + position[name]
        return rank

    def index(self, position: Position, group: Collection[str]) -> int:
        """The number of a position among the ranks of its group, in the order of ranks."""
        index = 0
        for name, size in self.factors:
            if name in group:
                index = index * size + position[name]
        return index

    def members(self, position: Position, group: Collection[str]) -> list[int]:
        """The ranks of a position's group, in order."""
        ranges = [range(size) if name in group else (position[name],) for name, size in self.factors]
        names = self.sizes.keys()
        return [self.rank_at(dict(zip(names, place, strict=True))) for place in product(*ranges)]

    def holders(self, rank: int) -> list[int]:
        """The ranks that hold the same slices of the state as a rank, itself among them."""
        return self.members(self.position(rank), self.sizes.keys() - {*self.cut, *self.sharded})

    def groups(self, group: Collection[str]) -> list[list[int]]:
        """All groups over a set of factors."""
        ranges = [(0,) if name in group else range(size) for name, size in self.factors]
        names = self.sizes.keys()
        return [self.members(dict(zip(names, place, strict=True)), group) for place in product(*ranges)]


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
    """A factor for each axis; ``replica`` where states are cut over some ranks of ``dp`` only.

    ``ep`` takes the innermost ranks of ``dp`` x ``cp``: one of both is two factors where it takes some of it.
    ``degrees``: below ``tp``, ascending, of layers that are cut over the innermost ranks of it
    (`tensor_axis`); those of ``tp`` that hold the same of them are an axis, too (`beyond`).
    """
    tensor = _tensor_factors(tp, degrees)
    inside = {degree: tuple(name for name, _, up_to in tensor if up_to <= degree) for degree in degrees}
    of_layers = [(tensor_axis(degree), inside[degree]) for degree in degrees]
    of_layers += [(beyond(d), tuple(n for n, _, _ in tensor if n not in inside[d])) for d in degrees if d > 1]
    inner = max(1, ep // cp), min(ep, cp)
    of_dp, of_cp = _factored("dp", dp, inner[0]), _factored("cp", cp, inner[1])
    experts = tuple(own[-1][0] for own, size in zip((of_dp, of_cp), inner, strict=True) if size > 1)
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
    """The axis over which layers of a tensor-parallel degree of their own are cut."""
    return f"tp{degree}"


def beyond(degree: int) -> str:
    """The axis of the ranks of ``tp`` that hold the same of layers of that degree, and see other samples."""
    return "tp" if degree == 1 else f"tp_beyond_{degree}"


def is_tensor(axis: str) -> bool:
    """Whether an axis is ``tp``, or inside it."""
    return axis.startswith("tp")


def _tensor_factors(tp: int, degrees: Sequence[int]) -> list[tuple[str, int, int]]:
    """The factors of ``tp``, outermost first: name, size, and the degree that those up to it make."""
    if not degrees:
        return [("tp", tp, tp)]
    found, before = [], 1
    for degree in (*degrees, tp):
        if degree > before:
            found.append((f"tp_to_{degree}", degree // before, degree))
        before = degree
    return found[::-1]


def _factored(axis: str, size: int, inner: int) -> list[tuple[str, int]]:
    """An axis as one factor, or as two where an inner part of it is of interest."""
    if inner in (1, size):
        return [(axis, size)]
    return [(f"{axis}_outer", size // inner), (f"{axis}_inner", inner)]


def sub_groups(mesh: tuple[int, ...], dim: int) -> list[list[int]]:
    """The groups of ranks that differ only in their index along a dim of a mesh of unnamed factors."""
    stride = prod(mesh[dim + 1 :])
    starts = [rank for rank in range(prod(mesh)) if rank // stride % mesh[dim] == 0]
    return [[start + index * stride for index in range(mesh[dim])] for start in starts]


def place_in(mesh: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Where a rank stands along every dim of such a mesh."""
    found = []
    for size in reversed(mesh):
        index, place = divmod(index, size)
        found.append(place)
    return tuple(reversed(found))
