"""``braid profile``: what a run's operators cost on this hardware, alone and together."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from braid.actors.config import Config, load_config
from braid.actors.config.paths import anchored
from braid.jobs.output import check_output
from braid.jobs.usage import AsJson, ConfigFile, Launcher, Overrides
from braid.scheduling.effectiveness import effectiveness
from braid.scheduling.json_text import json_text


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
    from braid.jobs.planning.heat_map import svg_map, terminal_map
    from braid.jobs.planning.work import write_file

    check_output("--output", output)
    check_output("--svg", svg)
    extra = [f"cluster.launcher={launcher}"] if launcher else []
    resolved = anchored(load_config(config, [*(overrides or []), *extra]), Path.cwd())
    found = _measure(resolved, anew)
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


def _measure(config: Config, anew: bool) -> Any:
    from braid.actors.controller.processes import ProcessLauncher
    from braid.actors.controller.profiling import find_or_measure
    from braid.jobs.data.tokenizer import tokenizer_of
    from braid.jobs.refusals import check_place_of_ranks
    from braid.jobs.session import ray_session

    shape = config.check(tokenizer_of(config).vocabulary)
    check_place_of_ranks(config, shape)
    if config.cluster.launcher == "processes":
        launcher = ProcessLauncher(config)
        return find_or_measure(config, shape, launcher, anew=anew)
    with ray_session(config):
        from braid.actors.controller.placement import RayLauncher

        ray_launcher = RayLauncher(config)
        ray_launcher.check(config.layout().ranks)
        return find_or_measure(config, shape, ray_launcher, anew=anew)
