"""From configuration to schedule: what the run will execute, without starting anything."""

from dataclasses import dataclass, replace
from itertools import product

from braid.actors.config import Config, ConfigError
from braid.actors.stage.messages import SerialStep
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.lowering.named import EXECUTABLE, SCHEDULES
from braid.scheduling.lowering.split import with_split_layers
from braid.scheduling.operators import Part
from braid.scheduling.plan import Setting, read_plan
from braid.scheduling.planner.compose import OVERLAPPING, SPLITS, Bench, decisions, run, with_hops
from braid.scheduling.profile import Profile, with_chunks
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_parser import parse
from braid.scheduling.simulate import Simulation, simulate
from braid.scheduling.spec import ModelShape, Placement
from braid.scheduling.validate import validate

FUSED = (0, 4)
"""Most layers of a run that are tried: none, and as many as a search of a second can order well."""
FUSED_IN_BOUNDS = (0, 1, 2, 4)
"""The same where memory is bounded: shorter runs hold less."""


def model_graphs(config: Config, shape: ModelShape) -> dict[str, Part]:
    """The operator graphs of the run's model parts. Only a layer of the user's own needs torch for this."""
    sizes = part_sizes(shape, config.layout(), config.train.micro_batch)
    if config.model.layer is None:
        return built_in_parts(sizes, config.train.recompute)
    from braid.actors.stage.layers import load_layer
    from braid.actors.stage.model import model_parts

    return model_parts(sizes, load_layer(config.model.layer), config.train.recompute)


def setting_of(config: Config, shape: ModelShape, fused: int = 0, split: int = 1) -> Setting:
    """What the planner is told of a run."""
    return Setting(
        model=shape,
        layout=config.layout(),
        workload=config.workload(),
        schedule=config.overlap.schedule,
        dtype=config.train.dtype,
        recompute=config.train.recompute,
        split=split,
        fused=fused,
    )


def decide_run(config: Config, shape: ModelShape, profile: Profile) -> tuple[Bench, Choices]:
    """Decisions for a run with measured costs: layers fused or not, how many chunks, as the simulation says.

    The fastest within ``overlap.memory_slack``; where nothing is, what needs the least. `ConfigError` if a
    schedule that splits collectives cannot cut the tokens evenly.
    """
    whole = model_graphs(config, shape)
    tried = []
    limit = _activation_limit(config, shape, profile)
    longest: tuple[int, ...] = (0,)
    if config.overlap.schedule in OVERLAPPING:
        longest = FUSED if limit == float("inf") else FUSED_IN_BOUNDS
    for fused, split in product(longest, _splits(config, shape)):
        members = with_split_layers(whole, split)
        costs = with_chunks(profile, members["layer"])
        bench = Bench(setting_of(config, shape, fused, split), members, costs)
        for (choices, _), variant in product(decisions(bench), with_hops(bench)):
            simulation = run(variant, choices)
            tried.append((max(0.0, _activations(simulation) - limit), simulation.step_ns, variant, choices))
    _, _, bench, choices = min(tried, key=lambda one: one[:2])
    return bench, choices


def _activation_limit(config: Config, shape: ModelShape, profile: Profile) -> float:
    """Bytes of activations that ``overlap.memory_slack`` allows: so much more than megatron's."""
    slack = config.overlap.memory_slack
    if slack is None:
        return float("inf")
    overlap = config.overlap.model_copy(update={"schedule": "megatron", "memory_slack": None})
    serial = run(*decide_run(config.model_copy(update={"overlap": overlap}), shape, profile))
    return _activations(serial) * (1 + slack)


def _activations(simulation: Simulation) -> int:
    """Bytes of activations on the stage that needs most, with what operators hand each other."""
    return max(rank.activation_bytes + rank.working_bytes for rank in simulation.memory())


