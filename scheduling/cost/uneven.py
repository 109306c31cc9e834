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
            uneven, late = _on_rows(graph, rows), 0.0
            # Time for which no collective has waited carries over to the next pass, which is the same again.
            for op in graph.operators * 2:
                alone = profile.solo_ns.get(op.key, 0)
                if op.name in uneven:
                    late += alone * (ratio - 1)
                    solo |= {key: round(profile.solo_ns[key] * ratio) for key in _with_pieces(op, profile)}
                elif op.axis is not None and not profile.transfers_alone:
                    waited = min(late, alone)
                    late -= waited
                    if op.key in solo:
                        solo[op.key] = round(alone - waited)
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


def _with_pieces(op: Operator, profile: Profile) -> list[str]:
    """Return the keys of an operator and of its measured pieces."""
    keys = [op.key, *(first_piece(op.key, ways) for ways in range(2, MOST_PIECES + 1))]
    return [key for key in keys if key in profile.solo_ns]
