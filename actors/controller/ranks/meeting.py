"""How the ranks of a group find each other."""

from braid.actors.controller.ranks.group import WorkerGroup
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import Rendezvous


def rendezvous(
    group: WorkerGroup, timeout_s: float, generation: int = 1, copies_shift: int = 0
) -> Rendezvous:
    """Open a store on the first rank, where all of them meet."""
    port = group.call(0, Rank.open_store, timeout_s)
    return Rendezvous(
        address=group.addresses[0],
        port=port,
        generation=generation,
        hosts=tuple(group.hosts),
        copies_shift=copies_shift,
    )
