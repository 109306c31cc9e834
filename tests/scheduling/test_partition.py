"""The partition space: every scheme gives what the whole collective gives, and what is left out is said."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.cluster import ClusterSpec, Contention, Efficiency, Gpu, Group, Level, Link
from braid.scheduling.collectives import collective_ns
from braid.scheduling.mesh import sub_groups
from braid.scheduling.operators import Kind
from braid.scheduling.partition import parse_partition
from braid.scheduling.planner.chain import ChainOperator, Dim, Role, matmul, pointwise
from braid.scheduling.planner.partition import (
    PIECE_COUNTS,
    Collective,
    Coverage,
    PartitionSpace,
    Primitive,
    Scheme,
    Stage,
    balanced_meshes,
    partition_space,
    primitive_ns,
    stage_ns,
)
from braid.scheduling.records import from_mapping, to_mapping

GROUPS = (
    Group(size=4, per_node=4),
    Group(size=4, per_node=2),
    Group(size=6, per_node=3),
    Group(size=8, per_node=2),
    Group(size=8, per_node=1),
    Group(size=12, per_node=3),
)
KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
WIDTH = 8
"""Elements of the block that each rank contributes or ends with."""
BLOCK_BYTES = 2**20


def centauri_cluster(name: str = "centauri_a", network_bytes_per_s: float = 3.125e9) -> ClusterSpec:
    """Centauri's testbed (section 5): 8 A100 in a node; 25 Gb/s for each on cluster A, 100 Gb/s on B."""
    gpu = Gpu(
        name="A100-80G",
        memory_bytes=80 * 10**9,
        peak_flops_per_s=312e12,
        memory_bytes_per_s=2.039e12,
        gemm=Efficiency(ceiling=0.75, half_flops=2e10),
        attention=Efficiency(ceiling=0.5, half_flops=2e10),
        memory_efficiency=0.8,
    )
    contention = Contention(
        gemm_intra=0.9,
        gemm_inter=0.95,
        attention_intra=0.9,
        attention_inter=0.95,
        memory_intra=0.8,
        memory_inter=0.9,
        intra_inter=0.9,
    )
    return ClusterSpec(
        name=name,
        nodes=32,
        gpus_per_node=8,
        gpu=gpu,
        intra=Link(kind="NVSwitch", bytes_per_s=300e9, latency_ns=3_000, efficiency=0.78),
        inter=Link(kind="InfiniBand HDR", bytes_per_s=network_bytes_per_s, latency_ns=8_000, efficiency=0.85),
        contention=contention,
    )


CLUSTER = centauri_cluster()

Blocks = dict[int, np.ndarray]
"""What a rank holds: parts of the tensor by the number of the rank that owns them."""


