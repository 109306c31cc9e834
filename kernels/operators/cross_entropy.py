"""Vocabulary-parallel cross-entropy around a single all-gather.

Each rank reduces its columns of the logits to three numbers per token (`CrossEntropyStatistics`); the ranks
gather them and combine them (`CrossEntropyLoss`); the gradient needs nothing but the logits and the
combined log-partition. Megatron-LM (Shoeybi et al. 2019, section 3) reduces three times instead; the
combination of partial maxima and sums is that of Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax".

Label smoothing and z-loss change the gradient alone, for which these numbers suffice: losses are plain
cross-entropies, which runs with and without them, and training and validation, have in common.

Legend: T tokens, V local vocabulary rows, 3 statistics per token, G groups of columns (the ranks of the
tensor group), c tokens of a chunk. Accumulation is in fp32, in float64 for float64 logits. No matrix of
probabilities is stored: exponentials are computed chunk by chunk of tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from braid.kernels.operators.embedding import VocabularyShard
from braid.kernels.operators.operator import ComputeOperator, wide

_CPU_CHUNK_BYTES = 1 << 20  # stays in a core's second-level cache: measured 2.5x faster than the whole matrix
_DEVICE_CHUNK_BYTES = 1 << 28  # on devices, launches cost time and only the temporary's size matters


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Return slices of tokens such that the wide logits of a slice fit the chunk size."""
    limit_bytes = _CPU_CHUNK_BYTES if logits_TV.device.type == "cpu" else _DEVICE_CHUNK_BYTES
    tokens, rows = logits_TV.shape
    step = max(1, limit_bytes // (rows * wide(logits_TV.dtype).itemsize))
    return (slice(start, start + step) for start in range(0, tokens, step))


class CrossEntropyStatistics(ComputeOperator):
    """The rank's share of the loss: columns [first_row, first_row + rows) of the logits.

    The gradient is that of the cross-entropy with targets of which the share ``label_smoothing`` is spread
    evenly over the vocabulary, plus ``z_loss`` x log-partition^2 (PaLM: Chowdhery et al. 2022, section 5).
    """

    def __init__(
        self, *, rows: int, first_row: int, vocabulary: int, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.spread = label_smoothing / vocabulary
        """Probability of every token that is not the target."""
        self.shard = VocabularyShard(rows=rows, first_row=first_row, vocabulary=vocabulary)

    def forward(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor]:
        """Return statistics_T3: max, sum of exp(logit - max), and the target's logit (0 if another rank has
        it).

        Raise ValueError for a target outside the vocabulary, on the CPU only.
        """
        statistics_T3 = logits_TV.new_empty(logits_TV.shape[0], 3, dtype=wide(logits_TV.dtype))
        maximum_T1, sum_T, target_T1 = statistics_T3[:, 0:1], statistics_T3[:, 1], statistics_T3[:, 2:3]
        for chunk in _chunks(logits_TV):
            maximum_T1[chunk] = logits_TV[chunk].amax(dim=-1, keepdim=True)
            sum_T[chunk] = torch.sub(logits_TV[chunk], maximum_T1[chunk]).exp_().sum(dim=-1)
        row_T, outside_T = self.shard.locate(targets_T)
        target_T1.copy_(logits_TV.gather(1, row_T.unsqueeze(-1)))
        if outside_T is not None:
            target_T1.masked_fill_(outside_T.unsqueeze(-1), 0)
        return (statistics_T3,)

    def input_gradient(
        self, logits_TV: Tensor, log_partition_T: Tensor, targets_T: Tensor, scale: Tensor | float
    ) -> tuple[Tensor]:
        """Return d_logits_TV, written OVER the logits, as no later operator reads them.

        It is scale * (softmax * (1 + 2 z_loss log_partition) - (1 - label_smoothing) onehot - spread).

        ``scale`` (a number, a 0-dim tensor, or one number per token: scale_T) is the gradient of the
        tokens' losses.
        """
        row_T, outside_T = self.shard.locate(targets_T)
        minus_onehot_T = log_partition_T.new_full(row_T.shape, self.label_smoothing - 1)
        if outside_T is not None:
            minus_onehot_T.masked_fill_(outside_T, 0)
        in_place = logits_TV.dtype == log_partition_T.dtype
        scale_T1 = scale.unsqueeze(-1) if isinstance(scale, Tensor) and scale.dim() == 1 else None
        for chunk in _chunks(logits_TV):
            logits_cV = logits_TV[chunk]
            d_cV = logits_cV if in_place else logits_cV.to(log_partition_T.dtype)
            d_cV.sub_(log_partition_T[chunk].unsqueeze(-1)).exp_()
            if self.z_loss:
                d_cV.mul_((1 + 2 * self.z_loss * log_partition_T[chunk]).unsqueeze(-1))
            if self.label_smoothing:
                d_cV.sub_(self.spread)
            d_cV.scatter_add_(1, row_T[chunk].unsqueeze(-1), minus_onehot_T[chunk].unsqueeze(-1))
            d_cV.mul_(scale if scale_T1 is None else scale_T1[chunk])
            if not in_place:
                logits_cV.copy_(d_cV)
        return (logits_TV,)


class CrossEntropyLoss(ComputeOperator):
    """The combined loss of all ranks: every rank does the same small computation."""

    def __init__(self, *, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens' losses_T, in nats, and log_partition_T.

        ``gathered`` is G x T x 3, or (G*T) x 3 as an all-gather along the first dim returns it.
        """
        gathered_GT3 = gathered.reshape(self.groups, -1, 3)
        maximum_GT, sum_GT, target_GT = gathered_GT3.unbind(dim=-1)
        maximum_T = maximum_GT.amax(dim=0)
        partition_T = (maximum_GT - maximum_T).exp_().mul_(sum_GT).sum(dim=0)
        log_partition_T = partition_T.log_().add_(maximum_T)
        return log_partition_T - target_GT.sum(dim=0), log_partition_T
