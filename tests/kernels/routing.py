"""Choices of experts by tokens, even and uneven, and the rows that plain Python gives to their visits.

Legend: t tokens, k choices of each, E experts.
"""

import torch
from torch import Tensor

from braid.kernels.family import OperatorFamily

UNEVEN = ("even", "hot", "unvisited", "zipf")
"""How experts are liked: alike; one by all tokens; half of them, if that is enough, by none; by Zipf."""


def preference(kind: str, experts: int, top_k: int) -> Tensor:
    """How much every expert is liked (E, float64): what is added to its logits."""
    rank_E = torch.randperm(experts).double()
    match kind:
        case "hot":
            return (rank_E == 0) * 40.0
        case "unvisited":
            return (rank_E >= max(top_k, experts // 2)) * -40.0
        case "zipf":
            return -1.5 * torch.log1p(rank_E)
        case _:
            return torch.zeros_like(rank_E)


def draw_choice(kind: str, tokens: int, experts: int, top_k: int) -> Tensor:
    """Random choices (t x k) of different experts."""
    gumbel_tE = -torch.empty(tokens, experts, dtype=torch.float64).exponential_().log()
    return (preference(kind, experts, top_k) + gumbel_tE).topk(top_k).indices


def rows_of_visits(choice_tk: Tensor, experts: int, capacity: int | None) -> dict[tuple[int, int], int]:
    """The row of every visit (token, number of the choice) that has one."""
    visits = [(t, j, e) for t, chosen in enumerate(choice_tk.tolist()) for j, e in enumerate(chosen)]
    rows: dict[tuple[int, int], int] = {}
    for expert in range(experts):
        mine = [(t, j) for t, j, e in visits if e == expert]
        first = len(rows) if capacity is None else expert * capacity
        rows |= {visit: first + place for place, visit in enumerate(mine[:capacity])}
    return rows


@torch.no_grad()
def check_holes(kinds: OperatorFamily, device: torch.device) -> None:
    """Rows that no visit fills, and the first row and token, where visits without a place could look, are
    not read."""
    choice_tk = torch.tensor([[0, 1], [0, 2], [0, 1]], device=device)
    permute, unpermute = kinds.permute(4, 2), kinds.unpermute(4, 2)
    x_tD, ones_tk = torch.tensor([[torch.inf], [1.0], [2.0]], device=device), torch.ones(3, 2, device=device)
    (rows_nD,) = permute(x_tD, choice_tk)
    assert rows_nD.flatten().tolist() == [torch.inf, 1, torch.inf, 2, 1, 0, 0, 0]
    rows_nD[5:] = torch.nan
    (y_tD,) = unpermute(rows_nD, ones_tk, choice_tk)
    assert y_tD.flatten().tolist() == [torch.inf, 2, 2]
    rows_nD[0] = torch.nan
    dy_tD = torch.tensor([[torch.nan], [3.0], [5.0]], device=device)
    d_rows_nD, d_gates_tk = unpermute.input_gradient(dy_tD, rows_nD, ones_tk, choice_tk)
    assert d_rows_nD.flatten().tolist()[1:2] + d_rows_nD.flatten().tolist()[3:] == [3, 5, 3, 0, 0, 0]
    assert d_gates_tk[1:].tolist() == [[3, 3], [0, 10]]
    d_rows_nD[5:] = torch.nan
    assert permute.input_gradient(d_rows_nD, choice_tk)[0].flatten().tolist()[1:] == [6, 5]
