"""Combines the measurements of all ranks into one profile.

It needs neither torch nor the configuration: tests of GPUs run where pydantic is not installed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

from braid.actors.stage.rank.messages import OUTSIDE, Samples, Together
from braid.scheduling.cost.analytic import operator_class
from braid.scheduling.cost.profile import Profile, TransferFit
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import Factor
from braid.scheduling.model.operators import Part

SHORT = 0.1
"""Share of a transfer's time below which an operator is too short to measure the overlap of the two."""
_MOST_LOST = 0.8

_T = TypeVar("_T")


def combine(samples: Sequence[Samples], parts: Mapping[str, Part]) -> Profile:
    """Combine all ranks' samples into one profile: mean times of operators, and pairs by DHelix's equation
    1."""
    solo, spares = _by_key(rank.solo_ns for rank in samples), _by_key(rank.spares for rank in samples)
    typical = {key: _typical(runs) for key, runs in (spares | solo).items()}
    spare_of = {key: name for rank in samples for key, name in rank.spare_of.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for key, name in spare_of.items():
        users[name].append(key)
    streams: dict[str, Stream] = {}
    for axis, stream in (item for rank in samples for item in rank.streams.items()):
        if streams.get(axis) is not Stream.INTER:  # if one rank's group spans nodes, the axis does
            streams[axis] = stream
    handling = {
        name: [max(0, round(_typical([[pair[n] for pair in run] for run in runs]))) for n in (0, 1)]
        for name, runs in _by_key(rank.handling for rank in samples).items()
    }
    classes = {
        op.key: operator_class(op) if op.axis is None else streams[op.axis].value
        for part in parts.values()
        for graph in (part.forward, part.backward)
        for op in graph.operators
    }
    links = {
        name: stream.value
        for axis, stream in streams.items()
        for ending in OUTSIDE
        if (name := f"{axis}{ending}") in spares
    }
    beside = {**classes, **links, **{spare: classes[key] for key, spare in spare_of.items()}}
    moves = {key for key, name in classes.items() if name in ("intra", "inter")}
    average = _with_delays(solo, moves)
    together: dict[tuple[str, str], list[Together]] = defaultdict(list)
    for pair, measured in (item for rank in samples for item in rank.together.items()):
        together[pair] += measured
    return Profile(
        source=f"measured: {hardware_of([rank.hardware for rank in samples])}",
        solo_ns={key: round(ns) for key, ns in average.items()},
        classes={**classes, "optimizer": "memory", "norm": "memory"},
        oef=_oef(together, typical, spares.keys(), users, beside),
        slowdowns=_slowdowns(together, _with_delays(spares, spares.keys()) | average, users, beside),
        transfers=_transfers(samples),
        streams=streams,
        meshes={axis.axis: axis.mesh for axis in streams if isinstance(axis, Factor)},
        issue_ns={key: handling[name][0] for key, name in spare_of.items() if name in handling},
        take_ns={key: handling[name][1] for key, name in spare_of.items() if name in handling},
        norm_ns_per_parameter=max(median(rank.norm_ns_per_parameter) for rank in samples),
        optimizer_ns_per_parameter=max(median(rank.optimizer_ns_per_parameter) for rank in samples),
        copy_ns_per_byte=max(median(rank.copy_ns_per_byte) for rank in samples),
        expert_imbalance=_imbalance(samples),
        transfers_alone=any(rank.transfers_alone for rank in samples),
        spread_ns={key: max(map(_spread, runs)) for key, runs in solo.items() if max(map(len, runs)) > 1},
    )


def _by_key(ranks: Iterable[Mapping[str, Sequence[_T]]]) -> dict[str, list[Sequence[_T]]]:
    """Collect what every rank measured, by key."""
    runs: dict[str, list[Sequence[_T]]] = defaultdict(list)
    for measured in ranks:
        for key, values in measured.items():
            runs[key].append(values)
    return runs


def _typical(runs: Collection[Sequence[int]]) -> float:
    """Return the mean over the ranks of each rank's median."""
    return sum(median(values) for values in runs) / len(runs)


def _spread(values: Sequence[int]) -> int:
    """Return the interquartile range; 0 for fewer than two values."""
    if len(values) < 2:
        return 0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return round(high - low)


def _imbalance(samples: Sequence[Samples]) -> float:
    """Return the ratio of a group's fullest rank to its average in expert rows, as mean over passes and
    groups; 0 if there are no experts."""
    groups = {rank.experts_with for rank in samples if rank.expert_rows}
    passes = [
        rows
        for group in sorted(groups)
        for rows in zip(*(samples[r].expert_rows for r in group), strict=True)
    ]
    ratios = [max(rows) * len(rows) / sum(rows) for rows in passes if sum(rows)]
    return round(sum(ratios) / len(ratios), 3) if ratios else 0.0


def _with_delays(times: Mapping[str, Sequence[Sequence[int]]], moves: Collection[str]) -> dict[str, float]:
    """Return average times: medians, scaled by the share by which averages exceed medians over all operators.

    A step takes the sum of averages. Executions that take longer than most are delayed from outside (other
    work on the machine, a late partner), so compute operators and transfers (``moves``) have one share each:
    an operator's own average of a few measurements would be noisier.
    """
    taken: dict[bool, float] = defaultdict(float)
    usual: dict[bool, float] = defaultdict(float)
    for key, values in ((key, values) for key, runs in times.items() for values in runs):
        taken[key in moves] += sum(values)
        usual[key in moves] += median(values) * len(values)
    shares = {kind: taken[kind] / ns for kind, ns in usual.items() if ns}
    return {key: _typical(runs) * shares.get(key in moves, 1.0) for key, runs in times.items()}


def _pair(first: str, second: str) -> str:
    return "|".join(sorted((first, second)))


def _oef(
    together: Mapping[tuple[str, str], Sequence[Together]],
    alone: Mapping[str, float],
    spares: Collection[str],
    users: Mapping[str, Sequence[str]],
    classes: Mapping[str, str],
) -> dict[str, float]:
    """Return overlap effects by pair. ``users``: by the name of each spare transfer, the operators that it
    stands for."""
    effects: dict[str, list[_Effect]] = defaultdict(list)
    for (key, name), times in together.items():
        operator, other = alone[key], alone[name]
        if (shorter := min(operator, other)) > 0:
            values = [(operator + other - time.both_ns) / shorter for time in times]
            listed = () if operator < SHORT * other or key in spares else tuple(users.get(name, ()))
            effects[_pair(classes[key], classes[name])].append(_Effect(key, listed, values, shorter))
    oef: dict[str, float] = {}
    for kinds, measured_effects in effects.items():
        oef |= _class_effects(kinds, measured_effects)
    for kind in ("gemm", "attention", "memory"):
        # A link that was not measured beside an operator is assumed to have the other link's effect; if
        # neither was measured, no gain is assumed.
        for link, instead in (("inter", "intra"), ("intra", "inter")):
            oef.setdefault(_pair(kind, link), oef.get(_pair(kind, instead), 0.0))
    for pair in ("inter|intra", "inter|inter", "intra|intra"):
        oef.setdefault(pair, 0.0)  # two transfers share a link: keys and values, and sums of gradients
    return oef


class _Effect(NamedTuple):
    """Measured overlap effects of an operator with a class of transfers."""

    key: str
    transfers: tuple[str, ...]
    """Transfers for which the pair is listed; empty if the operator is too short to be listed itself."""
    values: Sequence[float]
    weight_ns: float


def _class_effects(kinds: str, effects: Sequence[_Effect]) -> dict[str, float]:
    """Return the effect of a class of pairs, and of each pair: a weighted mean of its own and the class's
    median.

    A pair's own median has the weight of the spread between pairs relative to the total spread.
    """
    medians = [median(effect.values) for effect in effects]
    common = _weighted_median(list(zip(medians, (effect.weight_ns for effect in effects), strict=True)))
    between = median((value - common) ** 2 for value in medians)
    by_pair = {kinds: _within(common)}
    for effect, middle in zip(effects, medians, strict=True):
        count = len(effect.values)
        deviation = median(abs(value - middle) for value in effect.values) * 1.5
        error = deviation**2 / count if count > 2 else float("inf")
        trust = between / (between + error) if between > 0 else 0.0
        value = _within(common + trust * (middle - common))
        by_pair |= {_pair(effect.key, user): value for user in effect.transfers}
    return by_pair


def _slowdowns(
    together: Mapping[tuple[str, str], Sequence[Together]],
    alone: Mapping[str, float],
    users: Mapping[str, Sequence[str]],
    classes: Mapping[str, str],
) -> dict[str, float]:
    """Return how much compute and transfers slow each other down, separately: per class, and per transfer.

    While two operations run together, each completes the work of a shorter time alone. The lost share is
    summed over all measurements of a kind, so that each measurement counts by its duration.
    """
    losses: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (key, name), times in together.items():
        for time in times:
            if time.overlap_ns > 0:
                for slowed, beside, took in ((key, name, time.operator_ns), (name, key, time.other_ns)):
                    for sufferer in (classes[slowed], *users.get(slowed, ())):
                        lost = time.overlap_ns, took - alone[slowed]
                        losses[f"{sufferer}<{classes[beside]}"].append(lost)
    return {name: _slowdown(values) for name, values in losses.items()}


def _slowdown(losses: Sequence[tuple[float, float]]) -> float:
    """Compute a slowdown from pairs of time together and time lost in it.

    The tenths with the smallest and largest shares are left out: there, other work took the processor.
    """
    ranked = sorted(losses, key=lambda loss: loss[1] / loss[0])
    cut = len(ranked) // 10
    kept = ranked[cut : len(ranked) - cut]
    share = sum(lost for _, lost in kept) / sum(together for together, _ in kept)
    share = max(0.0, min(_MOST_LOST, share))
    return share / (1 - share)


def _within(effect: float) -> float:
    """Clip an effect to [-1, 1]: from slower by the shorter operator's whole time to completely hidden."""
    return max(-1.0, min(1.0, effect))


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def _transfers(samples: Sequence[Samples]) -> dict[str, TransferFit]:
    """Fit latency and rate to the medians of a small and a large payload."""
    fits = {}
    for key, runs in _by_key(rank.transfers for rank in samples).items():
        sizes: dict[int, list[int]] = defaultdict(list)
        for size, ns in (pair for run in runs for pair in run):
            if ns:
                sizes[size].append(ns)
        if not sizes:
            continue
        points = sorted((size, median(times)) for size, times in sizes.items())
        (small, small_ns), (large, large_ns) = points[0], points[-1]
        slope = max(0.0, (large_ns - small_ns) / (large - small)) if large > small else 0.0
        fits[key] = TransferFit(latency_ns=max(0.0, small_ns - slope * small), ns_per_byte=slope)
    return fits


def hardware_of(kinds: Sequence[str]) -> str:
    return f"{len(kinds)} x {' / '.join(sorted(set(kinds)))}"
