"""Schedules that earlier versions had by names of their own."""

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
"""What stands in the place of names that earlier versions had."""


def replacement(name: str) -> str:
    """What stands in the place of a schedule's name that is gone, for a message behind the name."""
    schedule, _, pipeline = GONE[name].partition(":")
    return f"is gone; use schedule {schedule}" + (f" with pipeline {pipeline}" if pipeline else "")
