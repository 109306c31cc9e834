"""The partition space of one collective (Centauri section 3.1): primitive, then group, then workload.

A *scheme* is one way to run the collective: *stages* (sub-collectives over sub-groups of a mesh of ranks) and
a cut of the payload, with the computation that depends on it, into pieces. What cannot win is pruned, and
every pruned way keeps its reason.

A mesh (N1, ..., Nd) numbers the ranks of a group with the last dim fastest, in the order in which ranks fill
nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Final

from braid.scheduling.cluster import ClusterSpec, Group, Level, common_level, dim_group
from braid.scheduling.collectives import collective_ns
from braid.scheduling.operators import Kind
from braid.scheduling.partition import DIMS, Partition
from braid.scheduling.planner.chain import ChainOperator, Role
from braid.scheduling.records import require_positive

PIECE_COUNTS: Final = (1, 2, 4, 8)
"""Into how many pieces a workload may be cut; the last is Centauri's MAX_CHUNKS."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective; ``payload_bytes`` as in `braid.scheduling.collectives`: those of the whole tensor."""

    kind: Kind
    payload_bytes: int
    dims: tuple[str, ...] = ()
    """Dims of the tensor, rows first; pieces of it are cut along one of them."""

    def __post_init__(self) -> None:
        require_positive(self, ("payload_bytes",))
        if self.kind not in _WHOLE:
            raise ValueError(f"kind={self.kind.value} has no partition; use one of {', '.join(_WHOLE)}")


class Primitive(StrEnum):
    """Collectives and their rooted parts (table 2)."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    REDUCES = "reduces"
    """One reduce to every rank in turn, each of its share."""
    BROADCASTS = "broadcasts"
    """One broadcast from every rank in turn, each of its share."""


_WHOLE: Final = {
    Kind.ALL_REDUCE: Primitive.ALL_REDUCE,
    Kind.REDUCE_SCATTER: Primitive.REDUCE_SCATTER,
    Kind.ALL_GATHER: Primitive.ALL_GATHER,
}
_KINDS: Final = {primitive: kind for kind, primitive in _WHOLE.items()}

SUBSTITUTIONS: Final = {
    Primitive.ALL_REDUCE: (
        (Primitive.REDUCE, Primitive.BROADCAST),
        (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER),
    ),
    Primitive.REDUCE_SCATTER: ((Primitive.REDUCE, Primitive.SCATTER), (Primitive.REDUCES,)),
    Primitive.ALL_GATHER: ((Primitive.GATHER, Primitive.BROADCAST), (Primitive.BROADCASTS,)),
}
"""Table 2: what may stand in for a primitive."""


class Coverage(StrEnum):
    """Which blocks of the tensor a stage moves, seen from the node that a rank stands on."""

    WHOLE = "whole"
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A sub-collective of a scheme, run by every sub-group along one dim of the mesh at the same time."""

    primitive: Primitive
    mesh_dim: int
    group: Group
    payload_bytes: float
    """Of the sub-group's tensor, all pieces together."""
    coverage: Coverage = Coverage.WHOLE
    after: tuple[int, ...] = ()
    """Stages of the same scheme whose result it moves."""
    share: float = 0.0
    """Part of the collective's output that is there with this stage and was not before."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A leaf of the partition space."""

    substitution: tuple[Primitive, ...]
    mesh: tuple[int, ...]
    stages: tuple[Stage, ...]
    pieces: int = 1
    dim: str | None = None
    """Along which the chain is cut; None: the transfer is cut, the computation is not."""
    operators: int = 0
    """Operators of the chain, nearest to the collective first, that are cut with it."""
    uneven: bool = False
    """The chain is cut as the stages deliver (``Stage.share``), not into equal pieces."""
    reduces: bool = False
    """The last of the cut operators is cut along its contraction: partial results are added up."""

    def partition(self, what: str, dims: Sequence[str]) -> Partition | None:
        """The scheme as what a schedule says of a collective of these dims (rows, columns); None: whole.

        `ValueError` for rooted primitives, which no schedule executes: they are always pruned.
        """
        if not set(self.substitution) <= set(_KINDS):
            raise ValueError(f"{self.describe()} is not executed")
        if len(self.mesh) == self.pieces == 1:
            return None
        per_primitive = len(self.stages) // len(self.substitution)
        return Partition(
            what=what,
            mesh=self.mesh if len(self.mesh) > 1 else (),
            order=tuple(s.mesh_dim for s in self.stages[:per_primitive]) if len(self.mesh) > 1 else (),
            pieces=self.pieces,
            dim="" if self.dim is None else DIMS[dims.index(self.dim)],
            operators=self.operators,
            delivered=self.uneven,
        )

    def describe(self) -> str:
        """The scheme in one line, such as ``all_gather 2x8 (dim 0, dim 1), 4 pieces of hidden``."""
        names = "+".join(primitive.value for primitive in self.substitution)
        mesh = "x".join(map(str, self.mesh))
        order = ", ".join(f"dim {stage.mesh_dim}" for stage in self.stages)
        text = f"{names} {mesh}" + (f" ({order})" if len(self.mesh) > 1 else "")
        if self.uneven:
            return f"{text}, cut as stages deliver along {self.dim}"
        return f"{text}, {self.pieces} pieces" + (f" of {self.dim}" if self.dim else "")


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A part of the space that is not searched, and why."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PartitionSpace:
    """All schemes of a collective, the unpartitioned one first."""

    schemes: tuple[Scheme, ...]
    pruned: tuple[Pruned, ...]


