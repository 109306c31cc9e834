"""The operators of `braid.kernels.operators` with Triton's kernels: the same contract, the same saved values.

Legend as there: t or T tokens, D hidden, F feed-forward width, V local vocabulary rows. What is not here is
PyTorch's, which is as quick or quicker.
"""

from torch import Tensor

from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.attention import Attention
from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.permute import Dispatch, Permute, Places, Unpermute
from braid.kernels.triton import activation, cross_entropy, norm, permute, rotary


class TritonRMSNorm(RMSNorm):
    """`RMSNorm` in one pass over the memory for each method."""

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and rstd_t1."""
        y_tD, statistics_1t = norm.norm(x_tD, self.weight, None, self.eps)
        return y_tD, statistics_1t.view(-1, 1)

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return dx_tD, plus ``d_skip_tD`` if given."""
        statistics_1t = rstd_t1.reshape(1, -1)
        return (norm.norm_input_gradient(dy_tD, x_tD, statistics_1t, self.weight, d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the weight's gradient."""
        norm.norm_weight_gradient(dy_tD, x_tD, rstd_t1.reshape(1, -1), self.gradients["weight"], None)


class TritonLayerNorm(LayerNorm):
    """`LayerNorm` in one pass over the memory for each method."""

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and statistics_t2, stored column by column."""
        y_tD, statistics_2t = norm.norm(x_tD, self.weight, self.bias, self.eps)
        return y_tD, statistics_2t.t()

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return dx_tD, plus ``d_skip_tD`` if given."""
        statistics_2t = statistics_t2.t().contiguous()
        return (norm.norm_input_gradient(dy_tD, x_tD, statistics_2t, self.weight, d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the gradients of weight and bias."""
        norm.norm_weight_gradient(
            dy_tD, x_tD, statistics_t2.t().contiguous(), self.gradients["weight"], self.gradients["bias"]
        )


class TritonSwiGLU(SwiGLU):
    """`SwiGLU` in one pass each way."""

    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        """Return a_TF."""
        return (activation.swiglu(gu_T2F),)

    def input_gradient(self, d_a_TF: Tensor, gu_T2F: Tensor) -> tuple[Tensor]:
        """Return d_gu_T2F."""
        return (activation.swiglu_gradient(d_a_TF, gu_T2F),)


class TritonGELU(GELU):
    """`GELU` in one pass each way."""

    def forward(self, h_TF: Tensor) -> tuple[Tensor]:
        """Return a_TF."""
        return (activation.gelu(h_TF),)

    def input_gradient(self, d_a_TF: Tensor, h_TF: Tensor) -> tuple[Tensor]:
        """Return d_h_TF."""
        return (activation.gelu_gradient(d_a_TF, h_TF),)


class _TritonPlaces(Places):
    """`Places` that move rows in one pass; the numbers are int32, which the kernels read."""

    def gather(self, x_tD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        """Return rows_nD."""
        return permute.gather_rows(x_tD, self.sources_n, self.slots_tk.shape[1], _gates(gates_tk))

    def combine(self, rows_nD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        """Return y_tD."""
        self._check(rows_nD)
        return permute.combine_rows(rows_nD, self.slots_tk, _gates(gates_tk))

    def gate_gradient(self, dy_tD: Tensor, rows_nD: Tensor) -> Tensor:
        """Return d_gates_tk (fp32)."""
        self._check(rows_nD)
        return permute.combine_weight_gradient(dy_tD, rows_nD, self.slots_tk)


def _gates(gates_tk: Tensor | None) -> Tensor | None:
    return None if gates_tk is None else gates_tk.contiguous()


class _TritonDispatch(Dispatch):
    def places(self, choice_tk: Tensor) -> Places:
        """Those of `Dispatch`: sorting stays PyTorch's."""
        places = super().places(choice_tk)
        return _TritonPlaces(
            sources_n=places.sources_n.int(), slots_tk=places.slots_tk.int(), complete=places.complete
        )


class TritonPermute(_TritonDispatch, Permute):
    """`Permute` in one pass each way."""


class TritonUnpermute(_TritonDispatch, Unpermute):
    """`Unpermute` in one pass, its two gradients in one each."""


class TritonAttention(Attention):
    """`Attention` with one kernel that turns queries and keys and packs them with the values."""

    def _turn_heads(self, qkv_bsnd: Tensor) -> Tensor:
        if self.rotary_base is None:
            return super()._turn_heads(qkv_bsnd)
        q, k, v = self._q_k_v(qkv_bsnd, dim=2)
        return rotary.rotary(q, k, v, *self._flat_tables(qkv_bsnd), False).view(qkv_bsnd.shape)

    def _turn_back(self, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Tensor:
        if self.rotary_base is None:
            return super()._turn_back(d_q, d_k, d_v)
        gradients = (d if d.stride(-1) == 1 else d.contiguous() for d in (d_q, d_k, d_v))
        return rotary.rotary(*gradients, *self._flat_tables(d_q), True)

    def _flat_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The tables, each s x d/2."""
        cos_s1h, sin_s1h = self._tables(like)
        return cos_s1h.squeeze(1), sin_s1h.squeeze(1)


class TritonCrossEntropyStatistics(CrossEntropyStatistics):
    """`CrossEntropyStatistics` in one pass each way."""

    def forward(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor]:
        """Return statistics_T3. A target outside the vocabulary raises on the CPU and is NaN elsewhere."""
        shard = self.shard
        statistics_T3 = cross_entropy.cross_entropy_statistics(
            logits_TV, targets_T, shard.first_row, shard.vocabulary
        )
        return (statistics_T3,)

    def input_gradient(
        self, logits_TV: Tensor, log_partition_T: Tensor, targets_T: Tensor, scale: Tensor | float
    ) -> tuple[Tensor]:
        """Return d_logits_TV, written over the logits."""
        tensor, factor = (scale, 1.0) if isinstance(scale, Tensor) else (None, float(scale))
        cross_entropy.cross_entropy_gradient(
            logits_TV, log_partition_T, targets_T, tensor, factor, self.shard.first_row
        )
        return (logits_TV,)
