"""From configuration to schedule: what the run will execute, without starting anything."""

from dataclasses import replace

from braid.actors.config import Config, ConfigError
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.operators import Part
from braid.scheduling.plan import read_plan
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_parser import parse
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.validate import validate


def model_graphs(config: Config, shape: ModelShape) -> dict[str, Part]:
    """The operator graphs of the run's model parts. Only a layer of the user's own needs torch for this."""
    sizes = part_sizes(shape, config.layout(), config.train.micro_batch)
    if config.model.layer is None:
        return built_in_parts(sizes, config.train.recompute)
    from braid.actors.stage.layers import load_layer
    from braid.actors.stage.model import model_parts

    return model_parts(sizes, load_layer(config.model.layer), config.train.recompute)


def build_schedule(config: Config, shape: ModelShape) -> Schedule:
    """The run's training schedule: the named one, or the text of ``overlap.schedule_file``; validated."""
    layout, parts = config.layout(), model_graphs(config, shape)
    micro_batches = config.workload().micro_batches(layout)
    file = config.overlap.schedule_file
    if file is None:
        choices = _choices(config, layout)
        try:
            schedule = training_schedule(config.overlap.schedule, layout, micro_batches, parts, choices)
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
    validate(schedule, layout, parts)
    return schedule


def _choices(config: Config, layout: ParallelLayout) -> Choices | None:
    """The decisions of ``overlap.plan``, which has to be for this schedule and layout."""
    file = config.overlap.plan
    if file is None:
        return None
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
    return replace(plan.choices, gathers=False)
