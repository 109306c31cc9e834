"""All keys of the configuration in words: ``docs/configuration.md``, made from the sections and their source.

What a key means is said once, in the comment on its line or in the comment lines right above it.
"""

import ast
import dataclasses
import inspect
import io
import tokenize
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from braid.actors.config import Config
from braid.actors.config.model import Section

_HEAD: Final = """\
# Configuration

Made from the source of `actors/config/` by `python -m braid.actors.config.reference > docs/configuration.md`.
"""
_TABLE: Final = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n"
_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}
_LIMITS: Final = {
    "ge": "at least {:g}",
    "gt": "> {:g}",
    "le": "at most {:g}",
    "lt": "< {:g}",
    "pattern": "like `{}`",
}
"""By the name that a limit has in a field's metadata."""


def reference() -> str:
    """The document: one table for the keys of the top level, then one per section."""
    return "\n".join([_HEAD, *tables(Config)])


def tables(config: type[Section]) -> Iterator[str]:
    """Headings, docstrings and tables of a configuration, the keys outside sections first."""
    keys = {name: info for name, info in config.model_fields.items() if _section(info) is None}
    yield f"## Top level\n\n{_docstring(config)}\n\n{_TABLE}{''.join(_rows(config, '', keys))}"
    for name, info in config.model_fields.items():
        if (section := _section(info)) is not None:
            said = "\n\n".join(_docstrings(section, name))
            rows = "".join(_rows(section, f"{name}.", section.model_fields))
            yield f"## {name}\n\n{said}\n\n{_TABLE}{rows}"


def _rows(section: type[Section], prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Lines of a table, also of the keys in a section's sections."""
    kinds = (kind for kind in reversed(section.__mro__) if issubclass(kind, Section))
    meanings = {name: text for kind in kinds for name, text in field_comments(kind).items()}
    for name, info in fields.items():
        if (inner := _section(info)) is not None:
            yield from _rows(inner, f"{prefix}{name}.", inner.model_fields)
            continue
        cells = (
            in_words(info.annotation, info.metadata),
            f"`{_yaml(info.get_default(call_default_factory=True))}`",
            meanings.get(name, ""),
        )
        escaped = (cell.replace("|", "\\|").replace("<", "\\<") for cell in cells)
        yield f"| `{prefix}{name}` | {' | '.join(escaped)} |\n"


def _section(info: FieldInfo) -> type[Section] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _docstrings(section: type[Section], name: str) -> Iterator[str]:
    """That of a section, and those of the sections in it."""
    yield _docstring(section)
    for key, info in section.model_fields.items():
        if (inner := _section(info)) is not None:
            yield from (f"`{name}.{key}`: {text}" for text in _docstrings(inner, f"{name}.{key}"))


def _docstring(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def in_words(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """The values that a type and what is attached to it allow, such as ``whole number at least 1``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return in_words(inner[0], [part for one in inner[1:] for part in getattr(one, "metadata", [one])])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if one is type(None) else in_words(one) for one in inner)
    if origin is dict:
        return f"{in_words(inner[1])}, by name"
    if dataclasses.is_dataclass(kind):
        return f"keys {', '.join(field.name for field in dataclasses.fields(kind))}"
    if origin is tuple:
        count = "" if Ellipsis in inner else f"{len(inner)} "
        return f"list of {count}{in_words(inner[0])}s"
    for one in metadata:
        if isinstance(one, AfterValidator) and (options := _options(one)):
            return f"one of {', '.join(options)}"
    given = [(getattr(one, name, None), text) for one in metadata for name, text in _LIMITS.items()]
    limits = ", ".join(text.format(limit) for limit, text in given if limit is not None)
    return f"{_WORDS[kind]} {limits}".strip()


def _options(validator: AfterValidator) -> tuple[str, ...]:
    """Those of ``_one_of``, which its check remembers."""
    known: tuple[str, ...] = inspect.getclosurevars(validator.func).nonlocals.get("known", ())
    return known


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def field_comments(section: type[Section]) -> dict[str, str]:
    """By field: the comment lines right above it, then those within it; empty where there are none."""
    source = dedent(inspect.getsource(section))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.removeprefix("#").strip() for token in found}
    alone = {token.start[0] for token in found if token.line.lstrip().startswith("#")}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for field in body.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            first, last = field.lineno, field.end_lineno or field.lineno
            while first - 1 in alone:
                first -= 1
            meanings[field.target.id] = " ".join(comments[n] for n in range(first, last + 1) if n in comments)
    return meanings


if __name__ == "__main__":
    print(reference(), end="")
