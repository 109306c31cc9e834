"""Every kind of peer, and what trains it."""

from collections.abc import Mapping

from braid.jobs.benchmarks.context_peers import CP, ContextPeer
from braid.jobs.benchmarks.expert_peers import EP, ExpertPeer
from braid.jobs.benchmarks.peers import Peer, PeerSettings
from braid.jobs.benchmarks.replicated_peers import REPLICATED

SPECIAL: Mapping[str, type[Peer]] = {**REPLICATED, EP: ExpertPeer, CP: ContextPeer}
"""Kinds that `Peer` itself does not train."""


def peer_of(settings: PeerSettings, rank: int, world_size: int) -> Peer:
    """One rank of a peer of any kind; raises as `Peer` does."""
    return SPECIAL.get(settings.kind, Peer)(settings, rank, world_size)
