"""Defines what `braid bench overlap` compares: layouts with their schedules and peers, and a case's model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from braid.actors.config import Config, ConfigError, parse_config
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.suggestions import must_be_one_of

_PIPELINES = ("interleaved", "wavelet", "dhelix", "braid:w", "braid:eager_w", "braid:v")
_SUMS = ("megatron", "ddp", "braid")
_STRANDS = ("megatron", "wavelet", "dhelix", "braid")
_EXPERTS = ("megatron", "expert_overlap", "wavelet", "dhelix", "braid")
_REPLICATED = ("torch_ddp", "torch_fsdp2", "torch_fsdp2_kept")
MIXTURE: Mapping[str, Any] = {"family": "moe", "experts": 8, "top_k": 2, "balance_loss": 0.01}
"""Settings of layouts with experts: as many experts as Mixtral has, each as wide as the other layouts'
MLP."""
NO_COLLECTIVE_AGAIN = ("oases", "braid")
"""Schedules that repeat no collective (``fine``) while others recompute whole layers (``full``): Oases,
section IV-B."""


@dataclass(frozen=True)
class BenchLayout:
    """A layout, the schedules that are compared in it by default, and its peers.

    Schedules that equal another one there are left out, as is the folded pipeline without overlap.
    """

    axes: Mapping[str, int]
    """Degrees of the mesh axes; experts (``ep``) are cut over replicas."""
    schedules: tuple[str, ...]
    peers: tuple[str, ...] = ()

    @property
    def filled(self) -> bool:
        """Whether neighbouring ranks share a host, as on a cluster; else they are on two hosts, so that a
        link lies between them."""
        ranks = math.prod(degree for axis, degree in self.axes.items() if axis != "ep")
        return ranks > 2 and "pp" not in self.axes


LAYOUTS: Mapping[str, BenchLayout] = {
    "tp2": BenchLayout(
        {"tp": 2}, ("megatron", "intra_batch", "wavelet", "dhelix", "braid:w", "braid:twins"), ("torch_tp",)
    ),
    "tp4": BenchLayout({"tp": 4}, ("megatron", "intra_batch", "braid")),
    "pp2": BenchLayout(
        {"pp": 2},
        ("megatron", "megatron:eager_1f1b", "zbv", "dualpipev", *_PIPELINES),
        ("torch_1f1b", "torch_dualpipev"),
    ),
    "tp2pp2": BenchLayout(
        {"tp": 2, "pp": 2},
        ("megatron", "megatron:eager_1f1b", "intra_batch", *_PIPELINES),
        ("torch_tp_1f1b",),
    ),
    "dp2": BenchLayout({"dp": 2}, _SUMS, _REPLICATED),
    "dp4": BenchLayout({"dp": 4}, _SUMS, _REPLICATED),
    "tp2dp2": BenchLayout({"tp": 2, "dp": 2}, _SUMS),
    "pp2dp2": BenchLayout({"pp": 2, "dp": 2}, _SUMS),
    "cp2": BenchLayout({"cp": 2}, _STRANDS),
    "cp2tp2": BenchLayout({"cp": 2, "tp": 2}, _STRANDS),
    "ep2": BenchLayout({"dp": 2, "ep": 2}, _EXPERTS),
    "ep2tp2": BenchLayout({"dp": 2, "ep": 2, "tp": 2}, _EXPERTS),
}


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """Model, batch, layout and link of a benchmark."""

    layout: str = "tp2"
    hidden: int = 1024
    layers: int = 2
    tokens: int = 512
    """Tokens of a micro-batch, which is one sample."""
    micro_batches: int = 16
    """Micro-batches of a step, in each replica."""
    mbit: float | None = None
    """Rate of the link between hosts."""
    inside_mbit: float | None = None
    """Rate of the links inside hosts; None: memory's."""
    alpha: float | None = None
    """Share of communication for which the rate of the link is chosen."""
    route_evenly: bool = False
    """Whether tokens visit experts in turn."""
    settings: tuple[str, ...] = ()
    """Further keys of the configuration, each ``section.key=value``."""

    def check(self, schedules: Sequence[str] = ()) -> None:
        """Raise `ConfigError` for options that exclude each other, and for unknown layouts, schedules or
        settings."""
        if self.layout not in LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} {must_be_one_of(self.layout, tuple(LAYOUTS))}")
        if self.mbit is not None and self.alpha is not None:
            raise ConfigError("--link-mbit and --alpha exclude each other: alpha is set by the rate")
        if self.inside_mbit is not None and not LAYOUTS[self.layout].filled:
            filled = ", ".join(name for name, layout in LAYOUTS.items() if layout.filled)
            raise ConfigError(
                f"--inside-mbit needs a layout with several ranks on a host ({filled}), not {self.layout}"
            )
        if self.route_evenly and "ep" not in self.axes:
            raise ConfigError(
                f"--route-evenly needs a layout with experts, such as --layout ep2, not {self.layout}"
            )
        for schedule in ("megatron", *schedules):
            self.config(schedule)

    def config(self, schedule: str) -> Config:
        """Build the configuration for a schedule, perhaps with a pipeline: ``braid:eager_w``."""
        schedule, _, pipeline = schedule.partition(":")
        content: dict[str, dict[str, Any]] = {
            "model": {
                "hidden": self.hidden,
                "layers": self.layers,
                "heads": max(2, self.hidden // 64),
                "sequence": self.tokens,
                **(MIXTURE if "ep" in self.axes else {}),
            },
            "train": {
                "global_batch": self.micro_batches * self.axes.get("dp", 1),
                "micro_batch": 1,
                "steps": 100_000,
                "warmup_steps": 100,
                "seed": 1,
            },
            "parallel": {**self.axes},
            "overlap": {"schedule": schedule, "pipeline": pipeline or None},
            "cluster": {"device": "cpu", "cpus_per_rank": 0.05, "group_timeout_s": 120},
        }
        config = parse_config(content, self.settings)
        if config.chooses_layers:
            raise ConfigError("--set: give train.recompute and parallel.tensor_degrees, not auto")
        if config.train.recompute == "full" and schedule in NO_COLLECTIVE_AGAIN:
            return config.changed(train={"recompute": "fine"})
        return config

    def shape(self) -> ModelShape:
        """Return the model's sizes, and whether tokens are routed evenly, which a configuration cannot
        say."""
        from braid.jobs.data.tokenizer import tokenizer_of

        config = self.config("megatron")
        return replace(config.check(tokenizer_of(config).vocabulary), route_evenly=self.route_evenly)

    @property
    def axes(self) -> Mapping[str, int]:
        return LAYOUTS[self.layout].axes

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
        parts = 32 if LAYOUTS[self.layout].filled else parts
        return self.tokens * self.hidden * 4 // parts

    @property
    def name(self) -> str:
        """Description of the model in one line."""
        facts = [
            f"{'moe' if 'ep' in self.axes else 'llama'} hidden {self.hidden} x {self.layers} layers",
            f"{self.tokens} tokens x {self.micro_batches} micro-batches{' a replica' * ('dp' in self.axes)}",
            self.layout,
            *self.settings,
        ]
        if self.route_evenly:
            facts.append("routed evenly")
        if self.inside_mbit:
            facts.append(f"{self.inside_mbit:g} Mbit/s inside hosts")
        return ", ".join(facts)