def run_stage(stage: Stage, mesh: tuple[int, ...], per_node: int, held: list[Blocks]) -> list[Blocks]:
    """One sub-collective by every sub-group; checks what the stage says of its group and its payload."""
    results: list[Blocks] = [{} for _ in held]
    if stage.coverage is Coverage.REMOTE:
        held = [
            {b: part for b, part in blocks.items() if b // per_node != rank // per_node}
            for rank, blocks in enumerate(held)
        ]
    whole = prod(mesh) * BLOCK_BYTES
    for ranks in sub_groups(mesh, stage.mesh_dim):
        nodes = len({rank // per_node for rank in ranks})
        assert stage.group.size == len(ranks)
        assert stage.group.nodes == nodes
        blocks = sorted({b for rank in ranks for b in held[rank]})
        assert stage.payload_bytes == pytest.approx(whole * len(blocks) / prod(mesh))
        for rank in ranks:
            match stage.primitive:
                case Primitive.ALL_GATHER:
                    results[rank] = {b: part for other in ranks for b, part in held[other].items()}
                case Primitive.ALL_REDUCE | Primitive.REDUCE_SCATTER:
                    sums = {b: sum(held[other][b] for other in ranks) for b in blocks}
                    stride = prod(mesh[stage.mesh_dim + 1 :])

                    def index(r: int, stride: int = stride) -> int:
                        return r // stride % mesh[stage.mesh_dim]

                    whole_result = stage.primitive is Primitive.ALL_REDUCE
                    results[rank] = {b: s for b, s in sums.items() if whole_result or index(b) == index(rank)}
                case other:
                    raise AssertionError(f"{other} should have been pruned")
    return results


def run_scheme(scheme: Scheme, per_node: int, start: list[Blocks]) -> list[Blocks]:
    """All stages of all pieces; the results of stages that nobody moves on, joined."""
    ranks = len(start)
    pieces = []
    for c in range(scheme.pieces):
        cut = slice(c * WIDTH // scheme.pieces, (c + 1) * WIDTH // scheme.pieces)
        initial = [{b: part[cut] for b, part in blocks.items()} for blocks in start]
        outputs: list[list[Blocks]] = []
        known = [set() if scheme.stages[0].share else None for _ in range(ranks)]
        for stage in scheme.stages:
            held = outputs[stage.after[0]] if stage.after else initial
            outputs.append(run_stage(stage, scheme.mesh, per_node, held))
            for rank in range(ranks):
                if known[rank] is not None:
                    new = set(outputs[-1][rank]) - known[rank]
                    assert stage.share == pytest.approx(len(new) / ranks)
                    known[rank] |= new
        moved_on = {n for stage in scheme.stages for n in stage.after}
        ends = [
            out
            for n, (out, stage) in enumerate(zip(outputs, scheme.stages, strict=True))
            if stage.primitive is Primitive.ALL_GATHER or n not in moved_on
        ]
        joined: list[Blocks] = [{} for _ in range(ranks)]
        for out in ends:
            for rank in range(ranks):
                joined[rank] |= out[rank]
        pieces.append(joined)
    return [
        {b: np.concatenate([piece[rank][b] for piece in pieces]) for b in pieces[0][rank]}
        for rank in range(ranks)
    ]


def whole_space(
    kind: Kind, group: Group, chain: tuple[ChainOperator, ...] = (), dims: tuple[str, ...] = ()
) -> PartitionSpace:
    payload = group.size * BLOCK_BYTES
    return partition_space(Collective(kind=kind, payload_bytes=payload, dims=dims), group, CLUSTER, chain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_scheme_gives_the_result_of_the_whole_collective(kind: Kind, group: Group) -> None:
    rng = np.random.default_rng(group.size)
    data = rng.integers(-1000, 1000, size=(group.size, group.size, WIDTH))
    everything = range(group.size)
    if kind is Kind.ALL_GATHER:
        start = [{rank: data[rank, rank]} for rank in everything]
        expected = [{b: data[b, b] for b in everything} for _ in everything]
    else:
        start = [{b: data[rank, b] for b in everything} for rank in everything]
        reduced = data.sum(axis=0)
        own = [everything if kind is Kind.ALL_REDUCE else [rank] for rank in everything]
        expected = [{b: reduced[b] for b in blocks} for blocks in own]
    space = whole_space(kind, group)
    meshes = {scheme.mesh for scheme in space.schemes}
    assert meshes == {(group.size,), *balanced_meshes(group)[0]}
    for scheme in space.schemes:
        found = run_scheme(scheme, group.per_node, start)
        for rank in everything:
            assert found[rank].keys() == expected[rank].keys(), scheme.describe()
            for b in found[rank]:
                np.testing.assert_array_equal(found[rank][b], expected[rank][b])


def test_first_scheme_is_the_collective_itself_and_none_comes_twice() -> None:
    for kind in KINDS:
        space = whole_space(kind, Group(size=8, per_node=2))
        first = space.schemes[0]
        assert (first.mesh, first.pieces, len(first.stages)) == ((8,), 1, 1)
        cost = collective_ns(CLUSTER, kind, 8 * BLOCK_BYTES, Group(size=8, per_node=2))
        assert stage_ns(CLUSTER, first.stages[0]) == cost
        assert len(set(space.schemes)) == len(space.schemes)
        assert {scheme.pieces for scheme in space.schemes} == set(PIECE_COUNTS)


def test_all_reduce_is_substituted_by_scatter_and_gather_and_by_nothing_dearer() -> None:
    space = whole_space(Kind.ALL_REDUCE, Group(size=16, per_node=8))
    assert {scheme.substitution for scheme in space.schemes} == {
        (Primitive.ALL_REDUCE,),
        (Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER),
    }
    reasons = {pruned.what: pruned.reason for pruned in space.pruned}
    assert "takes" in reasons["reduce+broadcast for all_reduce"]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_rooted_primitives_cost_at_least_what_they_stand_in_for(group: Group) -> None:
    for kind, rooted in ((Kind.REDUCE_SCATTER, Primitive.REDUCES), (Kind.ALL_GATHER, Primitive.BROADCASTS)):
        whole = collective_ns(CLUSTER, kind, 1e9, group)
        assert primitive_ns(CLUSTER, rooted, 1e9, group) > whole
        names = {pruned.what for pruned in whole_space(kind, group).pruned}
        assert f"{rooted.value} for {kind.value}" in names


def test_meshes_follow_the_topology() -> None:
    kept, pruned = balanced_meshes(Group(size=32, per_node=8))
    assert set(kept) == {(4, 8), (2, 2, 8)}
    reasons = {one.what: one.reason for one in pruned}
    assert "unbalanced bandwidth" in reasons["mesh 8x4"]
    assert "divides the 8 ranks of a node" in reasons["mesh 4x2x4"]
    inside, _ = balanced_meshes(Group(size=8, per_node=8))
    assert inside == ()


@given(st.integers(1, 4), st.integers(1, 6))
def test_balanced_sub_groups_have_one_kind_of_link(per_node: int, nodes: int) -> None:
    kept, pruned = balanced_meshes(Group(size=per_node * nodes, per_node=per_node))
    for mesh in kept:
        for dim in range(len(mesh)):
            for ranks in sub_groups(mesh, dim):
                assert len({rank // per_node for rank in ranks}) in (1, len(ranks))
        assert sum(prod(mesh[dim + 1 :]) < per_node for dim in range(len(mesh))) <= 1
    names = {one.what for one in pruned}
    assert not names & {"mesh " + "x".join(map(str, mesh)) for mesh in kept}


def test_gather_between_nodes_first_sends_least_between_nodes() -> None:
    space = whole_space(Kind.ALL_GATHER, Group(size=16, per_node=8))
    sent = {
        tuple(stage.mesh_dim for stage in scheme.stages): sum(
            stage.payload_bytes for stage in scheme.stages if stage.group.level is Level.INTER
        )
        for scheme in space.schemes
        if scheme.mesh == (2, 8)
    }
    payload = 16 * BLOCK_BYTES
    assert sent == {(0, 1): payload / 8, (1, 0): payload, (1, 0, 1): payload / 8}


ROWS, IN, OUT = Dim(name="rows", size=6), Dim(name="in", size=16), Dim(name="out", size=8)
CHAIN = (
    matmul("product", ROWS, IN, OUT),
    pointwise("relu", ROWS, OUT),
    pointwise("norm", ROWS, OUT, coupled=True),
)


def compute(op: str, value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    match op:
        case "product":
            return value @ weight
        case "relu":
            return np.maximum(value, 0)
        case _:
            return value - value.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("dims", [("in", "out"), ("rows", "in")])
def test_cut_chain_computes_what_the_whole_chain_computes(dims: tuple[str, str]) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(6, 16)), rng.normal(size=(16, 8))
    whole = compute("norm", compute("relu", compute("product", x, w), w), w)
    cuts = {
        (scheme.dim, scheme.operators, scheme.pieces)
        for scheme in whole_space(Kind.ALL_GATHER, GROUPS[3], CHAIN, dims).schemes
        if scheme.dim is not None
    }
    assert {dim for dim, _, _ in cuts} == set(dims)
    for dim, operators, pieces in cuts:
        parts = []
        for index in np.array_split(np.arange({"rows": 6, "in": 16, "out": 8}[dim]), pieces):
            a, b = x, w
            if dim == "rows":
                a = x[index]
            elif dim == "out":
                b = w[:, index]
            else:
                a, b = x[:, index], w[index]
            part = a
            for op in CHAIN[:operators]:
                part = compute(op.name, part, b)
            parts.append(part)
        contracted = CHAIN[operators - 1].role(dim) is Role.CONTRACTION
        value = sum(parts) if contracted else np.concatenate(parts, axis=0 if dim == "rows" else 1)
        for op in CHAIN[operators:]:
            value = compute(op.name, value, w)
        np.testing.assert_allclose(value, whole, atol=1e-12)


def test_cuts_stop_where_the_dims_do() -> None:
    space = whole_space(Kind.ALL_GATHER, GROUPS[3], CHAIN, ("rows", "in", "out", "head"))
    lengths = {
        dim: {s.operators for s in space.schemes if s.dim == dim} for dim in ("rows", "in", "out", "head")
    }
    assert lengths == {"rows": {1, 2, 3}, "in": {1}, "out": {1, 2}, "head": set()}
    assert all(scheme.reduces == (scheme.dim == "in") for scheme in space.schemes)
    reasons = {one.what: one.reason for one in space.pruned}
    assert reasons["cut along out of 3 operators and more"] == "norm is coupled along it"
    assert reasons["cut along head of 1 operators and more"] == "product has no such dim"
    assert "contracts it" in reasons["cut along in of 2 operators and more"]
    assert reasons["8 pieces along rows of product"] == "there are 6"


def test_pieces_are_as_many_as_there_are_rows_at_most() -> None:
    """They need not be equal."""
    space = whole_space(Kind.ALL_GATHER, GROUPS[3], CHAIN, ("rows", "in"))
    even = [scheme for scheme in space.schemes if not scheme.uneven]
    for dim, pieces in {"rows": {2, 4}, "in": {2, 4, 8}}.items():
        assert {scheme.pieces for scheme in even if scheme.dim == dim} == pieces


@pytest.mark.parametrize("dims", [("rows", "in"), ("rows", "out"), ("in", "out")])
def test_what_is_cut_as_stages_deliver_is_cut_along_the_rows(dims: tuple[str, str]) -> None:
    """Stages of gathers bring rows of ranks, all columns of them."""
    for kind in KINDS:
        uneven = [s for s in whole_space(kind, GROUPS[3], CHAIN, dims).schemes if s.uneven]
        assert {scheme.dim for scheme in uneven} == ({dims[0]} if kind is Kind.ALL_GATHER else set())
        assert all(scheme.pieces == 1 and len(scheme.stages) > 1 for scheme in uneven)


@pytest.mark.parametrize("dims", [("rows", "in"), ("in", "out")])
def test_products_of_parts_of_a_contraction_are_added_up(dims: tuple[str, str]) -> None:
    """Whatever decides the parts. Equal ones have all rows, which an interleaved gather brings in two."""
    schemes = whole_space(Kind.ALL_GATHER, GROUPS[3], CHAIN, dims).schemes
    assert {scheme.reduces for scheme in schemes} == {False, True}
    for scheme in schemes:
        assert scheme.reduces == (scheme.dim == "in"), scheme.describe()
        interleaved = any(stage.coverage is Coverage.REMOTE for stage in scheme.stages)
        assert not (interleaved and scheme.reduces) or scheme.uneven


@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_is_a_partition_that_a_schedule_can_say(kind: Kind) -> None:
    """None of them twice, and the whole collective none."""
    dims = ("rows", "out")
    schemes = whole_space(kind, GROUPS[3], CHAIN[:1], dims).schemes
    found = [scheme.partition("layer/it", dims) for scheme in schemes]
    whole = [scheme for scheme, one in zip(schemes, found, strict=True) if one is None]
    own = (Primitive(kind.value),)
    if kind is Kind.ALL_REDUCE:  # scattered and gathered, it is the same where nothing is divided
        assert {scheme.substitution for scheme in whole} >= {own}
    else:
        assert [scheme.describe() for scheme in whole] == [schemes[0].describe()]
        assert len({str(one) for one in found}) == len(found)
    for scheme, one in zip(schemes, found, strict=True):
        if one is None:
            assert (len(scheme.mesh), scheme.pieces, scheme.dim) == (1, 1, None)
            continue
        assert parse_partition(str(one)) == one
        assert one.mesh == (scheme.mesh if len(scheme.mesh) > 1 else ())
        assert (one.pieces, one.operators, one.delivered) == (scheme.pieces, scheme.operators, scheme.uneven)
        assert one.dim == {None: "", "rows": "tokens", "out": "width"}[scheme.dim]
        if one.mesh:
            visited = [stage.mesh_dim for stage in scheme.stages]
            assert list(one.order) == visited[: len(one.order)]
            assert len(visited) in (len(one.order), 2 * len(one.order))
        if one.about_own:
            assert [stage.coverage for stage in scheme.stages] == [
                Coverage.LOCAL,
                Coverage.WHOLE,
                Coverage.REMOTE,
            ]


def test_rooted_primitives_are_no_partition() -> None:
    (whole, *_) = whole_space(Kind.ALL_GATHER, GROUPS[1]).schemes
    rooted = replace(whole, substitution=(Primitive.GATHER, Primitive.BROADCAST), pieces=2)
    with pytest.raises(ValueError, match=r"^gather\+broadcast 4, 2 pieces is not executed$"):
        rooted.partition("layer/it", ())


def test_schemes_are_data() -> None:
    for scheme in whole_space(Kind.ALL_GATHER, GROUPS[3], CHAIN, ("out",)).schemes:
        assert from_mapping(Scheme, to_mapping(scheme), "scheme") == scheme


def test_what_cannot_be_partitioned_is_named() -> None:
    with pytest.raises(ValueError, match="all_to_all has no partition"):
        Collective(kind=Kind.ALL_TO_ALL, payload_bytes=8)
