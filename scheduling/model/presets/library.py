"""Reads model presets, cluster presets and cluster files."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.model.presets.hugging_face import initial_shape
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.records import file_text, from_mapping, number
from braid.scheduling.text.suggestions import nearest
from braid.scheduling.text.yaml_text import parse_yaml

_FOLDER = Path(__file__).parent


@cache
def _content(name: str) -> dict[str, Any]:
    content = parse_yaml((_FOLDER / name).read_text(encoding="utf-8"), name)
    assert isinstance(content, dict)
    return content


def model_names() -> tuple[str, ...]:
    return tuple(_content("models.yaml"))


def cluster_names() -> tuple[str, ...]:
    return tuple(_content("clusters.yaml")["clusters"])


def model_preset(name: str) -> ModelShape:
    """Return the shape of a model preset; for an unknown name the `ValueError` suggests a similar preset."""
    content = dict(_known("model.preset", name, _content("models.yaml")))
    content.pop("source")
    return from_mapping(ModelShape, content, f"preset {name}")


def known_shape(preset: str | None, initial: Path | None, configured: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a preset with the ``configured`` fields changed, or of the Hugging Face directory
    ``initial``.

    A directory must agree with the preset, if any, and the fields; else the `ValueError` names key, value and
    remedy.
    """
    if preset is None:
        assert initial is not None
        return initial_shape(initial, configured)
    shape = replace(model_preset(preset), **configured)
    return shape if initial is None else initial_shape(initial, vars(shape))


def model_source(name: str) -> str:
    """Return the text that says where a model preset's figures come from."""
    return str(_content("models.yaml")[name]["source"])


def cluster_preset(name: str, nodes: int | None = None) -> ClusterSpec:
    """Return a cluster preset, with ``nodes`` nodes if given.

    For an unknown name the `ValueError` suggests a similar preset.
    """
    entry = _known("cluster", name, _content("clusters.yaml")["clusters"])
    spec = from_mapping(ClusterSpec, _whole_cluster(name, entry), f"preset {name}")
    if nodes is None:
        return spec
    return _with_nodes(spec, nodes)


def load_cluster(reference: str, nodes: int | None = None) -> ClusterSpec:
    """Return the cluster preset named ``reference``, or read the YAML file of that name (``.yaml``,
    ``.yml``).

    A file holds a whole `ClusterSpec`, or ``base: PRESET`` and changes. ``nodes``: replaces the number of
    nodes.
    """
    if not reference.endswith((".yaml", ".yml")):
        return cluster_preset(reference, nodes)
    text = file_text(Path(reference), "cluster")
    spec = parse_cluster(parse_yaml(text, reference), reference)
    return spec if nodes is None else _with_nodes(spec, nodes)


def parse_cluster(content: Any, where: str) -> ClusterSpec:
    """Return the cluster that a file's content describes; GPU, link and contention may be names of presets.

    ``where``: source of the content, for errors.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must hold keys and values, found {content!r}")
    entry = dict(content)
    if "base" in entry:
        base = entry.pop("base")
        entry = {**_known(f"{where}.base", base, _content("clusters.yaml")["clusters"]), **entry}
    return from_mapping(ClusterSpec, _whole_cluster(str(entry.pop("name", where)), entry), where)


def _with_nodes(spec: ClusterSpec, nodes: int) -> ClusterSpec:
    if nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1")
    return replace(spec, nodes=nodes)


def _known(key: str, name: Any, presets: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(name, str) or name not in presets:
        near = nearest(str(name), presets)
        meant = f"did you mean {near!r}?" if near else "`braid presets` lists them"
        raise ValueError(f"{key} {name!r} is no preset; {meant}")
    entry: Mapping[str, Any] = presets[name]
    return entry


def _whole_cluster(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cluster's entry with preset names of GPU, link and contention replaced by the presets."""
    presets = _content("clusters.yaml")
    whole = {"name": name, **entry}
    for key, section in (("gpu", "gpus"), ("intra", "links"), ("contention", "contention")):
        part = whole.get(key)
        if isinstance(part, str):
            preset = dict(_known(key, part, presets[section]))
            whole[key] = {"name": part, **preset} if key == "gpu" else preset
    network = whole.pop("network", None)
    if network is not None and "inter" not in whole:
        whole["inter"] = _network(network, whole.get("gpus_per_node"), presets["network"], name)
    return whole


def _network(network: Any, gpus: Any, common: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the network link of one GPU, whose bandwidth is its share of the node's (``gbps_per_node``).

    ``gpus``: GPUs per node; ``common``: the presets' other constants of networks.
    """
    if not isinstance(network, Mapping) or "gbps_per_node" not in network:
        raise ValueError(f"{where}.network.gbps_per_node is missing; give the node's bandwidth in Gbit/s")
    gbps = number(network["gbps_per_node"])
    if isinstance(gbps, bool) or not isinstance(gbps, int | float) or not 0 < gbps < float("inf"):
        raise ValueError(f"{where}.network.gbps_per_node={gbps!r} must be a number greater than zero")
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"{where}.gpus_per_node={gpus!r} must be a whole number greater than zero")
    share = gbps * 1e9 / 8 / gpus
    extra = {key: value for key, value in network.items() if key != "gbps_per_node"}
    return {"kind": "network", **common, **extra, "bytes_per_s": share}
