"""One profile of what all ranks measured.

Needs neither torch nor the configuration: tests of GPUs run where pydantic is not installed.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from braid.actors.stage.messages import COMPUTE, OUTSIDE, Samples, Together
from braid.scheduling.analytic import operator_class
from braid.scheduling.operators import Part, Stream
from braid.scheduling.profile import Profile, TransferFit

SHORT = 0.1
"""An operator that takes less than this share of a transfer says little about the two together."""


def combine(samples: Sequence[Samples], parts: Mapping[str, Part]) -> Profile:
    """One profile of all ranks: what operators take on average, pairs by DHelix's equation 1."""
    solo = _medians([rank.solo_ns for rank in samples])
    spares = _medians([rank.spares for rank in samples])
    spare_of = {key: name for rank in samples for key, name in rank.spare_of.items()}
    streams = streams_of(samples)
    handling = [_handling(samples, number) for number in (0, 1)]
    classes = {
        op.key: operator_class(op) if op.axis is None else streams[op.axis].value
        for part in parts.values()
        for graph in (part.forward, part.backward)
        for op in graph.operators
    }
    links = {
        name: streams[axis].value
        for name in spares
        if (axis := name.partition("/")[0]) in streams and name.endswith(OUTSIDE)
    }
    beside = {**classes, COMPUTE: "gemm", **links, **{spare: classes[key] for key, spare in spare_of.items()}}
    moves = {key for key, name in classes.items() if name in ("intra", "inter")}
    average = _with_delays(solo, [rank.solo_ns for rank in samples], moves)
    average_spares = _with_delays(spares, [rank.spares for rank in samples], spares.keys())
    return Profile(
        source=f"measured: {hardware_of([rank.hardware for rank in samples])}",
        solo_ns={key: round(ns) for key, ns in average.items()},
        classes={**classes, "optimizer": "memory", "norm": "memory"},
        oef=_oef(samples, solo, spares, spare_of, beside),
        slowdowns=_slowdowns(samples, average, average_spares, spare_of, beside),
        transfers=_transfers(samples),
        streams=streams,
        issue_ns={key: handling[0][name] for key, name in spare_of.items() if name in handling[0]},
        take_ns={key: handling[1][name] for key, name in spare_of.items() if name in handling[1]},
        norm_ns_per_parameter=max(median(rank.norm_ns_per_parameter) for rank in samples),
        optimizer_ns_per_parameter=max(median(rank.optimizer_ns_per_parameter) for rank in samples),
        copy_ns_per_byte=max(median(rank.copy_ns_per_byte) for rank in samples),
        expert_imbalance=_imbalance(samples),
        transfers_alone=any(rank.transfers_alone for rank in samples),
        spread_ns=_spreads([rank.solo_ns for rank in samples]),
    )


def _imbalance(samples: Sequence[Samples]) -> float:
    """Rows of a group's fullest rank over its average, mean over passes and groups; 0: there are none."""
    groups = {rank.experts_with for rank in samples if rank.expert_rows}
    passes = [
        rows
        for group in sorted(groups)
        for rows in zip(*(samples[r].expert_rows for r in group), strict=True)
    ]
    ratios = [max(rows) * len(rows) / sum(rows) for rows in passes if sum(rows)]
    return round(sum(ratios) / len(ratios), 3) if ratios else 0.0


def streams_of(samples: Sequence[Samples]) -> dict[str, Stream]:
    """The stream of every axis: where one rank's group goes between nodes, all do."""
    found: dict[str, Stream] = {}
    for rank in samples:
        for axis, stream in rank.streams.items():
            if found.get(axis) is not Stream.INTER:
                found[axis] = stream
    return found


def _medians(series: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, float]:
    """Per key the mean over the ranks of each one's median."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in series:
        for key, values in one.items():
            found[key].append(median(values))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _with_delays(
    typical: Mapping[str, float], series: Sequence[Mapping[str, Sequence[int]]], moves: Collection[str]
) -> dict[str, float]:
    """Average times: medians, and the share by which averages exceed them, over all operators at once.

    A step takes the sum of averages. What makes some executions longer than most comes from outside (other
    work on the machine, a partner that was held up), so compute operators and transfers (``moves``) have one
    share each: an operator's own average of a few measurements would be the noisier number.
    """
    taken: dict[bool, float] = defaultdict(float)
    usual: dict[bool, float] = defaultdict(float)
    for one in series:
        for key, values in one.items():
            taken[key in moves] += sum(values)
            usual[key in moves] += median(values) * len(values)
    shares = {kind: taken[kind] / ns for kind, ns in usual.items() if ns}
    return {key: ns * shares.get(key in moves, 1.0) for key, ns in typical.items()}


def _handling(samples: Sequence[Samples], number: int) -> dict[str, int]:
    """What starting transfers (0) or going on after them (1) takes from computing, by class."""
    series = [{name: [one[number] for one in times] for name, times in r.handling.items()} for r in samples]
    return {name: max(0, round(ns)) for name, ns in _medians(series).items()}


def _spreads(series: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, int]:
    spreads: dict[str, int] = {}
    for times in series:
        for key, values in times.items():
            if len(values) > 1:
                low, _, high = quantiles(values, n=4, method="inclusive")
                spreads[key] = max(spreads.get(key, 0), round(high - low))
    return spreads


def _oef(
    samples: Sequence[Samples],
    solo: Mapping[str, float],
    spares: Mapping[str, float],
    spare_of: Mapping[str, str],
    classes: Mapping[str, str],
) -> dict[str, float]:
    together: dict[tuple[str, str], list[Together]] = defaultdict(list)
    for rank in samples:
        for pair_of, measured in rank.together.items():
            together[pair_of] += measured
    users = _users(spare_of)
    effects: dict[str, list[_Effect]] = defaultdict(list)
    for (key, name), times in together.items():
        alone = solo[key] if key in solo else spares[key]
        other = median(one.other_ns for one in times) if name == COMPUTE else spares[name]
        if min(alone, other) > 0:
            link = classes[name]
            found = [(alone + other - one.both_ns) / min(alone, other) for one in times]
            keys = () if alone < SHORT * other or key in spares else tuple(users[name])
            effects["|".join(sorted((classes[key], link)))].append(
                _Effect(key, keys, found, min(alone, other))
            )
    oef: dict[str, float] = {}
    for kinds, measured_effects in effects.items():
        oef |= _class_effects(kinds, measured_effects)
    for kind in ("gemm", "attention", "memory"):
        # Links that were not measured together with an operator are taken to cost what the other one does.
        for link, instead in (("inter", "intra"), ("intra", "inter")):
            pair, known = "|".join(sorted((kind, link))), "|".join(sorted((kind, instead)))
            if pair not in oef and known in oef:
                oef[pair] = oef[known]
    for link in ("inter", "intra"):
        for kind in ("gemm", "attention", "memory"):
            oef.setdefault("|".join(sorted((kind, link))), 0.0)  # nothing is known to be gained
    for pair in ("inter|intra", "inter|inter", "intra|intra"):
        oef.setdefault(pair, 0.0)  # two transfers share a link: keys and values, and sums of gradients
    return oef


def _users(spare_of: Mapping[str, str]) -> dict[str, list[str]]:
    """The operators that every spare stands for, by the spare's name."""
    users: dict[str, list[str]] = defaultdict(list)
    for key, name in spare_of.items():
        users[name].append(key)
    return users


