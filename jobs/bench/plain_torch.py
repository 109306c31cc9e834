"""A training loop as a PyTorch user writes it: ordinary modules, autograd, AdamW.

It is the independent reference of the tests and the baseline of the benchmark, so it must be good: PyTorch's
own attention, norms, loss and fused AdamW. From Braid it uses only the records of sizes and settings.
Projections are separate, as in Hugging Face's Llama: fused ones were no faster here, since autograd
concatenates their gradients with a copy.

Legend: B samples, S tokens of a sample (on this rank, where a peer shards the sequence), D hidden, N query
heads, K key-value heads, H head dimension (heads of this rank, where a peer shards them), V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.scheduling.model.shape import ModelShape

if TYPE_CHECKING:
    from braid.actors.config import TrainConfig
    from braid.actors.stage.state.optimizer import OptimizerSettings

    Settings = TrainConfig | OptimizerSettings


def learning_rate(settings: "Settings", step: int) -> float:
    """Return a step's learning rate (first step: 0): linear warm-up, then cosine decay to ``min_lr_fraction *
    lr``."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = min((step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1), 1.0)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_fraction + (1 - settings.min_lr_fraction) * cosine)


def adamw(parameters: Iterable[nn.Parameter], settings: "Settings") -> torch.optim.AdamW:
    """Build an AdamW that applies weight decay to matrices only."""
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    s = settings
    return torch.optim.AdamW(groups, s.lr, s.betas, s.eps, s.weight_decay, fused=True)


class Rotary(nn.Module):
    """Rotary position embedding as in Hugging Face's Llama: dimension i is rotated together with i + H/2."""

    cos: Tensor  # S x H
    sin: Tensor  # S x H

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        frequencies = shape.rotary_base**-exponents
        magnitude = 1.0
        if shape.rotary_scaling is not None:
            frequencies = frequencies.new_tensor(shape.rotary_scaling.frequencies(frequencies.tolist()))
            magnitude = shape.rotary_scaling.magnitude
        angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float64), frequencies)
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
    """Positions of tokens and the attention mask; None if every sample is one document."""

    positions_bs: Tensor | None = None
    mask_b1ss: Tensor | None = None

    @classmethod
    def of(cls, tokens_BS: Tensor, end_of_document: int, restart_positions: bool) -> "Seen":
        """Build masks, and perhaps positions, that begin anew after every token ``end_of_document``."""
        places_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        behind_BS = F.pad(tokens_BS[:, :-1] == end_of_document, (1, 0))
        first_BS = torch.where(behind_BS, places_BS, 0).cummax(dim=1).values
        earlier_SS = places_BS[0, :, None] >= places_BS[0]
        same_BSS = first_BS[:, :, None] == first_BS[:, None]
        positions_BS = places_BS - first_BS if restart_positions else places_BS
        return cls(positions_BS, (same_BSS & earlier_SS).unsqueeze(1))


class Projections(nn.ModuleDict):
    """Several linear maps of the same input, by name."""

    def __init__(self, inputs: int, outputs: Mapping[str, int], bias: bool) -> None:
        super().__init__({name: nn.Linear(inputs, width, bias) for name, width in outputs.items()})

    def forward(self, x_BSD: Tensor) -> list[Tensor]:
        return [linear(x_BSD) for linear in self.values()]


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.sizes = shape
        hidden, bias = shape.hidden, shape.family == "gpt"
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attention_norm = norm(shape)
        self.qkv = Projections(hidden, {"q": query, "k": key, "v": key}, bias or shape.qkv_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.head_norm else None for _ in "qk"
        )
        self.projection = nn.Linear(query, hidden, bias or shape.projection_bias)
        self.mlp_norm = norm(shape)
        inner = ("up",) if shape.family == "gpt" else ("gate", "up")
        self.mlp_in = Projections(hidden, dict.fromkeys(inner, shape.ffn), bias)
        self.mlp_out = nn.Linear(shape.ffn, hidden, bias)

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, seen: Seen) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary, seen)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))

    def attention(self, x_BSD: Tensor, rotary: Rotary | None, seen: Seen) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = (
            y_BSD.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for y_BSD in self.qkv(x_BSD)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        if rotary is not None:
            q_BNSH, k_BKSH = (rotary(x_BNSH, seen.positions_bs) for x_BNSH in (q_BNSH, k_BKSH))
        o_BNSH = self.attend(q_BNSH, k_BKSH, v_BKSH, seen.mask_b1ss)
        return self.projection(o_BNSH.transpose(1, 2).flatten(2))

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.sizes.kv_heads != self.sizes.heads
        return F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )

    def mlp(self, x_BSD: Tensor) -> Tensor:
        *gate, up = self.mlp_in(x_BSD)
        return self.mlp_out(F.silu(gate[0]) * up if gate else F.gelu(up, approximate="tanh"))


