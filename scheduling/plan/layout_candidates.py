"""Enumerates the layouts that a cluster allows, and estimates their step times and memory by formulas."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from braid.scheduling.cost.analytic import axis_groups
from braid.scheduling.cost.collectives import collective_ns
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.fit import check_fit
from braid.scheduling.model.operators import Graph, Kind, Part
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.units import chunk_parameters, members_of
from braid.scheduling.plan.decide import modelled
from braid.scheduling.schedule.memory import DTYPE_BYTES, sent_width, state_bytes
from braid.scheduling.schedule.states import ADAMW, OptimizerStates

MICRO_BATCHES = (1, 2, 4, 8)
"""Samples per micro-batch that the search tries."""

MOST_STAGES = 64

OURS = ScheduleName("braid")
"""Schedule under which layouts are compared if the user names none."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search for layouts is given: the job, and settings that the user fixed (None: searched)."""

    model: ModelShape
    global_batch: int
    dtype: str = "bf16"
    reduce_dtype: str | None = None
    states: OptimizerStates = ADAMW
    micro_batch: int | None = None
    recompute: str | None = None
    schedule: ScheduleName | None = None
    """None: layouts are ranked under the schedule ``braid``; the best one also runs the usual schedules."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Parallel degrees that the user fixed, by axis name (``tp``, ``pp``, ...)."""
    zero: int | None = None
    context: str = "all_gather"


@dataclass(frozen=True)
class Candidate:
    """A setting with its estimated step time in ns and its estimated memory per rank in bytes."""

    setting: Setting
    step_ns: float
    bytes: int


def candidates(search: Search, cluster: ClusterSpec) -> Iterator[Candidate]:
    """Yield, with estimates, every setting whose degrees divide the model, the batch and the cluster's GPUs.

    A layout's shardings (ZeRO stage, shards) are yielded, least communication first, up to the first that
    fits.
    """
    priced: dict[tuple[int, int, int, int, str], _LayerPrice] = {}
    for setting in _settings(search, cluster):
        layout = setting.layout
        key = (layout.tp, layout.cp, layout.ep, setting.workload.micro_batch, setting.recompute)
        if key not in priced:
            priced[key] = _price(setting, cluster)
        balanced = _balanced(setting, priced[key])
        for zero, shards in _shardings(search.zero, cluster, layout):
            sharded = replace(setting, layout=replace(balanced, zero=zero, shards=shards))
            candidate = _estimate(sharded, cluster, priced[key])
            yield candidate
            if candidate.bytes <= cluster.usable_bytes:
                break  # higher ZeRO stages communicate more


def _settings(search: Search, cluster: ClusterSpec) -> Iterator[Setting]:
    """Yield every combination of parallel degrees, micro-batch and recompute policy that the GPUs, the model
    and the batch allow."""
    named, model = search.schedule or OURS, search.model
    batches = [search.micro_batch] if search.micro_batch else MICRO_BATCHES
    recomputes = [search.recompute] if search.recompute else RECOMPUTE_POLICIES
    degrees = product(
        _powers(min(2 * cluster.gpus_per_node, cluster.gpus)),
        _powers(max(1, model.sequence // 4096)),
        range(1, min(cluster.gpus, model.layers, MOST_STAGES) + 1),
        _powers(min(cluster.gpus, max(1, model.experts))),
    )
    for tp, cp, pp, ep in degrees:
        if cluster.gpus % (tp * cp * pp * ep):
            continue
        dp = cluster.gpus // (tp * cp * pp)
        layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, placement=named.placement_on(pp))
        if any(layout.degree(axis) != degree for axis, degree in search.fixed.items()):
            continue
        for micro_batch in batches:
            workload = Workload(global_batch=search.global_batch, micro_batch=micro_batch)
            try:
                check_fit(model, layout, workload)
            except ValueError:
                continue
            if workload.micro_batches(layout) < pp:
                continue
            for recompute in recomputes:
                yield Setting(
                    model=model,
                    layout=layout,
                    workload=workload,
                    **named._asdict(),
                    dtype=search.dtype,
                    reduce_dtype=search.reduce_dtype,
                    states=search.states,
                    recompute=recompute,
                    context=search.context,
                )


def _shardings(zero: int | None, cluster: ClusterSpec, layout: ParallelLayout) -> list[tuple[int, int]]:
    """Return the pairs (ZeRO stage, ranks that share a bucket; 0: all) to try, least communication first.

    ``zero``: the user's ZeRO stage, None to try 1 to 3; sharding optimizer states (stage 1) costs nothing.
    Stages 2 and 3 repeat transfers for every micro-batch, so they are also tried with the shards inside a
    node if it has several replicas (hybrid sharding).
    """
    if layout.data_ranks == 1:
        return [(0, 0)]
    stages = (1, 2, 3) if zero is None else (zero,)
    inside = cluster.gpus_per_node // (layout.tp * layout.cp)
    hybrid = [inside] if 1 < inside < layout.dp and layout.dp % inside == 0 and layout.ep == 1 else []
    return [
        *((stage, 0) for stage in stages if stage < 2),
        *((stage, shards) for shards in (*hybrid, 0) for stage in stages if stage > 1),
    ]


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length())]


@dataclass(frozen=True)
class _LayerPrice:
    """Times and bytes of an average layer, and of embedding and head, on a rank for one micro-batch."""

    parts: Mapping[str, Part]
    forward_ns: float
    backward_ns: float
    pair_ns: float
    ends_ns: float
    saved_bytes: int
    ends_saved_bytes: int
    working_bytes: int


