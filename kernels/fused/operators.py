"""The operators of `braid.kernels.operators` with Triton's kernels: the same contract, the same saved values.

Legend as there: t or T tokens, D hidden, F feed-forward width, I and O input and output features, V local
vocabulary rows. What is not here stays PyTorch's: embeddings, scaled-dot-product attention, the loss of a
group's statistics.

The router of a mixture of experts stays PyTorch's too: `braid.kernels.fused.router` makes other choices and
other losses than `Router`. It compares probabilities in fp32, where logits that differ may be equal, and not
logits; it knows no bias that is added to what is compared and no loss that keeps logits small; its share of
visits is this rank's, not the micro-batch's; and it takes at most 1024 experts.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from braid.kernels.fused import (
    activation,
    cross_entropy,
    gemm,
    grouped_gemm,
    norm,
    norm_gradient,
    permute,
    rotary,
)
from braid.kernels.operators.accumulation import accumulate_sum
from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.attention import Attention
from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.operators.grouped_linear import GroupedLinear
from braid.kernels.operators.linear import ALL, Linear
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.permute import Dispatch, Permute, Places, Unpermute
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


class TritonGroupedLinear(GroupedLinear):
    """`GroupedLinear` with one kernel for all experts, whatever their rows."""

    num_sms = 0
    """Multiprocessors that the kernels take; 0: all."""
    _told: tuple[list[int], Tensor] | None = None
    """The last sizes and their offsets, on the host."""

    def forward(self, x_nI: Tensor, sizes: Sequence[int] | Tensor) -> tuple[Tensor]:
        """Return y_nO."""
        offsets = self._offsets(x_nI, sizes)
        return (grouped_gemm.grouped_linear(x_nI, self.weight, offsets, self.num_sms),)

    def input_gradient(self, dy_nO: Tensor, sizes: Sequence[int] | Tensor) -> tuple[Tensor]:
        """Return dx_nI, as `GroupedLinear` does."""
        offsets = self._offsets(dy_nO, sizes)
        return (grouped_gemm.grouped_input_gradient(dy_nO, self.weight, offsets, self.num_sms),)

    def weight_gradient(self, dy_nO: Tensor, x_nI: Tensor, sizes: Sequence[int] | Tensor) -> None:
        """Accumulate dyᵀ x of every expert's rows in the product's epilogue."""
        offsets, total_EOI = self._offsets(dy_nO, sizes), self.gradients["weight"]
        grouped_gemm.grouped_weight_gradient(total_EOI, dy_nO, x_nI, offsets, self.num_sms)

    def _offsets(self, x: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        """The first row of every expert and the end of the last one's, on the device of x.

        They are copied on the stream that reads them, from pinned memory: the host waits for nothing. That
        memory is kept as long as sizes stay the same (experts have a capacity), since a step that is captured
        copies from it again whenever it is replayed.
        """
        rows_E = self._checked(x, sizes)
        if self._told is None or self._told[0] != rows_E:
            ends = [0, *accumulate(rows_E)]
            self._told = rows_E, torch.tensor(ends, dtype=torch.int32, pin_memory=x.is_cuda)
        return self._told[1].to(x.device, non_blocking=True)


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
