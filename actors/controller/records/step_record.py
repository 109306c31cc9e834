"""What is kept of a training step: a line of ``metrics.jsonl``."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from braid.actors.controller.records.json_lines import lines_of
from braid.actors.controller.records.routing import ExpertNumbers


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl``; steps count from 1. Seconds are the slowest rank's. Where loss or norm
    is no number, the line has null."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    communication_seconds: float
    exposed_seconds: float
    hidden_fraction: float
    """Of the step's communication, mean over the ranks; as are the following."""
    slowdown_seconds: float | None
    launch_gap_seconds: float
    bubble_seconds: float
    peak_bytes: tuple[int, ...]
    """Of this step, by rank."""
    validation_loss: float | None = None
    """Of a token that was held out, in nats, as ``loss`` is of those trained on; None where no validation
    follows the step."""
    validation_bits_per_byte: float | None = None
    """The same loss by bytes of text; None also where nobody knows how many bytes tokens stand for."""
    time: float = 0.0
    """Wall clock at the step's end, seconds since 1970."""
    generation: int = 1
    samples: int = 0
    """Digest of the step's samples: the same whatever their order and the number of ranks."""
    mfu: float | None = None
    """Share of the ranks' peak FLOP/s (``cluster.peak_tflops``) that the model's took in ``wall_seconds``;
    None if not known."""
    wall_seconds: float = 0.0
    """From the end of the step before (or of the start) to the end of this one, whatever lay between."""
    between_seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of ``wall_seconds`` beside the step itself: ``validation``, ``save``, ``nodes`` (looking for
    them), ``records`` (writing them)."""
    waiting_seconds: float = 0.0
    """Waiting for a peer: with nothing running, as another member of a collective had not issued it yet."""
    exposed_by_axis: Mapping[str, float] = field(default_factory=dict)
    """Seconds of exposed transfers along every axis of the mesh ("pp": messages between stages)."""
    experts: ExpertNumbers | None = None
    """None for models without experts, whose lines do not name it."""

    @property
    def tokens_per_s(self) -> float:
        seconds = self.wall_seconds or self.seconds
        return self.tokens / seconds if seconds else 0.0


def record_of(content: dict[str, Any]) -> StepRecord:
    """The record of a line; a number that every step has, and that is null there, was none (`json_text`)."""
    numbers = {field.name for field in fields(StepRecord) if field.type is float}
    read: dict[str, Any] = {name: math.nan for name in numbers if content.get(name, 0.0) is None}
    if (experts := content.get("experts")) is not None:
        read["experts"] = ExpertNumbers(
            **{**experts, "layers": tuple(experts["layers"]), "visits": tuple(map(tuple, experts["visits"]))}
        )
    return StepRecord(**{**content, "peak_bytes": tuple(content["peak_bytes"]), **read})


def read_metrics(path: Path) -> Iterator[StepRecord]:
    """The records of a metrics file; a last line that a crash cut short is left out."""
    return (record_of(content) for content in lines_of(path))
