"""Of which kind each layer of a model is. A kind is the name of a part, such as ``layer``.

Layers of one kind have the same operators and sizes, and the same costs in a profile.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

UNIFORM: Final = "layer"
"""The family's own layer, and the pattern of a model that has no others."""
DENSE: Final = "dense"
"""In a mixture of experts, a layer without experts: with one MLP of the same width."""

ENDS: Final = ("embedding", "head")
"""The parts before and behind the layers."""
_WORD: Final = re.compile(r"(?:([1-9][0-9]*)\*)?([A-Za-z][A-Za-z0-9_]*)")


def is_layer(part: str) -> bool:
    """Whether a part is a layer, of whatever kind: neither the embedding nor the head."""
    return base_kind(part) not in ENDS


def built_in_kinds(family: str) -> tuple[str, ...]:
    """The kinds of layers of a family that need no class of the user's own."""
    return (UNIFORM, DENSE) if family == "moe" else (UNIFORM,)


def variant(kind: str, mark: int | str) -> str:
    """The name of a kind of layer of which something is its own: a tensor-parallel degree, or a recompute
    policy. ``layer.2.full`` has both."""
    return f"{kind}.{mark}"


def base_kind(kind: str) -> str:
    """The kind of the model that a `variant` is of."""
    return kind.partition(".")[0]


def own_degree(kind: str) -> int:
    """The tensor-parallel degree of a `variant`; 0: that of the layout."""
    return next((int(mark) for mark in kind.split(".")[1:] if mark.isdigit()), 0)


def documents_seen(degree: int = 0) -> str:
    """What parts read of a micro-batch's documents; with a degree of their own, of their group's samples."""
    return variant("documents", degree) if degree else "documents"


def own_recompute(kind: str) -> str:
    """The recompute policy of a `variant`; empty: that of the run."""
    return next((mark for mark in kind.split(".")[1:] if not mark.isdigit()), "")


@lru_cache
def measured_kind(part: str) -> str:
    """The part whose operators take as long: what a layer computes again changes none of them."""
    return ".".join(mark for n, mark in enumerate(part.split(".")) if n == 0 or mark.isdigit())


@lru_cache
def kinds_of(pattern: str, layers: int) -> tuple[str, ...]:
    """The kind of every layer: those of the pattern, repeated until there are so many.

    `ValueError` for text that is no pattern, or does not repeat evenly.
    """
    kinds = tuple(kind for word in pattern.split() for kind in _repeated(pattern, word))
    if not kinds:
        raise ValueError(
            f"model.pattern={pattern!r} has no layers; name their kinds, as in 'layer' or '2*layer wide'"
        )
    times, left = divmod(layers, len(kinds))
    if left or not times:
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
    """The shortest pattern that gives these kinds, equal for equal models."""
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if count % n == 0 and kinds[n:] == kinds[: count - n])
    return " ".join(counted(kinds[:period]))


def counted(names: Sequence[str]) -> Iterator[str]:
    """Names with how often they follow each other: ``embedding``, ``3*layer``."""
    for name, group in groupby(names):
        count = len(list(group))
        yield name if count == 1 else f"{count}*{name}"
