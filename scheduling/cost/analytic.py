"""Models profiles: computes the costs of a job's operators and transfers on a cluster from its `ClusterSpec`.

GEMMs and attention run at their share of the peak rate (a function of their size), other operators at their
share of the memory bandwidth; collectives follow `braid.scheduling.cost.collectives`.
"""

from collections.abc import Mapping, Sequence

from braid.scheduling.cost.collectives import collective_ns
from braid.scheduling.cost.profile import Profile, TransferFit
from braid.scheduling.mesh.cluster import (
    ClusterSpec,
    Contention,
    RankGroup,
    Stream,
    dim_group,
    group_of,
    node_mesh,
)
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import is_tensor
from braid.scheduling.mesh.partition import PARTITIONED, Factor
from braid.scheduling.model.operators import Kind, Operator, Part

OPTIMIZER_BYTES_PER_PARAMETER = 34
"""Bytes per parameter that AdamW accesses in mixed precision: it reads gradient, moments and master weight
(4 x 4) and writes moments, master weight, parameter and zeroed gradient (3 x 4 + 2 + 4)."""

NORM_BYTES_PER_PARAMETER = 4
"""Bytes per parameter that the gradients' norm accesses: it reads gradients in single precision."""

_LINKS = ("intra", "inter")

_FIT_SIZES = (1e5, 1e9)
"""Payloads in bytes of the two transfers through whose times `_transfers` draws a line."""


def axis_groups(layout: ParallelLayout, gpus_per_node: int) -> dict[str, RankGroup]:
    """Return {axis: size and position of its groups}, if ranks fill nodes in order with tp innermost; axes of
    one rank too."""
    mesh, strides, stride = layout.mesh, dict[str, int](), 1
    for factor, size in reversed(mesh.factors):
        strides[factor], stride = stride, stride * size
    groups = {}
    for axis in ("tp", "pp", "replica", *dict(mesh.joined)):
        factors = [factor for factor in mesh.factors_of(axis) if mesh.sizes.get(factor, 1) > 1]
        innermost = min((strides[factor] for factor in factors), default=1)
        groups[axis] = group_of(innermost, mesh.size(factors), gpus_per_node)
    return groups


def axis_streams(layout: ParallelLayout, gpus_per_node: int) -> dict[str, Stream]:
    """Return {axis: stream of its collectives} for a layout on nodes of ``gpus_per_node`` GPUs."""
    return {axis: group.stream for axis, group in axis_groups(layout, gpus_per_node).items()}


def analytic_profile(
    cluster: ClusterSpec, layout: ParallelLayout, parts: Mapping[str, Part], activation_bytes: int = 2
) -> Profile:
    """Return a profile with modelled costs of the parts' operators and of all transfers of a layout.

    ``activation_bytes``: bytes per activation element.
    """
    groups = axis_groups(layout, cluster.gpus_per_node)
    solo, classes = {}, {}
    for part in parts.values():
        for op in (*part.forward.operators, *part.backward.operators):
            key = op.key
            if op.kind.communicates:
                assert op.axis is not None
                group = _group_along(groups, op.axis)
                solo[key] = _collective_operator_ns(cluster, op, group, activation_bytes)
            else:
                solo[key] = _compute_ns(cluster, part, op, activation_bytes)
            classes[key] = operator_class(op)
    rate = cluster.gpu.memory_bytes_per_s * cluster.gpu.memory_efficiency
    meshes = {axis: mesh for axis in PARTITIONED if (mesh := node_mesh(groups[axis])) is not None}
    factors = [Factor(axis, mesh, dim) for axis, mesh in meshes.items() for dim in range(2)]
    return Profile(
        source=f"modelled: {cluster.name}",
        solo_ns=solo,
        classes={**classes, "optimizer": "memory", "norm": "memory"},
        oef=_oef(cluster.contention),
        transfers=_transfers(cluster, groups, factors),
        streams={axis: _group_along(groups, axis).stream for axis in (*groups, *factors)},
        meshes=meshes,
        barrier_ns=cluster.gpu.barrier_ns,
        optimizer_ns_per_parameter=OPTIMIZER_BYTES_PER_PARAMETER / rate * 1e9,
        norm_ns_per_parameter=NORM_BYTES_PER_PARAMETER / rate * 1e9,
        copy_ns_per_byte=2 / rate * 1e9,
    )


