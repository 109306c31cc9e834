"""What is wrong with a value, in one line; and what a key may hold, in words, which the reference has too."""

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from braid.actors.config.gone import GONE
from braid.actors.config.model import Section
from braid.scheduling.suggestions import key_called, must_be_one_of, nearest, plain

_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}
_LIMITS: Final = {
    "ge": "at least {}",
    "gt": "> {}",
    "le": "at most {}",
    "lt": "< {}",
    "pattern": "like `{}`",
}
"""By the name that a limit has in a field's metadata."""


def in_words(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """The values that a type and what is attached to it allow, such as ``whole number at least 1``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return in_words(inner[0], [part for one in inner[1:] for part in getattr(one, "metadata", [one])])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if one is type(None) else in_words(one) for one in inner)
    if origin is dict:
        return f"{in_words(inner[1])}, by name"
    if dataclasses.is_dataclass(kind):
        return f"keys {', '.join(field.name for field in dataclasses.fields(kind))}"
    if origin is tuple:
        count = "" if Ellipsis in inner else f"{len(inner)} "
        words = in_words(inner[0])
        name = next((one for one in _WORDS.values() if words.startswith(one)), words)
        return f"list of {count}{name}s{words.removeprefix(name)}"
    for one in metadata:
        if isinstance(one, AfterValidator) and (options := _options(one)):
            return f"one of {', '.join(options)}"
    given = [(getattr(one, name, None), text) for one in metadata for name, text in _LIMITS.items()]
    limits = ", ".join(text.format(_plain(limit)) for limit, text in given if limit is not None)
    return f"{_WORDS[kind]} {limits}".strip()


def _plain(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _options(validator: AfterValidator) -> tuple[str, ...]:
    """Those of ``one_of``, which its check remembers."""
    known: tuple[str, ...] = inspect.getclosurevars(validator.func).nonlocals.get("known", ())
    return known


def _choices(kind: Any) -> list[str]:
    """The words that a type allows, wherever in it."""
    if get_origin(kind) is Literal:
        return [str(one) for one in get_args(kind)]
    return [word for inner in get_args(kind) for word in _choices(inner)]


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def problems_in(errors: Iterable[Mapping[str, Any]], whole: type[BaseModel]) -> list[str]:
    """One line for each key that something is wrong with, in a configuration that ``whole`` describes: key,
    value, what would be right. ``errors``: pydantic's."""
    lines: dict[str, str] = {}
    for error in errors:
        keys, field = _key(error["loc"], whole)
        lines.setdefault(".".join(keys), _line(error, keys, field, whole))
    return list(lines.values())


def _key(place: Iterable[int | str], whole: type[BaseModel]) -> tuple[list[str], FieldInfo | None]:
    """The key that an error is of, without the parts of its type, and its field if there is one."""
    keys: list[str] = []
    section: type[BaseModel] | None = whole
    field: FieldInfo | None = None
    for part in place:
        if section is None:  # below a key: of types or entries, which the value shows
            break
        keys.append(str(part))
        field = section.model_fields.get(str(part))
        section = section_of(field.annotation) if field is not None else None
    return keys, field


def _line(error: Mapping[str, Any], keys: list[str], field: FieldInfo | None, whole: type[BaseModel]) -> str:
    key, kind, value = ".".join(keys), error["type"], error.get("input")
    if not keys:  # a check over sections names the keys itself
        return _said(error)
    if key in GONE:
        return f"{key}={_shown(value)}: this key is gone; leave it out: {GONE[key]}"
    if field is None:
        return f"unknown key {key!r}; {_meant(keys, whole)}"
    inside = "" if kind == "missing" else _entry(field, error["loc"][len(keys) :])
    if kind == "value_error":
        shown = "" if isinstance(value, (dict, Section)) else f"={_shown(value)}"
        return f"{key}{inside}{shown}: {_said(error)}"
    if (section := section_of(field.annotation)) is not None:
        first = next(iter(section.model_fields))
        return f"{key}={_shown(value)}: is a section of keys; write them as {key}: {{{first}: ...}}"
    if kind in ("string_type", "path_type") and isinstance(value, bool | int | float):
        text = f'"{json.dumps(value)}"'
        remedy = f"write it in quotes: {text}" + ("" if inside else f", or --set '{key}={text}'")
        return f"{key}{inside}={_shown(value)}: must be text; {remedy}"
    if kind == "tuple_type" and isinstance(value, str | bool | int | float):
        text = f"[{json.dumps(value)}]"
        return f"{key}={_shown(value)}: must be a list; write it in brackets: {text}, or --set '{key}={text}'"
    start = f"{key}{inside}={_shown(value)}:"
    if kind == "literal_error" and (words := _choices(field.annotation))[1:]:
        return f"{start} {must_be_one_of(value, words)}"
    wanted = in_words(field.annotation, field.metadata)
    wanted = re.sub(r"\b(whole number|number|path|list)\b", r"a \1", wanted)
    of = f"{key} must be" if inside else "must be"
    return f"{start} {of} {wanted}"


def _entry(field: FieldInfo, place: tuple[int | str, ...]) -> str:
    """The entry of a list or of a mapping that an error is of, such as ``[1]`` or ``.NAME``; or nothing."""
    if get_origin(field.annotation) is dict and place:
        return f".{place[0]}"
    return next((f"[{part}]" for part in place if isinstance(part, int)), "")


def _shown(value: Any) -> str:
    """A value as it is written in YAML, where that differs from Python."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return json.dumps(value) if isinstance(value, bool) or value is None else repr(value)


def _said(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _meant(keys: list[str], whole: type[BaseModel]) -> str:
    """What an unknown key stands for: in its section, in another one, or in other systems."""
    *parents, last = keys
    section: type[BaseModel] | None = whole
    for parent in parents:
        field = section.model_fields.get(parent) if section is not None else None
        section = section_of(field.annotation) if field is not None else None
    here = list(section.model_fields) if section is not None else []
    everywhere = list(all_keys(whole))
    same = [one for one in everywhere if plain(one.rpartition(".")[2]) == plain(last)]
    in_place = [".".join([*parents, one]) for one in here if plain(one) == plain(last)]
    if found := in_place or same:
        return f"did you mean {found[0]!r}?"
    ours = key_called(last)
    if ours.partition("=")[0] in everywhere:
        return f"did you mean {ours!r}?"
    if (near := nearest(last, here)) is not None:
        return f"did you mean {'.'.join([*parents, near])!r}?"
    return f"known here: {', '.join(here)}" if here else "this section has no keys"


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key with its sections in front, and the sections of the top level."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or not prefix:
            yield f"{prefix}{name}"
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")
