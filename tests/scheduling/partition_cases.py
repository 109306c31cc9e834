"""Partitions drawn at random, for all tests that need some."""

from collections.abc import Sequence

from hypothesis import strategies as st

from braid.scheduling.mesh.partition import ABOUT_OWN, Partition
from braid.scheduling.model.operators import Graph, Kind, Operator, Part

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.@~-]{0,12}", fullmatch=True)
SIZES = st.lists(st.integers(2, 9), min_size=2, max_size=4).map(tuple)
CUT = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
"""What is cut of layers."""


def orders(mesh: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """All orders of stages over a mesh."""
    found = st.permutations(range(len(mesh))).map(tuple)
    return st.one_of(found, st.just(ABOUT_OWN)) if len(mesh) == 2 else found


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Any partition that there can be, of whatever is named."""
    what = f"{draw(WORDS)}/{draw(WORDS)}"
    mesh = draw(st.one_of(st.just(()), SIZES))
    order = draw(orders(mesh)) if mesh else ()
    dim = draw(st.sampled_from(["", "tokens", "width"]))
    operators = draw(st.integers(1, 9 if dim == "tokens" else 1)) if dim else 0
    delivered = bool(mesh) and dim == "tokens" and draw(st.booleans())
    pieces = 1 if delivered else draw(st.integers(1 if mesh else 2, 64))
    return Partition(
        what=what,
        mesh=mesh,
        order=order,
        pieces=pieces,
        dim=dim,
        operators=operators,
        delivered=delivered,
    )


PARTITIONS = partitions()


def collectives_of(part: Part) -> list[tuple[Graph, Operator]]:
    """The collectives of a layer that may be cut, of both passes, with their graphs."""
    return [
        (graph, op) for graph in (part.forward, part.backward) for op in graph.operators if op.kind in CUT
    ]


@st.composite
def partition_of(
    draw: st.DrawFn, what: str, kind: Kind, meshes: Sequence[tuple[int, ...]], most: int
) -> Partition:
    """A partition of a gather or a scatter over one of ``meshes`` or none, with ``most`` operators beside.

    What makes no sense of a kind is left out: sums are delivered by no stage before the last, and products
    along the width need all rows at once.
    """
    gathers = kind is Kind.ALL_GATHER
    mesh = draw(st.sampled_from([(), *meshes]))
    operators = draw(st.integers(0, most))
    dim = draw(st.sampled_from(["tokens", "width"] if operators == 1 else ["tokens"])) if operators else ""
    order: tuple[int, ...] = ()
    if mesh:
        order = draw(orders(mesh).filter(lambda one: one != ABOUT_OWN or (gathers and dim != "width")))
    delivered = bool(mesh) and gathers and dim == "tokens" and draw(st.booleans())
    pieces = 1 if delivered else draw(st.integers(1 if mesh else 2, 8))
    return Partition(
        what=what,
        mesh=mesh,
        order=order,
        pieces=pieces,
        dim=dim,
        operators=operators,
        delivered=delivered,
    )
