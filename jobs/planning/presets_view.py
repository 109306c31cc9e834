"""Presets for the terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    """Clusters and models in two tables whose names are never cut; sources stand below, by number."""
    sources: dict[str, int] = {}

    def number_of(source: str) -> str:
        return f"[{sources.setdefault(source, len(sources) + 1)}]"

    table = _table(
        "clusters (--cluster)", ("name", "GPUs"), ("TFLOP/s", "GB", "intra GB/s", "inter GB/s", "")
    )
    for name in cluster_names():
        c = cluster_preset(name)
        table.add_row(
            name,
            f"{c.nodes} x {c.gpus_per_node} {c.gpu.name}",
            f"{c.gpu.peak_flops_per_s / 1e12:g}",
            f"{c.gpu.memory_bytes / 1e9:g}",
            f"{c.intra.bytes_per_s / 1e9:g}",
            f"{c.inter.bytes_per_s / 1e9:g}" if c.inter else "-",
            Text(number_of(c.source)),
        )
    console.print(table)
    table = _table("models", ("name", "family"), ("parameters", "layers", "hidden", "sequence", ""))
    for name in model_names():
        m = model_preset(name)
        sizes = (f"{m.parameters() / 1e9:.2f} B", str(m.layers), str(m.hidden), str(m.sequence))
        table.add_row(name, m.family, *sizes, Text(number_of(model_source(name))))
    console.print(table)
    grid = Table.grid(padding=(0, 1))
    for source, number in sources.items():
        grid.add_row(Text(f"[{number}]"), Text(source))
    console.print("sources; rates are of one GPU", grid)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table
