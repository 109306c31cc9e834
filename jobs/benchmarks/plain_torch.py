"""A training loop as a PyTorch user writes it: ordinary modules, autograd, AdamW; nothing of Braid in it.

It is the independent reference of the tests and the peer of the benchmark, so it must be good: PyTorch's own
attention, norms, loss and fused AdamW. Projections are separate, as in Hugging Face's Llama: fused ones were
no faster here, since autograd puts their gradients together with a copy.

Legend: B samples, S tokens of a sample, D hidden, N query heads, K key-value heads, H head dimension, V
vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class PlainSizes:
    """Sizes of a decoder-only transformer of the family ``llama`` or ``gpt``."""

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
    rotary_scaling: Any = None
    """Makes frequencies of others, in radians per token, and has the magnitude of what is turned."""
    qkv_bias: bool = False
    projection_bias: bool = False
    head_bias: bool = False
    head_norm: bool = False
    layer_norm: bool = False
    end_of_document: int | None = None
    """The token behind which attention begins anew; None: it sees whole samples."""
    restart_positions: bool = False

    @classmethod
    def of(cls, shape: object) -> "PlainSizes":
        """The sizes that a record with the same names holds."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(shape, name) for name in names if hasattr(shape, name)})

    @property
    def is_gpt(self) -> bool:
        """LayerNorm, learned positions, GELU and biases, instead of RMSNorm, rotary embedding and SwiGLU."""
        return self.family == "gpt"


@dataclass(frozen=True, kw_only=True)
class PlainSettings:
    """AdamW with linear warm-up, then cosine decay to ``min_lr_fraction``; ``clip_norm`` 0: no clipping."""

    steps: int
    lr: float
    min_lr_fraction: float
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float

    def learning_rate(self, step: int) -> float:
        """Learning rate of ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1), 1.0)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr_fraction + (1 - self.min_lr_fraction) * cosine)


class Rotary(nn.Module):
    """Rotary position embedding as in Hugging Face's Llama: dimension i turns with i + H/2."""

    cos: Tensor  # S x H
    sin: Tensor  # S x H

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim
        frequencies = sizes.rotary_base**-exponents
        magnitude = 1.0
        if sizes.rotary_scaling is not None:
            frequencies = frequencies.new_tensor(sizes.rotary_scaling.frequencies(frequencies.tolist()))
            magnitude = sizes.rotary_scaling.magnitude
        angles = torch.outer(torch.arange(sizes.sequence, dtype=torch.float64), frequencies)
        angles_SH = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles_SH.cos() * magnitude, persistent=False)
        self.register_buffer("sin", angles_SH.sin() * magnitude, persistent=False)

    def forward(self, x_BNSH: Tensor, positions_BS: Tensor | None) -> Tensor:
        length = x_BNSH.shape[-2]
        cos, sin = (
            table[:length] if positions_BS is None else table[positions_BS].unsqueeze(1)
            for table in (self.cos, self.sin)
        )
        low, high = x_BNSH.chunk(2, dim=-1)
        rotated_half = torch.cat((-high, low), dim=-1)
        return x_BNSH * cos + rotated_half * sin


