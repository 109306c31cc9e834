"""Adapts a profile to the rank that other ranks wait for, if experts have unequal numbers of rows.

Profiles hold means over ranks. On a CPU a collective's time includes the ranks' wait for the fullest rank. A
simulation would treat this wait as time of a link, which other work could hide; but the fullest rank computes
all the while.
"""

from collections.abc import Mapping
from dataclasses import replace

from braid.scheduling.cost.profile import Profile, first_piece
from braid.scheduling.mesh.partition import MOST_PIECES
from braid.scheduling.model.operators import Graph, Kind, Operator, Part


def of_fullest_rank(profile: Profile, parts: Mapping[str, Part]) -> Profile:
    """Return the profile of the rank whose experts have most rows.

    Operators on rows of experts take `Profile.expert_imbalance` times their mean. The added time is
    subtracted from the next collective in the serial order, where other ranks waited, so that the serial step
    takes as long as before; nothing is subtracted if collectives' times exclude waiting
    (`Profile.transfers_alone`).
    """
    ratio = profile.expert_imbalance
    if ratio <= 1:
        return profile
    solo = dict(profile.solo_ns)
    for part in parts.values():
        rows: set[str] = set()
        for graph in (part.forward, part.backward):
            uneven = _on_rows(graph, rows)
            added = _added(graph, uneven, profile, ratio, 0.0)
            _ = _added(graph, uneven, profile, ratio, added, into=solo)
    return replace(profile, solo_ns=solo)


def _on_rows(graph: Graph, rows: set[str]) -> set[str]:
    """Return the names of the operators that compute on rows of a rank's experts.

    ``rows``: names of the values that hold such rows; the function adds those that the operators write.
    """
    names = set[str]()
    for op in graph.operators:
        reads = any(name in rows for name in op.reads)
        if op.kind is Kind.ALL_TO_ALL:
            if op.reads[0] not in rows:
                rows.update(op.writes)
        elif reads:
            rows.update(op.writes)
            if op.axis is None:
                names.add(op.name)
    return names


def _added(
    graph: Graph,
    uneven: set[str],
    profile: Profile,
    ratio: float,
    before: float,
    into: dict[str, int] | None = None,
) -> float:
    """Walk over a pass and return the ns that the fullest rank takes longer and no collective has waited for.

    ``uneven``: operators that take ``ratio`` times as long; ``before``: the result for the previous pass;
    ``into``: solo times that are changed to those of the fullest rank, if given.
    """
    added = before
    for op in graph.operators:
        alone = profile.solo_ns.get(op.key, 0)
        if op.name in uneven:
            added += alone * (ratio - 1)
            if into is not None:
                for key in _with_pieces(op, profile):
                    into[key] = round(profile.solo_ns[key] * ratio)
        elif op.axis is not None and not profile.transfers_alone:
            waited = min(added, alone)
            added -= waited
            if into is not None and op.key in into:
                into[op.key] = round(alone - waited)
    return added


def _with_pieces(op: Operator, profile: Profile) -> list[str]:
    """Return the keys of an operator and of its measured pieces."""
    keys = [op.key, *(first_piece(op.key, ways) for ways in range(2, MOST_PIECES + 1))]
    return [key for key in keys if key in profile.solo_ns]
