"""Turns a configuration into what the run will execute, without starting anything.

Decisions are those of `braid.scheduling.plan.decide`, here with a run's own graphs and measured costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

from braid.actors.config import Config, ConfigError
from braid.actors.config.model import as_config_error
from braid.scheduling.cost.profile import Profile
from braid.scheduling.cost.simulate import Simulation
from braid.scheduling.generate.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.generate.partitions import WAYS, mega_scale, with_partitions
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts, model_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import (
    Outcome,
    Over,
    anything,
    decide,
    measured,
    outcome_of,
    outcome_of_schedule,
    within,
)
from braid.scheduling.plan.plan import read_plan
from braid.scheduling.plan.space import AUTO, Space, searched_schedules, with_schedule
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import parse
from braid.scheduling.schedule.validate import check, linked

IN_BOUNDS = Space(unit_layers=(0, 1, 2, 4))
"""Search space if memory is limited: shorter units hold less."""


def model_graphs(
    config: Config, shape: ModelShape, streams: Mapping[str, Stream] | None = None
) -> dict[str, Part]:
    """Build the operator graphs of the run's model parts. Only user-defined layers need torch for this.

    ``streams``: the stream of each axis's transfers (`Profile.streams`), by default inside the node.
    """
    sizes = config.sizes(shape, streams)
    if not config.model.own_layers:
        return built_in_parts(sizes)
    from braid.actors.stage.model.layers import load_layers

    layers = load_layers(config.model.own_layers)
    graphs = {kind: definition.graph for kind, definition in layers.items()}
    return model_parts(sizes, graphs)


@as_config_error()
def setting_of(config: Config, shape: ModelShape) -> Setting:
    """Describe a run for the planner, with nothing decided; for ``auto``, with the serial schedule."""
    return Setting(
        model=shape,
        layout=config.layout(),
        workload=config.workload(),
        **config.overlap.name._asdict(),
        dtype=config.train.dtype,
        reduce_dtype=config.train.reduce_dtype,
        states=config.train.states,
        recompute=config.recompute,
        context=config.parallel.context,
    )


@dataclass(frozen=True)
class Planned:
    """The outcome that a run will execute, and the alternatives it was compared with."""

    outcomes: tuple[Outcome, ...]
    """Compared outcomes; the first one is taken."""
    serial: Outcome
    """Outcome of the same layout without overlap (``megatron``)."""

    @property
    def taken(self) -> Outcome:
        return self.outcomes[0]


def plan_run(config: Config, shape: ModelShape, profile: Profile) -> Planned:
    """Decide with measured costs: the schedule's name, its pipeline, layers of a unit, partitions, orders.

    Take the fastest within ``overlap.memory_slack``; if nothing fits, the one that needs least memory. What a
    plan or a schedule file fixes is not decided again. Raise `ConfigError` for a plan or a file that is not
    for this run, `ValueError` for a cost that the profile does not have.
    """
    graphs = model_graphs(config, shape, profile.streams)
    setting, bench_of = setting_of(config, shape), measured(graphs, profile)
    serial_setting = with_schedule(setting, "megatron")
    serial = decide([serial_setting], bench_of, anything)[0]
    over = _over(config, serial)
    if (given := _given(config, setting, graphs)) is not None:
        planned, choices, schedule = given
        if schedule is not None:
            return Planned((outcome_of_schedule(schedule, bench_of(planned), over),), serial)
        outcome = outcome_of(bench_of(planned), choices, None, over)
        check(outcome.code)
        return Planned((outcome,), serial)
    if setting == serial_setting and config.overlap.schedule != AUTO:
        return Planned((serial,), serial)
    settings = searched_schedules(setting) if config.overlap.schedule == AUTO else [setting]
    space = Space() if config.overlap.memory_slack is None else IN_BOUNDS
    return Planned(tuple(decide(settings, bench_of, over, space)), serial)


def _over(config: Config, serial: Outcome) -> Over:
    """Return a function of the bytes beyond the limits: activations may exceed megatron's by
    ``overlap.memory_slack``, and the total is limited by ``cluster.memory_gb``.
    """
    slack, total = config.overlap.memory_slack, in_memory(config)
    if slack is None:
        return total

    def activations(simulation: Simulation) -> int:
        return max(rank.activation_bytes for rank in simulation.memory)

    limit = activations(serial.simulation) * (1 + slack)
    return lambda simulation: max(total(simulation), activations(simulation) - limit)


def in_memory(config: Config) -> Over:
    """Return a function of the bytes beyond ``cluster.memory_gb``."""
    room = config.cluster.memory_gb
    return anything if room is None else within(room * 1e9)


@as_config_error()
def build_schedule(config: Config, shape: ModelShape) -> Schedule:
    """Build and check the run's training schedule without costs: the named one, a plan's, or the text of a
    file.

    Nothing is searched for: operators are cut into as few pieces as can overlap. Raise `ConfigError` for
    schedules that need a pairing.
    """
    setting, graphs = setting_of(config, shape), model_graphs(config, shape)
    if (given := _given(config, setting, graphs)) is not None:
        setting, choices, schedule = given
    else:
        choices, schedule = Choices(), None
        if setting.kind.cuts_collectives and setting.layout.tp > 1:
            setting = replace(setting, partitions=mega_scale(WAYS[0]))
    layout, kinds, pieces = setting.layout, setting.kinds, setting.partitions
    parts = scheduled_parts(graphs, layout, kinds, unit_layers=setting.unit_layers, partitions=pieces)
    if schedule is None:
        schedule = training_schedule(setting, parts, choices)
    linked(schedule, layout, kinds, parts)
    return schedule


# -- plans and schedules of the user -------------------------------------------------------------------------

_KEYS = {
    "model": "model",
    "schedule": "overlap.schedule",
    "layout": "parallel",
    "workload": "train.global_batch and train.micro_batch",
    "dtype": "train.dtype",
    "reduce_dtype": "train.reduce_dtype",
    "states": "train.optimizer and train.average",
    "recompute": "train.recompute",
    "context": "parallel.context",
}
"""Fields in which a plan and a configuration must agree, and the keys of these fields."""


def _given(
    config: Config, setting: Setting, graphs: Mapping[str, Part]
) -> tuple[Setting, Choices, Schedule | None] | None:
    """Return the decisions of ``overlap.plan``, or the schedule of ``overlap.schedule_file`` and its
    decisions; None if neither is set.

    Raise `ConfigError` if the file cannot be read, or is for another run.
    """
    if (file := config.overlap.plan) is not None:
        with as_config_error("overlap.plan: "):
            plan = read_plan(file)
        if plan.not_executed:
            raise ConfigError(
                f"overlap.plan={file} decides {', '.join(plan.not_executed)}, which this version does not "
                f"execute; plan without"
            )
        for name, key in _KEYS.items():
            theirs, ours = getattr(plan.setting, name), getattr(setting, name)
            if theirs != ours:
                differs = f"{_told(theirs, ours)}, the configuration has {_told(ours, theirs)}"
                raise ConfigError(f"overlap.plan={file} is for {key}={differs}: plan anew, or set {key}")
        with as_config_error(f"overlap.plan={file}: "):
            with_partitions(graphs, plan.setting.partitions, setting.layout)
        return plan.setting, plan.choices, None
    if (file := config.overlap.schedule_file) is None:
        return None
    with as_config_error(f"overlap.schedule_file={file}: "):
        try:
            schedule = parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"overlap.schedule_file={file} cannot be read: {error.strerror}") from None
        if not schedule.trains:
            raise ConfigError(f"overlap.schedule_file={file} has no backward programs, so it would not train")
        if schedule.micro_batches != setting.micro_batches:
            raise ConfigError(
                f"overlap.schedule_file={file} is for {schedule.micro_batches} micro-batches; "
                f"train.global_batch, train.micro_batch and parallel.dp give {setting.micro_batches}"
            )
        with_partitions(graphs, schedule.partitions, setting.layout)
    setting = replace(setting, unit_layers=schedule.unit_layers, partitions=schedule.partitions)
    return setting, Choices(), schedule


def _told(value: object, other: object) -> str:
    """Describe a value of a setting; of a record only the fields that differ."""
    if isinstance(value, ParallelLayout):
        return value.describe()
    if not is_dataclass(value):
        return "null" if value is None else str(value)
    names = (field.name for field in fields(value))
    return ", ".join(
        f"{name} {getattr(value, name)}" for name in names if getattr(value, name) != getattr(other, name)
    )
