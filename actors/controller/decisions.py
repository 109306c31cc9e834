"""Keeps decisions made with a run's measured costs beside the profiles, so that a restart need not search
again.

A search takes seconds. Its result is a pure function of what the key covers: the profile, the operators'
graphs, shape, layout, batch, what the configuration says about schedules, and the planner's own sources.
"""

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import braid
import braid.scheduling
from braid.actors.config import Config
from braid.actors.config.training import AUTO
from braid.actors.controller import planning
from braid.actors.controller.state.manifest import write_durably
from braid.actors.stage.rank.messages import SerialStep
from braid.scheduling.cost.profile import Profile
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import Outcome
from braid.scheduling.plan.plan import Plan, score_of
from braid.scheduling.schedule.text import write
from braid.scheduling.text.records import from_mapping, to_mapping
from braid.scheduling.trace.batches import batches_of, encode_all

KEPT = 32
"""Number of decisions that are kept in a folder of profiles: those used last."""
PLANNER = (Path(braid.scheduling.__file__).parent, Path(planning.__file__), Path(__file__))
"""Folders and files of the sources on which decisions depend."""


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """A schedule that ``overlap.schedule: auto`` has simulated with the measured profile."""

    schedule: str
    pipeline: str
    seconds: float
    hidden_fraction: float
    bubble_fraction: float
    peak_bytes: int
    unit_layers: int


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """A run's schedule and what is expected of it, by simulation with a measured profile."""

    name: str
    """Name of the schedule: the configuration's, or the choice of ``overlap.schedule: auto``."""
    candidates: tuple[SimulatedSchedule, ...]
    """Schedules that ``auto`` compared, its choice first; empty without ``auto``."""
    schedule: str
    """Text of the schedule."""
    solo_ns: Mapping[str, int]
    """Measured solo times of operators, and of the pieces into which the schedule cuts them."""
    serial: SerialStep
    texts: Mapping[str, str]
    """Contents of ``plan.yaml`` and ``predicted.json`` in the run directory."""
    spans: str
    """Content of ``trace/predicted.arrows``, in base 64."""

    @property
    def files(self) -> dict[str, str | bytes]:
        return {**self.texts, "trace/predicted.arrows": base64.b64decode(self.spans)}


def find_or_decide(config: Config, shape: ModelShape, profile: Profile) -> Decisions:
    """Return the decisions made before for the same run and profile; else decide and keep the result.

    Raise `ValueError` for a cost that the profile does not have, and `ConfigError` as `planning.plan_run`
    does.
    """
    path = config.runs / "profiles" / f"decisions-{decisions_key(config, shape, profile)}.json"
    if (kept := _read(path)) is not None:
        return kept
    decisions = decide(config, shape, profile)
    with contextlib.suppress(OSError):  # if the disk is full, the next start decides again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(to_mapping(decisions)))
        remove_oldest(path.parent.glob("decisions-*.json"), KEPT)
    return decisions


def remove_oldest(files: Iterable[Path], keep: int) -> list[Path]:
    """Remove all but the ``keep`` files that were used last; return the removed ones."""
    oldest = sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-keep]
    for file in oldest:
        file.unlink(missing_ok=True)
    return oldest


def decide(config: Config, shape: ModelShape, profile: Profile) -> Decisions:
    """Search and simulate. Raise `ValueError` as `find_or_decide` does."""
    planned = planning.plan_run(config, shape, profile)
    taken, alone = planned.taken, planned.serial.numbers
    serial = SerialStep(seconds=alone.step_seconds, alpha=alone.communication_seconds / alone.step_seconds)
    searched = config.overlap.schedule == AUTO
    texts = {"predicted.json": json.dumps(prediction(taken, serial), indent=1)}
    if config.overlap.schedule_file is None:  # `braid train --plan` can run it again
        plan = Plan(
            cluster="this run's",
            profile=taken.bench.profile.source,
            setting=taken.setting,
            choices=taken.choices,
            score=score_of(taken.numbers),
            pairing=taken.note,
        )
        texts["plan.yaml"] = plan.to_yaml()
    return Decisions(
        name=str(taken.setting.name if searched else config.overlap.name),
        candidates=tuple(map(_candidate, planned.outcomes)) if searched else (),
        schedule=write(taken.code.schedule),
        solo_ns=taken.bench.profile.solo_ns,
        serial=serial,
        texts=texts,
        spans=base64.b64encode(encode_all(batches_of(taken.simulation.spans()))).decode(),
    )


def _candidate(outcome: Outcome) -> SimulatedSchedule:
    numbers = outcome.numbers
    return SimulatedSchedule(
        schedule=str(outcome.setting.name),
        pipeline=outcome.setting.pipeline,
        seconds=numbers.step_seconds,
        unit_layers=outcome.setting.unit_layers,
        **{name: getattr(numbers, name) for name in ("hidden_fraction", "bubble_fraction", "peak_bytes")},
    )


def prediction(outcome: Outcome, serial: SerialStep) -> dict[str, float | str]:
    """Return the contents of ``predicted.json``: the simulated step, for comparison with the measured
    ones."""
    parts = ("step", "communication", "exposed", "slowdown", "launch_gap", "bubble")
    return {
        "source": outcome.bench.profile.source,
        **{f"{part}_seconds": getattr(outcome.numbers, f"{part}_seconds") for part in parts},
        "hidden_fraction": outcome.numbers.hidden_fraction,
        "serial_seconds": serial.seconds,
        "alpha": serial.alpha,
        "limit_speedup": serial.limit_speedup,
    }


# -- used again --------------------------------------------------------------------------------------------


def decisions_key(config: Config, shape: ModelShape, profile: Profile) -> str:
    """Return a key of everything that decisions depend on; equal keys mean equal decisions."""
    overlap, train = config.overlap, config.train
    content = {
        "braid": braid.__version__,
        "planner": sources_digest(PLANNER),
        "profile": to_mapping(profile),
        "graphs": to_mapping(planning.model_graphs(config, shape, profile.streams)),
        "shape": asdict(shape),
        "layout": asdict(config.layout()),
        "parallel": config.parallel.model_dump(mode="json"),
        "workload": asdict(config.workload()),
        "train": [train.dtype, train.reduce_dtype, config.recompute, train.kernels, asdict(train.states)],
        "memory_gb": config.cluster.memory_gb,
        "overlap": overlap.model_dump(mode="json", exclude={"profile", "plan", "schedule_file"}),
        "files": [_digest(file) for file in (overlap.plan, overlap.schedule_file)],
    }
    return key_of(content)


def key_of(content: Mapping[str, object]) -> str:
    """Return a short key of plain data: equal data have equal keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def sources_digest(places: Iterable[Path]) -> str:
    """Return a digest of Python sources: of files, and of all sources below folders."""
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else (place,))]
    return hashlib.sha256("".join(_digest(file) or "" for file in sorted(files)).encode()).hexdigest()


def _digest(file: Path | None) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read, which is reported where the file is needed."""
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _read(path: Path) -> Decisions | None:
    """Read the decisions in a file; return None if it is missing or damaged."""
    try:
        decisions = from_mapping(Decisions, json.loads(path.read_text(encoding="utf-8")), str(path))
        os.utime(path)  # mark as used, so that it is removed last
    except (OSError, ValueError):
        return None
    return decisions
