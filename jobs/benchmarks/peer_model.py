"""The Llama that every peer trains, whole or as stages of a pipeline, in public PyTorch only.

Legend: B samples, S tokens of a sample (on this rank, where the sequence is sharded), D hidden, N query heads
(on this rank), K key-value heads (on this rank), H head dimension, V vocabulary.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from braid.jobs.benchmarks.plain_torch import PlainSizes, Rotary


class Attention(nn.Module):
    """Causal grouped-query attention over all tokens of a sample; it takes the heads it finds in ``q``."""

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        self.head_dim, self.grouped = sizes.head_dim, sizes.kv_heads != sizes.heads
        query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q = nn.Linear(sizes.hidden, query, bias=False)
        self.k = nn.Linear(sizes.hidden, key, bias=False)
        self.v = nn.Linear(sizes.hidden, key, bias=False)
        self.projection = nn.Linear(query, sizes.hidden, bias=False)

    def forward(self, x_BSD: Tensor, rotary: Rotary) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = (
            linear(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        o_BNSH = self.attend(rotary(q_BNSH, None), rotary(k_BKSH, None), v_BKSH)
        return self.projection(o_BNSH.transpose(1, 2).flatten(2))

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        """Values that every query has found."""
        return F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=self.grouped)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.out = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps)
        self.attention = Attention(sizes)  # or of another kind (`braid.jobs.benchmarks.context_peers`)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps)
        self.mlp: nn.Module = Mlp(sizes)  # or a mixture (`braid.jobs.benchmarks.expert_peers`)

    def forward(self, x_BSD: Tensor, rotary: Rotary) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Stage(nn.Module):
    """Stage ``index`` of ``count``: consecutive layers; the first has the embedding, the last the head."""

    def __init__(self, sizes: PlainSizes, index: int, count: int) -> None:
        super().__init__()
        begin, end = sizes.layers * index // count, sizes.layers * (index + 1) // count
        first, last = index == 0, index == count - 1
        self.rotary = Rotary(sizes).float()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden) if first else None
        self.layers = nn.ModuleDict({str(number): Layer(sizes) for number in range(begin, end)})
        self.final_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps) if last else None
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids_BS (first stage) or activations_BSD to activations_BSD or logits_BSV (last stage)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        if self.final_norm is not None and self.head is not None:
            x = self.head(self.final_norm(x))
        return x


NAMES = {
    ".attention.projection.": ".projection.",
    ".attention.": ".qkv.",
    ".mlp.router.": ".router.",
    ".mlp.experts.": ".experts.",
    ".mlp.out.": ".mlp_out.",
    ".mlp.": ".mlp_in.",
}
"""Parts of names here -> the same in `Peer.load`'s names, to be replaced in this order."""


def global_name(name: str) -> str:
    """``layers.3.attention.q.weight`` -> ``layers.3.qkv.q.weight``."""
    for here, there in NAMES.items():
        name = name.replace(here, there)
    return name
