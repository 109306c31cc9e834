"""Presets: all load, have a source, and have the size that their makers publish."""

import pytest

from braid.scheduling.model.presets.library import (
    cluster_names,
    cluster_preset,
    load_cluster,
    model_preset,
)

PUBLISHED = """
llama-3.1-405b     405.9       -      -
llama-3.1-70b       70.6       -      -
llama-3.1-8b        8.03       -      -
llama-3.2-1b        1.24       -      -
llama-3.2-3b        3.21       -      -
llama-3.3-70b       70.6       -      -
mistral-7b-v0.1     7.24       -      -
mistral-7b-v0.3     7.25       -      -
mixtral-8x22b      140.6       -     39
mixtral-8x7b        46.7       -   12.9
phi-3.5-moe         41.9       -    6.6
qwen2.5-0.5b        0.49    0.36      -
qwen2.5-1.5b        1.54    1.31      -
qwen2.5-14b         14.7    13.1      -
qwen2.5-32b         32.5      31      -
qwen2.5-3b          3.09    2.77      -
qwen2.5-72b         72.7      70      -
qwen2.5-7b          7.61    6.53      -
qwen3-0.6b           0.6    0.44      -
qwen3-1.7b             -     1.4      -
qwen3-14b           14.8    13.2      -
qwen3-235b-a22b      235     234     22
qwen3-30b-a3b       30.5    29.9    3.3
qwen3-32b           32.8    31.2      -
qwen3-4b               4       -      -
qwen3-8b             8.2    6.95      -
"""
"""Model cards: billions of parameters; without the tables; that a token visits."""


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines())
def test_parameters_are_those_published(line: str) -> None:
    name, *published = line.split()
    shape = model_preset(name)
    tables = shape.vocabulary * shape.hidden * (1 if shape.tied_head else 2)
    idle = shape.layers * (shape.experts - shape.top_k) * 3 * shape.hidden * (shape.expert_width or 0)
    every = shape.parameters()
    for found, said, near in zip(
        (every, every - tables, every - idle), published, (0.01, 0.015, 0.02), strict=True
    ):
        assert said == "-" or found / 1e9 == pytest.approx(float(said), rel=near)


OF_PAPERS = "llama-25b llama-39b llama-66b gpt-6.7b gpt-18b gpt-30b phi-16b phi-31b phi-42b bert-1.3b"


@pytest.mark.parametrize("name", OF_PAPERS.split())
def test_models_of_the_papers_have_the_size_of_their_name(name: str) -> None:
    """With the tables or without: the papers count in both ways."""
    shape = model_preset(name)
    tables = shape.vocabulary * shape.hidden * 2
    promised = float(name.partition("-")[2].removesuffix("b")) * 1e9
    assert pytest.approx(promised, rel=0.06) in (shape.parameters(), shape.parameters() - tables)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_and_has_sources(name: str) -> None:
    spec = cluster_preset(name)
    links = [spec.intra] + ([spec.inter] if spec.inter else [])
    assert all([spec.source, spec.gpu.source, spec.contention.source, *(link.source for link in links)])
    assert spec.name == name
    assert load_cluster(name) == spec
    assert (spec.inter is None) == (spec.nodes == 1)
    assert spec.usable_bytes > 0
    if spec.inter is not None:
        assert spec.inter.bytes_per_s < spec.intra.bytes_per_s, "a network slower than the node's own links"
        assert cluster_preset(name, nodes=2).nodes == 2


def test_unknown_names_without_a_near_one() -> None:
    with pytest.raises(ValueError, match=r"^model.preset 'zzz' is no preset; `braid presets` lists them$"):
        model_preset("zzz")
    with pytest.raises(ValueError, match=r"^cluster 'a80' is no preset; did you mean 'a800'\?$"):
        cluster_preset("a80")


def test_a_single_node_cannot_be_made_two() -> None:
    with pytest.raises(ValueError, match="inter is missing, but nodes=2: give the bandwidth and latency"):
        cluster_preset("a100x8", nodes=2)


@pytest.mark.parametrize("nodes", [0, -1])
def test_clusters_have_nodes(nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"^nodes={nodes} must be at least 1$"):
        cluster_preset("a800", nodes=nodes)
