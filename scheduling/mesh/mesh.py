"""Describes ranks by coordinates along named factors, and groups of ranks by sets of factors (docs/design.md,
Mesh)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

Position = Mapping[str, int]
"""Factor name -> coordinate of a rank along that factor."""


@dataclass(frozen=True)
class MeshShape:
    """Mesh of ranks: named factors (dimensions) with their sizes, outermost first.

    The coordinate along the last factor changes fastest with the rank. A group is given by a set of factors:
    it consists of ranks that differ along these factors and along no others.
    """

    factors: tuple[tuple[str, int], ...]
    cut: tuple[str, ...] = ()
    """Factors over which parameters are divided (pipeline, tensor and expert parallelism)."""
    sharded: tuple[str, ...] = ()
    """Additional factors over which ZeRO shards optimizer states, in equal shares of a rank's parameters.

    Ranks that differ along no factor that is cut or sharded hold the same state (hybrid sharding: along
    ``replica``).
    """
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs (axis, its factors) for axes that are not a single factor of the same name, largest first.
    ``dp``, over which most gradients are summed, includes the factors of ``cp``; ``ep`` and ``edp`` are parts
    of ``dp``."""

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Factor name -> number of ranks along it."""
        return dict(self.factors)

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @cached_property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """Axis -> its factors, for all axes over which ranks communicate; axes of one rank are left out."""
        inside = {name for _, factors in self.joined for name in factors}
        single = (name for name in self.sizes if name not in inside)
        named = {axis: self.factors_of(axis) for axis in (*single, *dict(self.joined))}
        return {axis: factors for axis, factors in named.items() if self.size(factors) > 1}

    def factors_of(self, axis: str) -> tuple[str, ...]:
        """Return the names of the mesh factors that make up an axis."""
        return dict(self.joined).get(axis, (axis,))

    def axes_over(self, factors: Collection[str]) -> tuple[str, ...]:
        """Return axes that together consist of exactly the given factors, innermost first."""
        axes = []
        for name, _ in reversed(self.factors):
            if name in factors:
                whole = (
                    axis for axis, members in self.joined if name in members and self._all(members, factors)
                )
                axes.append(next(whole, name))
        return tuple(dict.fromkeys(axes))

    def _all(self, members: Collection[str], factors: Collection[str]) -> bool:
        """Return whether ``factors`` contains all of ``members`` that have more than one rank."""
        return all(name in factors for name in members if self.sizes[name] > 1)

    def shares_along(self, axis: str) -> bool:
        """Return whether ranks along an axis each keep only a shard of the gradients summed over it
        (ZeRO)."""
        return axis in ("dp", "edp") and bool(self.sharded)

    def size(self, group: Collection[str]) -> int:
        """Return the number of ranks in a group, given by its factors."""
        return prod(self.sizes[name] for name in group)

    def position(self, rank: int) -> dict[str, int]:
        """Return {factor name: coordinate of the rank along it}."""
        coordinates = {}
        for name, size in reversed(self.factors):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def rank_at(self, position: Position) -> int:
        """Return the rank with the given coordinates; this inverts the method `position`."""
        rank = 0
        for name, size in self.factors:
            rank = rank * size + position[name]
        return rank

    def index(self, position: Position, group: Collection[str]) -> int:
        """Return the index that the rank at ``position`` has in its group, whose ranks are in ascending
        order."""
        index = 0
        for name, size in self.factors:
            if name in group:
                index = index * size + position[name]
        return index

    def members(self, position: Position, group: Collection[str]) -> list[int]:
        """Return all ranks, ascending, of the group that contains the rank at ``position``."""
        ranges = [range(size) if name in group else (position[name],) for name, size in self.factors]
        names = self.sizes.keys()
        return [self.rank_at(dict(zip(names, coordinates, strict=True))) for coordinates in product(*ranges)]

    def holders(self, rank: int) -> list[int]:
        """Return the ranks, ``rank`` included, that hold the same slices of parameters and optimizer states
        as ``rank``."""
        return self.members(self.position(rank), self.sizes.keys() - {*self.cut, *self.sharded})

    def groups(self, group: Collection[str]) -> list[list[int]]:
        """Return the lists of ranks of all groups that a set of factors forms."""
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

    ``ep`` uses the innermost ranks of ``dp`` x ``cp``, which splits ``dp`` or ``cp`` into two factors if
    necessary. ``degrees``: tensor-parallel degrees below ``tp`` of some layers, ascending. These layers are
    cut over the innermost ranks of ``tp`` (axis `tensor_axis`); ranks with the same slices form the axis
    `beyond`.
    """
    tensor = _tensor_factors(tp, degrees)
    inside = {degree: tuple(name for name, _, up_to in tensor if up_to <= degree) for degree in degrees}
    of_layers: list[tuple[str, tuple[str, ...]]] = [(tensor_axis(d), inside[d]) for d in degrees]
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


class TensorAxis(str):
    """Name of an axis that is a part of ``tp``."""


def tensor_axis(degree: int) -> TensorAxis:
    """Return the name of the axis over which layers of a tensor-parallel degree below ``tp`` are cut."""
    return TensorAxis(f"tp{degree}")


def beyond(degree: int) -> str:
    """Return the name of the axis of ``tp`` ranks that hold the same slices of layers of tensor-parallel
    degree ``degree`` (below ``tp``) and process different samples."""
    return "tp" if degree == 1 else TensorAxis(f"tp_beyond_{degree}")


def is_tensor(axis: str) -> bool:
    """Return whether an axis is ``tp`` or a part of ``tp``."""
    return axis == "tp" or isinstance(axis, TensorAxis)


def _tensor_factors(tp: int, degrees: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return the factors into which smaller ``degrees`` split ``tp``, outermost first.

    Each is (name, size, product of its size and the sizes of all factors inside it).
    """
    if not degrees:
        return [("tp", tp, tp)]
    factors, before = [], 1
    for degree in (*degrees, tp):
        if degree > before:
            factors.append((f"tp_to_{degree}", degree // before, degree))
        before = degree
    return factors[::-1]


def _factored(axis: str, size: int, inner: int) -> list[tuple[str, int]]:
    """Return the factors (name, size) of an axis: one, or two if ``inner`` neighbouring ranks form a
    group."""
    if inner in (1, size):
        return [(axis, size)]
    return [(f"{axis}_outer", size // inner), (f"{axis}_inner", inner)]


def sub_groups(mesh: tuple[int, ...], dim: int) -> list[list[int]]:
    """Return all groups of ranks that differ only in their coordinate along ``dim``.

    ``mesh``: sizes of the dimensions, outermost first.
    """
    stride = prod(mesh[dim + 1 :])
    starts = [rank for rank in range(prod(mesh)) if rank // stride % mesh[dim] == 0]
    return [[start + index * stride for index in range(mesh[dim])] for start in starts]


def place_in(mesh: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Return the coordinates of rank ``index`` in a mesh, given the sizes of its dimensions, outermost
    first."""
    coordinates = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))
