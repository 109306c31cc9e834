"""Checks for which a run is refused before anything starts: without ranks and Ray, and without torch unless
there are user-defined layers."""

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Sequence

from braid.actors.config import Config, ConfigError
from braid.actors.config.paths import check_protocol
from braid.actors.config.variables import inherited
from braid.actors.controller.controller import RunOptions, check_begin
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.cpus import memory_here
from braid.actors.controller.ranks.processes import ProcessPlace, check_room
from braid.actors.controller.ranks.rank_environment import gpus_here
from braid.actors.controller.ranks.rendezvous import launcher_here
from braid.actors.controller.state.mirror import KEY
from braid.actors.stage.files.hub_files import check_initial
from braid.jobs.cluster.session import check_installed, check_lasting, is_private
from braid.jobs.data.data_sets import check_data
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.cost.profile import read_profile
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.memory import DTYPE_BYTES

_STATE_BYTES = 8
"""Least bytes per parameter beside the optimizer's states: the parameter with its gradient and fp32 copy."""


def check_run(
    config: Config, options: RunOptions, places: Sequence[ProcessPlace] | None = None
) -> ModelShape:
    """Check a run and return the model's shape.

    ``config``: with absolute paths. ``places``: places of ranks that do not run on this machine's own
    loopback.
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
    """Check all inputs of the run and return the model's shape. ``begins``: the run starts from
    ``model.initial``, not from a checkpoint."""
    shape = config.check(tokenizer_of(config).vocabulary)
    if begins or shape.lora is not None:  # the base of adapters is in no checkpoint
        check_initial(config.model.initial, shape)
    check_data(config)
    if config.checkpoint.mirror is not None:
        check_protocol(KEY, config.checkpoint.mirror)
    if config.overlap.profile is not None:
        read_profile(config.overlap.profile)
    return shape


def check_place_of_ranks(
    config: Config, shape: ModelShape, places: Sequence[ProcessPlace] | None = None
) -> None:
    """Raise `ConfigError` if the ranks find no room on this machine, or cannot be started from this
    script."""
    fixed = not config.parallel.auto
    if config.cluster.launcher == "processes":
        check_script()
        launcher = launcher_here(config, places)
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
    """Raise `ConfigError` if the states of all ranks between steps do not fit in this machine's memory,
    unless they are on GPUs."""
    if config.cluster.device == "cuda" or (config.cluster.device == "auto" and gpus_here(os.environ)):
        return
    copies = 1 if config.parallel.zero else config.parallel.dp
    trained = shape.parameters() if shape.lora is None else shape.adapter_parameters()
    states = config.train.states.bytes(trained, 4, matrix=True)
    needed, memory = (trained * _STATE_BYTES + states) * copies, memory_here()
    if shape.lora is not None:
        bases = 1 if config.parallel.zero > 2 else config.parallel.dp
        needed += shape.parameters() * DTYPE_BYTES[config.train.dtype] * bases
    if memory is not None and needed > memory:
        raise ConfigError(
            f"model: weights, gradients and optimizer of {shape.parameters() / 1e9:.2f} B parameters need "
            f"{needed / 2**30:,.0f} GiB{f' on {copies} replicas' if copies > 1 else ''}, this machine has "
            f"{memory / 2**30:,.0f} GiB; take a smaller model, or plan it for a cluster with `braid plan`"
        )


def check_script() -> None:
    """Refuse a call at the top level of the script that Python runs, outside of ``if __name__ ==
    "__main__":``: ranks, which import the script, would start ranks themselves."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    calls = [call.lineno for call in inspect.stack(0) if (call.filename, call.function) == (file, "<module>")]
    lines = linecache.getlines(file) if file is not None else []
    if not calls or not lines:
        return
    line = calls[0]
    for statement in ast.parse("".join(lines)).body:
        inside = statement.lineno <= line <= (statement.end_lineno or 0)
        if inside and isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            return
    raise ConfigError(
        f"{file}, line {line}: with cluster.launcher=processes every rank imports this script; "
        f'put this line below `if __name__ == "__main__":`, or set cluster.launcher to ray'
    )
