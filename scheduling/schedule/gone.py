"""Schedule names of earlier versions; they are refused with an error that gives the present name."""

from collections.abc import Mapping
from typing import Final

GONE: Final[Mapping[str, tuple[str, str]]] = {
    "eager": ("megatron", "eager_1f1b"),
    "folded": ("megatron", "folded"),
    "oases_folded": ("oases", "folded_sub_batches"),
    "braid_w": ("braid", "w"),
    "braid_eager": ("braid", "eager_w"),
    "braid_twins": ("braid", "twins"),
    "braid_v": ("braid", "v"),
    **{f"braid_together_{count}": ("braid", f"together_{count}") for count in (2, 4, 8)},
    "braid_sub_batches": ("braid", "sub_batches"),
    "braid_sub_batches_folded": ("braid", "folded_sub_batches"),
    **dict.fromkeys(("braid_whole", "braid_in_order", "braid_apart"), ("braid", "")),
    "ooo_backprop": ("ddp", ""),
    "two_beside_one": ("wavelet", ""),
    "bidirectional": ("dhelix", ""),
}
"""Schedule name of an earlier version -> present schedule, and its pipeline; an empty text: any."""


def replacement(name: str) -> str:
    """Return the end of an error message: which present schedule replaces ``name`` of an earlier version."""
    schedule, pipeline = GONE[name]
    return f"is gone; use schedule {schedule}" + (f" with pipeline {pipeline}" if pipeline else "")
