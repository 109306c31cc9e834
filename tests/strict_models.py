"""Strict models of what other programs read, written by type: any other key or type is an error."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

STRICT = ConfigDict(extra="forbid", strict=True)
Text = Annotated[str, Field(min_length=1)]
Count, Size = Annotated[int, Field(ge=0)], Annotated[int, Field(gt=0)]


def model(config: ConfigDict = STRICT, optional: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """A model with fields of these types; ``optional`` ones may be missing."""
    required = {name: (kind, ...) for name, kind in fields.items()}
    missing = {name: (kind, None) for name, kind in (optional or {}).items()}
    return create_model("Model", __config__=config, **required, **missing)


def each(kind: Any, names: str) -> dict[str, Any]:
    """Fields of one type."""
    return dict.fromkeys(names.split(), kind)


def one_of(words: str) -> Any:
    """One of some words."""
    return Literal[tuple(words.split())]


def matching(pattern: str, **limits: int) -> Any:
    """A text of this form."""
    return Annotated[str, Field(pattern=pattern, **limits)]


def some(kind: Any) -> Any:
    """A list that is not empty."""
    return Annotated[list[kind], Field(min_length=1)]
