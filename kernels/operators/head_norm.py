"""RMSNorm over every head of queries and of keys, before they are turned (Henry et al. 2020, as in Qwen3).

Legend: T tokens, C columns q, k, v of a rank, each head by head; n its query heads and key heads together,
d the dimension of a head.
"""

import torch
from torch import Tensor

from braid.kernels.operators.operator import ComputeOperator, empty_parameter


class HeadNorm(ComputeOperator):
    """x / sqrt(mean(x²) + eps) * weight for every head of q, with one weight, and of k, with another.

    Values are handed on as they are. Statistics are at least fp32, and so is all arithmetic of the gradients.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        self.q_weight = empty_parameter(head_dim, device=device, dtype=dtype)
        self.k_weight = empty_parameter(head_dim, device=device, dtype=dtype)

    def forward(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_TC and rstd_Tn, the reciprocal root mean squares (fp32, or float64 if qkv is)."""
        x_Tnd, v = self._parts(qkv_TC)
        y_TC = torch.empty_like(qkv_TC)
        y_Tnd, v_out = self._parts(y_TC)
        wide = torch.promote_types(qkv_TC.dtype, torch.float32)
        norm_Tn = torch.linalg.vector_norm(x_Tnd, dim=-1, dtype=wide)
        rstd_Tn = norm_Tn.square_().div_(self.head_dim).add_(self.eps).rsqrt_()
        torch.mul(x_Tnd, rstd_Tn.unsqueeze(-1), out=y_Tnd)
        y_Tnd.mul_(self._weights_nd())
        v_out.copy_(v)
        return y_TC, rstd_Tn

    def input_gradient(self, dy_TC: Tensor, qkv_TC: Tensor, rstd_Tn: Tensor) -> tuple[Tensor]:
        """Return d_qkv_TC: rstd * (w dy - x rstd * mean(w dy x rstd)) for a head of q or k with weight w."""
        dy_Tnd, d_v = self._parts(dy_TC)
        d_qkv_TC = torch.empty_like(dy_TC)
        dx_Tnd, v_out = self._parts(d_qkv_TC)
        normed_Tnd = self._normed(qkv_TC, rstd_Tn)
        scaled_Tnd = dy_Tnd * self._weights_nd().to(rstd_Tn.dtype)
        mean_Tn1 = (scaled_Tnd * normed_Tnd).mean(-1, keepdim=True)
        torch.mul(scaled_Tnd.sub_(normed_Tnd.mul_(mean_Tn1)), rstd_Tn.unsqueeze(-1), out=dx_Tnd)
        v_out.copy_(d_v)
        return (d_qkv_TC,)

    def weight_gradient(self, dy_TC: Tensor, qkv_TC: Tensor, rstd_Tn: Tensor) -> None:
        """Accumulate the sums over tokens and heads of dy * x * rstd; takes what ``input_gradient`` takes."""
        dy_Tnd, _ = self._parts(dy_TC)
        sums_nd = self._normed(qkv_TC, rstd_Tn).mul_(dy_Tnd).sum(0)
        self.gradients["q_weight"].add_(sums_nd[: self.heads].sum(0))
        self.gradients["k_weight"].add_(sums_nd[self.heads :].sum(0))

    def _normed(self, qkv_TC: Tensor, rstd_Tn: Tensor) -> Tensor:
        """Queries and keys over their root mean squares, in the statistics' dtype."""
        return self._parts(qkv_TC)[0] * rstd_Tn.unsqueeze(-1)

    def _weights_nd(self) -> Tensor:
        shapes = (self.heads, -1), (self.kv_heads, -1)
        pairs = zip((self.q_weight, self.k_weight), shapes, strict=True)
        return torch.cat([weight.expand(shape) for weight, shape in pairs])

    def _parts(self, columns_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Views: heads that are normed, T x n x d, and the columns of the values."""
        normed = (self.heads + self.kv_heads) * self.head_dim
        first, values = columns_TC[:, :normed], columns_TC[:, normed:]
        return first.unflatten(1, (-1, self.head_dim)), values
