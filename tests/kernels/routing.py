"""Choices of experts by tokens, even and uneven, and the rows that plain Python gives to their visits.

Legend: t tokens, k choices of each, E experts.
"""

import torch
from torch import Tensor

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
