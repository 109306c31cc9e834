"""Names of schedules in earlier versions, which are refused with their present names."""

from collections.abc import Mapping
from typing import Final

GONE: Final[Mapping[str, str]] = {
    "eager": "megatron:eager_1f1b",
    "folded": "megatron:folded",
    "oases_folded": "oases:folded_sub_batches",
    "braid_w": "braid:w",
    "braid_eager": "braid:eager_w",
    "braid_twins": "braid:twins",
    "braid_v": "braid:v",
    **{f"braid_together_{count}": f"braid:together_{count}" for count in (2, 4, 8)},
    "braid_sub_batches": "braid:sub_batches",
    "braid_sub_batches_folded": "braid:folded_sub_batches",
    **dict.fromkeys(("braid_whole", "braid_in_order", "braid_apart"), "braid"),
    "ooo_backprop": "ddp",
    "two_beside_one": "wavelet",
    "bidirectional": "dhelix",
}
"""Name in earlier versions -> present schedule, with its pipeline after a colon."""


def replacement(name: str) -> str:
    """Return the end of an error message that names the present form of an earlier schedule's name."""
    schedule, _, pipeline = GONE[name].partition(":")
    return f"is gone; use schedule {schedule}" + (f" with pipeline {pipeline}" if pipeline else "")
