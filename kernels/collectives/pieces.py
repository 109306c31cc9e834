"""Pieces of a collective over tokens: which rows are gathered, and where they belong in the whole.

Every rank of a group of R holds t tokens; gathered they are T = R x t, rank after rank. Piece i of n gathers
rows [i t/n, (i+1) t/n) of every rank into a tensor of its own, T/n tokens long, rank after rank again: rows
that lie side by side, for the GEMM that works on them. In the whole, the rows of one piece lie in R places,
t/n rows each, t apart.
"""

import torch
from torch import Tensor


def rows_of_piece(x: Tensor, number: int, ways: int) -> Tensor:
    """A view of what a rank gives to piece ``number`` (from 1) of ``ways``: (t, ...) -> (t / ways, ...)."""
    assert x.shape[0] % ways == 0, f"{x.shape[0]} tokens in {ways} pieces"
    rows = x.shape[0] // ways
    return x[(number - 1) * rows : number * rows]


def whole_for(part: Tensor, ways: int) -> Tensor:
    """Room for all pieces of what ``part`` is one of: (T / ways, ...) -> (T, ...), not initialised."""
    return torch.empty((part.shape[0] * ways, *part.shape[1:]), dtype=part.dtype, device=part.device)


def place_piece(whole: Tensor, part: Tensor, number: int, ways: int, ranks: int) -> None:
    """Copy a piece (from 1) of ``ways``, gathered over ``ranks``, to its rows in the whole, (T, ...)."""
    rows = part.shape[0] // ranks
    assert whole.shape[0] == ranks * ways * rows, f"{whole.shape[0]} tokens: {ranks} x {ways} x {rows}"
    rest = part.shape[1:]
    whole.view(ranks, ways, rows, *rest)[:, number - 1].copy_(part.reshape(ranks, rows, *rest))
