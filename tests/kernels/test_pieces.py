"""Chunks of a gather over emulated ranks against the whole gather.

Legend: T all tokens, t a rank's share of them, D features.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.kernels.collectives.pieces import place_piece, rows_of_piece, whole_for


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), max_size=2),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_pieces_in_any_order_make_the_whole(
    ranks: int, ways: int, rows: int, features: list[int], data: st.DataObject
) -> None:
    shards = [torch.randn(ways * rows, *features) for _ in range(ranks)]
    gathered = [
        torch.cat([rows_of_piece(shard, number, ways) for shard in shards]) for number in range(1, ways + 1)
    ]
    whole = whole_for(gathered[0], ways)
    for number in data.draw(st.permutations(range(1, ways + 1))):
        place_piece(whole, gathered[number - 1], number, ways, ranks)
    assert torch.equal(whole, torch.cat(shards))


def test_tokens_that_do_not_divide_are_no_pieces() -> None:
    with pytest.raises(AssertionError, match="5 tokens in 2 pieces"):
        rows_of_piece(torch.zeros(5, 3), 1, 2)
    with pytest.raises(AssertionError, match="9 tokens"):
        place_piece(torch.zeros(9, 3), torch.zeros(4, 3), 1, 2, 2)
