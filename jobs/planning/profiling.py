"""``braid profile``: what a run's operators cost on this hardware, alone and together."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from braid.actors.config import Config, ConfigError, load_config
from braid.actors.config.paths import anchored
from braid.jobs.output import check_output
from braid.jobs.usage import AsJson, ConfigFile, Launcher, Overrides
from braid.scheduling.cost.effectiveness import effectiveness
from braid.scheduling.text.json_text import json_text

if TYPE_CHECKING:
    from braid.actors.controller.ranks import group
    from braid.scheduling.model.shape import ModelShape
    from braid.scheduling.schedule.schedule import Schedule


def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    launcher: Launcher = None,
    output: Annotated[Path | None, typer.Option(help="Also write the profile to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the heat map to this file.")] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Measure even if that was done before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a run's operators alone and beside communication, with its shapes, ranks and links."""
    from braid.actors.controller.profiling import find_or_measure
    from braid.jobs.data.tokenizer import tokenizer_of
    from braid.jobs.planning.heat_map import svg_map, terminal_map
    from braid.jobs.planning.work import write_file
    from braid.jobs.training.refusals import check_place_of_ranks

    check_output("--output", output)
    check_output("--svg", svg)
    extra = [f"cluster.launcher={launcher}"] if launcher else []
    resolved = anchored(load_config(config, [*(overrides or []), *extra]), Path.cwd())
    shape = resolved.check(tokenizer_of(resolved).vocabulary)
    check_place_of_ranks(resolved, shape)
    with _launcher(resolved) as starts:
        starts.check(resolved.layout().ranks)
        found = find_or_measure(resolved, shape, starts, anew=anew)
    if found.trouble:
        typer.echo(f"braid: {found.trouble}", err=True)
    if output is not None:
        write_file(output, found.profile.to_json(), "--output")
    heat = effectiveness(found.profile)
    if svg is not None:
        write_file(svg, svg_map(heat), "--svg")
    if as_json:
        typer.echo(json_text(json.loads(found.profile.to_json())))
        return
    console = Console()
    if heat.columns:
        console.print(terminal_map(heat))
    else:
        console.print("this layout has no communication inside layers: nothing to overlap there")
    how = "measured before; --anew measures again" if found.reused else f"measured in {found.seconds:.0f} s"
    console.print(f"profile {found.path} ({how})", highlight=False, soft_wrap=True)


@contextmanager
def _launcher(config: Config) -> "Iterator[group.Launcher]":
    """What starts a run's ranks; while it is used, the command has the run's Ray cluster."""
    from braid.actors.controller.ranks.processes import ProcessLauncher
    from braid.jobs.cluster.session import ray_session

    if config.cluster.launcher == "processes":
        yield ProcessLauncher(config)
        return
    with ray_session(config):
        from braid.actors.controller.ranks.placement import RayLauncher

        yield RayLauncher(config)


def known_schedule(config: Config, shape: "ModelShape") -> "Schedule":
    """What `braid train` would execute, found without measuring anything.

    Where costs decide, with the profile that is given or was measured before; `ConfigError` where there is
    none. Which profile belongs to a run on Ray, its cluster says, which is joined, or started, for this.
    """
    from braid.actors.controller.decisions import find_or_decide
    from braid.actors.controller.planning import build_schedule
    from braid.actors.controller.profiling import known_profile
    from braid.scheduling.cost.profile import read_profile
    from braid.scheduling.schedule.text import parse

    if not config.overlap.needs_profile:
        return build_schedule(config, shape)
    config = anchored(config, Path.cwd())
    measured = None
    if config.overlap.profile is not None:
        measured = read_profile(config.overlap.profile)
    elif any((config.runs / "profiles").glob("*.json")):
        with _launcher(config) as launcher:
            if (found := known_profile(config, shape, launcher)) is not None:
                measured = found.profile
    if measured is None:
        raise ConfigError(
            f"overlap.schedule={config.overlap.schedule} is decided by measured costs, and this run has "
            f"none in {config.runs / 'profiles'}: measure them with `braid profile`, or name a file in "
            f"overlap.profile"
        )
    return parse(find_or_decide(config, shape, measured).schedule)
