"""What a run is refused for before anything starts: no rank, no Ray; torch for layers of the user's alone."""

import ast
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from braid.actors.config import Config, ConfigError
from braid.actors.config.variables import inherited
from braid.actors.controller.controller import RunOptions, check_begin
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.cpus import memory_here
from braid.actors.controller.ranks.processes import ProcessLauncher, ProcessPlace, check_room
from braid.actors.controller.ranks.rank_environment import gpus_here
from braid.actors.controller.state.mirror import check_url
from braid.actors.stage.files.hub_files import check_initial
from braid.jobs.cluster.session import check_installed, check_lasting, is_private
from braid.jobs.data.data_sets import check_data
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.cost.profile import read_profile
from braid.scheduling.model.shape import ModelShape

_STATE_BYTES = 16
"""At least, of a parameter with its gradient, its fp32 copy and AdamW's two moments."""


def check_run(
    config: Config, options: RunOptions, places: Sequence[ProcessPlace] | None = None
) -> ModelShape:
    """The model's shape; `ConfigError`, or another `ValueError`, for what the user can mend.

    ``config``: with absolute paths. ``places``: of ranks that do not run on this machine's own loopback.
    """
    check_lasting(config)
    inherited(config.cluster.env, os.environ)
    shape = check_inputs(config, begins=not options.resume or options.again)
    check_begin(config, options, shape)
    check_place_of_ranks(config, shape, places)
    if not config.overlap.needs_profile and not config.parallel.auto:
        build_schedule(config, shape)
    return shape


def check_inputs(config: Config, *, begins: bool = True) -> ModelShape:
    """The model's shape, after a look at all that the run reads. ``begins``: with weights of
    ``model.initial``, not of a checkpoint."""
    shape = config.check(tokenizer_of(config).vocabulary)
    if begins:
        check_initial(config.model.initial, shape)
    check_data(config)
    if config.checkpoint.mirror is not None:
        check_url(config.checkpoint.mirror)
    if config.overlap.profile is not None:
        read_profile(config.overlap.profile)
    return shape


def check_place_of_ranks(
    config: Config, shape: ModelShape, places: Sequence[ProcessPlace] | None = None
) -> None:
    """`ConfigError` where the ranks find no room on this machine, or cannot be started from this script."""
    fixed = not config.parallel.auto
    if config.cluster.launcher == "processes":
        check_script()
        launcher = ProcessLauncher(config, places)
        if fixed:
            launcher.check(config.layout().ranks)
    else:
        check_installed()
        if not is_private(config) or config.elastic.max_ranks is not None:
            return
        if fixed:
            check_room(config, config.layout().ranks)
    if places is None and fixed:
        _check_memory(config, shape)


def _check_memory(config: Config, shape: ModelShape) -> None:
    """What all ranks hold between steps has to fit in this machine, if they hold it in its memory."""
    if config.cluster.device == "cuda" or (config.cluster.device == "auto" and gpus_here(os.environ)):
        return
    copies = 1 if config.parallel.zero else config.parallel.dp
    needed, memory = shape.parameters() * _STATE_BYTES * copies, memory_here()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"model: weights, gradients and optimizer of {shape.parameters() / 1e9:.2f} B parameters need "
            f"{needed / 2**30:,.0f} GiB{f' on {copies} replicas' if copies > 1 else ''}, this machine has "
            f"{memory / 2**30:,.0f} GiB; take a smaller model, or plan it for a cluster with `braid plan`"
        )


def check_script() -> None:
    """`ConfigError` where ranks, which import the script that starts them, would start ranks themselves.

    That is so if the call comes from the top level of the script that Python runs, outside of
    ``if __name__ == "__main__":``. What has no file, as in a notebook, is not imported again.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    calls = [
        call
        for call in inspect.stack(0)
        if call.frame.f_code.co_filename == file and call.function == "<module>"
    ]
    if file is None or not calls:
        return
    line = calls[0].lineno
    try:
        statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return
    for statement in statements:
        inside = statement.lineno <= line <= (statement.end_lineno or 0)
        if inside and isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            return
    raise ConfigError(
        f"{file}, line {line}: with cluster.launcher=processes every rank imports this script; "
        f'put this line below `if __name__ == "__main__":`, or set cluster.launcher to ray'
    )
