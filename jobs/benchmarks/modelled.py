"""What a planner would believe of two emulated hosts without measuring them."""

from collections.abc import Mapping

from braid.scheduling.analytic import analytic_profile
from braid.scheduling.cluster import ClusterSpec, Efficiency, Gpu, Link
from braid.scheduling.operators import Part, Pass
from braid.scheduling.presets.library import cluster_preset
from braid.scheduling.profile import Profile
from braid.scheduling.spec import ParallelLayout

MEMORY_BYTES_PER_S = 8e9
"""Of one core. Assumed: what a stream of copies reaches on a shared server."""
LATENCY_NS = 100_000
"""Of a message over TCP between two processes. Assumed."""


def modelled_profile(
    layout: ParallelLayout, parts: Mapping[str, Part], measured: Profile, mbit: float
) -> Profile:
    """Costs from a model: the mean FLOP/s of forward operators stands for a data sheet, the rest is assumed.

    Contention is that of the preset of GPUs on a PCIe switch.
    """
    forward = [
        op
        for part in parts.values()
        for op in part.forward.operators
        if op.phase is Pass.FORWARD and op.flops
    ]
    flops = sum(op.flops for op in forward)
    seconds = sum(measured.solo_ns[op.key] for op in forward) / 1e9
    whole = Efficiency(ceiling=1.0, half_flops=0.0)
    core = Gpu(
        name="core",
        memory_bytes=1 << 34,
        # The model takes the peak for 16-bit inputs, and half of it for 32-bit ones.
        peak_flops_per_s=2 * flops / seconds,
        memory_bytes_per_s=MEMORY_BYTES_PER_S,
        gemm=whole,
        attention=whole,
        memory_efficiency=1.0,
        launch_ns=20_000,
        barrier_ns=100_000,
    )
    link = Link(kind="TCP", bytes_per_s=mbit * 1e6 / 8, latency_ns=LATENCY_NS, efficiency=0.95)
    cluster = ClusterSpec(
        name=f"two hosts at {mbit:g} Mbit/s",
        nodes=1,
        gpus_per_node=layout.ranks,
        gpu=core,
        intra=link,
        contention=cluster_preset("a40").contention,
    )
    return analytic_profile(cluster, layout, parts, activation_bytes=4)
