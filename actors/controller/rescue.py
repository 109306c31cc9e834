"""The end of a run, or of its layout, without a save: what ranks hold in memory becomes a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.group import WorkerError, WorkerGroup
from braid.actors.controller.records import Incident, RunDirectory, Saved
from braid.actors.controller.recovery import newest_common
from braid.actors.controller.saving import Saver
from braid.actors.stage.messages import CopiesHeld, Rendezvous, Rescue, Written
from braid.actors.stage.rank import Rank

_NOTHING = CopiesHeld(own=(), partner=None, partners=())


def rescue(
    group: WorkerGroup,
    config: Config,
    saver: Saver,
    directory: RunDirectory,
    generation: int,
    done: int,
    facts: Mapping[str, Any],
) -> Iterator[Saved | Incident]:
    """Let survivors write the newest state that they hold of all ranks, unless a checkpoint is as new.

    The run, in another layout or resumed by its user, then goes on from this state. If writing fails, it goes
    on from the newest checkpoint. ``done``: the number of recorded steps. ``facts``: what a manifest says
    beside files. Ranks that hold no state, such as ranks that have just been replaced, are not asked.
    """
    layout, left = config.layout(), group.left()
    try:
        held = dict(zip(left, group.call_some(left, Rank.copies_held), strict=True))
        common = newest_common([held.get(rank, _NOTHING) for rank in range(layout.ranks)], layout.mesh, done)
        if common is None or common[0] <= (saver.last_step or 0):
            return
        step, sources = common
        holders = sorted(set(sources))

        def write(folder: str) -> list[Written]:
            group.call_some(holders, Rank.leave)
            port = group.call(holders[0], Rank.open_store, config.cluster.group_timeout_s)
            meeting = Rendezvous(address=group.addresses[holders[0]], port=port, generation=generation)
            plan = Rescue(meeting=meeting, survivors=tuple(holders), step=step, sources=tuple(sources))
            return group.call_some(holders, Rank.rescue, folder, plan)

        yield from saver.rescue(step, generation, facts, write)
        kind, text = "rescued", f"{_names(holders)} held the states of all ranks after step {step} in memory"
    except (WorkerError, ValueError, OSError) as error:
        kind, text = "failed", f"copies in memory could not be written as a checkpoint: {error}"
    directory.note(kind, done, generation, text)
    yield Incident(kind=kind, text=text, step=done)


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