class PlainModel(nn.Module):
    """A decoder-only transformer in ``dtype``, or a stage of one, with PyTorch's default initial values."""

    end_of_document: int | None = None
    """The token after which attention begins anew; None: attention spans whole samples."""
    restart_positions = False

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype = torch.float32,
        *,
        stage: int = 0,
        stages: int = 1,
        layer: Callable[[int], Layer] | None = None,
    ) -> None:
        """``layer``: makes the layer with a given number. Of several ``stages``, the first has the embedding,
        the last the head."""
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        is_gpt = shape.family == "gpt"
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if first else None
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if first and is_gpt else None
        self.rotary = None if is_gpt else Rotary(shape)
        numbers = range(shape.layers * stage // stages, shape.layers * (stage + 1) // stages)
        self.layers = nn.ModuleDict(
            {str(number): layer(number) if layer else Layer(shape) for number in numbers}
        )
        self.final_norm = norm(shape) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=shape.head_bias) if last else None
        if shape.tied_head and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids_BS (in later stages: x_BSD) to logits_BSV (in stages before the last: x_BSD)."""
        seen = Seen()
        if self.end_of_document is not None:
            seen = Seen.of(x, self.end_of_document, self.restart_positions)
        if self.embedding is not None:
            length, x = x.shape[1], self.embedding(x)
            if self.positions is not None:
                positions = slice(length) if seen.positions_bs is None else seen.positions_bs
                x = x + self.positions.weight[positions]
        for layer in self.layers.values():
            x = layer(x, self.rotary, seen)
        if self.final_norm is not None and self.head is not None:
            x = self.head(self.final_norm(x))
        return x

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of the tokens' cross-entropies, in nats."""
        return F.cross_entropy(self(tokens_BS).flatten(0, 1), targets_BS.flatten(), reduction="sum")


def norm(shape: ModelShape) -> nn.Module:
    """Build the family's normalisation layer over the hidden dimension."""
    kind = nn.LayerNorm if shape.family == "gpt" or shape.layer_norm else nn.RMSNorm
    return kind(shape.hidden, eps=shape.norm_eps)


class PlainTrainer:
    """The training loop: gradient accumulation, clipping (none if ``clip_norm`` is 0), AdamW."""

    def __init__(self, model: PlainModel, settings: "Settings") -> None:
        self.model, self.settings = model, settings
        self.optimizer = adamw(model.parameters(), settings)

    def step(self, step: int, windows: Sequence[Tensor]) -> tuple[float, float]:
        """Train on micro-batches of windows (B x (S + 1) tokens each); return (mean loss, gradient norm)."""
        tokens = sum(window.shape[0] * (window.shape[1] - 1) for window in windows)
        losses = []  # read at the end: until then the host may run ahead of a GPU
        for window in windows:
            loss = self.model.loss_sum(window[:, :-1], window[:, 1:])
            (loss / tokens).backward()
            losses.append(loss.detach())
        limit = self.settings.clip_norm or math.inf
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / tokens, gradient_norm.item()

    @torch.no_grad()
    def mean_loss(self, windows: Sequence[Tensor]) -> float:
        """Return the mean loss per token over windows (B x (S + 1) tokens each), without training."""
        losses = [self.model.loss_sum(window[:, :-1], window[:, 1:]).item() for window in windows]
        return sum(losses) / sum(window[:, 1:].numel() for window in windows)


@torch.no_grad()
def load_named(model: PlainModel, tensors: Mapping[str, Tensor]) -> None:
    """Set all parameters from tensors with Braid's global names, which are also this model's names.

    Raise `ValueError`, naming the difference, if the names differ from the model's.
    """
    parameters = dict(model.named_parameters())
    if odd := parameters.keys() ^ tensors.keys():
        raise ValueError(f"these are in the model or in the tensors, not in both: {', '.join(sorted(odd))}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