SHARING = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
"""Kinds of collectives that sum gradients or gather parameters among ranks with the same parameters."""


def _group_along(groups: Mapping[str, RankGroup], axis: str) -> RankGroup:
    """Return size and position of the groups of an axis, or of a factor of an axis such as ``tp.2x4.1``."""
    return dim_group(groups[axis.axis], axis.mesh, axis.dim) if isinstance(axis, Factor) else groups[axis]


def operator_class(op: Operator) -> str:
    """Return the operator's class in the model of contention: gemm, attention, memory, intra or inter."""
    if op.kind.communicates:
        return op.stream.value
    match op.kind:
        case Kind.GEMM | Kind.GROUPED_GEMM | Kind.CUSTOM:
            return "gemm"
        case Kind.ATTENTION:
            return "attention"
        case _:
            return "memory"


def _oef(contention: Contention) -> dict[str, float]:
    """Return {pair of classes, such as ``gemm|intra``: its overlap effectiveness}, as profiles list them."""
    pairs = [(of_compute, link) for of_compute in ("gemm", "attention", "memory") for link in _LINKS]
    return {
        "|".join(sorted(pair)): getattr(contention, "_".join(pair)) for pair in (*pairs, ("intra", "inter"))
    }


def _collective_operator_ns(
    cluster: ClusterSpec, op: Operator, group: RankGroup, activation_bytes: int
) -> int:
    sent_bytes = op.bytes * activation_bytes / 2
    payload = sent_bytes if op.kind is Kind.SEND_RECEIVE else sent_bytes * group.size / (group.size - 1)
    return cluster.gpu.launch_ns + collective_ns(cluster, op.kind, payload, group)


def _compute_ns(cluster: ClusterSpec, part: Part, op: Operator, activation_bytes: int) -> int:
    gpu = cluster.gpu
    touched = 0
    for name in {*op.reads, *op.writes}:
        value = part.values.get(name)
        # A value that is only passed on under another name is not touched.
        if value is not None and not (name in op.writes and value.alias_of):
            touched += value.bytes(activation_bytes)
    if op.kind is Kind.RESIDUAL and all(part.values[name].alias_of for name in op.writes):
        touched = 0
    ns = touched / (gpu.memory_bytes_per_s * gpu.memory_efficiency) * 1e9
    if op.flops:
        curve = gpu.attention if op.kind is Kind.ATTENTION else gpu.gemm
        # The data sheet's peak holds for 16-bit inputs; the rate falls with their width.
        rate = gpu.peak_flops_per_s * curve.at(op.flops) * 2 / activation_bytes
        ns = max(ns, op.flops / rate * 1e9)
    return round(gpu.launch_ns + ns)


def _transfers(
    cluster: ClusterSpec, groups: Mapping[str, RankGroup], factors: Sequence[Factor]
) -> dict[str, TransferFit]:
    """Return {``AXIS/KIND``: fitted line of time over payload} for every kind of transfer outside layers."""
    fits = {}
    wanted = [("pp", Kind.SEND_RECEIVE), *((axis, Kind.ALL_REDUCE) for axis in ("tp", "pp", "replica", "ep"))]
    wanted += [(axis, Kind.ALL_REDUCE) for axis in groups if is_tensor(axis) and axis != "tp"]
    wanted += [(axis, kind) for axis in ("dp", "edp") for kind in SHARING]
    wanted += [(factor, kind) for factor in factors for kind in SHARING]
    for axis, kind in wanted:
        group = _group_along(groups, axis)
        if group.size > 1:
            small, large = (collective_ns(cluster, kind, size, group) for size in _FIT_SIZES)
            slope = (large - small) / (_FIT_SIZES[1] - _FIT_SIZES[0])
            latency = max(0.0, small - slope * _FIT_SIZES[0]) + cluster.gpu.launch_ns
        else:
            slope = latency = 0.0
        fits[f"{axis}/{kind.value}"] = TransferFit(latency_ns=latency, ns_per_byte=slope)
    return fits
