"""Parses the kinds of a model's layers. A kind is the name of a part, such as ``layer``.

Layers of one kind have the same operators and sizes, and the same costs in a profile.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

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
    return part not in ENDS


def built_in_kinds(family: str) -> tuple[str, ...]:
    """Return the kinds of layers that a model family has built in."""
    return (UNIFORM, DENSE) if family == "moe" else (UNIFORM,)


class Variant(str):
    """Kind of a layer with a tensor-parallel degree or a recompute policy of its own.

    As a text it is the kind's name: ``layer.2.full``. `variant_of` parses the name.
    """

    base: str
    """The kind in the model's pattern: ``layer``."""
    degree: int
    """The layer's tensor-parallel degree; 0: that of the run."""
    recompute: str
    """The layer's recompute policy; empty: that of the run."""

    def __new__(cls, base: str, degree: int = 0, recompute: str = "") -> "Variant":
        kind = super().__new__(
            cls, ".".join([base, *([str(degree)] if degree else []), *filter(None, [recompute])])
        )
        kind.base, kind.degree, kind.recompute = base, degree, recompute
        return kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, self.degree, self.recompute)


def variant_of(name: str) -> str:
    """Parse the name of a part, which may be that of a `Variant`; a name without marks is returned
    unchanged."""
    base, *marks = name.split(".")
    degree = next((int(mark) for mark in marks if mark.isdigit()), 0)
    recompute = next((mark for mark in marks if not mark.isdigit()), "")
    return Variant(base, degree, recompute) if marks else name


def base_kind(kind: str) -> str:
    """Return the kind in the model's pattern: ``layer`` for the `Variant` ``layer.2.full``."""
    return kind.base if isinstance(kind, Variant) else kind


def own_degree(kind: str) -> int:
    """Return the tensor-parallel degree of a `Variant`; 0 if it has none, so that ``tp`` applies."""
    return kind.degree if isinstance(kind, Variant) else 0


def documents_seen(degree: int = 0) -> str:
    """Return the name of the input that describes a micro-batch's documents.

    ``degree``: tensor-parallel degree of a layer that processes only some of the samples; 0 for other layers.
    """
    return f"documents.{degree}" if degree else "documents"


def own_recompute(kind: str) -> str:
    """Return the recompute policy of a `Variant`; empty if it has none, so that the run's applies."""
    return kind.recompute if isinstance(kind, Variant) else ""


def measured_kind(part: str) -> str:
    """Return a part's name without its recompute policy, since policies do not change operators' times."""
    if not isinstance(part, Variant) or not part.recompute:
        return part
    return Variant(part.base, part.degree) if part.degree else part.base


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
