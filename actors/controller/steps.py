"""One step on all ranks: its record, its guards, its validation."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from braid.actors.controller.ranks.group import WorkerGroup
from braid.actors.controller.ranks.interruptions import GuardError, Interruptions, SpikeError
from braid.actors.controller.records.reporting import overlap_fields, rank_fields
from braid.actors.controller.records.routing import expert_numbers, tells_visits
from braid.actors.controller.records.run_records import StepDone
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan, StepResult
from braid.scheduling.schedule.memory import model_flops

_MOST_ENDS = 100_000
"""Steps that a failure may lose and the clock still counts."""


class StepClock:
    """Measures the time from the end of a step to the end of the next, and its parts, by a monotonic clock.

    It does not know the time before this process began: when a run is resumed, it begins anew.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ended = now()
        self._ends: dict[int, float] = {}
        """Of the newest steps, by number."""
        self._parts: dict[str, float] = {}

    def goes_on(self, done: int) -> None:
        """Training goes on after ``done`` steps; what was lost since they were done belongs to the next."""
        self._ended = self._ends.get(done, self._now())
        self._ends = {step: end for step, end in self._ends.items() if step <= done}
        self._parts = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something that lies between two steps, or follows a step's update."""
        begin = self._now()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + self._now() - begin

    def step_ends(self, step: int) -> tuple[float, dict[str, float]]:
        """Seconds since the last end, and the parts of them that lay beside the step."""
        before, self._ended = self._ended, self._now()
        parts, self._parts = self._parts, {}
        self._ends[step] = self._ended
        while len(self._ends) > _MOST_ENDS:
            del self._ends[next(iter(self._ends))]
        return self._ended - before, parts


class Stepper:
    """Runs the steps of a generation. ``facts``: of the data (`Rank.data_facts`)."""

    def __init__(
        self,
        plan: RunPlan,
        group: WorkerGroup,
        generation: int,
        facts: dict[str, Any],
        interruptions: Interruptions,
        clock: StepClock,
    ) -> None:
        self._plan, self._group, self._generation, self._facts = plan, group, generation, facts
        self._interruptions, self._clock = interruptions, clock

    def run(self, step: int, last: int, records: Sequence[StepRecord]) -> tuple[StepDone, list[str]]:
        """Run a step (from 0); returns also what the guards say of it. ``records``: of earlier steps.

        Raises `WorkerError`.
        """
        results: list[StepResult] = self._group.call_all(Rank.train_step, step)
        config, shape, layout = self._plan.config, self._plan.shape, self._plan.config.layout()
        train = config.train
        tokens = train.global_batch * shape.sequence
        loss = sum(result.loss_sum for result in results) / tokens
        texts = self._odd(step, loss, results[0], records)
        held_out = bits = None
        every = train.validate_every
        due = step + 1 == last or (every > 0 and (step + 1) % every == 0)
        if due and config.data.validation_fraction > 0:
            with self._clock.part("validation"):
                held_out, bits = self._validate()
        now = time.time()
        wall_seconds, between = self._clock.step_ends(step + 1)
        mfu = None
        if config.cluster.peak_tflops is not None and wall_seconds:
            peak = config.cluster.peak_tflops * 1e12 * layout.ranks
            mfu = model_flops(shape, tokens) / wall_seconds / peak
        experts = None
        if shape.experts:
            visits = tells_visits(shape, step + 1, last)
            experts = expert_numbers([r.routing for r in results], shape, layout, tokens, visits=visits)
        record = StepRecord(
            step=step + 1,
            loss=loss,
            grad_norm=results[0].gradient_norm,
            lr=results[0].lr,
            seconds=max(result.seconds for result in results),
            tokens=tokens,
            **overlap_fields([result.overlap for result in results]),
            peak_bytes=tuple(result.peak_bytes for result in results),
            validation_loss=held_out,
            validation_bits_per_byte=bits,
            time=now,
            generation=self._generation,
            samples=sum(result.samples for result in results) % 2**64,
            mfu=mfu,
            wall_seconds=wall_seconds,
            between_seconds=between,
            experts=experts,
        )
        return StepDone(record=record, ranks={"step": step + 1, "time": now, **rank_fields(results)}), texts

    def _odd(self, step: int, loss: float, result: StepResult, records: Sequence[StepRecord]) -> list[str]:
        """What the guards say of a step; `WorkerError` if they end the run or repeat the step."""
        failure = self._plan.config.failure
        if failure.on_nan == "stop" and result.discarded:
            text = (
                f"the gradient norm of step {step + 1} is {result.gradient_norm}; the run ends as "
                f"failure.on_nan=stop asks; --resume goes on from the newest checkpoint"
            )
            raise GuardError(0, text, user_error=True)
        texts = []
        if result.discarded:
            what = "repeated" if result.applied else "skipped on all ranks"
            texts.append(f"gradients of step {step + 1} were no numbers; the step was {what}")
        before = [record.loss for record in records if math.isfinite(record.loss)]
        if failure.spike and len(before) >= 5 and loss > failure.spike * median(before):
            text = f"the loss of step {step + 1} is {loss:.4g}, {loss / median(before):.1f} times the median"
            if self._interruptions.repeats(step):
                raise SpikeError(0, f"{text} of the steps before it; it is repeated")
            again = step in self._interruptions.repeated
            why = "twice: it belongs to the data" if again else "as enough others were"
            texts.append(f"{text} of the steps before it, and it is not repeated, {why}")
        return texts

    def _validate(self) -> tuple[float, float | None]:
        """Nats per token, and bits per byte of the text of the same tokens, where that is known."""
        nats: float = sum(self._group.call_all(Rank.validate))
        text_bytes = self._facts["validation_bytes"]
        bits = nats / math.log(2) / text_bytes if text_bytes else None
        return nats / self._facts["validation_tokens"], bits
