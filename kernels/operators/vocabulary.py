"""Rows of the vocabulary that a rank holds; shared by the embedding and the loss.

Legend: T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from braid.kernels.operators.operator import check_numbers


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
