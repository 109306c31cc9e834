"""The schedule that a run would execute, found without measuring anything."""

from pathlib import Path

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import anchored
from braid.actors.controller.decisions import find_or_decide
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.profiling import Profiled, known_profile
from braid.jobs.session import ray_session
from braid.scheduling.profile import read_profile
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_text import parse
from braid.scheduling.spec import ModelShape


def known_schedule(config: Config, shape: ModelShape) -> Schedule:
    """What `braid train` would execute: where costs decide, with the profile that is given or was measured
    before. `ConfigError` where there is none. Which one belongs to a run on Ray, its cluster says, which is
    joined, or started, for this."""
    if not config.overlap.needs_profile:
        return build_schedule(config, shape)
    config = anchored(config, Path.cwd())
    if config.overlap.profile is not None:
        profile = read_profile(config.overlap.profile)
    else:
        found = _measured(config, shape) if any((config.runs / "profiles").glob("*.json")) else None
        if found is None:
            raise ConfigError(
                f"overlap.schedule={config.overlap.schedule} is decided by measured costs, and this run has "
                f"none in {config.runs / 'profiles'}: measure them with `braid profile`, or name a file in "
                f"overlap.profile"
            )
        profile = found.profile
    return parse(find_or_decide(config, shape, profile).schedule)


def _measured(config: Config, shape: ModelShape) -> Profiled | None:
    if config.cluster.launcher == "processes":
        return known_profile(config, shape, ProcessLauncher(config))
    with ray_session(config):
        from braid.actors.controller.placement import RayLauncher

        return known_profile(config, shape, RayLauncher(config))
