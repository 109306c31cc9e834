"""Defines what `braid bench overlap` compares: layouts with their schedules and peers, and a case's model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from typer import Option

from braid.actors.config import Config, ConfigError, parse_config
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.suggestions import must_be_one_of

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
"""Layouts whose layers have individual tensor-parallel degrees, given behind the schedule's name: ``oases 2*4
2``, ``oases planned``."""
PLANNED = "planned"
"""Stands for the degrees that `braid.scheduling.plan.layer_choices` chooses within ``memory_gb``."""
OURS = ("braid:w", "braid:eager_w", "braid:v")
ANY_OF_OURS = "braid"
"""Name that stands for the pipeline of Braid's own with the fastest simulated step."""
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
"""Schedules that are compared in each layout. Schedules that equal another one there are left out, as is the
folded pipeline without overlap; `zbv` and `dualpipev` are left out if tp and pp are combined."""
RECOMPUTING = ("megatron", "merak", "oases", ANY_OF_OURS)
"""Schedules that are compared by default if activations are recomputed."""
NO_COLLECTIVE_AGAIN = ("oases", "braid")
"""Schedules that repeat no collective (``fine``) while others recompute whole layers (``full``): Oases,
section IV-B."""
FILLED = ("tp4", "dp4", "tp2dp2", "cp2tp2", "ep2tp2", "mixed4")
"""Layouts in which neighbouring ranks share a host, as on a cluster; in the other layouts they are on two
hosts, so that a link lies between them."""
ZERO: Mapping[str, int] = {f"zero{stage}": stage for stage in (1, 2, 3)}
"""Names of baselines that run `ddp`, and their ZeRO stage."""
MIXTURE: Mapping[str, Any] = {"family": "moe", "experts": 8, "top_k": 2, "balance_loss": 0.01}
"""Settings of layouts with experts: as many experts as Mixtral has, each as wide as the other layouts'
MLP."""
EXCHANGE = "Braid's exchange"
"""Suffix of a peer's name if its collectives are Braid's messages instead of gloo's (`PeerPlan.messages`)."""
PEERS: Mapping[str, tuple[str, ...]] = {
    "tp2": ("torch_tp", f"torch_tp, {EXCHANGE}"),
    "pp2": ("torch_1f1b", "torch_dualpipev", "torch_dualpipev_threads"),
    "tp2pp2": ("torch_tp_1f1b", f"torch_tp_1f1b, {EXCHANGE}"),
    **dict.fromkeys(("dp2", "dp4"), ("torch_ddp", "torch_fsdp2", "torch_fsdp2_kept")),
    "cp2": ("torch_cp",),
    "ep2": ("torch_ep",),
}
"""Peers by layout.

Layouts that also cut experts or sequences over tensor-parallel ranks have no peer: it would be a new
implementation, with a plan for routers, experts and gathered keys, and gradients that
`DistributedDataParallel` does not sum.
"""


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """Model, batch, layout and link of a benchmark; fields that have a help text are options of the
    command."""

    layout: Annotated[str, Option(help=", ".join(LAYOUTS))] = "tp2"
    zero: Annotated[int, Option(help="parallel.zero of the schedules.", min=0, max=3)] = 0
    shards: Annotated[int, Option(help="parallel.shards of the schedules.", min=0)] = 0
    context: Annotated[Literal["all_gather", "ring"], Option(help="parallel.context of the schedules.")] = (
        "all_gather"
    )
    recompute: Annotated[
        Literal["none", "selective", "full", "fine"],
        Option(help="train.recompute; of full, oases and braid make fine, as Oases does."),
    ] = "none"
    hidden: Annotated[int, Option(help="Width of the model.", min=64)] = 1024
    layers: Annotated[int, Option(help="Layers of the model.", min=1)] = 2
    tokens: Annotated[int, Option(help="Tokens of a micro-batch.", min=16)] = 512
    micro_batches: Annotated[int, Option(help="Micro-batches of a step, in each replica.", min=1)] = 16
    mbit: Annotated[float | None, Option("--link-mbit", help="Rate of the link.", min=1)] = None
    inside_mbit: Annotated[
        float | None, Option(help=f"Rate of links inside hosts, of {', '.join(FILLED)}.", min=1)
    ] = None
    alpha: Annotated[
        float | None, Option(help="Set the rate so that communication has this share.", min=0.02, max=0.95)
    ] = None
    route_evenly: Annotated[
        bool,
        Option("--route-evenly", help="Tokens visit experts in turn: a balanced load, for the peers too."),
    ] = False
    memory_slack: Annotated[float | None, Option(help="overlap.memory_slack of the schedules.", min=0.0)] = (
        None
    )
    memory_gb: Annotated[
        float | None, Option(help="cluster.memory_gb, within which degrees of layers are planned.")
    ] = None
    ffn: Annotated[int | None, Option(help="model.ffn (default: the family's).", min=1)] = None
    seed: int = 1

    def check(self, schedules: Sequence[str] = ()) -> None:
        """Raise `ConfigError` for options that exclude each other, and for unknown layouts or schedules."""
        if self.layout not in LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} {must_be_one_of(self.layout, tuple(LAYOUTS))}")
        if self.mbit is not None and self.alpha is not None:
            raise ConfigError("--link-mbit and --alpha exclude each other: alpha is set by the rate")
        if self.inside_mbit is not None and self.layout not in FILLED:
            raise ConfigError(
                f"--inside-mbit needs a layout with several ranks on a host ({', '.join(FILLED)}), "
                f"not {self.layout}"
            )
        if self.route_evenly and "ep" not in self.axes:
            raise ConfigError(
                f"--route-evenly needs a layout with experts, such as --layout ep2, not {self.layout}"
            )
        for text in (name.partition(" ")[0] for name in schedules):
            if text not in ZERO or "dp" not in self.axes:
                try:
                    ScheduleName.parse(text)
                except ValueError as error:
                    raise ConfigError(f"--schedules: {error}") from None

    def config(self, schedule: str, **cluster: Any) -> Config:
        """Build the configuration for a schedule, perhaps with degrees (`MIXED`), or for a baseline (`ZERO`).

        Degrees that are still to be planned are ``auto``.
        """
        schedule, _, degrees = schedule.partition(" ")
        zero = ZERO.get(schedule, self.zero)
        schedule, _, pipeline = ("ddp" if schedule in ZERO else schedule).partition(":")
        fine = self.recompute == "full" and schedule in NO_COLLECTIVE_AGAIN
        content: dict[str, dict[str, Any]] = {
            "model": {
                "hidden": self.hidden,
                "layers": self.layers,
                "heads": max(2, self.hidden // 64),
                "sequence": self.tokens // self.samples,
                "ffn": self.ffn,
                **(MIXTURE if "ep" in self.axes else {}),
            },
            "train": {
                "global_batch": self.micro_batches * self.samples * self.axes.get("dp", 1),
                "micro_batch": self.samples,
                "steps": 100_000,
                "warmup_steps": 100,
                "seed": self.seed,
                "recompute": "fine" if fine else self.recompute,
            },
            "parallel": {
                **self.axes,
                "zero": zero,
                "shards": self.shards,
                "context": self.context,
                "tensor_degrees": ("auto" if degrees == PLANNED else degrees) or None,
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
        return parse_config(content)

    def shape(self) -> ModelShape:
        """Return the model's sizes, and whether tokens are routed evenly, which a configuration cannot
        say."""
        from braid.jobs.data.tokenizer import tokenizer_of

        config = self.config("megatron")
        return replace(config.check(tokenizer_of(config).vocabulary), route_evenly=self.route_evenly)

    @property
    def axes(self) -> Mapping[str, int]:
        """Degrees of the layout's mesh axes."""
        return LAYOUTS[self.layout]

    @property
    def samples(self) -> int:
        """Samples of a micro-batch: as many as the tensor-parallel degree if layers may have smaller degrees,
        else 1."""
        return self.axes["tp"] if self.layout in MIXED else 1

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, summed over all replicas."""
        return self.tokens * self.micro_batches * self.axes.get("dp", 1)

    @property
    def message_bytes(self) -> int:
        """Bytes that one rank sends another at once: the fp32 activations of its share of a micro-batch's
        tokens.

        With data parallelism an eighth of that, the smallest sum that a profile measures: costs of gradient
        sums are extrapolated from it, so the link's bucket must not let it pass at once
        (`braid.jobs.drill.hosts.Hosts.shape`). If ranks share a host, a 32nd, since stages between hosts are
        measured too. With context parallelism, keys and values are as wide as two hidden states.
        """
        parts = 8 if "dp" in self.axes else self.axes.get("tp", 1)
        parts = 32 if self.layout in FILLED else parts
        return self.tokens * self.hidden * 4 // parts

    @property
    def name(self) -> str:
        """Description of the model in one line."""
        facts = [
            f"{'moe' if 'ep' in self.axes else 'llama'} hidden {self.hidden} x {self.layers} layers",
            f"{self.tokens} tokens x {self.micro_batches} micro-batches{' a replica' * ('dp' in self.axes)}",
            self.layout + (f" {self.context}" if "cp" in self.axes else ""),
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
