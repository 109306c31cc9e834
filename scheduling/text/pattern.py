"""Parses the kinds of a model's layers. A kind is the name of a part, such as ``layer``.

Layers of one kind have the same operators and sizes, and the same costs in a profile.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

UNIFORM: Final = "layer"
"""Kind of the family's standard layer; also the pattern of a model whose layers are all of this kind."""
DENSE: Final = "dense"
"""Kind of a layer without experts in a mixture of experts; it has one MLP of the width ``ffn``."""

ENDS: Final = ("embedding", "head")
"""Names of the parts before and after the layers."""
TOKEN_NUMBERS: Final = "token_numbers"
"""Name of the input that holds a number for each of a rank's tokens."""
_WORD: Final = re.compile(r"(?:([1-9][0-9]*)\*)?([A-Za-z][A-Za-z0-9_]*)")


def is_layer(part: str) -> bool:
    """Return whether a part's name is a kind of layer, so neither the embedding nor the head."""
    return base_kind(part) not in ENDS


def built_in_kinds(family: str) -> tuple[str, ...]:
    """Return the kinds of layers that a model family has built in."""
    return (UNIFORM, DENSE) if family == "moe" else (UNIFORM,)


def variant(kind: str, mark: int | str) -> str:
    """Return the name of a kind of layer with its own tensor-parallel degree or recompute policy: the name
    ``KIND.MARK``. ``layer.2.full`` has both marks."""
    return f"{kind}.{mark}"


def base_kind(kind: str) -> str:
    """Return the kind, as in the model's pattern, from which a `variant` was made: ``layer`` for
    ``layer.2.full``."""
    return kind.partition(".")[0]


def own_degree(kind: str) -> int:
    """Return the tensor-parallel degree in the name of a `variant`; 0 if it has none, so that ``tp``
    applies."""
    return next((int(mark) for mark in kind.split(".")[1:] if mark.isdigit()), 0)


def documents_seen(degree: int = 0) -> str:
    """Return the name of the input that describes a micro-batch's documents.

    ``degree``: tensor-parallel degree of a layer that processes only some of the samples; 0 for other layers.
    """
    return variant("documents", degree) if degree else "documents"


def own_recompute(kind: str) -> str:
    """Return the recompute policy in the name of a `variant`; empty if it has none, so that the run's
    applies."""
    return next((mark for mark in kind.split(".")[1:] if not mark.isdigit()), "")


@lru_cache
def measured_kind(part: str) -> str:
    """Return a part's name without its recompute policy, since policies do not change operators' times."""
    return ".".join(mark for n, mark in enumerate(part.split(".")) if n == 0 or mark.isdigit())


@lru_cache
def kinds_of(pattern: str, layers: int) -> tuple[str, ...]:
    """Return the kind of every layer: the kinds of the pattern, repeated until there are ``layers`` of them.

    Raises `ValueError` if the text is no pattern, or if its length does not divide ``layers``.
    """
    kinds = tuple(kind for word in pattern.split() for kind in _repeated(pattern, word))
    if not kinds:
        raise ValueError(
            f"model.pattern={pattern!r} has no layers; name their kinds, as in 'layer' or '2*layer wide'"
        )
    times, remainder = divmod(layers, len(kinds))
    if remainder or not times:
        near = " or ".join(str(n * len(kinds)) for n in (times, times + 1) if n)
        raise ValueError(
            f"model.pattern={pattern!r} of {len(kinds)} layers does not repeat evenly to model.layers="
            f"{layers}; set model.layers to {near}, or change the pattern"
        )
    return kinds * times


def _repeated(pattern: str, word: str) -> list[str]:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"model.pattern={pattern!r}: {word!r} must be NAME or NUMBER*NAME, with a NAME of letters, "
            f"digits and _ that begins with a letter"
        )
    if not is_layer(match[2]):
        raise ValueError(
            f"model.pattern={pattern!r}: {match[2]!r} is another part of every model; "
            f"name the layer otherwise"
        )
    return [match[2]] * int(match[1] or 1)


def pattern_of(kinds: Sequence[str]) -> str:
    """Return the shortest pattern whose repetition gives these kinds of layers; this inverts `kinds_of`."""
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if count % n == 0 and kinds[n:] == kinds[: count - n])
    return " ".join(counted(kinds[:period]))


def counted(names: Sequence[str]) -> Iterator[str]:
    """Yield each run of equal names with its length: ``embedding``, ``3*layer``."""
    for name, group in groupby(names):
        count = len(list(group))
        yield name if count == 1 else f"{count}*{name}"
