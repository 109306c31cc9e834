"""Recomputation policies: which forward values the backward pass computes again instead of keeping them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Precision
from braid.scheduling.text.pattern import Variant, base_kind, own_degree

RECOMPUTE_POLICIES: Final = ("none", "selective", "full", "fine")


def _known(policy: str) -> str:
    if policy not in RECOMPUTE_POLICIES:
        choices = ", ".join(RECOMPUTE_POLICIES)
        raise ValueError(f"train.recompute={policy!r} is not a recompute policy; use one of {choices}")
    return policy


@lru_cache
def policies_of(recompute: str, layers: int) -> tuple[str, ...]:
    """Return the recompute policy of every layer.

    ``recompute``: one policy for all layers, or words POLICY and NUMBER*POLICY for all layers in order.
    Raises `ValueError` for other words or another number of layers.
    """
    if recompute in RECOMPUTE_POLICIES:
        return (recompute,) * layers
    policies: list[str] = []
    for word in recompute.split() or [recompute]:
        times, _, policy = word.rpartition("*")
        policies += [_known(policy)] * (int(times) if times.isdigit() else 1)
    if len(policies) != layers:
        raise ValueError(
            f"train.recompute={recompute!r} has {len(policies)} policies, and model.layers={layers}; give "
            f"one for every layer, or one word for all"
        )
    return tuple(policies)


def with_policies(kinds: Sequence[str], recompute: str) -> tuple[str, ...]:
    """Return the kind of every layer; if recompute policies differ, layers with a policy other than ``none``
    get a `Variant` of their kind."""
    if recompute in RECOMPUTE_POLICIES:
        return tuple(kinds)
    policies = policies_of(recompute, len(kinds))
    if len(set(policies)) == 1:
        return tuple(kinds)
    return tuple(
        kind if policy == "none" else Variant(base_kind(kind), own_degree(kind), policy)
        for kind, policy in zip(kinds, policies, strict=True)
    )


def policy_of_all(recompute: str, layers: int) -> str:
    """Return the recompute policy of parts without their own: that of all layers, or ``none`` if layers
    differ."""
    policies = set(policies_of(recompute, layers))
    return policies.pop() if len(policies) == 1 else "none"


def with_recompute(part: Part, policy: str) -> Part:
    """Return the part with the operators of dropped values repeated at the start of its backward graph.

    ``none`` keeps all values; ``selective`` recomputes the outputs of norms and activations; ``fine`` keeps
    the outputs of collectives, so that none is repeated (Oases section III-B); ``full`` keeps only the part's
    inputs. A part that runs its backward pass at once (the head) keeps nothing and is returned unchanged.
    """
    if _known(policy) == "none" or not part.backward.operators:
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
        replace(op, name=f"{op.name}.again", own_name=f"{op.name}.again", phase=Phase.RECOMPUTE)
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
