"""Small clusters, settings and profiles for the tests of planning and simulation."""

from dataclasses import replace

from braid.scheduling.cluster import ClusterSpec, Contention, Efficiency, Gpu, Link
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.operators import Part
from braid.scheduling.plan import Setting
from braid.scheduling.profile import Profile
from braid.scheduling.spec import ModelShape, ParallelLayout, Workload

SMALL = ModelShape(
    family="llama",
    hidden=1024,
    ffn=2816,
    layers=8,
    heads=16,
    kv_heads=8,
    head_dim=64,
    vocabulary=1024,
    sequence=1024,
)


def cluster(nodes: int = 1, gpus: int = 4, oef: float = 0.9, **links: float) -> ClusterSpec:
    """A made-up cluster; ``intra`` and ``inter`` are bytes per second."""
    gpu = Gpu(
        name="test",
        memory_bytes=32 * 10**9,
        peak_flops_per_s=1e14,
        memory_bytes_per_s=1e12,
        gemm=Efficiency(ceiling=0.7, half_flops=1e9),
        attention=Efficiency(ceiling=0.5, half_flops=1e9),
        memory_efficiency=0.8,
    )
    same = Contention(
        gemm_intra=oef,
        gemm_inter=oef,
        attention_intra=oef,
        attention_inter=oef,
        memory_intra=oef,
        memory_inter=oef,
        intra_inter=oef,
    )

    def link(kind: str, rate: float) -> Link:
        return Link(kind=kind, bytes_per_s=rate, latency_ns=2000, efficiency=0.8)

    return ClusterSpec(
        name="test",
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=gpu,
        intra=link("intra", links.get("intra", 2e10)),
        inter=link("inter", links.get("inter", 5e9)) if nodes > 1 else None,
        contention=same,
    )


def setting(
    schedule: str = "megatron",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    micro_batches: int = 4,
    model: ModelShape = SMALL,
    **more: object,
) -> Setting:
    """A setting of the small model."""
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, placement=SCHEDULES[schedule].placement)
    workload = Workload(global_batch=micro_batches * dp, micro_batch=1)
    return replace(
        Setting(model=model, layout=layout, workload=workload, schedule=schedule),
        **more,  # type: ignore[arg-type]
    )


def free_ends(profile: Profile, parts: dict[str, Part]) -> Profile:
    """The profile with embedding, head, messages and the update taking no time: formulas leave them out."""
    solo = {key: 0 if key.startswith(("embedding/", "head/")) else ns for key, ns in profile.solo_ns.items()}
    transfers = {key: replace(fit, latency_ns=0.0, ns_per_byte=0.0) for key, fit in profile.transfers.items()}
    return replace(profile, solo_ns=solo, transfers=transfers, optimizer_ns_per_parameter=0.0, barrier_ns=0)
