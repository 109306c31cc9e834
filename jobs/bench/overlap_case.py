"""What `braid bench overlap` compares: layouts with their schedules and peers, and the model of a case."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from braid.actors.config import Config, parse_config
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.generate.named import ScheduleKind
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.layer_choices import degrees_within

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2dp2": {"tp": 2, "dp": 2},
    "pp2dp2": {"pp": 2, "dp": 2},
    "cp2": {"cp": 2},
    "cp2tp2": {"cp": 2, "tp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep2tp2": {"dp": 2, "ep": 2, "tp": 2},
    "mixed2": {"tp": 2},
    "mixed4": {"tp": 4},
}
MIXED = ("mixed2", "mixed4")
"""Layouts whose layers have degrees of their own, behind the schedule: ``oases 2*4 2``, ``oases planned``."""
PLANNED = "planned"
"""The degrees that `braid.scheduling.plan.layer_choices` takes within ``memory_gb``."""
OURS = ("braid:w", "braid:eager_w", "braid:v")
ANY_OF_OURS = "braid"
"""Takes the one of ours that is simulated to be the fastest; compared where it is asked for."""
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "tp2": ("megatron", "intra_batch", "wavelet", "dhelix", "braid:w", "braid:twins"),
    "pp2": ("megatron", "megatron:eager_1f1b", "interleaved", "zbv", "dualpipev", "wavelet", "dhelix", *OURS),
    "tp2pp2": ("megatron", "megatron:eager_1f1b", "interleaved", "intra_batch", "wavelet", "dhelix", *OURS),
    "tp4": ("megatron", "intra_batch", ANY_OF_OURS),
    **dict.fromkeys(("dp2", "dp4", "tp2dp2", "pp2dp2"), ("megatron", "ddp", ANY_OF_OURS)),
    **dict.fromkeys(("cp2", "cp2tp2"), ("megatron", "wavelet", "dhelix", ANY_OF_OURS)),
    **dict.fromkeys(MIXED, ("megatron",)),
    **dict.fromkeys(("ep2", "ep2tp2"), ("megatron", "expert_overlap", "wavelet", "dhelix", ANY_OF_OURS)),
}
"""Those that are compared in a layout. Left out is what is the same as another one there, the folded pipeline
without overlap, and with both kinds of parallelism `zbv` and `dualpipev`."""
RECOMPUTING = ("megatron", "merak", "oases", ANY_OF_OURS)
"""Those that are compared by default where activations are recomputed."""
NO_COLLECTIVE_AGAIN = ("oases", "braid")
"""Schedules that repeat no collective (``fine``) where others recompute whole layers (``full``): Oases,
section IV-B."""
FILLED = ("tp4", "dp4", "tp2dp2", "cp2tp2", "ep2tp2", "mixed4")
"""Layouts whose neighbours stand on one host, as on a cluster; of others on two, so that there is a link."""
ZERO: Mapping[str, int] = {f"zero{stage}": stage for stage in (1, 2, 3)}
"""Baselines: `ddp` under that ZeRO stage."""
MIXTURE: Mapping[str, Any] = {"family": "moe", "experts": 8, "top_k": 2, "balance_loss": 0.01}
"""Of layouts with experts: as many as Mixtral's, each as wide as the MLP of the other layouts' model."""
EXCHANGE = "Braid's exchange"
"""Stands behind a peer whose collectives are Braid's messages, not gloo's (`PeerPlan.messages`)."""
PEERS: Mapping[str, tuple[str, ...]] = {
    "tp2": ("torch_tp", f"torch_tp, {EXCHANGE}"),
    "pp2": ("torch_1f1b", "torch_dualpipev", "torch_dualpipev_threads"),
    "tp2pp2": ("torch_tp_1f1b", f"torch_tp_1f1b, {EXCHANGE}"),
    **dict.fromkeys(("dp2", "dp4"), ("torch_ddp", "torch_fsdp2", "torch_fsdp2_kept")),
    "cp2": ("torch_cp",),
    "ep2": ("torch_ep",),
}
"""Peers, by layout.

