"""Runs one step on all ranks: record, guards and validation; and watches ranks and telemetry between
steps."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from braid.actors.controller.ranks.failures import GuardError, Interruptions, SpikeError
from braid.actors.controller.ranks.group import Collector, WorkerGroup
from braid.actors.controller.records.reporting import overlap_fields, rank_fields
from braid.actors.controller.records.routing import expert_numbers, tells_visits
from braid.actors.controller.records.run_records import Incident, RunDirectory, StepDone
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan, StepResult
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.flops import model_flops
from braid.scheduling.trace.stragglers import LAST, STRETCH, Straggler, stragglers

_MOST_ENDS = 100_000
"""Most steps that a failure may lose for the clock still to count their time."""
_WATCH_SECONDS = 5.0
"""Seconds between two checks of the telemetry."""


class StepClock:
    """Measures the time from the end of a step to the end of the next, and its parts, by a monotonic clock.

    It does not know the time before this process began: when a run is resumed, it begins anew.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ended = now()
        self._ends: dict[int, float] = {}
        """End times of the newest steps, by step number."""
        self._parts: dict[str, float] = {}

    def goes_on(self, done: int) -> None:
        """Continue after ``done`` steps; time lost since they were done counts for the next step."""
        self._ended = self._ends.get(done, self._now())
        self._ends = {step: end for step, end in self._ends.items() if step <= done}
        self._parts = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the time of something between two steps, or after a step's update, as part ``name``."""
        begin = self._now()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + self._now() - begin

    def step_ends(self, step: int) -> tuple[float, dict[str, float]]:
        """End a step; return the seconds since the last end, and the parts of them outside the step
        itself."""
        before, self._ended = self._ended, self._now()
        parts, self._parts = self._parts, {}
        self._ends[step] = self._ended
        while len(self._ends) > _MOST_ENDS:
            del self._ends[next(iter(self._ends))]
        return self._ended - before, parts


@dataclass(frozen=True)
class Stepper:
    plan: RunPlan
    group: WorkerGroup
    generation: int
    facts: Mapping[str, Any]
    """Facts about the data (`Rank.data_facts`)."""
    interruptions: Interruptions
    clock: StepClock

    def run(self, step: int, last: int, records: Sequence[StepRecord]) -> tuple[StepDone, list[str]]:
        """Run a step (from 0); return its event and the guards' remarks. ``records``: records of earlier
        steps.

        Raise `WorkerError` if a rank fails or a guard objects.
        """
        results: list[StepResult] = self.group.call_all(Rank.train_step, step)
        config, shape, layout = self.plan.config, self.plan.shape, self.plan.config.layout()
        tokens, every = config.train.global_batch * shape.sequence, config.train.validate_every
        loss = sum(result.loss_sum for result in results) / tokens
        texts = self._odd(step, loss, results[0], records)
        facts: dict[str, Any] = {}
        due = step + 1 == last or (every > 0 and (step + 1) % every == 0)
        if due and config.data.validates:
            with self.clock.part("validation"):
                by_set = [sum(of_ranks) for of_ranks in zip(*self.group.call_all(Rank.validate), strict=True)]
            nats = sum(by_set)
            facts["validation_loss"] = nats / self.facts["validation_tokens"]
            if config.data.mixture:
                parts = zip(by_set, self.facts["validation_tokens_by_set"].items(), strict=True)
                facts["validation_losses"] = {name: sum_ / count for sum_, (name, count) in parts}
            if text_bytes := self.facts["validation_bytes"]:
                facts["validation_bits_per_byte"] = nats / math.log(2) / text_bytes
        now = time.time()
        seconds, facts["between_seconds"] = self.clock.step_ends(step + 1)
        if config.cluster.peak_tflops is not None and seconds:
            peak = config.cluster.peak_tflops * 1e12 * layout.ranks
            facts["mfu"] = model_flops(shape, tokens) / seconds / peak
        if shape.experts:
            visits = tells_visits(shape, step + 1, last)
            routed = [result.routing for result in results]
            facts["experts"] = expert_numbers(routed, shape, layout, tokens, visits=visits)
        record = StepRecord(
            step=step + 1,
            loss=loss,
            grad_norm=results[0].gradient_norm,
            lr=results[0].lr,
            seconds=max(result.seconds for result in results),
            tokens=tokens,
            **overlap_fields([result.overlap for result in results]),
            peak_bytes=tuple(result.peak_bytes for result in results),
            time=now,
            generation=self.generation,
            samples=sum(result.samples for result in results) % 2**64,
            wall_seconds=seconds,
            **facts,
        )
        return StepDone(record=record, ranks={"step": step + 1, "time": now, **rank_fields(results)}), texts

    def _odd(self, step: int, loss: float, result: StepResult, records: Sequence[StepRecord]) -> list[str]:
        """Return the guards' remarks on a step; raise `WorkerError` if they end the run or repeat the
        step."""
        failure = self.plan.config.failure
        if failure.on_nan == "stop" and result.discarded:
            text = (
                f"the gradient norm of step {step + 1} is {result.gradient_norm}; the run ends as "
                f"failure.on_nan=stop asks; resume=True goes on from the newest checkpoint"
            )
            raise GuardError(0, text, user_error=True)
        texts = []
        if result.discarded:
            what = "repeated" if result.applied else "skipped on all ranks"
            texts.append(f"gradients of step {step + 1} were no numbers; the step was {what}")
        before = [record.loss for record in records if math.isfinite(record.loss)]
        if failure.spike and len(before) >= 5 and loss > failure.spike * median(before):
            text = f"the loss of step {step + 1} is {loss:.4g}, {loss / median(before):.1f} times the median"
            if self.interruptions.repeats(step):
                raise SpikeError(0, f"{text} of the steps before it; it is repeated")
            again = step in self.interruptions.repeated
            why = "twice: it belongs to the data" if again else "as enough others were"
            texts.append(f"{text} of the steps before it, and it is not repeated, {why}")
        return texts


