"""How much of the text is in the tokens that were made of it."""

from pathlib import Path

import numpy as np

from braid.actors.config.paths import BYTES
from braid.actors.stage.data import TOKEN_DTYPES, VALIDATION, DataIndex
from braid.jobs.data.tokenizer import Tokenizer

_COUNTED_TOKENS = 1 << 20
_ROUNDED = 0.01
"""Tokenizers add a space here and there, or leave one out: so much of the text may be counted wrong."""
_MOST_UNKNOWN = 0.1
"""Above this share, of characters that have no token or of tokens that stand for such, tokens are refused."""


def known_bytes(tokenizer: Tokenizer, folder: Path, index: DataIndex) -> tuple[int, ...]:
    """`DataIndex.token_bytes`: none where they do not add up to the text that is held out."""
    shards = index.splits[VALIDATION]
    counts = np.zeros(index.vocabulary, np.int64)
    for shard in shards:
        tokens = np.memmap(folder / shard.file, TOKEN_DTYPES[index.dtype], mode="r")
        for begin in range(0, len(tokens), _COUNTED_TOKENS):
            counts += np.bincount(tokens[begin : begin + _COUNTED_TOKENS], minlength=index.vocabulary)
    token_bytes = tokenizer.token_bytes
    text = sum(shard.bytes_of_text for shard in shards)
    return token_bytes if abs(counts @ np.array(token_bytes) - text) <= _ROUNDED * text else ()


def check_known(index: DataIndex) -> None:
    """Refuse a data set that says little of its text: its tokenizer was made for another one."""
    tokens = sum(index.tokens(split) for split in index.splits)
    for count, of, what in (
        (index.characters_lost, index.characters, "characters have no token in it"),
        (index.tokens_unknown, tokens, "tokens are its token for what it does not know"),
    ):
        if count > _MOST_UNKNOWN * of:
            raise ValueError(
                f"data.tokenizer: {index.tokenizer!r} does not fit data.files: {count} of {of} {what}; take "
                f"a tokenizer that was trained on such text or works on bytes, such as data.tokenizer={BYTES}"
            )
