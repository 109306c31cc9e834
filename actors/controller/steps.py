"""One step on all ranks: its record, its guards, its validation."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from braid.actors.controller.group import WorkerError, WorkerGroup
from braid.actors.controller.records import (
    Incident,
    RunDirectory,
    StepDone,
    StepRecord,
    overlap_fields,
    rank_fields,
)
from braid.actors.stage.messages import RunPlan, StepResult
from braid.scheduling.memory import model_flops
from braid.scheduling.trace import Span

WINDOW = 20
"""Steps whose losses a spike is measured against."""


class Stepper:
    """Runs the steps of a generation."""

    def __init__(
        self, plan: RunPlan, group: WorkerGroup, generation: int, facts: dict[str, Any], spiked: set[int]
    ) -> None:
        """``facts``: of the data. ``spiked``: steps that were repeated because of their loss; grows."""
        self._plan, self._group, self._generation, self._facts = plan, group, generation, facts
        self._spiked = spiked

    def _validates_after(self, step: int, last: int) -> bool:
        every = self._plan.config.train.validate_every
        due = step == last or (every > 0 and step % every == 0)
        return due and self._plan.config.data.validation_fraction > 0

    def run(
        self, step: int, last: int, records: Sequence[StepRecord], directory: RunDirectory
    ) -> tuple[StepDone, list[Incident]]:
        """One step (from 0), and what was odd about it; the last one's trace is written down.

        ``records``: of the steps before. Raises `WorkerError`.
        """
        results: list[StepResult] = self._group.call_all("train_step", step)
        train = self._plan.config.train
        tokens = train.global_batch * self._plan.shape.sequence
        loss = sum(result.loss_sum for result in results) / tokens
        told = self._odd(step, loss, results[0], records)
        if step + 1 == last:
            directory.write_trace(self._trace(step))
        bits = self._validate() if self._validates_after(step + 1, last) else None
        slowest = max(results, key=lambda result: result.seconds)
        now = time.time()
        record = StepRecord(
            step=step + 1,
            loss=loss,
            grad_norm=results[0].gradient_norm,
            lr=results[0].lr,
            seconds=slowest.seconds,
            tokens=tokens,
            **overlap_fields([result.overlap for result in results]),
            peak_bytes=tuple(result.peak_bytes for result in results),
            validation_bits_per_byte=bits,
            time=now,
            generation=self._generation,
            samples=sum(result.samples for result in results) % 2**64,
            mfu=self._mfu(tokens, slowest.seconds),
        )
        return StepDone(record=record, ranks={"step": step + 1, "time": now, **rank_fields(results)}), told

    def _odd(
        self, step: int, loss: float, result: StepResult, records: Sequence[StepRecord]
    ) -> list[Incident]:
        """What the guards make of a step: told, or a `WorkerError` that ends or repeats it."""
        failure = self._plan.config.failure
        if failure.on_nan == "stop" and result.discarded:
            text = (
                f"the gradient norm of step {step + 1} is {result.gradient_norm}; the run ends as "
                f"failure.on_nan=stop asks; --resume goes on from the newest checkpoint"
            )
            raise WorkerError(0, text, user_error=True)
        told = []
        if result.discarded:
            what = "repeated" if result.applied else "skipped on all ranks"
            told.append(f"gradients of step {step + 1} were no numbers; the step was {what}")
        before = [record.loss for record in records[-WINDOW:]]
        if failure.spike and len(before) >= 5 and loss > failure.spike * median(before):
            text = f"the loss of step {step + 1} is {loss:.4g}, {loss / median(before):.1f} times the median"
            if step not in self._spiked:
                self._spiked.add(step)
                raise WorkerError(0, f"{text} of the steps before it; it is repeated")
            told.append(f"{text} of the steps before it, twice: it belongs to the data")
        return [Incident(kind="guard", text=text, step=step + 1) for text in told]

    def _mfu(self, tokens: int, seconds: float) -> float | None:
        peak = self._plan.config.cluster.peak_tflops
        if peak is None:
            return None
        ranks = self._plan.config.layout().ranks
        return model_flops(self._plan.shape, tokens) / seconds / (peak * 1e12 * ranks)

    def _trace(self, step: int) -> list[Span]:
        """All ranks' spans of the step that ran last, from the first one's begin."""
        spans: list[Span] = [span for own in self._group.call_all("spans", step) for span in own]
        begin = min((span.start_ns for span in spans), default=0)
        return [replace(s, start_ns=s.start_ns - begin, end_ns=s.end_ns - begin) for s in spans]

    def _validate(self) -> float:
        results = self._group.call_all("validate")
        loss = sum(result[0] for result in results) / sum(result[1] for result in results)
        return float(loss / math.log(2) / self._facts["validation_bytes_per_token"])
