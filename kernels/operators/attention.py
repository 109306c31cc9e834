"""Causal self-attention with rotary position embedding and grouped keys and values.

Sources: Vaswani et al. 2017; rotary embedding, Su et al. 2021, in the pairing of Hugging Face's Llama
(dimension i is rotated with i + d/2), so that weights are interchangeable; grouped queries, Ainslie et al.
2023.

Legend: T tokens = b samples of s tokens, Q = local query heads * d, K = local key/value heads * d, d the
dimension of a head, n heads.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from braid.kernels.operators.autograd import AutogradGraph, record
from braid.kernels.operators.operator import ComputeOperator, wide

BACKENDS: Final[Mapping[str, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Torch's attention kernels that do not store the scores, by name. Most support few devices and dtypes; the
first call raises RuntimeError if a kernel does not support its inputs."""


class Scaling(Hashable, Protocol):
    """Changes the frequencies and the magnitude of a rotary embedding; hashable, and equal by value."""

    @property
    def magnitude(self) -> float:
        """Factor by which the rotated vectors are multiplied."""

    def frequencies(self, plain: Sequence[float], /) -> Sequence[float]:
        """Return the frequencies (radians per token, highest first) in place of ``plain``."""


@lru_cache(maxsize=8)
def rotary_tables(
    sequence: int,
    head_dim: int,
    base: float,
    device: torch.device,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return tables (each s x 1 x d/2) of cos and sin of position * frequency; all layers share one copy.

    Frequency i is base^(-2i/d), or the value that ``scaling`` replaces it with; ``scaling`` may also multiply
    the tables. Tables for 16-bit activations (``dtype``) are fp32, since 16 bits would round angles visibly.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    positions = torch.arange(sequence, device=device, dtype=torch.float64)
    frequencies = base**-exponents
    if scaling is not None:
        frequencies = frequencies.new_tensor(scaling.frequencies(frequencies.tolist()))
    magnitude = 1.0 if scaling is None else scaling.magnitude
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    cos, sin = ((table * magnitude).to(wide(dtype)) for table in (angles.cos(), angles.sin()))
    return cos, sin


def turn(
    x_bsnd: Tensor, tables: tuple[Tensor, Tensor] | None, out_bsnd: Tensor, *, back: bool = False
) -> None:
    """Rotate every pair (i, i + d/2) of x by its angle, or by the negative angle if ``back``; write to
    ``out``.

    The rotation is computed in the dtype of the tables (`rotary_tables`) and rounded once to the dtype of
    ``out``. Without tables x is copied.
    """
    if tables is None:
        out_bsnd.copy_(x_bsnd)
        return
    (cos, sin), sign = tables, -1 if back else 1
    first, second = x_bsnd.chunk(2, dim=-1)
    out_first, out_second = out_bsnd.chunk(2, dim=-1)
    for one, other, weight, out in ((first, second, -sign, out_first), (second, first, sign, out_second)):
        if out.dtype == cos.dtype:
            torch.mul(one, cos, out=out).addcmul_(other, sin, value=weight)
        else:
            torch.addcmul(torch.mul(one, cos), other, sin, value=weight, out=out)


def _grouped_kernel_exists(q: Tensor) -> bool:
    """Return whether an attention kernel that stores no scores accepts fewer key heads than query heads.

    The flash kernels do: on a CPU in every dtype, on CUDA in 16 bits. Otherwise torch would silently choose
    the implementation that stores all s x s scores.
    """
    return q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16)


class Heads(ComputeOperator):
    """Base of operators on this rank's heads of queries, keys and values, which rotary embedding rotates."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sequence: int,
        rotary_base: float | None,
        rotary_scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.sequence = heads, kv_heads, head_dim, sequence
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling

    @property
    def width(self) -> int:
        """Number of columns of q, k and v together, head by head: Q + 2K."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def _q_k_v(self, heads: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=dim)

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary tables (cos, sin) of all positions, on the device of ``like``."""
        assert self.rotary_base is not None
        where = like.device, like.dtype
        return rotary_tables(self.sequence, self.head_dim, self.rotary_base, *where, self.rotary_scaling)


class Attention(Heads):
    """Causal attention, softmax(q kᵀ / sqrt(d)) v, for this rank's heads; has no parameters.

    ``backend``: the torch kernel that computes attention (a key of `BACKENDS`); None: torch chooses.
    """

    def __init__(self, *, backend: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.backend = None if backend is None else BACKENDS[backend]

    def forward(self, qkv: Tensor) -> tuple[Tensor, AutogradGraph]:
        """Map qkv (T x (Q + 2K)) to o_TQ and the values saved for the backward pass.

        The saved values are the rotated q, k, v (a copy: qkv may be freed), the log-sum-exp of the scores,
        and o, which shares the storage of o_TQ.
        """
        turned_bsnd = self._turn_heads(self._split_heads(qkv))
        (o_bnsd,), graph = record(self._attend, *self._q_k_v(turned_bsnd.transpose(1, 2), dim=1))
        return o_bnsd.transpose(1, 2).reshape(qkv.shape[0], -1), graph

    def input_gradient(self, d_o_TQ: Tensor, saved: AutogradGraph) -> tuple[Tensor]:
        """Return d_qkv (T x (Q + 2K)), the gradient of the input; free the memory of ``saved``."""
        d_o_bnsd = d_o_TQ.view(-1, self.sequence, self.heads, self.head_dim).transpose(1, 2)
        d_q, d_k, d_v = (cast(Tensor, d) for d in saved.gradients((d_o_bnsd,), saved.inputs))
        return (self._turn_back(d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)),)

    def _turn_heads(self, qkv_bsnd: Tensor) -> Tensor:
        """Return a copy of q, k, v in which q and k are rotated."""
        turned_bsnd = torch.empty_like(qkv_bsnd)
        turning = self.heads + self.kv_heads if self.rotary_base is not None else 0
        if turning:
            turn(qkv_bsnd[:, :, :turning], self._tables(qkv_bsnd), turned_bsnd[:, :, :turning])
        turned_bsnd[:, :, turning:] = qkv_bsnd[:, :, turning:]
        return turned_bsnd

    def _turn_back(self, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Tensor:
        """Return d_qkv (T x (Q + 2K)), given the gradients of the rotated heads, each b x s x n x d."""
        d_qkv = d_q.new_empty(d_q.shape[0] * d_q.shape[1], self.width)
        to_q, to_k, to_v = self._q_k_v(self._split_heads(d_qkv), dim=2)
        tables = None if self.rotary_base is None else self._tables(d_qkv)
        turn(d_q, tables, to_q, back=True)
        turn(d_k, tables, to_k, back=True)
        to_v.copy_(d_v)
        return d_qkv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = self.heads != self.kv_heads
        if grouped and not _grouped_kernel_exists(q):
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
            grouped = False
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def _split_heads(self, qkv: Tensor) -> Tensor:
        """View qkv as b x s x heads x d; raise ValueError if it has other columns."""
        if qkv.shape[1] != self.width:
            raise ValueError(
                f"qkv has {qkv.shape[1]} columns, not (heads + 2 kv_heads) head_dim = {self.width}"
            )
        return qkv.view(-1, self.sequence, self.heads + 2 * self.kv_heads, self.head_dim)