def partition_space(
    collective: Collective,
    group: Group,
    cluster: ClusterSpec | None,
    chain: Sequence[ChainOperator] = (),
) -> PartitionSpace:
    """Every scheme of a collective over a rank group, and what was pruned (Centauri section 3.1, figure 4).

    ``chain`` are the dependent operators, nearest to the collective first: those that follow it, or, for a
    reduce-scatter, those that come before it. ``cluster``: whose links say what may stand in for a primitive;
    None: nothing, which is what they all say of reduce-scatters and all-gathers.
    """
    pruned: list[Pruned] = []
    own = [(_WHOLE[collective.kind],)]
    substitutions = own if cluster is None else _substitutions(collective, group, cluster, pruned)
    meshes, unbalanced = balanced_meshes(group)
    pruned.extend(unbalanced)
    plans: list[Scheme] = []
    for substitution in substitutions:
        whole = substitution == (_WHOLE[collective.kind],)
        for mesh in ((group.size,), *meshes):
            if whole or len(mesh) == 1 or collective.kind is Kind.ALL_REDUCE:
                for stages in _stage_orders(substitution, mesh, group, float(collective.payload_bytes)):
                    plans.append(Scheme(substitution=substitution, mesh=mesh, stages=stages))
    cuts = list(_workload_cuts(collective, chain, pruned))
    schemes = [replace(plan, **vars(cut)) for plan in plans for cut in cuts if _fits(plan, cut)]
    return PartitionSpace(schemes=tuple(schemes), pruned=tuple(pruned))


def stage_ns(cluster: ClusterSpec, stage: Stage, pieces: int = 1) -> int:
    """Time of one piece of a stage, without the launch."""
    return primitive_ns(cluster, stage.primitive, stage.payload_bytes / pieces, stage.group)


def primitive_ns(cluster: ClusterSpec, primitive: Primitive, payload: float, group: Group) -> int:
    """Time of a primitive; rooted ones are pipelined chains (reduce, broadcast) or serve from one rank.

    A chain over k ranks of each node leaves the node once for them all; what one root sends to, or takes
    from, all others goes through that root's own link.
    """
    if primitive in _KINDS:
        return collective_ns(cluster, _KINDS[primitive], payload, group)
    size, hops = group.size, group.size - 1
    link = cluster.link(group.level)
    match primitive:
        case Primitive.REDUCE | Primitive.BROADCAST:
            shared = group.per_node if group.level is Level.INTER else 1
            return round(link.transfer_ns(payload / shared, hops))
        case Primitive.REDUCES | Primitive.BROADCASTS:
            each = Primitive.REDUCE if primitive is Primitive.REDUCES else Primitive.BROADCAST
            return size * primitive_ns(cluster, each, payload / size, group)
        case _:
            peers = size if group.level is Level.INTRA else size - group.per_node + 1
            return round(link.transfer_ns(payload * (peers - 1) / size, hops))


@cache
def balanced_meshes(group: Group) -> tuple[tuple[tuple[int, ...], ...], tuple[Pruned, ...]]:
    """Meshes of two or more dims whose sub-groups have one kind of link each (Centauri section 3.1.2).

    A sub-group either lies inside a node or has every rank on another node; the ranks of a node are not
    divided further. Every other factorisation is in the second result.
    """
    kept: list[tuple[int, ...]] = []
    pruned: list[Pruned] = []
    for mesh in _factorisations(group.size):
        if len(mesh) == 1:
            continue
        levels = [common_level(mesh, dim, group.per_node) for dim in range(len(mesh))]
        reason = None
        if None in levels:
            dim = levels.index(None)
            reason = f"sub-groups along dim {dim} have links inside and between nodes: unbalanced bandwidth"
        elif levels.count(Level.INTRA) > 1:
            reason = f"divides the {group.per_node} ranks of a node, which would break up the rings inside it"
        if reason is None:
            kept.append(mesh)
        else:
            pruned.append(Pruned(what="mesh " + "x".join(map(str, mesh)), reason=reason))
    return tuple(kept), tuple(pruned)


