"""``parallel.tensor_degrees: auto`` and ``train.recompute: auto``: what is fastest for every layer and fits.

A run measures layers of every degree that they may have, side by side in one model, and the planner chooses
(`braid.scheduling.plan.layer_choices`); the run then is as if that had been given.
"""

import contextlib
from dataclasses import replace
from itertools import cycle, islice

from braid.actors.config import Config
from braid.actors.config.training import AUTO
from braid.actors.controller.planning import in_memory, model_graphs, setting_of
from braid.actors.controller.profiling import find_or_measure
from braid.actors.controller.ranks.group import Launcher
from braid.jobs.training.layouts import MeasuredLayout
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.setting import Setting
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
from braid.scheduling.plan.layouts import Tell
from braid.scheduling.plan.orders import CostedSetting
from braid.scheduling.plan.space import searched_schedules
from braid.scheduling.plan.tensor_degrees import LayerChoice


def layer_search(config: Config, limit_bytes: float | None = None) -> LayerSearch:
    """What may be chosen for every layer, within ``cluster.memory_gb`` or another limit."""
    recompute, tp = config.train.recompute, config.parallel.tp
    return LayerSearch(
        degrees=degrees_within(tp) if config.parallel.tensor_degrees == AUTO else (tp,),
        policies=RECOMPUTE_POLICIES if recompute == AUTO else (recompute,),
        limit_bytes=limit_bytes or (config.cluster.memory_gb or float("inf")) * 1e9,
    )


def as_chosen(config: Config, setting: Setting) -> Config:
    """The configuration with what was chosen for its layers."""
    degrees = setting.layout.tensor_degrees or None
    return config.changed(parallel={"tensor_degrees": degrees}, train={"recompute": setting.recompute})


def with_layers(
    config: Config, shape: ModelShape, launcher: Launcher, tell: Tell, data: str = ""
) -> tuple[Config, list[MeasuredLayout]]:
    """The configuration with a degree and a policy for every layer, and what was simulated, best first."""
    setting = setting_of(config, shape)
    degrees = _fitting(setting, layer_search(config))
    tell(f"layers of degree {' and '.join(map(str, degrees))}")
    side_by_side = islice(cycle(reversed(degrees)), shape.layers)  # so that one profile has all of them
    choices = tuple(LayerChoice(degree, "none") for degree in side_by_side)
    probe = as_chosen(config, with_choices(setting, choices))
    return layers_chosen(config, shape, find_or_measure(probe, shape, launcher, data=data).profile)


def layers_chosen(config: Config, shape: ModelShape, profile: Profile) -> tuple[Config, list[MeasuredLayout]]:
    """The same with a profile that has layers of every degree that the micro-batch allows."""
    setting, search = setting_of(config, shape), layer_search(config)

    def bench_of(candidate: Setting) -> CostedSetting:
        graphs = model_graphs(as_chosen(config, candidate), shape, profile.streams)
        return measured(graphs, profile)(candidate)

    search = replace(search, degrees=_fitting(setting, search))
    found = choose_layers(setting, search, bench_of, in_memory(config), schedules_of(config))
    return as_chosen(config, found[0].setting), [*map(_row, found)]


def left_open(config: Config, shape: ModelShape) -> Config:
    """With degrees of layers to be chosen, where none were given and the micro-batch allows several."""
    if config.parallel.tensor_degrees is not None or config.parallel.tp == 1:
        return config
    opened = config.changed(parallel={"tensor_degrees": AUTO})
    several = len(_fitting(setting_of(opened, shape), layer_search(opened))) > 1
    return opened if several else config


def schedules_of(config: Config) -> Schedules:
    """What a setting is compared under."""
    return searched_schedules if config.overlap.schedule == AUTO else lambda setting: [setting]


def _fitting(setting: Setting, search: LayerSearch) -> tuple[int, ...]:
    """Degrees that the micro-batch allows, the largest ones where there are more than layers."""
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
