"""The operators of `braid.kernels.operators` with Triton's kernels: the same contract, the same saved values.

Legend as there: t or T tokens, D hidden, F feed-forward width, I and O input and output features, V local
vocabulary rows. What is not here stays PyTorch's: embeddings, scaled-dot-product attention, the loss of a
group's statistics.
"""

from torch import Tensor

from braid.kernels.fused import activation, cross_entropy, gemm, norm, norm_gradient, rotary
from braid.kernels.operators.accumulation import accumulate_sum
from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.attention import Attention
from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.operators.linear import ALL, Linear
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.residual import Residual


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
        return (norm_gradient.norm_input_gradient(dy_tD, x_tD, statistics_1t, self.weight, d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the weight's gradient."""
        norm_gradient.norm_weight_gradient(
            dy_tD, x_tD, rstd_t1.reshape(1, -1), self.gradients["weight"], None
        )


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
        return (norm_gradient.norm_input_gradient(dy_tD, x_tD, statistics_2t, self.weight, d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the gradients of weight and bias."""
        norm_gradient.norm_weight_gradient(
            dy_tD, x_tD, statistics_t2.t().contiguous(), self.gradients["weight"], self.gradients["bias"]
        )


class TritonResidual(Residual):
    """`Residual` in one pass."""

    def forward(self, branch_tD: Tensor, x_tD: Tensor) -> tuple[Tensor]:
        """Return y_tD."""
        return (norm.bias_dropout_add(x_tD, branch_tD, self.bias, None, 0.0),)

    def weight_gradient(self, dy_tD: Tensor) -> None:
        """Accumulate the bias's gradient."""
        assert self.bias is not None, "a residual connection without bias has no weight gradient"
        norm_gradient.bias_dropout_add_gradient(dy_tD, None, 0.0, self.gradients["bias"])


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
        return (activation.bias_gelu(h_TF, None),)

    def input_gradient(self, d_a_TF: Tensor, h_TF: Tensor) -> tuple[Tensor]:
        """Return d_h_TF."""
        return (activation.bias_gelu_gradient(d_a_TF, h_TF, None, None),)


class TritonLinear(Linear):
    """`Linear` whose kernels can leave multiprocessors free and accumulate the weight's gradient."""

    num_sms = 0
    """Multiprocessors that the kernels take; 0: all."""

    def forward(self, x_TI: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return y_TO; of columns, as `Linear` does it."""
        if not inputs == outputs == ALL:
            return super().forward(x_TI, inputs=inputs, outputs=outputs)
        return (gemm.linear(x_TI, self.weight, self.bias, self.num_sms, 1, None),)

    def input_gradient(self, dy_TO: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return dx_TI; of columns, as `Linear` does it."""
        if not inputs == outputs == ALL:
            return super().input_gradient(dy_TO, inputs=inputs, outputs=outputs)
        return (gemm.linear_input_gradient(dy_TO, self.weight, self.num_sms, 1, None),)

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Accumulate dyᵀ x in the product's epilogue, and the sum of dy if there is a bias."""
        gemm.accumulate_product(self.gradients["weight"], dy_TO, x_TI, self.num_sms)
        if self.bias is not None:
            accumulate_sum(self.gradients["bias"], dy_TO)


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