def _factorisations(size: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations into factors above 1."""
    if size > 1:
        yield (size,)
    for first in range(2, size):
        if size % first == 0:
            for rest in _factorisations(size // first):
                yield (first, *rest)


def _substitutions(
    collective: Collective, group: Group, cluster: ClusterSpec, pruned: list[Pruned]
) -> list[tuple[Primitive, ...]]:
    """The collective itself and what may stand in for it at no higher cost by the byte.

    Latencies are left to the scheduled time, where they count for every piece.
    """

    def per_gigabyte_ns(primitive: Primitive) -> int:
        small, large = (primitive_ns(cluster, primitive, size, group) for size in (1e9, 2e9))
        return large - small

    own = _WHOLE[collective.kind]
    kept: list[tuple[Primitive, ...]] = [(own,)]
    whole_ns = per_gigabyte_ns(own)
    for parts in SUBSTITUTIONS[own]:
        parts_ns = sum(per_gigabyte_ns(part) for part in parts)
        # Each part is rounded to a nanosecond.
        if parts_ns <= whole_ns + 2 * len(parts):
            kept.append(parts)
        else:
            names = "+".join(part.value for part in parts)
            reason = f"takes {parts_ns} ns for each GB, {own.value} {whole_ns} ns"
            pruned.append(Pruned(what=f"{names} for {own.value}", reason=reason))
    return kept


def _stage_orders(
    substitution: tuple[Primitive, ...], mesh: tuple[int, ...], group: Group, payload: float
) -> Iterator[tuple[Stage, ...]]:
    """The stages of a substitution over a mesh: innermost dim first and outermost first.

    Gathering visits the dims in the opposite order to scattering. An all-gather over nodes x ranks is also
    *interleaved* (Centauri figure 5e): own node and own rank of all nodes at once, then the rest.
    """
    dims = range(len(mesh))
    groups = [dim_group(group, mesh, dim) for dim in dims]
    orders = [tuple(reversed(dims))] + ([tuple(dims)] if len(mesh) > 1 else [])
    for order in orders:
        stages: list[Stage] = []
        size = payload
        for primitive in substitution:
            gathers = primitive is Primitive.ALL_GATHER
            if gathers and len(substitution) == 1:
                size = payload / group.size
            for dim in reversed(order) if gathers else order:
                size = size * mesh[dim] if gathers else size
                there = size / payload
                before = sum(stage.share for stage in stages)
                stages.append(
                    Stage(
                        primitive=primitive,
                        mesh_dim=dim,
                        group=groups[dim],
                        payload_bytes=size,
                        after=(len(stages) - 1,) if stages else (),
                        share=there - before if gathers else 0.0,
                    )
                )
                if primitive is Primitive.REDUCE_SCATTER:
                    size /= mesh[dim]
        yield tuple(stages)
    if substitution == (Primitive.ALL_GATHER,) and len(mesh) == 2 and groups[1].level is Level.INTRA:
        yield _interleaved(groups[0], groups[1], payload)


def _interleaved(outer: Group, inner: Group, payload: float) -> tuple[Stage, ...]:
    world = outer.size * inner.size
    local, across = inner.size / world, (outer.size - 1) / world

    def stage(dim: int, covered: float, coverage: Coverage, after: tuple[int, ...], share: float) -> Stage:
        return Stage(
            primitive=Primitive.ALL_GATHER,
            mesh_dim=dim,
            group=(outer, inner)[dim],
            payload_bytes=payload * covered,
            coverage=coverage,
            after=after,
            share=share,
        )

    return (
        stage(1, 1 / outer.size, Coverage.LOCAL, (), local),
        stage(0, 1 / inner.size, Coverage.WHOLE, (), across),
        stage(1, 1 - 1 / outer.size, Coverage.REMOTE, (1,), 1 - local - across),
    )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    pieces: int = 1
    dim: str | None = None
    operators: int = 0
    uneven: bool = False
    reduces: bool = False


def _workload_cuts(
    collective: Collective, chain: Sequence[ChainOperator], pruned: list[Pruned]
) -> Iterator[_Cut]:
    """Piece counts, alone and along every dim and length of chain that take the cut (section 3.1.3)."""
    yield from (_Cut(pieces=pieces) for pieces in PIECE_COUNTS)
    for dim in collective.dims:
        for length, op in enumerate(chain, start=1):
            role = op.role(dim)
            size = next((d.size for d in op.dims if d.name == dim), 0)
            if role is None or role is Role.NONE_SPLIT:
                reason = f"{op.name} has no such dim" if role is None else f"{op.name} is coupled along it"
                pruned.append(Pruned(what=f"cut along {dim} of {length} operators and more", reason=reason))
                break
            reduces = role is Role.CONTRACTION
            if dim == collective.dims[0]:
                yield _Cut(dim=dim, operators=length, uneven=True, reduces=reduces)
            for pieces in PIECE_COUNTS[1:]:
                if pieces <= size:
                    yield _Cut(pieces=pieces, dim=dim, operators=length, reduces=reduces)
                else:
                    what = f"{pieces} pieces along {dim} of {op.name}"
                    pruned.append(Pruned(what=what, reason=f"there are {size}"))
            if reduces:
                what = f"cut along {dim} of {length + 1} operators and more"
                pruned.append(Pruned(what=what, reason=f"{op.name} contracts it: its result is whole"))
                break


def _fits(plan: Scheme, cut: _Cut) -> bool:
    """Whether a cut applies: uneven ones follow the stages of a gather that delivers in parts.

    Along a contraction every piece has all rows, which an interleaved gather brings in two.
    """
    if cut.reduces and not cut.uneven and any(stage.coverage is Coverage.REMOTE for stage in plan.stages):
        return False
    return not cut.uneven or sum(1 for stage in plan.stages if stage.share > 0) > 1 == len(plan.substitution)