class Watch:
    """Reports when a rank falls behind, and once each if telemetry loses data or cannot keep up."""

    def __init__(self, collector: Collector, directory: RunDirectory, layout: ParallelLayout) -> None:
        self._collector, self._directory = collector, directory
        self._looked = time.monotonic()
        self._told: set[str] = set()
        self._stages = [layout.coordinate(rank)["pp"] for rank in range(layout.ranks)]
        self._compute: deque[list[float]] = deque(maxlen=LAST)
        self._named: dict[int, int] = {}
        """For each rank that was reported, the last step in which it was slow."""
        self.slowest: Straggler | None = None
        """The rank that delays the others most; None if no rank does."""

    def look(self, step: int, generation: int, ranks: dict[str, Any]) -> Iterator[Incident]:
        """Yield reports after a step. A rank that recovers and slows down again is reported again."""
        self._compute.append(ranks["compute_seconds"])
        slow = stragglers(list(self._compute), self._stages)
        self.slowest = next(iter(slow), None)
        for rank, times in ((straggler.rank, straggler.times) for straggler in slow):
            if step - self._named.get(rank, -STRETCH - 1) > STRETCH:
                text = f"rank {rank} computes {times:.2f} times as long as the others of its stage"
                yield self._directory.note("straggler", step, generation, text, rank=rank, times=times)
            self._named[rank] = step
        if time.monotonic() - self._looked < _WATCH_SECONDS:
            return
        self._looked = time.monotonic()
        counts = self._collector.counts()
        texts = {
            "trouble": counts.trouble and f"spans cannot be written: {counts.trouble}",
            "lost": f"{counts.lost} spans were lost on their way or not written" if counts.lost else "",
            "records": self._directory.trouble,
            "dropped": "ranks record faster than spans are streamed, or nobody takes them: some are dropped"
            if any(ranks["dropped_spans"])
            else "",
            "sampled": "spans of some steps only, to stay within 1 % of the time"
            if max(ranks["sampled_every"]) > 1
            else "",
        }
        for kind, text in texts.items():
            if text and kind not in self._told:
                self._told.add(kind)
                yield self._directory.note("telemetry", step, generation, text)
