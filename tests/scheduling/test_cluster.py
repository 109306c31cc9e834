"""Clusters and cluster files: limits of their figures, groups of ranks, and wrong input by name.

What is wrong in files of any sort: `test_records`."""

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Efficiency, Link, Stream, group_of
from braid.scheduling.model.presets.library import cluster_preset, load_cluster, parse_cluster
from braid.scheduling.text.records import to_mapping

WHOLE = to_mapping(cluster_preset("a800"))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The file of a whole cluster with one value changed; `...` removes it."""
    content = deepcopy(WHOLE)
    *above, key = path.split(".")
    place = content
    for name in above:
        place = place[name]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return content


def refused(content: Any) -> str:
    """The message with which a cluster file is refused; one line that names the file."""
    with pytest.raises(ValueError) as error:
        parse_cluster(content, "mine.yaml")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("mine.yaml")
    return message


# -- wrong input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("nodes", 0), "mine.yaml: nodes=0 must be greater than zero"),
        (changed("gpu.memory_bytes", -1), "mine.yaml.gpu: memory_bytes=-1 must be greater than zero"),
        (changed("inter.bytes_per_s", 0), "mine.yaml.inter: bytes_per_s=0.0 must be greater than zero"),
        (changed("intra.latency_ns", -1), "mine.yaml.intra: latency_ns=-1"),
        (changed("gpu.launch_ns", -1), "mine.yaml.gpu: launch_ns=-1"),
        (changed("gpu.gemm.ceiling", -1), "mine.yaml.gpu.gemm: ceiling=-1"),
        (changed("gpu.memory", 1), "mine.yaml.gpu: unknown key 'memory'; did you mean 'memory_bytes'?"),
        (changed("intra.efficiency", 0), "mine.yaml.intra: efficiency=0.0 must be above 0 and at most 1"),
        (changed("intra.efficiency", 70), "mine.yaml.intra: efficiency=70.0 must be above 0 and at most 1"),
        (
            changed("contention.memory_inter", -1.01),
            "mine.yaml.contention: memory_inter=-1.01 must be between -1",
        ),
        (changed("inter", ...), "mine.yaml: inter is missing, but nodes=8: give the bandwidth and latency"),
        (None, "mine.yaml must hold keys and values, found None"),
        ({"base": "a80"}, "mine.yaml.base 'a80' is no preset; did you mean 'a800'?"),
        ({"base": ["a800"]}, "mine.yaml.base ['a800'] is no preset; did you mean 'a800'?"),
        ({"base": "a800", "nods": 2}, "mine.yaml: unknown key 'nods'; did you mean 'nodes'?"),
        (
            {"base": "a800", "network": {"gbps": 1}},
            "mine.yaml.network.gbps_per_node is missing; give the node's",
        ),
        (
            {"base": "a800", "network": {"gbps_per_node": 100, "latncy_ns": 5}},
            "mine.yaml.inter: unknown key 'latncy_ns'; did you mean 'latency_ns'?",
        ),
        ({"base": "a800", "gpus_per_node": 0}, "mine.yaml.gpus_per_node=0 must be a whole number greater"),
        ({"base": "a800", "gpus_per_node": 2.5}, "mine.yaml.gpus_per_node=2.5 must be a whole number"),
    ],
)
def test_other_wrong_input(content: Any, message: str) -> None:
    assert refused(content).startswith(message)


# -- presets as bases --------------------------------------------------------------------------------------


def test_a_file_may_name_a_base_and_what_differs() -> None:
    made = parse_cluster({"base": "a800", "nodes": 2, "network": {"gbps_per_node": 400}}, "mine.yaml")
    base = cluster_preset("a800")
    assert made.inter is not None
    assert base.inter is not None
    assert (made.name, made.nodes, made.gpu, made.intra) == ("mine.yaml", 2, base.gpu, base.intra)
    assert made.inter.bytes_per_s == 400e9 / 8 / 8 == base.inter.bytes_per_s / 2
    assert parse_cluster({"base": "a800", "name": "ours"}, "mine.yaml").name == "ours"


def test_unknown_parts_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^intra 'pcie5' is no preset; did you mean 'pcie4'\?$"):
        parse_cluster({"base": "a800", "intra": "pcie5"}, "mine.yaml")


def test_parts_may_be_presets() -> None:
    content = {"gpu": "H100", "intra": "nvlink-900", "contention": "nvlink", "nodes": 1, "gpus_per_node": 4}
    made, h100 = parse_cluster(content, "mine.yaml"), cluster_preset("h100")
    assert made.inter is None
    assert (made.gpu, made.intra, made.contention) == (h100.gpu, h100.intra, h100.contention)


@pytest.mark.parametrize("gbps", [0, math.nan, "100 Gbit", True])
def test_wrong_bandwidths_of_a_node(gbps: Any) -> None:
    assert refused({"base": "a800", "network": {"gbps_per_node": gbps}}) == (
        f"mine.yaml.network.gbps_per_node={gbps!r} must be a number greater than zero"
    )


# -- files -------------------------------------------------------------------------------------------------


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: a40\nnodes: 2\nnetwork: {gbps_per_node: 200}\n", encoding="utf-8")
    assert load_cluster(str(path)).nodes == 2
    assert load_cluster(str(path), nodes=4).nodes == 4
    path.write_text(yaml.safe_dump(WHOLE), encoding="utf-8")
    assert load_cluster(str(path)) == cluster_preset("a800")


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read: it is not text"),
        (lambda path: path.write_text("a: [1"), "is not valid YAML: "),
        (lambda path: path.write_text(""), "must hold keys and values, found None"),
        (lambda path: path.write_text("!!python/object:os.system {}"), "is not valid YAML: "),
    ],
)
def test_unreadable_files(tmp_path: Path, make: Callable[[Path], Any], cause: str) -> None:
    path = tmp_path / "mine.yaml"
    make(path)
    with pytest.raises(ValueError) as error:
        load_cluster(str(path))
    assert str(path) in str(error.value)
    assert cause in str(error.value)
    assert "\n" not in str(error.value)


# -- figures -----------------------------------------------------------------------------------------------


def test_efficiency_rises_with_size_to_its_ceiling() -> None:
    curve = Efficiency(ceiling=0.8, half_flops=1e9)
    assert curve.at(1e9) == pytest.approx(0.4)
    assert curve.at(1e15) == pytest.approx(0.8, rel=1e-5)
    assert [curve.at(10.0**n) for n in range(6, 13)] == sorted(curve.at(10.0**n) for n in range(6, 13))
    assert Efficiency(ceiling=0.5, half_flops=0).at(1) == 0.5


def test_a_link_takes_latency_and_bandwidth() -> None:
    link = Link(kind="test", bytes_per_s=1e9, latency_ns=1000, efficiency=0.5)
    assert link.transfer_ns(1e6, 1) == 1000 + 2e6
    assert link.transfer_ns(1e6, 3) == 3000 + 2e6
    assert link.transfer_ns(0, 3) == link.transfer_ns(1e6, 0) == 0
    half = Link(kind="test", bytes_per_s=1e9, latency_ns=0, efficiency=1.0, half_bytes=1e6)
    assert half.transfer_ns(1e6, 1) == 2e6, "a message of this size reaches half the rate"


def test_a_single_node_has_no_network() -> None:
    single = cluster_preset("a100x8")
    assert single.link(Stream.INTRA) == single.intra
    with pytest.raises(ValueError, match="cluster a100x8 has one node and no network between nodes"):
        single.link(Stream.INTER)
    assert single.usable_bytes == single.gpu.memory_bytes - single.gpu.reserved_bytes > 0


# -- groups ------------------------------------------------------------------------------------------------

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(stride=POWERS, size=POWERS, gpus_per_node=st.sampled_from([1, 2, 4, 8, 16]))
def test_groups_are_what_lies_on_the_nodes(stride: int, size: int, gpus_per_node: int) -> None:
    """Counted rank by rank, for every group of an axis that begins on a node."""
    group = group_of(stride, size, gpus_per_node)
    on_nodes = Counter(stride * place // gpus_per_node for place in range(size))
    assert set(on_nodes.values()) == {group.per_node}
    assert group.nodes == len(on_nodes)
    assert group.stream is (Stream.INTRA if len(on_nodes) == 1 else Stream.INTER)
    assert group.size == size