def _price(setting: Setting, cluster: ClusterSpec) -> _LayerPrice:
    """Compute a layer's serial times, and estimate the time of its forward and backward pass overlapped."""
    bench, width = modelled(cluster)(setting), DTYPE_BYTES[setting.dtype]
    parts, profile = bench.members, bench.profile
    kinds, head, ends = setting.kinds, parts["head"], (parts["embedding"], parts["head"])
    shares = [(parts[kind], count / len(kinds)) for kind, count in Counter(kinds).items()]

    def ns(graph: Graph) -> float:
        return sum(profile.solo(op.key) for op in graph.operators)

    # Bytes that each operator of the head's forward pass reads and writes.
    touched = (
        sum(head.values[name].bytes(width) for name in {*op.reads, *op.writes})
        for op in head.forward.operators
    )
    return _LayerPrice(
        parts=parts,
        forward_ns=sum(share * ns(part.forward) for part, share in shares),
        backward_ns=sum(share * ns(part.backward) for part, share in shares),
        pair_ns=sum(share * _paired_ns(part, profile) for part, share in shares),
        ends_ns=sum(ns(part.forward) + ns(part.backward) for part in ends),
        saved_bytes=round(sum(share * part.saved_bytes(width) for part, share in shares)),
        ends_saved_bytes=sum(part.saved_bytes(width) for part in ends),
        working_bytes=max(touched) + 2 * head.values["x"].bytes(width),
    )


def _paired_ns(layer: Part, profile: Profile) -> float:
    """Estimate the ns of a layer's forward pass overlapped with its backward pass: the busiest stream's time
    plus 0.3 of the way to the serial time."""
    loads: dict[str, float] = {}
    for op in (*layer.forward.operators, *layer.backward.operators):
        loads[op.stream] = loads.get(op.stream, 0.0) + profile.solo(op.key)
    busiest = max(loads.values())
    return busiest + 0.3 * (sum(loads.values()) - busiest)


def _balanced(setting: Setting, layer: _LayerPrice) -> ParallelLayout:
    """Return the layout with ``head_layers`` as large as the number of layers whose time equals that of
    embedding and head, or the nearest smaller number with which the layers divide among the stages."""
    counts = round(layer.ends_ns / (layer.forward_ns + layer.backward_ns))
    for head_layers in range(counts, 0, -1):
        balanced = replace(setting.layout, head_layers=head_layers)
        with suppress(ValueError):
            balanced.layers_of(0, setting.model.layers)
            return balanced
    return setting.layout


def _estimate(setting: Setting, cluster: ClusterSpec, layer: _LayerPrice) -> Candidate:
    m, p, layout = setting.micro_batches, setting.layout.pp, setting.layout
    layers = math.ceil(setting.model.layers / p)
    serial = layer.forward_ns + layer.backward_ns
    pairs = setting.pairs is not None
    steady = max(0, m - p) * (layer.pair_ns if pairs else serial) + min(m, p) * serial
    # The ends of the model lengthen their stages, for which all other stages wait.
    step = layers * (steady + (p - 1) * serial) + m * layer.ends_ns
    kinds, chunks = setting.kinds, layout.chunks_of(0)
    parameters = sum((chunk_parameters(layer.parts, layout, kinds, chunk) for chunk in chunks), Parameters())
    step += _sharing_ns(setting, cluster, parameters, step)
    width = DTYPE_BYTES[setting.dtype]
    states = sum(state_bytes(parameters.total, width, layout.share_ranks, layout.zero, setting.states))
    frozen = sum(
        part.frozen_parameters.total for c in chunks for part in members_of(layer.parts, layout, kinds, c)
    )
    states += frozen * width // (layout.share_ranks if layout.zero > 2 else 1)
    if layout.zero > 1:  # buckets of two layers that are whole for a while
        rounded = sent_width(setting.dtype, setting.reduce_dtype) if setting.reduce_dtype else 0
        states += parameters.total // layers * 2 * (4 + rounded + width * (layout.zero > 2))
    alive = min(m, p) * layers * layer.saved_bytes + layer.ends_saved_bytes
    if pairs:
        alive += round(1.6 * layer.saved_bytes)  # two layers under way; the simulation counts exactly
    return Candidate(setting, step, states + alive + layer.working_bytes)


def _sharing_ns(setting: Setting, cluster: ClusterSpec, parameters: Parameters, compute_ns: float) -> float:
    """Return the ns that gradient sums and parameter gathers add to a step with ``compute_ns`` of compute.

    ``parameters``: a rank's parameters. ZeRO 2 and 3 repeat transfers for every micro-batch; of the time
    that compute could hide, a quarter is assumed to stay exposed.
    """
    layout, micro_batches = setting.layout, setting.micro_batches
    groups = axis_groups(layout, cluster.gpus_per_node)
    sent_bytes = sent_width(setting.dtype, setting.reduce_dtype)

    def along(kind: Kind, element_bytes: int) -> float:
        dense = collective_ns(cluster, kind, parameters.dense * element_bytes, groups["dp"])
        return dense + collective_ns(cluster, kind, parameters.experts * element_bytes, groups["edp"])

    if layout.zero < 2:
        return 0.75 * along(Kind.ALL_REDUCE, sent_bytes)
    gathers = 2 * micro_batches if layout.zero > 2 else 1
    travel = micro_batches * along(Kind.REDUCE_SCATTER, sent_bytes)
    travel += gathers * along(Kind.ALL_GATHER, DTYPE_BYTES[setting.dtype])
    share = parameters.total * sent_bytes // layout.share_ranks
    travel += collective_ns(cluster, Kind.ALL_REDUCE, share, groups["replica"])
    return 0.25 * min(travel, compute_ns) + max(0.0, travel - compute_ns)