_ALIKE = 0.02
"""Steps that differ by less the simulator cannot tell apart (docs/log.md)."""


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
    """All schedules that the runtime executes and the layout allows, the one to take first, then by time.

    It is the fastest, or one that is not 2 % slower and needs less memory. Those that keep
    ``overlap.memory_slack`` come before the rest, which is in the order of what it needs.
    `ValueError` for a cost that the profile does not have.
    """
    serial_step(config, shape, profile)  # a profile of something else fails here, not as no schedule at all
    limit = _activation_limit(config, shape, profile)
    candidates: list[tuple[float, Candidate]] = []
    for name in EXECUTABLE:
        alone = config.with_schedule(name)
        if config.parallel.pp == 1 and (
            SCHEDULES[name].placement_on(1) is not Placement.LINEAR or name == "eager"
        ):
            continue  # pipelines of one stage are all the same
        if config.parallel.pp > 1 and name == "braid_twins":
            continue  # it is braid then
        if config.parallel.tp == 1 and SCHEDULES[name].splits_collectives:
            continue  # nothing to split
        try:
            alone.check(shape.vocabulary)
            bench, choices = decide_run(alone, shape, profile)
            simulation = run(bench, choices)
            numbers = simulation.numbers(config.train.micro_batch)
        except ValueError:
            continue  # this layout or number of micro-batches has no such schedule
        candidate = Candidate(
            schedule=name,
            seconds=numbers.step_seconds,
            hidden_fraction=numbers.hidden_fraction,
            bubble_fraction=numbers.bubble_fraction,
            peak_bytes=numbers.peak_bytes,
            fused=bench.setting.fused,
        )
        candidates.append((max(0.0, _activations(simulation) - limit), candidate))
    ranked = sorted(candidates, key=lambda found: (found[0], found[1].seconds))
    over, fastest = ranked[0]
    alike = [one for one in ranked if one[0] == over and one[1].seconds < fastest.seconds * (1 + _ALIKE)]
    taken = min(alike, key=lambda found: found[1].peak_bytes)
    return [taken[1], *(one for _, one in ranked if one is not taken[1])]


def predict(config: Config, shape: ModelShape, profile: Profile, schedule: Schedule) -> Simulation:
    """What a schedule is expected to do, by simulation with measured costs."""
    layout, members = config.layout(), model_graphs(config, shape)
    parts = scheduled_parts(members, layout, shape.layers, fused=schedule.fused, split=schedule.split)
    costs = schedule_costs(config, shape, profile, schedule)
    return simulate(schedule, layout, shape, parts, costs, dtype=config.train.dtype)


def schedule_costs(config: Config, shape: ModelShape, profile: Profile, schedule: Schedule) -> Profile:
    """The profile with the costs of the chunks that a schedule cuts operators into."""
    members = with_split_layers(model_graphs(config, shape), schedule.split)
    return with_chunks(profile, members["layer"])


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
        choices, fused, split, hop = _choices(config, shape)
        if choices is None and profile is not None:
            bench, choices = decide_run(config, shape, profile)
            fused, split, hop = bench.setting.fused, bench.setting.split, bench.setting.hop
        parts = scheduled_parts(parts, layout, shape.layers, fused=fused, split=split)
        try:
            schedule = training_schedule(
                config.overlap.schedule, layout, micro_batches, parts, choices, fused, split, hop
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
        _check_split(config, shape, schedule.split, f"overlap.schedule_file={file}")
        parts = scheduled_parts(parts, layout, shape.layers, fused=schedule.fused, split=schedule.split)
    validate(schedule, layout, parts)
    return schedule


def _splits(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """The numbers of chunks that the run's schedule may take: 1 unless it splits and there is what to split.

    `ConfigError` if the tokens of a micro-batch on a rank cannot be cut evenly.
    """
    name, layout = config.overlap.schedule, config.layout()
    if not SCHEDULES[name].splits_collectives or layout.tp == 1:
        return (1,)
    _check_split(config, shape, SPLITS[0], f"overlap.schedule={name}")
    tokens = part_sizes(shape, layout, config.train.micro_batch).local_tokens
    return tuple(split for split in SPLITS if tokens % split == 0)


def _check_split(config: Config, shape: ModelShape, split: int, source: str) -> None:
    """`ConfigError` if ``split`` chunks, which ``source`` asks for, do not have equally many tokens."""
    tokens = part_sizes(shape, config.layout(), config.train.micro_batch).local_tokens
    if tokens % split:
        raise ConfigError(
            f"{source} cuts a micro-batch in {split} chunks, but a rank holds {tokens} tokens of it "
            f"(train.micro_batch={config.train.micro_batch} x model.sequence={shape.sequence} / "
            f"parallel.tp={config.parallel.tp}); make that a multiple of {split} or use another "
            f"overlap.schedule"
        )


def _choices(config: Config, shape: ModelShape) -> tuple[Choices | None, int, int, int]:
    """The decisions of ``overlap.plan``, which has to be for this schedule and layout; its fused, split, hop.

    Without a plan there are no decisions, and as few chunks as can overlap.
    """
    file, layout = config.overlap.plan, config.layout()
    if file is None:
        return None, 0, _splits(config, shape)[0], 0
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
    _check_split(config, shape, setting.split, f"overlap.plan={file}")
    return replace(plan.choices, gathers=False), setting.fused, setting.split, setting.hop
