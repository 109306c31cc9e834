"""Shows samples of a prepared data set as text: where documents begin, and which tokens' losses count."""

import re
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from braid.actors.stage.data.mixture import Mixture
from braid.jobs.data.tokenizer import Tokenizer

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which could change the terminal."""


def show_sample(console: Console, title: str, sample: int, shards: Mixture, tokenizer: Tokenizer) -> None:
    """Print a sample; text whose loss does not count is dim, or between ``[-`` and ``-]`` without a terminal.

    All tokens of a stream count. Padding is told, not shown.
    """
    id = np.array([sample])
    tokens_S, masks = shards.tokens_at(id)[0], shards.masks_at(id)
    counts_S = np.ones(len(tokens_S), bool) if masks is None else np.append(False, masks[0])
    begins = [0, *np.flatnonzero(shards.begins_at(id)[0]).tolist()]
    padded, last = 0, begins[-1]
    if (
        masks is not None
        and (tokens_S[last:] == shards.sets[0].index.end_of_document).all()
        and not counts_S[last:].any()
    ):
        padded = len(tokens_S) - begins.pop()
    edges = [*begins, len(tokens_S) - padded]
    console.rule(title, characters="=", align="left")
    counted = shards.counts_at(id)[0]
    console.print(f"{counted} of {shards.sequence} targets count; {padded} of {len(tokens_S)} tokens pad")
    for number, (begin, end) in enumerate(pairwise(edges), start=1):
        told = f"document {number} of {len(begins)}: {end - begin} tokens"
        console.rule(told, characters="-", align="left")
        text = _shown(tokens_S[begin:end], counts_S[begin:end], tokenizer, marked=not console.is_terminal)
        console.print(text, soft_wrap=True, highlight=False)


def _shown(tokens_S: np.ndarray, counts_S: np.ndarray, tokenizer: Tokenizer, *, marked: bool) -> Text:
    """Return the text of a document; ``marked``: with marks instead of styles."""
    shown, before = Text(), ""
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(counts_S)) + 1).tolist(), len(tokens_S)]):
        # decoded from the document's begin, as some tokenizers drop the space before a text's first word
        whole = tokenizer.decode(tokens_S[:end].tolist())
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", whole[len(before) :])
        masked, before = not counts_S[begin], whole
        shown.append(f"[-{text}-]" if masked and marked else text, "dim" if masked else None)
    return shown
