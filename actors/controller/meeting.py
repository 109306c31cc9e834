"""How the ranks of a group find each other, and what their places mean for a run."""

from collections.abc import Mapping

from braid.actors.controller.group import WorkerGroup
from braid.actors.stage.messages import Rendezvous
from braid.actors.stage.rank import Rank
from braid.scheduling.operators import Stream
from braid.scheduling.topology import Topology


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


def placement_notes(topology: Topology, planned: Mapping[str, Stream]) -> list[str]:
    """What to say about the places of a run's ranks.

    ``planned``: where the profile that decisions were made with says that axes lie; empty without one.
    """
    where = {Stream.INTRA: "inside nodes", Stream.INTER: "between nodes"}
    moved = [
        f"parallel.{axis} was planned {where[planned[axis]]} and lies {where[stream]}"
        for axis, stream in topology.streams().items()
        if planned.get(axis, stream) is not stream
    ]
    told = [f"{', '.join(moved)}: steps take longer or shorter than predicted"] if moved else []
    return [*topology.warnings(), *told]
