"""Numbers ranks on Ray by their nodes and GPUs, and names machines and hosts."""

from collections.abc import Mapping, Sequence
from typing import Any


def machine_name(has: Mapping[str, float]) -> str:
    kinds = sorted(name for name in has if name.startswith("accelerator_type:"))
    return " ".join([f"{has.get('CPU', 0):g} CPU {has.get('GPU', 0):g} GPU", *kinds])


def numbered(nodes: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> list[int]:
    """Assign the numbers ``ranks`` to the actors that were started with them; return each number's actor.

    Actors are sorted by node and GPU, so that inner mesh axes lie inside nodes. An actor that replaces a lost
    rank on a node with other ranks takes the free number nearest to theirs. ``nodes``: the nodes of all
    ranks.
    """

    def place(rank: int) -> tuple[Any, ...]:
        node = nodes[rank]
        return node["address"], node["node"], [(len(gpu), gpu) for gpu in node["gpus"]], rank

    free, waiting = list(ranks), sorted(ranks, key=place)
    taken: dict[int, int] = {}
    for actor in list(waiting):
        beside = [
            n for n, node in enumerate(nodes) if n not in ranks and node["node"] == nodes[actor]["node"]
        ]
        if beside:
            nearest = min(free, key=lambda rank: min(abs(rank - n) for n in beside))
            taken[nearest] = actor
            free.remove(nearest)
            waiting.remove(actor)
    taken |= dict(zip(free, waiting, strict=True))
    return [taken[rank] for rank in ranks]


def host_names(addresses: Sequence[str], node_ids: Sequence[str]) -> list[str]:
    """Name every rank's host by its address; add the start of the node's id if several nodes share the
    address."""
    ids: dict[str, set[str]] = {}
    for address, node in zip(addresses, node_ids, strict=True):
        ids.setdefault(address, set()).add(node)
    return [
        address if len(ids[address]) == 1 else f"{address} ({node[:8]})"
        for address, node in zip(addresses, node_ids, strict=True)
    ]
