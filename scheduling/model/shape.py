"""The input of a planner: the model's shape and the size of a step.

All checks raise `ValueError` with the configuration keys, their values and a remedy.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout, require_at_least_one
from braid.scheduling.model.lora import Lora
from braid.scheduling.model.rotary import RotaryScaling
from braid.scheduling.text.pattern import DENSE, UNIFORM, kinds_of, pattern_of
from braid.scheduling.text.suggestions import must_be_one_of

FAMILIES: Final = ("llama", "gpt", "moe")

_NOT_OF_GPT: Final = ("rotary_scaling", "qkv_bias", "projection_bias", "head_bias", "head_norm", "layer_norm")

_SIZES: Final = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "sequence")

_LOSSES: Final = ("balance_loss", "balance_rate", "z_loss")
_NOT_NEGATIVE: Final = ("capacity_factor", *_LOSSES, "expert_ffn", "shared_experts", "mixer_jitter")

CONTEXT_MODES: Final = ("all_gather", "ring")

OF_TRAINING: Final = ("documents", "dropout", "label_smoothing", "logit_z_loss")
"""Fields of a shape that no parameters depend on, and that may change when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    ``llama``: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases.
    ``gpt``: LayerNorm, learned positions, GELU, biases.
    ``moe``: Llama with ``experts`` SwiGLU experts of width ``ffn``, of which every token visits ``top_k``.
    ``qkv_bias`` to ``layer_norm`` modify ``llama`` and ``moe``.
    """

    family: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    sequence: int
    tied_head: bool = False
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, in a family without other biases."""
    projection_bias: bool = False
    """Whether the output projection of attention has a bias, in a family without other biases."""
    head_bias: bool = False
    """Whether the logits have a bias."""
    head_norm: bool = False
    """Whether RMSNorm is applied to every head of queries and keys before they are rotated."""
    layer_norm: bool = False
    """Whether norms of the hidden size are LayerNorms with biases instead of RMSNorms."""
    experts: int = 0
    top_k: int = 0
    capacity_factor: float = 0.0
    """Number of tokens that an expert takes from each rank, divided by the average number. Tokens beyond it
    are dropped; fewer are padded. 0: no limit."""
    expert_ffn: int = 0
    """Width of an expert's MLP; 0: as wide as ``ffn``, which is also the width in layers without experts."""
    shared_experts: int = 0
    """Number of shared experts, which process every token in addition to its chosen ones; they form one
    MLP."""
    softmax_after: bool = False
    """Whether gates are a softmax over the chosen experts' scores instead of all experts' scores."""
    normalised: bool = True
    """Whether the gates of a token are divided by their sum."""
    mixer_jitter: float = 0.0
    """Jitter of SparseMixer gates (Liu et al. 2024): each gate is a softmax over the experts whose scores are
    at most twice the jitter, relatively, below the best remaining score. 0: gates are not SparseMixer's."""
    balance_loss: float = 0.0
    """Factor of the loss that balances experts (Fedus et al. 2021)."""
    balance_rate: float = 0.0
    """Step by which each expert's bias on its scores changes to balance experts without a loss (Wang et al.
    2024)."""
    z_loss: float = 0.0
    """Factor of the loss that keeps the router's logits small (Zoph et al. 2022)."""
    route_evenly: bool = False
    """Whether tokens are sent to experts in turn, regardless of scores; for measurements, not for
    training."""
    documents: bool = False
    """Whether tokens attend only to tokens of their own document."""
    dropout: float = 0.0
    """Probability that training sets an element of an embedding, or of what a layer adds to the residual
    stream, to 0."""
    label_smoothing: float = 0.0
    """Share of the training target's probability that is spread evenly over the vocabulary."""
    logit_z_loss: float = 0.0
    """Factor of the loss that keeps the log-partition of the model's logits near 0."""
    pattern: str = UNIFORM
    """Kinds of layers, such as ``2*layer wide``, repeated until there are ``layers`` of them; it is stored in
    its shortest form."""
    lora: Lora | None = None
    """Adapters, which are trained in place of the model's own parameters; None: the latter are trained."""

    def __post_init__(self) -> None:
        require_at_least_one("model", self, _SIZES)
        object.__setattr__(self, "pattern", pattern_of(self.kinds))
        if self.family not in FAMILIES:
            raise ValueError(f"model.family={self.family!r} {must_be_one_of(self.family, FAMILIES)}")
        self._check_experts()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"each key-value head must serve the same number of query heads"
            )
        if self.family != "gpt" and self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even for rotary embedding")
        if self.family == "gpt":
            for key in _NOT_OF_GPT:
                if value := getattr(self, key):
                    raise ValueError(
                        f"model.{key}={value} does not go with model.family gpt, which has learned "
                        f"positions, LayerNorms, biases on all matrices but the head's and no norms of "
                        f"heads; leave it out"
                    )
        if self.head_bias and self.tied_head:
            raise ValueError(
                "model.head_bias=true needs an output matrix of its own; leave out model.tied_head"
            )
        self._check_rotary()
        self._check_lora()

    def _check_lora(self) -> None:
        if (lora := self.lora) is None:
            return
        held = {kind: self.matrices(kind) for kind in self.kinds}
        for target in lora.targets or ():
            if not any(target in matrices for matrices in held.values()):
                why = "an MLP without gate" if not self.experts else "experts, which have no adapters here"
                raise ValueError(
                    f"model.lora.targets: no layer has a matrix {target!r} for adapters; model.family "
                    f"{self.family} has {why}: leave it out"
                )
        for kind, matrices in held.items():
            if not any(map(lora.adapts, matrices)):
                raise ValueError(
                    f"model.lora.targets={list(lora.targets or ())} leaves layers of the kind {kind!r} "
                    f"without adapters, so that a stage may have nothing to train; add one of "
                    f"{', '.join(matrices)}"
                )
        if self.balance_rate:
            raise ValueError(
                f"model.balance_rate={self.balance_rate:g} changes a bias of the router, which model.lora "
                f"freezes; leave one out"
            )

    def matrices(self, kind: str) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the matrices in a layer of a kind that can have adapters, by
        `lora.TARGETS`; those of experts cannot."""
        hidden, width = self.hidden, self.ffn
        widths = {"q": self.query_width, "k": self.kv_width, "v": self.kv_width}
        found = {name: (hidden, outputs) for name, outputs in widths.items()}
        found["o"] = (self.query_width, hidden)
        if self.experts and kind != DENSE:
            width = self.shared_experts * self.expert_width
        if not width:
            return found
        gate = {"gate": (hidden, width)} if self.gated else {}
        return {**found, **gate, "up": (hidden, width), "down": (width, hidden)}

    def adapter_parameters(self) -> int:
        if (lora := self.lora) is None:
            return 0
        adapted = (size for kind in self.kinds for at, size in self.matrices(kind).items() if lora.adapts(at))
        return sum(lora.rank * sum(size) for size in adapted)

    def _check_rotary(self) -> None:
        scaling = self.rotary_scaling
        if scaling is None or not scaling.factors:
            return
        if len(scaling.factors) != self.head_dim // 2:
            raise ValueError(
                f"model.rotary_scaling.factors has {len(scaling.factors)} entries; model.head_dim="
                f"{self.head_dim} has {self.head_dim // 2} frequencies"
            )
        if scaling.original_sequence is not None and self.sequence > scaling.original_sequence:
            raise ValueError(
                f"model.sequence={self.sequence} is longer than model.rotary_scaling.original_sequence="
                f"{scaling.original_sequence}, and its factors are for samples up to that; "
                f"set model.sequence to at most {scaling.original_sequence}"
            )

    def _check_experts(self) -> None:
        if self.family != "moe":
            if self.experts or self.top_k:
                raise ValueError(
                    f"model.experts={self.experts} and model.top_k={self.top_k} need model.family moe"
                )
            if self.mixer_jitter:
                raise ValueError(
                    f"model.mixer_jitter={self.mixer_jitter:g} needs experts, and with them model.family moe"
                )
            return
        if not self.experts:
            raise ValueError(
                "model.family moe routes among experts, but model.experts=0; set model.experts, or another "
                "model.family"
            )
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"model.top_k={self.top_k} must be between 1 and model.experts={self.experts} "
                f"for model.family moe"
            )
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0")
        for name in ("softmax_after", "balance_rate"):
            if self.mixer_jitter and (value := getattr(self, name)):
                raise ValueError(
                    f"model.mixer_jitter={self.mixer_jitter:g} has gates and a choice of its own, which do "
                    f"not go with model.{name}={str(value).lower()}; leave one out"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer, which is also the name of the part that holds its graphs."""
        return kinds_of(self.pattern, self.layers)

    @property
    def expert_layers(self) -> int:
        return self.layers - self.kinds.count(DENSE) if self.experts else 0

    @property
    def expert_width(self) -> int:
        """Number of elements of an expert's activation for one token."""
        return self.expert_ffn or self.ffn

    @property
    def loss_terms(self) -> dict[str, float]:
        """Terms that training adds to the cross-entropy, by argument of its operator; empty if none is."""
        terms = {"label_smoothing": self.label_smoothing, "z_loss": self.logit_z_loss}
        return {name: value for name, value in terms.items() if value}

    def capacity(self, tokens: int) -> int:
        """Return the number of rows that an expert takes from a rank of ``tokens`` tokens under
        ``capacity_factor``."""
        return max(1, ceil(tokens * self.top_k * self.capacity_factor / self.experts))

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family != "gpt"

    @property
    def biases(self) -> bool:
        """Whether all linear layers but the head have biases."""
        return self.family == "gpt"

    @property
    def norms_center(self) -> bool:
        """Whether norms of the hidden size are LayerNorms with biases."""
        return self.biases or self.layer_norm

    @property
    def bias_of_projection(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.biases or self.projection_bias

    @property
    def biases_of_qkv(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.biases or self.qkv_bias

    @property
    def query_width(self) -> int:
        """Number of elements of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Number of elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Return the number of parameters of the whole model; user-defined layers count as built-in ones."""
        norm = self.hidden * (2 if self.norms_center else 1)
        qkv = self.query_width + 2 * self.kv_width
        mlp_in = self.ffn * (2 if self.gated else 1)
        mlp = self.hidden * (mlp_in + self.ffn)
        routed = 3 * self.hidden * self.expert_width * (self.experts + self.shared_experts)
        routed += (self.hidden + (self.balance_rate > 0)) * self.experts
        experts = self.expert_layers * (routed - mlp)
        layer = 2 * norm + self.hidden * (qkv + self.query_width) + mlp
        if self.biases:
            layer += mlp_in + self.hidden
        if self.bias_of_projection:
            layer += self.hidden
        if self.biases_of_qkv:
            layer += qkv
        if self.head_norm:
            layer += 2 * self.head_dim
        tables = self.vocabulary * (self.hidden * (1 if self.tied_head else 2) + self.head_bias)
        positions = self.sequence * self.hidden if self.family == "gpt" else 0
        return self.layers * layer + experts + norm + tables + positions


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The batch of one optimizer step, in samples of ``ModelShape.sequence`` tokens."""

    global_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        require_at_least_one("train", self, ("global_batch", "micro_batch"))

    def micro_batches(self, layout: ParallelLayout) -> int:
        """Return the number of micro-batches that each data-parallel replica runs in one step."""
        return self.global_batch // (self.micro_batch * layout.sample_ranks)
