"""``parallel: auto`` of a run: layouts of the ranks there is room for are measured, and the fastest is taken.

What `braid plan` does with a model of a cluster, here with the machine that is there: every layout is
profiled as a run in it would be (profiles are kept), decided and simulated; the run does what was decided.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from braid.actors.config import Config, ConfigError, ParallelConfig
from braid.actors.controller.decisions import find_or_decide
from braid.actors.controller.profiling import find_or_measure
from braid.actors.controller.ranks.elastic import degrees_up_to
from braid.actors.controller.ranks.group import Launcher, WorkerError
from braid.scheduling.model.presets.library import cluster_preset
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.candidates import Search, candidates
from braid.scheduling.plan.layouts import Tell
from braid.scheduling.text.pattern import UNIFORM

MEASURED = 6
"""Layouts that are measured at most: a profile takes seconds to a minute."""
_SETTLED_SECONDS = 2.0
LIKE = "h100"
"""The cluster preset whose simulation says which layouts are measured, where there are more."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """A layout that ``parallel: auto`` has looked at."""

    layout: str
    schedule: str = ""
    seconds: float | None = None
    """The simulated step, with measured costs; None where measuring failed."""
    trouble: str = ""


def with_layout(
    config: Config, shape: ModelShape, launcher: Launcher, tell: Tell, data: str = ""
) -> tuple[Config, list[MeasuredLayout]]:
    """The configuration in the layout with the fastest simulated step, and what was looked at, best first.
    ``tell`` is called before each measurement.

    `ConfigError` where no layout suits model and batch; `WorkerError` where none could be measured.
    """
    measured: list[tuple[MeasuredLayout, Config]] = []
    failure: WorkerError | None = None
    fitting = fitting_layouts(config, shape, _room(launcher))
    for number, candidate in enumerate(fitting, 1):
        layout = candidate.layout().describe()
        tell(f"layout {layout} ({number} of {len(fitting)})")
        try:
            profile = find_or_measure(candidate, shape, launcher, data=data).profile
        except WorkerError as error:  # such as a model that does not fit
            failure = error
            failed = MeasuredLayout(layout=layout, trouble=str(error).partition("\n")[0])
            measured.append((failed, candidate))
            continue
        made = find_or_decide(candidate, shape, profile)
        seconds = json.loads(made.texts["predicted.json"])["step_seconds"]
        measured.append((MeasuredLayout(layout=layout, schedule=made.name, seconds=seconds), candidate))
    measured.sort(key=lambda pair: float("inf") if pair[0].seconds is None else pair[0].seconds)
    (best, chosen), *_ = measured
    if best.seconds is None:
        assert failure is not None
        raise failure
    return chosen, [layout for layout, _ in measured]


def _room(launcher: Launcher) -> int:
    """Ranks there is room for; what preparing the data has held is given back within a moment."""
    room, deadline = 1, time.monotonic() + _SETTLED_SECONDS
    while time.monotonic() < deadline:
        room = max(room, launcher.capacity(None)[0])
        time.sleep(_SETTLED_SECONDS / 10)
    return room


def fitting_layouts(config: Config, shape: ModelShape, room: int) -> list[Config]:
    """The configuration in every layout of as many ranks as possible that suits model, batch and schedule.

    Degrees that are given are kept; samples are cut over ranks (cp) only where that is given. `ConfigError`
    where none does. The most promising ones, if they are many.
    """
    fixed, refused = config.parallel.fixed, ConfigError("there is no room for a rank")
    by_ranks: dict[int, list[Config]] = {}
    for degrees in degrees_up_to(room, fixed.get("cp", 1), shape.experts or 1):
        if any(fixed.get(axis, degree) != degree for axis, degree in vars(degrees).items()):
            continue
        given = config.parallel.model_dump(exclude={"auto", *vars(degrees)}, exclude_unset=True)
        parallel = ParallelConfig.model_validate({**given, **vars(degrees)})
        candidate = config.model_copy(update={"parallel": parallel})
        try:
            candidate.check(shape.vocabulary)
        except ConfigError as error:
            refused = error
            continue
        by_ranks.setdefault(degrees.ranks, []).append(candidate)
    if not by_ranks:
        raise ConfigError(f"parallel: auto finds no layout of up to {room} ranks: {refused}")
    ranks = max(by_ranks)
    fitting = by_ranks[ranks]
    return fitting if len(fitting) <= MEASURED else _promising(config, shape, ranks, fitting)


def _promising(config: Config, shape: ModelShape, ranks: int, fitting: Sequence[Config]) -> list[Config]:
    """The fastest layouts on the known cluster `LIKE`; only their order is of interest.

    Layers of the user's own are taken for the family's.
    """
    spec = cluster_preset(LIKE)
    each = spec.gpus_per_node if ranks % spec.gpus_per_node == 0 else ranks
    spec = replace(spec, nodes=ranks // each, gpus_per_node=each)
    train = config.train
    search = Search(
        model=replace(shape, pattern=UNIFORM),
        global_batch=train.global_batch,
        reduce_dtype=train.reduce_dtype,
        micro_batch=train.micro_batch,
        recompute=config.recompute,
        fixed={"cp": config.parallel.cp},
        zero=config.parallel.zero if "zero" in config.parallel.model_fields_set else None,
    )
    degrees = attrgetter("dp", "tp", "pp", "ep")
    steps = {degrees(found.setting.layout): found.step_ns for found in candidates(search, spec)}
    return sorted(fitting, key=lambda fit: steps.get(degrees(fit.parallel), float("inf")))[:MEASURED]
