"""From what ranks measured to a `Profile`; profiles that were measured before are used again."""

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles

import braid
from braid.actors.config import Config
from braid.actors.controller.group import Launcher, WorkerGroup
from braid.actors.stage.messages import COMPUTE, Rendezvous, RunPlan, Samples, Together
from braid.scheduling.analytic import operator_class
from braid.scheduling.operators import Part, Stream
from braid.scheduling.profile import Profile, TransferFit, operator_key
from braid.scheduling.spec import ModelShape

ROUNDS = 9
SHORT = 0.1
"""An operator that takes less than this share of a transfer says little about the two together."""


def measure(plan: RunPlan, launcher: Launcher, parts: Mapping[str, Part], rounds: int = ROUNDS) -> Profile:
    """Start the ranks of a run, let them measure, end them. ``plan`` holds any schedule of the layout."""
    group = launcher.start(plan.config.layout().ranks)
    try:
        port = group.call(0, "open_store", plan.config.cluster.group_timeout_s)
        meeting = Rendezvous(address=group.addresses[0], port=port, generation=1)
        group.call_all("setup", plan, meeting)
        return measured_profile(group, parts, rounds, plan.config.train.seed)
    finally:
        group.shutdown()


def measured_profile(
    group: WorkerGroup, parts: Mapping[str, Part], rounds: int = ROUNDS, seed: int = 0
) -> Profile:
    """What a group of ranks that are set up measure; their parameters are of no use afterwards."""
    return combine(group.call_all("profile", rounds, seed), parts)


def combine(samples: Sequence[Samples], parts: Mapping[str, Part]) -> Profile:
    """One profile of all ranks: medians of their medians, pairs by DHelix's equation 1."""
    solo = _medians([rank.solo_ns for rank in samples])
    spares = _medians([rank.spares for rank in samples])
    spare_of = {key: name for rank in samples for key, name in rank.spare_of.items()}
    for key, name in spare_of.items():
        solo[key] = min(solo[key], spares[name]) if name in spares else solo[key]
    classes = {
        operator_key(part.name, op): operator_class(op)
        for part in parts.values()
        for graph in (part.forward, part.backward)
        for op in graph.operators
    }
    return Profile(
        source=f"measured: {_hardware(samples)}",
        solo_ns={key: round(ns) for key, ns in solo.items()},
        classes={**classes, "optimizer": "memory"},
        oef=_oef(samples, solo, spares, spare_of, classes),
        transfers=_transfers(samples),
        optimizer_ns_per_parameter=max(median(rank.optimizer_ns_per_parameter) for rank in samples),
        spread_ns=_spreads([rank.solo_ns for rank in samples]),
    )


def _medians(series: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, float]:
    """Per key the mean over the ranks of each one's median."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in series:
        for key, values in one.items():
            found[key].append(median(values))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _spreads(series: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, int]:
    spreads: dict[str, int] = {}
    for one in series:
        for key, values in one.items():
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
    oef: dict[str, float] = {}
    by_class: dict[str, list[tuple[float, float]]] = defaultdict(list)
    users = defaultdict(list)
    for key, name in spare_of.items():
        users[name].append(key)
    for (key, name), times in together.items():
        alone = solo[key] if key in solo else spares[key]
        other = median(one.other_ns for one in times) if name == COMPUTE else spares[name]
        shorter = min(alone, other)
        if not shorter:
            continue
        effect = (alone + other - median(one.both_ns for one in times)) / shorter
        effect = max(-1.0, min(1.0, effect))
        link = "gemm" if name == COMPUTE else classes[users[name][0]]
        by_class["|".join(sorted((classes[key], link)))].append((effect, shorter))
        if name != COMPUTE and alone >= SHORT * other:
            oef |= {"|".join(sorted((key, user))): effect for user in users[name]}
    for kinds, effects in by_class.items():
        weight = sum(share for _, share in effects)
        oef[kinds] = sum(effect * share for effect, share in effects) / weight
    for kind in ("gemm", "attention", "memory"):
        # Links that were not measured together with an operator are taken to cost what the other one does.
        for link, instead in (("inter", "intra"), ("intra", "inter")):
            pair, known = "|".join(sorted((kind, link))), "|".join(sorted((kind, instead)))
            if pair not in oef and known in oef:
                oef[pair] = oef[known]
    oef.setdefault("inter|intra", 0.0)
    return oef


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
        fits[key] = TransferFit(
            latency_ns=max(0.0, small_ns - slope * small),
            ns_per_byte=slope,
            stream=Stream.INTRA if key.startswith("tp/") else Stream.INTER,
        )
    return fits


def _hardware(samples: Sequence[Samples]) -> str:
    kinds = sorted({rank.hardware for rank in samples})
    return f"{len(samples)} x {' / '.join(kinds)}"


# -- used again --------------------------------------------------------------------------------------------


def profile_key(config: Config, shape: ModelShape, hardware: str) -> str:
    """What a profile is good for: hardware, shapes, layout, versions; equal keys, equal costs."""
    from importlib.metadata import version

    layout = config.layout()
    content = {
        "hardware": hardware,
        "machine": platform.machine(),
        "torch": version("torch"),
        "braid": braid.__version__,
        "shape": asdict(shape),
        "degrees": {axis: layout.degree(axis) for axis in ("dp", "pp", "cp", "tp")},
        "micro_batch": config.train.micro_batch,
        "dtype": config.train.dtype,
        "recompute": config.train.recompute,
        "layer": config.model.layer,
        "threads": config.cluster.threads_per_rank,
        "backend": config.cluster.backend,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
