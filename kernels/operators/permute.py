"""Copies tokens to the experts that they visit and back, and changes the order of segments of rows.

A visit is a token together with one of its k choices. Every visit has at most one row and every row at most
one visit, so that rows are moved by gathers in both directions, and sums do not depend on the order of
threads.

Legend: t tokens of this rank, k experts that a token visits, n rows in the order of the experts, D hidden, E
experts, S source ranks of rows. Sums are at least fp32, rounded once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.kernels.operators.operator import ComputeOperator, check_numbers, wide
from braid.kernels.operators.router import count_visits


@dataclass(frozen=True, kw_only=True)
class Places:
    """Assignment of visits to rows, in both directions: int64, -1 for a row or visit without a partner."""

    sources_n: Tensor
    """The visit of every row: token * k + number of the choice."""
    slots_tk: Tensor
    """The row of every visit."""
    complete: bool
    """Whether every visit has a row and every row a visit, so that there is no -1."""

    def gather(self, x_tD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        """Return rows_nD: the token of a row's visit, times its gate if given; 0 without a visit."""
        rows, choices = self.sources_n.shape[0], self.slots_tk.shape[1]
        if not x_tD.shape[0]:
            return x_tD.new_zeros(rows, x_tD.shape[1])
        source_n = self.sources_n if self.complete else self.sources_n.clamp(min=0)
        rows_nD = x_tD.index_select(0, source_n // choices)
        if gates_tk is not None:
            gate_n1 = gates_tk.flatten().index_select(0, source_n).unsqueeze(-1)
            rows_nD = rows_nD.to(wide(x_tD.dtype)).mul_(gate_n1).to(x_tD.dtype)
        return self._without_absent(rows_nD, self.sources_n)

    def combine(self, rows_nD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        """Return y_tD: the sum of a token's rows, first choice first, times gates if given."""
        self._check(rows_nD)
        tokens, choices = self.slots_tk.shape
        y_tD = rows_nD.new_zeros(tokens, rows_nD.shape[1], dtype=wide(rows_nD.dtype))
        for choice in range(choices):
            row_tD = self._visited(rows_nD, choice)
            if gates_tk is None:
                y_tD.add_(row_tD)
            else:
                y_tD.addcmul_(row_tD, gates_tk[:, choice].unsqueeze(-1))
        return y_tD.to(rows_nD.dtype)

    def gate_gradient(self, dy_tD: Tensor, rows_nD: Tensor) -> Tensor:
        """Return d_gates_tk (wide) of `combine`: dy of the token times the visit's row, or 0."""
        self._check(rows_nD)
        dy_tD = dy_tD.to(wide(dy_tD.dtype))
        d_gates_tk = dy_tD.new_empty(self.slots_tk.shape)
        for choice in range(self.slots_tk.shape[1]):
            d_gates_tk[:, choice] = (self._visited(rows_nD, choice) * dy_tD).sum(-1)
        return d_gates_tk

    def _visited(self, rows_nD: Tensor, choice: int) -> Tensor:
        """Return every token's row of its choice ``choice`` (t x D); 0 if there is none."""
        slot_t = self.slots_tk[:, choice]
        row_tD = rows_nD.index_select(0, slot_t if self.complete else slot_t.clamp(min=0))
        return self._without_absent(row_tD, slot_t)

    def _without_absent(self, rows: Tensor, index: Tensor) -> Tensor:
        """Set rows whose index is -1 to zero, in place."""
        return rows if self.complete else rows.masked_fill_((index < 0).unsqueeze(-1), 0)

    def _check(self, rows_nD: Tensor) -> None:
        if rows_nD.shape[0] != self.sources_n.shape[0]:
            raise ValueError(f"{rows_nD.shape[0]} rows, not the {self.sources_n.shape[0]} that were sent out")


class Dispatch(ComputeOperator):
    """Base of `Permute` and `Unpermute`: assigns visits to rows.

    ``capacity`` None: every visit has a row, n = t k. Otherwise every expert has ``capacity`` rows, n = E
    capacity, and those of expert e begin at e * capacity; visits beyond the capacity are dropped, last tokens
    first.
    """

    def __init__(self, experts: int, capacity: int | None) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity

    def places(self, choice_tk: Tensor) -> Places:
        """Return places in the order of experts, and within an expert in the order of tokens.

        Raise ValueError for a choice outside [0, experts), on the CPU only: elsewhere the check would stall.
        """
        self._check(choice_tk)
        choice = choice_tk.flatten()
        visit = torch.arange(choice.shape[0], device=choice.device)
        order = choice.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, visit)
        if self.capacity is None:
            return Places(sources_n=order, slots_tk=place.view(choice_tk.shape), complete=True)
        counts_E = count_visits(choice_tk, self.experts)
        within = place - (counts_E.cumsum(0) - counts_E).index_select(0, choice)
        rows, kept = self.experts * self.capacity, within < self.capacity
        slot = torch.where(kept, choice * self.capacity + within, rows)
        sources = choice.new_full((rows + 1,), -1).scatter_(0, slot, visit)  # last row: all dropped visits
        slots_tk = slot.masked_fill(kept.logical_not_(), -1).view(choice_tk.shape)
        return Places(sources_n=sources[:rows], slots_tk=slots_tk, complete=False)

    def _check(self, choice_tk: Tensor) -> None:
        check_numbers("choices", choice_tk, self.experts, f"[0, {self.experts}), the experts")


class Permute(Dispatch):
    """Copies every token once for each of its visits; the copies are in the order of the experts."""

    def forward(self, x_tD: Tensor, choice_tk: Tensor) -> tuple[Tensor]:
        """Return rows_nD; rows without a visit are zero."""
        return (self.places(choice_tk).gather(x_tD),)

    def input_gradient(self, d_rows_nD: Tensor, choice_tk: Tensor) -> tuple[Tensor]:
        """Return dx_tD: for each token the sum of the gradients of its rows."""
        return (self.places(choice_tk).combine(d_rows_nD),)


class Unpermute(Dispatch):
    """Sums the experts' results of each token, weighted by gates: y_t = sum_j gate_tj row of visit (t, j)."""

    def forward(self, rows_nD: Tensor, gates_tk: Tensor, choice_tk: Tensor) -> tuple[Tensor]:
        """Return y_tD, in the dtype of the rows; dropped visits contribute 0."""
        return (self.places(choice_tk).combine(rows_nD, gates_tk),)

    def input_gradient(
        self, dy_tD: Tensor, rows_nD: Tensor, gates_tk: Tensor, choice_tk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return d_rows_nD and d_gates_tk (wide), both 0 for rows and visits without a partner."""
        places = self.places(choice_tk)
        return places.gather(dy_tD, gates_tk), places.gate_gradient(dy_tD, rows_nD)


class Regroup(ComputeOperator):
    """Reorders rows from the order (source, expert) to the order (expert, source).

    Rows of one source and expert stay together in their order. ``back``: forward reorders from (expert,
    source) to (source, expert), and the gradient the other way.
    """

    def __init__(self, *, back: bool = False) -> None:
        super().__init__()
        self.back = back

    def forward(self, rows_nD: Tensor, sizes_SE: Tensor) -> tuple[Tensor]:
        """Return the reordered rows: the input itself if there is one source or one expert.

        ``sizes_SE`` (int64, on the host): number of rows of every source for every expert.
        """
        return (self._regrouped(rows_nD, sizes_SE, self.back),)

    def input_gradient(self, d_rows_nD: Tensor, sizes_SE: Tensor) -> tuple[Tensor]:
        return (self._regrouped(d_rows_nD, sizes_SE, not self.back),)

    def _regrouped(self, rows_nD: Tensor, sizes_SE: Tensor, back: bool) -> Tensor:
        if 1 in sizes_SE.shape:
            return rows_nD
        sizes = sizes_SE.t() if back else sizes_SE
        outer, inner = sizes.shape
        segments = torch.split(rows_nD, sizes.flatten().tolist())
        return torch.cat([segments[i * inner + j] for j in range(inner) for i in range(outer)])
