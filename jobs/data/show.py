"""Shows samples of a prepared data set as text: where documents begin, and which tokens' losses count."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from braid.actors.stage.data.token_files import TokenShards
from braid.jobs.data.tokenizer import Tokenizer

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which could change the terminal."""


@dataclass(frozen=True)
class TextRun:
    """Consecutive tokens of a document: their text, and whether the losses of predicting them count."""

    text: str
    counts: bool


@dataclass(frozen=True)
class ShownDocument:
    """A document, or the part of it that lies in a sample."""

    tokens: int
    runs: tuple[TextRun, ...]
    padding: bool


def documents_in(shards: TokenShards, sample: int, tokenizer: Tokenizer) -> Iterator[ShownDocument]:
    """Yield the documents of a sample; all tokens of a stream count."""
    ids = np.array([sample])
    tokens_S, begins_s, masks = shards.tokens_at(ids)[0], shards.begins_at(ids)[0], shards.masks_at(ids)
    counts_S = np.ones(len(tokens_S), bool) if masks is None else np.append(False, masks[0])
    for begin, end in pairwise([0, *np.flatnonzero(begins_s).tolist(), len(tokens_S)]):
        tokens, counts = tokens_S[begin:end], counts_S[begin:end]
        fills = (
            masks is not None and not counts.any() and bool((tokens == shards.index.end_of_document).all())
        )
        yield ShownDocument(len(tokens), () if fills else tuple(_runs(tokens, counts, tokenizer)), fills)


def _runs(tokens: np.ndarray, counts: np.ndarray, tokenizer: Tokenizer) -> Iterator[TextRun]:
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(tokens)]
    before = ""
    for begin, end in pairwise(edges):
        # decoded from the document's begin, as some tokenizers drop the space before a text's first word
        text = tokenizer.decode(tokens[:end].tolist())
        yield TextRun(text[len(before) :], bool(counts[begin]))
        before = text


def show_sample(
    console: Console, number: int, sample: int, shards: TokenShards, tokenizer: Tokenizer
) -> None:
    """Print a sample; text whose loss does not count is dim, or between ``[-`` and ``-]`` without a
    terminal."""
    documents = list(documents_in(shards, sample, tokenizer))
    counted = int(shards.counts_at(np.array([sample])).sum())
    padded = sum(shown.tokens for shown in documents if shown.padding)
    console.rule(f"sample {number}: {shards.split} {sample}", characters="=", align="left")
    _line(
        console, f"{counted} of {shards.sequence} targets count; {padded} of {shards.sequence + 1} tokens pad"
    )
    texts = [shown for shown in documents if not shown.padding]
    for place, shown in enumerate(texts, start=1):
        console.rule(f"document {place} of {len(texts)}: {shown.tokens} tokens", characters="-", align="left")
        line = Text()
        for run in shown.runs:
            text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", run.text)
            if run.counts:
                line.append(text)
            elif console.is_terminal:
                line.append(text, "dim")
            else:
                line.append(f"[-{text}-]")
        console.print(line, soft_wrap=True, highlight=False)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
