"""Token and position embeddings, and the rows of the vocabulary that a rank holds.

Legend: T all tokens of the micro-batch, t this rank's slice of them, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.context_blocks import Documents
from braid.kernels.operators.operator import ComputeOperator, Home, check_numbers


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The range [first_row, first_row + rows) of a vocabulary's rows that one rank holds."""

    rows: int
    first_row: int
    vocabulary: int

    def __post_init__(self) -> None:
        last = self.first_row + self.rows
        if self.rows < 1 or self.first_row < 0 or last > self.vocabulary:
            raise ValueError(
                f"rows [{self.first_row}, {last}) of a vocabulary of {self.vocabulary}: "
                "every tensor-parallel rank needs at least one row, and none outside the vocabulary"
            )

    def locate(self, tokens_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each token's local row, and a mask of the tokens of other shards (None if there are none).

        The local rows of tokens of other shards are valid but arbitrary, and spread out, so that zeros
        scattered to them do not all go to one row. Raise ValueError for tokens outside the vocabulary, on the
        CPU only.
        """
        self._check(tokens_T)
        if self.rows == self.vocabulary:
            return tokens_T, None
        local_T = tokens_T - self.first_row
        outside_T = (local_T < 0).logical_or_(local_T >= self.rows)
        return local_T.remainder_(self.rows), outside_T

    def _check(self, tokens_T: Tensor) -> None:
        check_numbers("tokens", tokens_T, self.vocabulary, f"a vocabulary of {self.vocabulary}")


def _accumulate_rows(total_VD: Tensor, row_T: Tensor, d_TD: Tensor) -> None:
    """Add each row of d to its row of a sum of gradients, in an order that is the same in every run.

    ``index_add_`` is deterministic on the CPU only; elsewhere an accumulating ``index_put_`` is, which sorts.
    """
    d_TD = d_TD.to(total_VD.dtype)
    if d_TD.device.type == "cpu":
        total_VD.index_add_(0, row_T, d_TD)
    else:
        total_VD.index_put_((row_T,), d_TD, accumulate=True)


class VocabularyEmbedding(ComputeOperator):
    """Embeds tokens by rows [first_row, first_row + rows) of the table, which has ``vocabulary`` rows.

    The partial results of the ranks sum to the embedding: every row is zero on all ranks but one.
    """

    def __init__(
        self, *, hidden: int, rows: int, first_row: int, vocabulary: int, **home: Unpack[Home]
    ) -> None:
        super().__init__()
        self.shard = VocabularyShard(rows=rows, first_row=first_row, vocabulary=vocabulary)
        self.weight = nn.Parameter(torch.empty(rows, hidden, **home))

    def forward(self, tokens_T: Tensor) -> tuple[Tensor]:
        """Return partial_TD; raise ValueError for a token outside the vocabulary (CPU only)."""
        row_T, outside_T = self.shard.locate(tokens_T)
        partial_TD = F.embedding(row_T, self.weight)
        return (partial_TD if outside_T is None else partial_TD.masked_fill_(outside_T.unsqueeze(-1), 0),)

    def input_gradient(self, d_tD: Tensor) -> tuple[()]:
        """Drop the gradient of the embedded tokens, where the table is not trained."""
        return ()

    def weight_gradient(self, d_TD: Tensor, tokens_T: Tensor) -> None:
        """Accumulate d into the weight rows of the tokens that this rank holds; deterministic."""
        row_T, outside_T = self.shard.locate(tokens_T)
        if outside_T is not None:
            d_TD = d_TD.masked_fill(outside_T.unsqueeze(-1), 0)
        _accumulate_rows(self.gradients["weight"], row_T, d_TD)


class PositionEmbedding(ComputeOperator):
    """Adds learned position embeddings: y = x + weight[position].

    ``own``: positions in a sample of the tokens that this rank has (context parallelism), by default all.
    ``token_offset``: index of this operator's first token in the micro-batch's tokens, which are flattened
    sample by sample: token i has position own[(token_offset + i) mod len(own)].
    """

    def __init__(
        self,
        *,
        sequence: int,
        hidden: int,
        token_offset: int,
        own: Sequence[int] | None = None,
        **home: Unpack[Home],
    ) -> None:
        super().__init__()
        self.sequence, self.token_offset = sequence, token_offset
        self.own = None if own is None or list(own) == list(range(sequence)) else tuple(own)
        self.weight = nn.Parameter(torch.empty(sequence, hidden, **home))

    def forward(self, x_tD: Tensor, documents: Documents | None = None) -> tuple[Tensor]:
        return (F.embedding(self._positions(x_tD, documents), self.weight).add_(x_tD),)

    def input_gradient(self, dy_tD: Tensor, documents: Documents | None = None) -> tuple[Tensor]:
        return (dy_tD,)

    def weight_gradient(self, dy_tD: Tensor, documents: Documents | None = None) -> None:
        """Accumulate dy into the weight rows of its positions; deterministic."""
        _accumulate_rows(self.gradients["weight"], self._positions(dy_tD, documents), dy_tD)

    def _positions(self, x_tD: Tensor, documents: Documents | None) -> Tensor:
        first = self.token_offset
        if documents is not None:
            return documents.positions[first : first + x_tD.shape[0]]
        rows = torch.arange(first, first + x_tD.shape[0], device=x_tD.device)
        if self.own is None:
            return rows.remainder_(self.sequence)
        return torch.tensor(self.own, device=x_tD.device)[rows.remainder_(len(self.own))]