class _Effect(NamedTuple):
    """Measured overlap of an operator with a class of transfers."""

    key: str
    transfers: tuple[str, ...]
    """Those that the pair is listed with; none where it is too short to stand for itself."""
    values: Sequence[float]
    weight_ns: float


def _class_effects(kinds: str, effects: Sequence[_Effect]) -> dict[str, float]:
    """The effect of a class of pairs, and of each pair: nearer to its own median the surer that one is.

    A pair's own median counts with the share that the spread between pairs has in all spread.
    """
    common = _weighted_median([(median(one.values), one.weight_ns) for one in effects])
    between = median((median(one.values) - common) ** 2 for one in effects)
    found = {kinds: _within(common)}
    for one in effects:
        own = median(one.values)
        deviation = median(abs(value - own) for value in one.values) * 1.5
        error = deviation**2 / len(one.values) if len(one.values) > 2 else float("inf")
        trust = between / (between + error) if between > 0 else 0.0
        value = _within(common + trust * (own - common))
        found |= {"|".join(sorted((one.key, user))): value for user in one.transfers}
    return found


def _slowdowns(
    samples: Sequence[Samples],
    solo: Mapping[str, float],
    spares: Mapping[str, float],
    spare_of: Mapping[str, str],
    classes: Mapping[str, str],
) -> dict[str, float]:
    """What compute and transfers suffer from each other, apart: per class, and per transfer.

    While two run together for some time, each gets done what it would do alone in a shorter one. The share
    that is lost is summed up over all measurements of a kind, so that each counts by the time that it lasted.
    """
    users = _users(spare_of)
    losses: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for rank in samples:
        for (key, name), pairs in rank.together.items():
            if name == COMPUTE:
                continue
            alone, other = solo[key] if key in solo else spares[key], spares[name]
            kind = classes[key]
            link = classes[name]
            for one in pairs:
                lost = one.operator_ns - alone, one.other_ns - other
                losses[f"{kind}<{link}"].append((one.overlap_ns, lost[0]))
                losses[f"{link}<{kind}"].append((one.overlap_ns, lost[1]))
                for user in users[name]:
                    losses[f"{user}<{kind}"].append((one.overlap_ns, lost[1]))
                for user in users[key]:
                    losses[f"{user}<{link}"].append((one.overlap_ns, lost[0]))
    measured = {name: [one for one in values if one[0] > 0] for name, values in losses.items()}
    return {name: _slowdown(values) for name, values in measured.items() if values}


def _slowdown(losses: Sequence[tuple[float, float]]) -> float:
    """From times together and what was lost in them.

    The tenths with the largest and the smallest shares are left out: something else took the processor.
    """
    ranked = sorted(losses, key=lambda one: one[1] / one[0])
    cut = len(ranked) // 10
    kept = ranked[cut : len(ranked) - cut]
    share = sum(lost for _, lost in kept) / sum(together for together, _ in kept)
    share = max(0.0, min(_MOST_LOST, share))
    return share / (1 - share)


_MOST_LOST = 0.8


def _within(effect: float) -> float:
    """From slower by as much as the shorter one takes to hidden altogether."""
    return max(-1.0, min(1.0, effect))


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def _transfers(samples: Sequence[Samples]) -> dict[str, TransferFit]:
    """Latency and rate through the medians of a small and a large payload."""
    fits = {}
    measured: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in samples:
        for key, values in rank.transfers.items():
            for size, ns in values:
                if ns:
                    measured[key][size].append(ns)
    for key, sizes in measured.items():
        points = sorted((size, median(times)) for size, times in sizes.items())
        (small, small_ns), (large, large_ns) = points[0], points[-1]
        slope = max(0.0, (large_ns - small_ns) / (large - small)) if large > small else 0.0
        fits[key] = TransferFit(latency_ns=max(0.0, small_ns - slope * small), ns_per_byte=slope)
    return fits


def hardware_of(kinds: Sequence[str]) -> str:
    """The ranks' hardware in one line."""
    return f"{len(kinds)} x {' / '.join(sorted(set(kinds)))}"
