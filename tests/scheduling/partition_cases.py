"""Partitions drawn at random, for all tests that need some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from braid.scheduling.generate.partition_checks import operators_beside
from braid.scheduling.mesh.partition import ABOUT_OWN, Partition, Target, parse_partition
from braid.scheduling.model.operators import Graph, Kind, Operator, Part
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from tests.scheduling.cases import GPT, LLAMA, TOKENS, model_parts

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.@~-]{0,12}", fullmatch=True)
SIZES = st.lists(st.integers(2, 9), min_size=2, max_size=4).map(tuple)
CUT = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
"""What is cut of layers."""


def orders(mesh: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """All orders of stages over a mesh."""
    found = st.permutations(range(len(mesh))).map(tuple)
    return st.one_of(found, st.just(ABOUT_OWN)) if len(mesh) == 2 else found


@st.composite
def partition_of(
    draw: st.DrawFn,
    what: str,
    meshes: Sequence[tuple[int, ...]] | st.SearchStrategy[tuple[int, ...]],
    most: int = 9,
    pieces: int = 64,
    kind: Kind | None = None,
) -> Partition:
    """Any partition over one of ``meshes`` or none, of so many pieces at most; operators beside: ``most``.

    What makes no sense of a ``kind`` is left out: sums are delivered by no stage before the last, and
    products along the width need all rows at once.
    """
    gathers, any_kind = kind is Kind.ALL_GATHER, kind is None
    mesh = draw(
        st.just(()) | meshes if isinstance(meshes, st.SearchStrategy) else st.sampled_from([(), *meshes])
    )
    operators = draw(st.integers(0, most))
    dim = draw(st.sampled_from(["tokens", "width"] if operators == 1 else ["tokens"])) if operators else ""
    order: tuple[int, ...] = ()
    if mesh:
        order = draw(
            orders(mesh).filter(lambda one: any_kind or one != ABOUT_OWN or (gathers and dim != "width"))
        )
    delivered = bool(mesh) and (gathers or any_kind) and dim == "tokens" and draw(st.booleans())
    count = 1 if delivered else draw(st.integers(1 if mesh else 2, pieces))
    return Partition(
        what=Target.parse(what),
        mesh=mesh,
        order=order,
        pieces=count,
        dim=dim,
        operators=operators,
        delivered=delivered,
    )


PARTITIONS = st.tuples(WORDS, WORDS).flatmap(lambda words: partition_of("/".join(words), SIZES))
"""Any partition that there can be, of whatever is named."""


def collectives_of(part: Part) -> list[tuple[Graph, Operator]]:
    """The collectives of a layer that may be cut, of both passes, with their graphs."""
    return [
        (graph, op) for graph in (part.forward, part.backward) for op in graph.operators if op.kind in CUT
    ]


SHAPES = {"llama": replace(LLAMA, kv_heads=8), "gpt": GPT}


@dataclass(frozen=True)
class Cut:
    """A layer and how it is cut; texts, so that what fails can be read."""

    family: str
    tp: int
    recompute: str
    partitions: tuple[str, ...]

    @property
    def found(self) -> tuple[Partition, ...]:
        """The partitions."""
        return tuple(map(parse_partition, self.partitions))


@st.composite
def cuts(draw: st.DrawFn, meshes: Mapping[int, Sequence[tuple[int, ...]]], kinds_alone: bool = False) -> Cut:
    """Partitions of some of a layer's collectives, each its own, or (``kinds_alone``) of all of a kind.

    ``meshes``: of so many tensor-parallel ranks.
    """
    tp = draw(st.sampled_from([*meshes]))
    family, recompute = draw(st.sampled_from([*SHAPES])), draw(st.sampled_from(RECOMPUTE_POLICIES))
    found: list[Partition] = []
    for graph, op in collectives_of(model_parts(SHAPES[family], tp, recompute)["layer"]):
        what = f"tp/{op.kind.value}" if kinds_alone else f"layer/{op.name}"
        if draw(st.booleans()) or any(one.what == what for one in found):
            continue
        most = 2 if kinds_alone else len(operators_beside(graph, op, 2))
        own = partition_of(what, meshes[tp], most, 8, op.kind)
        found.append(draw(own.filter(lambda one: one.dim == "width" or one.pieces <= TOKENS // tp)))
    return Cut(family, tp, recompute, tuple(map(str, found)))