Experts and sequences that are cut over tensor-parallel ranks too have no peer: it would be another one, with
a plan for routers, experts and gathered keys, and gradients that `DistributedDataParallel` does not sum.
"""


def compared(case: "OverlapCase") -> tuple[str, ...]:
    """The schedules of a case, where none are named."""
    if case.layout in MIXED:
        tp = LAYOUTS[case.layout]["tp"]
        ours = "oases" if case.recompute == "full" else "braid:sub_batches"
        alike = [f"{ours} {case.layers}*{degree}" for degree in degrees_within(tp)]
        return ("megatron", *alike, f"{ours} {PLANNED}")
    return SCHEDULES[case.layout] if case.recompute == "none" else RECOMPUTING


def drawn(schedule: str, case: "OverlapCase", count: int) -> tuple[str, ...]:
    """So many schedules with degrees that are drawn for every layer, all of them different.

    How many layers have which is drawn first, so that few of one and many of another are as likely as equal
    numbers.
    """
    found, draw = set[str](), random.Random(case.seed)
    degrees = degrees_within(LAYOUTS[case.layout]["tp"])
    count = min(count, len(degrees) ** case.layers)
    while len(found) < count:
        weights = [draw.expovariate(1) for _ in degrees]
        found.add(" ".join(map(str, draw.choices(degrees, weights, k=case.layers))))
    return tuple(f"{schedule} {degrees}" for degrees in sorted(found))


@dataclass(frozen=True, kw_only=True)
class WithoutTier(Setting):
    """A setting whose schedule leaves out one of Centauri's tiers."""

    tier: str
    """partitions, reorders or early_sums (`ScheduleKind`): Centauri's operation, layer and model tier."""

    @property
    def kind(self) -> ScheduleKind:
        off: dict[str, Any] = {self.tier: False}
        return replace(super().kind, **off)


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """What is trained, and over which link; ``zero`` to ``ffn`` are the configuration's keys."""

    layout: str = "tp2"
    hidden: int = 1024
    layers: int = 2
    tokens: int = 512
    """Of a micro-batch: one sample, or `samples` of them."""
    micro_batches: int = 16
    """Of a step, in each replica."""
    mbit: float | None = None
    inside_mbit: float | None = None
    """Rate of the links inside hosts, of layouts that fill these (`FILLED`); by default what memory gives."""
    alpha: float | None = None
    """Instead of a rate: the share of communication in the serial step that the rate is set for."""
    zero: int = 0
    shards: int = 0
    context: str = "all_gather"
    recompute: str = "none"
    """Schedules of `NO_COLLECTIVE_AGAIN` make ``fine`` of ``full``."""
    memory_slack: float | None = None
    memory_gb: float | None = None
    """Within which degrees are planned."""
    ffn: int | None = None
    route_evenly: bool = False
    """Whether tokens visit experts in turn, in layouts with experts."""
    seed: int = 1

    def config(self, schedule: str, **cluster: Any) -> Config:
        """The run's configuration under a schedule, perhaps with degrees (`MIXED`), or a baseline (`ZERO`).

        Degrees that are still to be planned are ``auto``.
        """
        schedule, _, degrees = schedule.partition(" ")
        zero = ZERO.get(schedule, self.zero)
        schedule, _, pipeline = ("ddp" if schedule in ZERO else schedule).partition(":")
        fine = self.recompute == "full" and schedule in NO_COLLECTIVE_AGAIN
        return parse_config(
            {
                "model": {
                    "hidden": self.hidden,
                    "layers": self.layers,
                    "heads": max(2, self.hidden // 64),
                    "sequence": self.tokens // self.samples,
                    **({"ffn": self.ffn} if self.ffn else {}),
                    **(MIXTURE if "ep" in LAYOUTS[self.layout] else {}),
                },
                "train": {
                    "global_batch": self.micro_batches * self.samples * self.replicas,
                    "micro_batch": self.samples,
                    "steps": 100_000,
                    "warmup_steps": 100,
                    "seed": self.seed,
                    "recompute": "fine" if fine else self.recompute,
                },
                "parallel": {
                    **LAYOUTS[self.layout],
                    "zero": zero,
                    "shards": self.shards,
                    "context": self.context,
                    **({"tensor_degrees": "auto" if degrees == PLANNED else degrees} if degrees else {}),
                },
                "overlap": {
                    "schedule": schedule,
                    "pipeline": pipeline or None,
                    "memory_slack": self.memory_slack,
                },
                "cluster": {
                    "device": "cpu",
                    "cpus_per_rank": 0.05,
                    "group_timeout_s": 120,
                    "memory_gb": self.memory_gb,
                    **cluster,
                },
            }
        )

    def shape(self) -> ModelShape:
        """The model's sizes, and whether tokens are routed evenly, which no configuration can say."""
        config = self.config("megatron")
        return replace(config.check(tokenizer_of(config).vocabulary), route_evenly=self.route_evenly)

    @property
    def samples(self) -> int:
        """Of a micro-batch: so many that every rank can have some of its own."""
        return LAYOUTS[self.layout]["tp"] if self.layout in MIXED else 1

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return LAYOUTS[self.layout].get("dp", 1)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, of all replicas."""
        return self.tokens * self.micro_batches * self.replicas

    @property
    def message_bytes(self) -> int:
        """What one rank sends another at once: its tokens' activations, single precision.

        Of replicas an eighth of it, the least that a profile sums over them: what gradients take is on a line
        through that, so it must not pass at once either (`braid.jobs.drill.hosts.Hosts.shape`). Of ranks that
        share a host a quarter of that again: stages between hosts are measured too. Keys and values of ranks
        of cp are as wide as two hidden states.
        """
        parts = 8 if self.replicas > 1 else LAYOUTS[self.layout].get("tp", 1)
        parts = 32 if self.layout in FILLED else parts
        return self.tokens * self.hidden * 4 // parts

    @property
    def name(self) -> str:
        """The model in one line."""
        axes = LAYOUTS[self.layout]
        facts = [
            f"{'moe' if 'ep' in axes else 'llama'} hidden {self.hidden} x {self.layers} layers",
            f"{self.tokens} tokens x {self.micro_batches} micro-batches{' a replica' * (self.replicas > 1)}",
            self.layout + (f" {self.context}" if "cp" in axes else ""),
        ]
        if self.zero:
            facts.append(f"ZeRO {self.zero}" + (f" over {self.shards}" if self.shards else ""))
        if self.route_evenly:
            facts.append("routed evenly")
        if self.recompute != "none":
            facts.append(f"recompute {self.recompute}")
        if self.inside_mbit:
            facts.append(f"{self.inside_mbit:g} Mbit/s inside hosts")
        return ", ".join([*facts, "fp32"])
