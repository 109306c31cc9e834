"""Presets for the terminal and as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table

from braid.scheduling.presets.library import (
    cluster_names,
    cluster_preset,
    model_names,
    model_preset,
    model_source,
)
from braid.scheduling.records import to_mapping


def presets_json() -> dict[str, Any]:
    """All presets with their figures and sources."""
    return {
        "clusters": {name: to_mapping(cluster_preset(name)) for name in cluster_names()},
        "models": {
            name: {
                **to_mapping(model_preset(name)),
                "parameters": model_preset(name).parameters(),
                "source": model_source(name),
            }
            for name in model_names()
        },
    }


# -- terminal ------------------------------------------------------------------------------------------------


def show_presets(console: Console) -> None:
    """Clusters and models in two tables."""
    table = Table(title="clusters (--cluster)", title_justify="left")
    for name in ("name", "nodes x GPUs", "GPU", "TFLOP/s", "GB", "intra GB/s", "inter GB/s a GPU", "source"):
        table.add_column(name)
    for name in cluster_names():
        c = cluster_preset(name)
        table.add_row(
            name,
            f"{c.nodes} x {c.gpus_per_node}",
            c.gpu.name,
            f"{c.gpu.peak_flops_per_s / 1e12:g}",
            f"{c.gpu.memory_bytes / 1e9:g}",
            f"{c.intra.bytes_per_s / 1e9:g}",
            f"{c.inter.bytes_per_s / 1e9:g}" if c.inter else "-",
            c.source,
        )
    console.print(table)
    table = Table(title="models", title_justify="left")
    for name in ("name", "family", "parameters", "layers", "hidden", "sequence", "source"):
        table.add_column(name)
    for name in model_names():
        m = model_preset(name)
        table.add_row(
            name,
            m.family,
            f"{m.parameters() / 1e9:.2f} B",
            str(m.layers),
            str(m.hidden),
            str(m.sequence),
            model_source(name),
        )
    console.print(table)
