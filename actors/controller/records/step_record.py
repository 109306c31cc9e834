"""Defines the record of a training step: a line of ``metrics.jsonl``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from braid.actors.controller.records.json_lines import lines_of
from braid.actors.controller.records.routing import ExpertNumbers


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl``; steps count from 1. Seconds are the slowest rank's. If loss or norm is
    NaN or infinite, the line has null."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    communication_seconds: float
    exposed_seconds: float
    hidden_fraction: float | None
    """Share of the step's communication that was hidden, mean over the ranks, None if there was none; the
    following fields are means, too."""
    slowdown_seconds: float | None
    launch_gap_seconds: float
    bubble_seconds: float
    peak_bytes: tuple[int, ...]
    """Peak memory in this step, by rank."""
    validation_loss: float | None = None
    """Mean loss per validation token, in nats as ``loss`` is; None if no validation follows the step."""
    validation_bits_per_byte: float | None = None
    """Validation loss in bits per byte of text; None also if the tokens' numbers of bytes are unknown."""
    validation_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean loss per validation token of each set of ``data.mixture``, by its name, in nats."""
    time: float = 0.0
    """Wall-clock time at the step's end, in seconds since 1970."""
    generation: int = 1
    samples: int = 0
    """Digest of the step's samples, independent of their order and of the number of ranks."""
    mfu: float | None = None
    """Model FLOP/s in ``wall_seconds`` as share of the ranks' peak (``cluster.peak_tflops``); None if that is
    not known."""
    wall_seconds: float = 0.0
    """Seconds from the end of the previous step (or the start) to the end of this one, whatever lay
    between."""
    between_seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of ``wall_seconds`` outside the step itself: ``validation``, ``save``, ``nodes`` (querying the
    cluster), ``records`` (writing them)."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for a peer: nothing ran, as another member of a collective had not issued it yet."""
    exposed_by_axis: Mapping[str, float] = field(default_factory=dict)
    """Seconds of exposed transfers along every axis of the mesh ("pp": messages between stages)."""
    experts: ExpertNumbers | None = None
    """None for models without experts, whose lines have no such field."""

    @property
    def tokens_per_s(self) -> float:
        seconds = self.wall_seconds or self.seconds
        return self.tokens / seconds if seconds else 0.0


def record_of(content: dict[str, Any]) -> StepRecord:
    """Read a record from a line; null in a number that every step has means NaN (`json_text`)."""
    numbers = {field.name for field in fields(StepRecord) if field.type is float}
    read: dict[str, Any] = {name: math.nan for name in numbers if content.get(name, 0.0) is None}
    if (experts := content.get("experts")) is not None:
        read["experts"] = ExpertNumbers(
            **{**experts, "layers": tuple(experts["layers"]), "visits": tuple(map(tuple, experts["visits"]))}
        )
    return StepRecord(**{**content, "peak_bytes": tuple(content["peak_bytes"]), **read})


def read_metrics(path: Path) -> Iterator[StepRecord]:
    """Yield the records of a metrics file; a last line that a crash cut short is skipped."""
    return (record_of(content) for content in lines_of(path))
