"""Brings the ranks of a new generation to the state that training goes on from."""

import threading
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.group import StoppedError, WorkerGroup
from braid.actors.controller.homes import AwayError, Found, Homes, Verify
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.records import Incident
from braid.actors.controller.recovery import Failure, newest_common
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.scheduling.spec import ModelShape

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 1.0, 30.0
"""Between two looks for a home of checkpoints that is away: doubled each time, up to the second number."""


def restore(
    group: WorkerGroup,
    homes: Homes,
    plan: RunPlan,
    facts: dict[str, Any],
    failure: Failure | None,
    *,
    goes_on: bool,
    wait_s: float,
    stop: threading.Event,
) -> Generator[Incident, None, tuple[int, tuple[str, ...]]]:
    """Bring the ranks to the newest state there is; returns its number of steps, and what to tell.

    After a failure that is the newest one among the copies in memory and the good checkpoints; else the
    newest good checkpoint if the run ``goes_on``, or initial weights. ``facts``: of the data. ``wait_s``: for
    a home of checkpoints that is away. `CheckpointError` if the run goes on and no home has a good
    checkpoint, or none comes back in time; `StoppedError` once ``stop`` is set meanwhile.
    """
    config = plan.config
    copies = config.checkpoint.copies_every
    if failure is not None and copies:
        common = newest_common(group.call_all(Rank.copies_held), config.layout().mesh, failure.step)
        # Checkpoints of later steps than are done: damaged ones that the run once fell back from.
        saved = max((step for step in homes.steps() if step <= failure.step), default=0)
        if common is not None and common[0] >= saved:
            group.call_all(Rank.restore_copies, *common)
            failure.source = "copies in memory"
            return common[0], ()
    done = 0
    notes: tuple[str, ...] = ()
    if goes_on:
        step = failure.step if failure is not None else 0
        found = yield from _newest(homes, plan.shape, partial(_verify, group), wait_s, stop, step)
        if failure is not None:
            failure.source = f"checkpoint step-{found.manifest.step}"
        found.check_data(data_cursor(config, facts))
        group.call_all(Rank.load, found.path, found.manifest.step)
        done, notes = found.manifest.step, found.notes
    elif config.model.initial is not None:
        group.call_all(Rank.load_initial, str(config.model.initial))
    if copies:
        group.call_all(Rank.keep_copy, done)
    return done, notes


def _newest(
    homes: Homes, shape: ModelShape, verify: Verify, wait_s: float, stop: threading.Event, step: int
) -> Generator[Incident, None, Found]:
    """Call `Homes.newest_of`, again for up to ``wait_s`` while no home holds a checkpoint: a missing disk may
    be mounted again, but steps that a new beginning throws away are lost."""
    deadline, pause, told = time.monotonic() + wait_s, _LOOK_SECONDS, False
    while True:
        try:
            return homes.newest_of(shape, verify)
        except AwayError as error:
            left = deadline - time.monotonic()
            if not wait_s:
                raise
            what = str(error).partition("; start without")[0]
            if left <= 0:
                waited = f"waited {wait_s:g} s for it to come back (elastic.wait_s)"
                raise CheckpointError(f"{what}; {waited}; bring it back and go on with --resume") from None
            if not told:
                told = True
                yield Incident(kind="waiting", text=f"{what}; waiting for it to come back", step=step)
        if stop.wait(min(pause, left)):
            raise StoppedError
        pause = min(2 * pause, _LONGEST_LOOK_SECONDS)


def data_cursor(config: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """What fixes, together with the step, which samples come next (docs/design.md, The runtime)."""
    return {
        "fingerprint": facts["fingerprint"],
        "seed": config.train.seed,
        "global_batch": config.train.global_batch,
    }


def _verify(group: WorkerGroup, checkpoint: Path) -> None:
    """Let the ranks read a checkpoint's files, each its share; `CheckpointError` names a damaged one."""
    found: list[str | None] = group.call_all(Rank.damage, str(checkpoint))
    if damaged := sorted({text for text in found if text is not None}):
        raise CheckpointError(f"checkpoint {checkpoint}: {damaged[0]}")