@dataclass(frozen=True)
class Seen:
    """Where documents are apart: positions of tokens, and which ones see each other."""

    positions_bs: Tensor | None = None
    mask_b1ss: Tensor | None = None

    @classmethod
    def of(cls, tokens_BS: Tensor, sizes: PlainSizes) -> "Seen":
        """Of samples; every sample begins a document."""
        if sizes.end_of_document is None:
            return cls()
        places_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        behind_BS = F.pad(tokens_BS[:, :-1] == sizes.end_of_document, (1, 0))
        first_BS = torch.where(behind_BS, places_BS, 0).cummax(dim=1).values
        earlier_SS = places_BS[0, :, None] >= places_BS[0]
        same_BSS = first_BS[:, :, None] == first_BS[:, None]
        positions_BS = places_BS - first_BS if sizes.restart_positions else places_BS
        return cls(positions_BS, (same_BSS & earlier_SS).unsqueeze(1))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, bias = sizes.hidden, sizes.is_gpt
        query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.attention_norm = norm(sizes)
        widths = {"q": query, "k": key, "v": key}
        qkv_bias = bias or sizes.qkv_bias
        self.qkv = nn.ModuleDict({name: nn.Linear(hidden, width, qkv_bias) for name, width in widths.items()})
        self.q_norm, self.k_norm = (
            nn.RMSNorm(sizes.head_dim, eps=sizes.norm_eps) if sizes.head_norm else None for _ in "qk"
        )
        self.projection = nn.Linear(query, hidden, bias or sizes.projection_bias)
        self.mlp_norm = norm(sizes)
        inner = ("up",) if sizes.is_gpt else ("gate", "up")
        self.mlp_in = nn.ModuleDict({name: nn.Linear(hidden, sizes.ffn, bias) for name in inner})
        self.mlp_out = nn.Linear(sizes.ffn, hidden, bias)

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, seen: Seen) -> Tensor:
        x_BSD = x_BSD + self.projection(self._attention(self.attention_norm(x_BSD), rotary, seen))
        return x_BSD + self.mlp_out(self._inner(self.mlp_norm(x_BSD)))

    def _attention(self, x_BSD: Tensor, rotary: Rotary | None, seen: Seen) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = (
            self.qkv[name](x_BSD).unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for name in "qkv"
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        if rotary is not None:
            q_BNSH, k_BKSH = (rotary(x_BNSH, seen.positions_bs) for x_BNSH in (q_BNSH, k_BKSH))
        grouped = self.sizes.kv_heads != self.sizes.heads
        o_BNSH = F.scaled_dot_product_attention(
            q_BNSH,
            k_BKSH,
            v_BKSH,
            attn_mask=seen.mask_b1ss,
            is_causal=seen.mask_b1ss is None,
            enable_gqa=grouped,
        )
        return o_BNSH.transpose(1, 2).flatten(2)

    def _inner(self, x_BSD: Tensor) -> Tensor:
        if self.sizes.is_gpt:
            return F.gelu(self.mlp_in["up"](x_BSD), approximate="tanh")
        return F.silu(self.mlp_in["gate"](x_BSD)) * self.mlp_in["up"](x_BSD)


class PlainModel(nn.Module):
    """A decoder-only transformer in ``dtype``, uninitialised beyond PyTorch's defaults (see `load_named`)."""

    def __init__(self, sizes: PlainSizes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden) if sizes.is_gpt else None
        self.rotary = None if sizes.is_gpt else Rotary(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.final_norm = norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=sizes.head_bias)
        if sizes.tied_head:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Token ids to logits_BSV."""
        x_BSD, seen = self.embedding(tokens_BS), Seen.of(tokens_BS, self.sizes)
        if self.positions is not None:
            positions = slice(tokens_BS.shape[1]) if seen.positions_bs is None else seen.positions_bs
            x_BSD = x_BSD + self.positions.weight[positions]
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.rotary, seen)
        return self.head(self.final_norm(x_BSD))

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Sum of the tokens' cross-entropies, in nats."""
        return F.cross_entropy(self(tokens_BS).flatten(0, 1), targets_BS.flatten(), reduction="sum")


def norm(sizes: PlainSizes) -> nn.Module:
    """The family's normalisation of the hidden dim."""
    centers = sizes.is_gpt or sizes.layer_norm
    kind = nn.LayerNorm if centers else nn.RMSNorm  # nn.RMSNorm is F.rms_norm with a weight
    return kind(sizes.hidden, eps=sizes.norm_eps)


class PlainTrainer:
    """The training loop: gradient accumulation, clipping, AdamW."""

    def __init__(self, model: PlainModel, settings: PlainSettings) -> None:
        self.model, self.settings = model, settings
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, step: int, windows: Sequence[Tensor]) -> tuple[float, float]:
        """Train on micro-batches of windows (B x (S + 1) tokens each); returns (mean loss, gradient norm)."""
        tokens = sum(window.shape[0] * (window.shape[1] - 1) for window in windows)
        losses = []  # read at the end: until then the host may run ahead of a GPU
        for window in windows:
            loss = self.model.loss_sum(window[:, :-1], window[:, 1:])
            (loss / tokens).backward()
            losses.append(loss.detach())
        limit = self.settings.clip_norm or math.inf
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / tokens, gradient_norm.item()

    @torch.no_grad()
    def mean_loss(self, windows: Sequence[Tensor]) -> float:
        """Mean loss over the tokens of micro-batches of windows, without training."""
        losses = [self.model.loss_sum(window[:, :-1], window[:, 1:]).item() for window in windows]
        return sum(losses) / sum(window[:, 1:].numel() for window in windows)


@torch.no_grad()
def load_named(model: PlainModel, tensors: Mapping[str, Tensor]) -> None:
    """Set all parameters from tensors with Braid's global names, which are this model's own.

    Raises ValueError, naming the difference, if the names are not those of the model.
    """
    parameters = dict(model.named_parameters())
    if odd := parameters.keys() ^ tensors.keys():
        raise ValueError(f"these are in the model or in the tensors, not in both: {', '.join(sorted(odd))}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
