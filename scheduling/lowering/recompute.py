"""Recomputation as a policy on a part's graphs: which forward values are computed again, not kept."""

from dataclasses import replace
from typing import Final

from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass, Precision

RECOMPUTE_POLICIES: Final = ("none", "selective", "full", "fine")


def with_recompute(part: Part, policy: str) -> Part:
    """Drop forward values after the forward pass and compute them again at the head of the backward pass.

    ``none`` keeps all; ``selective`` recomputes what norms and activations write; ``fine`` keeps what
    collectives write, so that none is repeated (Oases section III-B); ``full`` keeps only the part's inputs.
    A part that runs its backward pass at once (the head) keeps nothing and is left as it is.
    """
    if policy not in RECOMPUTE_POLICIES:
        known = ", ".join(RECOMPUTE_POLICIES)
        raise ValueError(f"train.recompute={policy!r} is not a recompute policy; use one of {known}")
    if policy == "none" or not part.backward.operators:
        return part
    producers = {name: op for op in part.forward.operators for name in op.writes}

    def dropped(name: str) -> bool:
        return name in producers and not _keeps(policy, producers[name], part.values[name].precision)

    pending = [name for op in part.backward.operators for name in op.reads if dropped(name)]
    repeated: set[str] = set()
    while pending:
        op = producers[pending.pop()]
        if op.name not in repeated:
            repeated.add(op.name)
            pending += [name for name in op.reads if dropped(name)]
    again = tuple(
        replace(op, name=f"{op.name}.again", own_name=f"{op.name}.again", phase=Pass.RECOMPUTE)
        for op in part.forward.operators
        if op.name in repeated
    )
    return replace(part, backward=Graph(operators=again + part.backward.operators))


def _keeps(policy: str, producer: Operator, precision: Precision) -> bool:
    if policy == "full":
        return False
    if precision is Precision.STATISTIC:
        return True
    if policy == "fine":
        return producer.kind.communicates
    return producer.kind not in (Kind.NORM, Kind.ACTIVATION)
