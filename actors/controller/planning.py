"""From configuration to schedule: what the run will execute, without starting anything."""

from dataclasses import dataclass, replace

from braid.actors.config import Config, ConfigError
from braid.actors.stage.messages import SerialStep
from braid.scheduling.fusion import fused_parts
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import EXECUTABLE, SCHEDULES
from braid.scheduling.operators import Part
from braid.scheduling.plan import Setting, read_plan
from braid.scheduling.planner.compose import OVERLAPPING, Bench, decide, run
from braid.scheduling.profile import Profile
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_parser import parse
from braid.scheduling.simulate import Simulation, simulate
from braid.scheduling.spec import ModelShape, ParallelLayout, Placement
from braid.scheduling.validate import validate

FUSED = (0, 4)
"""Most layers of a run that are tried: none, and as many as a search of a second can order well."""


def model_graphs(config: Config, shape: ModelShape) -> dict[str, Part]:
    """The operator graphs of the run's model parts. Only a layer of the user's own needs torch for this."""
    sizes = part_sizes(shape, config.layout(), config.train.micro_batch)
    if config.model.layer is None:
        return built_in_parts(sizes, config.train.recompute)
    from braid.actors.stage.layers import load_layer
    from braid.actors.stage.model import model_parts

    return model_parts(sizes, load_layer(config.model.layer), config.train.recompute)


def setting_of(config: Config, shape: ModelShape, fused: int = 0) -> Setting:
    """What the planner is told of a run."""
    return Setting(
        model=shape,
        layout=config.layout(),
        workload=config.workload(),
        schedule=config.overlap.schedule,
        dtype=config.train.dtype,
        recompute=config.train.recompute,
        fused=fused,
    )


def decide_run(config: Config, shape: ModelShape, profile: Profile) -> tuple[Bench, Choices]:
    """Decisions for a run with measured costs: of layers one by one or fused, as the simulation says."""
    members = model_graphs(config, shape)
    tried = []
    for fused in FUSED if config.overlap.schedule in OVERLAPPING else (0,):
        bench = Bench(setting_of(config, shape, fused), members, profile)
        choices, _ = decide(bench)
        tried.append((run(bench, choices).step_ns, bench, choices))
    _, bench, choices = min(tried, key=lambda one: one[0])
    return bench, choices


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that ``overlap.schedule: auto`` has simulated with the measured profile."""

    schedule: str
    seconds: float
    hidden_fraction: float
    bubble_fraction: float
    peak_bytes: int
    fused: int


def rank_schedules(config: Config, shape: ModelShape, profile: Profile) -> list[Candidate]:
    """All schedules that the runtime executes and the layout allows, the fastest first."""
    candidates = []
    for name in EXECUTABLE:
        alone = config.with_schedule(name)
        if config.parallel.pp == 1 and SCHEDULES[name].placement_on(1) is not Placement.LINEAR:
            continue  # pipelines of one stage are all the same
        try:
            alone.check(shape.vocabulary)
            bench, choices = decide_run(alone, shape, profile)
            numbers = run(bench, choices).numbers(config.train.micro_batch)
        except ValueError:
            continue  # this layout or number of micro-batches has no such schedule
        candidates.append(
            Candidate(
                schedule=name,
                seconds=numbers.step_seconds,
                hidden_fraction=numbers.hidden_fraction,
                bubble_fraction=numbers.bubble_fraction,
                peak_bytes=numbers.peak_bytes,
                fused=bench.setting.fused,
            )
        )
    return sorted(candidates, key=lambda one: one.seconds)


def predict(config: Config, shape: ModelShape, profile: Profile, schedule: Schedule) -> Simulation:
    """What a schedule is expected to do, by simulation with measured costs."""
    layout = config.layout()
    parts = fused_parts(model_graphs(config, shape), layout, shape.layers, schedule.fused)
    return simulate(schedule, layout, shape, parts, profile, dtype=config.train.dtype)


def serial_step(config: Config, shape: ModelShape, profile: Profile) -> SerialStep:
    """What a step takes in the serial schedule, by simulation with the measured profile."""
    serial = config.with_schedule("megatron")
    numbers = run(*decide_run(serial, shape, profile)).numbers(config.train.micro_batch)
    return SerialStep(
        seconds=numbers.step_seconds, alpha=numbers.communication_seconds / numbers.step_seconds
    )


def build_schedule(config: Config, shape: ModelShape, profile: Profile | None = None) -> Schedule:
    """The run's training schedule: the named one, or the text of ``overlap.schedule_file``; validated.

    With a profile, decisions that no plan makes are made by it.
    """
    layout, parts = config.layout(), model_graphs(config, shape)
    micro_batches = config.workload().micro_batches(layout)
    file = config.overlap.schedule_file
    if file is None:
        choices, fused = _choices(config, layout)
        if choices is None and profile is not None:
            bench, choices = decide_run(config, shape, profile)
            fused = bench.setting.fused
        parts = fused_parts(parts, layout, shape.layers, fused)
        try:
            schedule = training_schedule(
                config.overlap.schedule, layout, micro_batches, parts, choices, fused
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
    else:
        try:
            schedule = parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"overlap.schedule_file={file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"overlap.schedule_file={file}: {error}") from None
        if not schedule.trains:
            raise ConfigError(f"overlap.schedule_file={file} has no backward programs, so it would not train")
        if schedule.micro_batches != micro_batches:
            raise ConfigError(
                f"overlap.schedule_file={file} is for {schedule.micro_batches} micro-batches; "
                f"train.global_batch, train.micro_batch and parallel.dp give {micro_batches}"
            )
        parts = fused_parts(parts, layout, shape.layers, schedule.fused)
    validate(schedule, layout, parts)
    return schedule


def _choices(config: Config, layout: ParallelLayout) -> tuple[Choices | None, int]:
    """The decisions of ``overlap.plan``, which has to be for this schedule and layout, and what it fuses."""
    file = config.overlap.plan
    if file is None:
        return None, 0
    plan = read_plan(file)
    setting = plan.setting
    if setting.schedule != config.overlap.schedule:
        raise ConfigError(
            f"overlap.plan={file} is for overlap.schedule={setting.schedule}, not {config.overlap.schedule}; "
            f"set overlap.schedule to {setting.schedule}"
        )
    planned = replace(setting.layout, head_layers=0)
    if planned != layout or setting.recompute != config.train.recompute:
        raise ConfigError(
            f"overlap.plan={file} is for {setting.layout.describe()} with train.recompute="
            f"{setting.recompute}; the configuration has {layout.describe()} with "
            f"{config.train.recompute}: plan anew"
        )
    return replace(plan.choices, gathers=False), setting.fused
