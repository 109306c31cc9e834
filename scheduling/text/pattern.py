"""The kind of each layer of a model. A kind is the name of a part, such as ``layer``.

Layers of one kind have the same operators and sizes, and the same costs in a profile.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

UNIFORM: Final = "layer"
"""The family's standard layer, and the pattern of a model that has no other kinds."""
DENSE: Final = "dense"
"""In a mixture of experts, a layer without experts: it has one MLP of the same width."""

ENDS: Final = ("embedding", "head")
"""The parts before and after the layers."""
_WORD: Final = re.compile(r"(?:([1-9][0-9]*)\*)?([A-Za-z][A-Za-z0-9_]*)")


def is_layer(part: str) -> bool:
    """Tell whether a part is a layer of any kind, neither the embedding nor the head."""
    return base_kind(part) not in ENDS


def built_in_kinds(family: str) -> tuple[str, ...]:
    """Return the kinds of layers of a model family that need no layer class of the user."""
    return (UNIFORM, DENSE) if family == "moe" else (UNIFORM,)


def variant(kind: str, mark: int | str) -> str:
    """Return the name of a kind of layer with its own tensor-parallel degree or recompute policy, the
    ``mark``. ``layer.2.full`` has both marks."""
    return f"{kind}.{mark}"


def base_kind(kind: str) -> str:
    """Return the kind in the model's pattern that a `variant` was made from."""
    return kind.partition(".")[0]


def own_degree(kind: str) -> int:
    """Return the tensor-parallel degree in the name of a `variant`; 0 where the layout's degree applies."""
    return next((int(mark) for mark in kind.split(".")[1:] if mark.isdigit()), 0)


def documents_seen(degree: int = 0) -> str:
    """Return the name of the input that describes a micro-batch's documents, or its group's share of them."""
    return variant("documents", degree) if degree else "documents"


def own_recompute(kind: str) -> str:
    """Return the recompute policy in the name of a `variant`; empty where the run's policy applies."""
    return next((mark for mark in kind.split(".")[1:] if not mark.isdigit()), "")


@lru_cache
def measured_kind(part: str) -> str:
    """Return ``part`` without its recompute policy, which changes no operator's time."""
    return ".".join(mark for n, mark in enumerate(part.split(".")) if n == 0 or mark.isdigit())


@lru_cache
def kinds_of(pattern: str, layers: int) -> tuple[str, ...]:
    """Return the kind of every layer: the kinds of the pattern, repeated until there are ``layers`` of them.

    `ValueError` for text that is no pattern, or for a pattern that does not repeat evenly.
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
    """Return the shortest pattern that gives these kinds. Equal kinds give equal patterns."""
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if count % n == 0 and kinds[n:] == kinds[: count - n])
    return " ".join(counted(kinds[:period]))


def counted(names: Sequence[str]) -> Iterator[str]:
    """Yield each run of equal names with its length: ``embedding``, ``3*layer``."""
    for name, group in groupby(names):
        count = len(list(group))
        yield name if count == 1 else f"{count}*{name}"
