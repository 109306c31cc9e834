"""Chooses what ``auto`` leaves to measurement in a run: its layout, and a tensor-parallel degree and
recompute policy for every layer. The run then continues as if all that had been configured."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from operator import attrgetter

from braid.actors.config import Config, ConfigError, ParallelConfig
from braid.actors.config.training import AUTO
from braid.actors.controller.decisions import find_or_decide
from braid.actors.controller.planning import in_memory, model_graphs, setting_of
from braid.actors.controller.profiling import find_or_measure
from braid.actors.controller.ranks.elastic import degrees_up_to
from braid.actors.controller.ranks.group import Launcher, WorkerError
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.presets.library import cluster_preset
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import Outcome, measured
from braid.scheduling.plan.layer_choices import (
    LayerSearch,
    Schedules,
    choose_layers,
    degrees_within,
    with_choices,
)
from braid.scheduling.plan.layout_candidates import Search, candidates
from braid.scheduling.plan.layouts import Tell
from braid.scheduling.plan.orders import CostedSetting
from braid.scheduling.plan.space import searched_schedules
from braid.scheduling.plan.tensor_degrees import LayerChoice
from braid.scheduling.text.pattern import UNIFORM

MEASURED = 6
"""Most layouts that are measured: a profile takes seconds to a minute."""
_SETTLED_SECONDS = 2.0
LIKE = "h100"
"""Cluster preset whose simulation selects the layouts to measure, if there are more than `MEASURED`."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """A layout, or a choice for every layer, that was compared."""

    layout: str
    schedule: str = ""
    seconds: float | None = None
    """Seconds of the step, simulated with measured costs; None if measuring failed."""
    trouble: str = ""


def with_layout(
    config: Config, shape: ModelShape, launcher: Launcher, tell: Tell, data: str = ""
) -> tuple[Config, list[MeasuredLayout]]:
    """Return the configuration in the layout with the fastest simulated step, and all compared layouts, best
    first.

    ``tell`` is called before each measurement.
    """
    rows: list[tuple[MeasuredLayout, Config]] = []
    failure: WorkerError | None = None
    fitting = fitting_layouts(config, shape, _room(launcher))
    for number, candidate in enumerate(fitting, 1):
        layout = candidate.layout().describe()
        tell(f"layout {layout} ({number} of {len(fitting)})")
        try:
            profile = find_or_measure(candidate, shape, launcher, data=data).profile
        except WorkerError as error:  # such as a model that does not fit
            failure = error
            row = MeasuredLayout(layout=layout, trouble=str(error).partition("\n")[0])
        else:
            made = find_or_decide(candidate, shape, profile)
            seconds = json.loads(made.texts["predicted.json"])["step_seconds"]
            row = MeasuredLayout(layout=layout, schedule=made.name, seconds=seconds)
        rows.append((row, candidate))
    rows.sort(key=lambda pair: float("inf") if pair[0].seconds is None else pair[0].seconds)
    if failure is not None and rows[0][0].seconds is None:
        raise failure
    return rows[0][1], [row for row, _ in rows]


def _room(launcher: Launcher) -> int:
    """Return how many ranks there is room for; resources of the data preparation are released within a
    moment."""
    room, deadline = 1, time.monotonic() + _SETTLED_SECONDS
    while time.monotonic() < deadline:
        room = max(room, launcher.capacity(None)[0])
        time.sleep(_SETTLED_SECONDS / 10)
    return room


def fitting_layouts(config: Config, shape: ModelShape, room: int) -> list[Config]:
    """Return the configuration in every layout, of as many ranks as possible, that suits model, batch and
    schedule.

    Given degrees are kept; context parallelism is used only if it is given. If there are more than `MEASURED`
    layouts, return the most promising ones. Raise `ConfigError` if no layout suits.
    """
    fixed = config.parallel.fixed
    refused = ConfigError("none has the degrees that are given; lower them, or cluster.cpus_per_rank")
    by_ranks: dict[int, list[Config]] = {}
    for degrees in degrees_up_to(room, fixed.get("cp", 1), shape.experts or 1):
        if any(fixed.get(axis, degree) != degree for axis, degree in vars(degrees).items()):
            continue
        uncut = {"zero", "shards"} if degrees.dp * degrees.cp == 1 else set()
        others = {"auto", *vars(degrees), *uncut}
        given = config.parallel.model_dump(exclude=others, exclude_unset=True)
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
    """Select the fastest layouts as simulated on the cluster `LIKE`; only their order matters.

    User-defined layers are treated as the family's.
    """
    spec = cluster_preset(LIKE)
    each = spec.gpus_per_node if ranks % spec.gpus_per_node == 0 else ranks
    spec = replace(spec, nodes=ranks // each, gpus_per_node=each)
    train = config.train
    search = Search(
        model=replace(shape, pattern=UNIFORM),
        global_batch=train.global_batch,
        reduce_dtype=train.reduce_dtype,
        states=train.states,
        micro_batch=train.micro_batch,
        recompute=config.recompute,
        fixed={"cp": config.parallel.cp},
        zero=config.parallel.zero if "zero" in config.parallel.model_fields_set else None,
    )
    degrees = attrgetter("dp", "tp", "pp", "ep")
    steps = {degrees(found.setting.layout): found.step_ns for found in candidates(search, spec)}
    return sorted(fitting, key=lambda fit: steps.get(degrees(fit.parallel), float("inf")))[:MEASURED]


# -- layers --------------------------------------------------------------------------------------------------


def layer_search(config: Config, limit_bytes: float | None = None) -> LayerSearch:
    """Return the choices for every layer, within ``cluster.memory_gb`` or another limit."""
    recompute, tp = config.train.recompute, config.parallel.tp
    return LayerSearch(
        degrees=degrees_within(tp) if config.parallel.tensor_degrees == AUTO else (tp,),
        policies=RECOMPUTE_POLICIES if recompute == AUTO else (recompute,),
        limit_bytes=limit_bytes or (config.cluster.memory_gb or float("inf")) * 1e9,
    )


def as_chosen(config: Config, setting: Setting) -> Config:
    """Return the configuration with the choices that were made for its layers."""
    degrees = setting.layout.tensor_degrees or None
    return config.changed(parallel={"tensor_degrees": degrees}, train={"recompute": setting.recompute})


def with_layers(
    config: Config, shape: ModelShape, launcher: Launcher, tell: Tell, data: str = ""
) -> tuple[Config, list[MeasuredLayout]]:
    """Choose a degree and a policy for every layer; return the configuration, and the simulated choices, best
    first."""
    setting, search = setting_of(config, shape), layer_search(config)
    search = replace(search, degrees=_fitting(setting, search))
    tell(f"layers of degree {' and '.join(map(str, search.degrees))}")
    # side by side, so that one profile contains layers of all degrees
    degrees = islice(cycle(reversed(search.degrees)), shape.layers)
    choices = tuple(LayerChoice(degree, "none") for degree in degrees)
    probe = as_chosen(config, with_choices(setting, choices))
    profile = find_or_measure(probe, shape, launcher, data=data).profile

    def bench_of(candidate: Setting) -> CostedSetting:
        graphs = model_graphs(as_chosen(config, candidate), shape, profile.streams)
        return measured(graphs, profile)(candidate)

    found = choose_layers(setting, search, bench_of, in_memory(config), schedules_of(config))
    return as_chosen(config, found[0].setting), [*map(_row, found)]


def left_open(config: Config, shape: ModelShape) -> Config:
    """Return the configuration with ``tensor_degrees: auto``, if none were given and the micro-batch allows
    several degrees."""
    if config.parallel.tensor_degrees is not None or config.parallel.tp == 1:
        return config
    opened = config.changed(parallel={"tensor_degrees": AUTO})
    several = len(_fitting(setting_of(opened, shape), layer_search(opened))) > 1
    return opened if several else config


def schedules_of(config: Config) -> Schedules:
    """Return the function that yields the schedules under which a setting is compared."""
    return searched_schedules if config.overlap.schedule == AUTO else lambda setting: [setting]


def _fitting(setting: Setting, search: LayerSearch) -> tuple[int, ...]:
    """Return the degrees that the micro-batch allows; only the largest ones if there are more than layers."""
    layers, allowed = setting.model.layers, []
    for degree in search.degrees:
        with contextlib.suppress(ValueError):
            with_choices(setting, (LayerChoice(degree, "none"),) * layers)
            allowed.append(degree)
    return tuple(allowed[-layers:])


def _row(outcome: Outcome) -> MeasuredLayout:
    setting = outcome.setting
    again = "" if setting.recompute == "none" else f", recompute {setting.recompute}"
    return MeasuredLayout(
        layout=setting.layout.describe() + again,
        schedule=str(setting.name),
        seconds=outcome.numbers.step_seconds,
        trouble=f"{outcome.missing_bytes / 1e9:.2f} GB too much" if outcome.missing_bytes else "",
    )
