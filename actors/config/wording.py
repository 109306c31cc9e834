"""Describes in one line what is wrong with a value, and in words what a key may hold, also for the
reference."""

import dataclasses
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from braid.actors.config.model import Section, shown
from braid.scheduling.text.suggestions import key_called, must_be_one_of, nearest, plain

GONE: Final[Mapping[str, str]] = {
    "model.route_evenly": "`braid bench overlap --route-evenly` measures under a balanced load",
    "train.bucket_mb": "gradient buckets hold 25 MiB",
    "parallel.late_layers": "where memory is short, raise parallel.zero or set train.recompute",
    "parallel.end_degrees": "embedding and head are cut over parallel.tp ranks",
    "overlap.expert_imbalance": "profiles have the rows of the run's first step",
    "cluster.nccl.tp.min_ctas": "NCCL decides, within cluster.nccl.tp.max_ctas",
    "cluster.nccl.pp.min_ctas": "NCCL decides, within cluster.nccl.pp.max_ctas",
    "cluster.nccl.dp.min_ctas": "NCCL decides, within cluster.nccl.dp.max_ctas",
    "checkpoint.copies_wait": "a copy travels while the next step runs",
    "failure.refill_steps": "100 new steps give one of failure.max_restarts back",
    "failure.max_tries": "a recovery is tried 5 times",
    "failure.backoff_s": "the second try waits a second, each further one twice as long",
}
"""Keys that a configuration no longer has, and their replacements."""
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
"""Words for limits, by the limit's name in a field's metadata."""


def in_words(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe the values that a type and its metadata allow, such as ``whole number at least 1``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return in_words(inner[0], [part for item in inner[1:] for part in getattr(item, "metadata", [item])])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if choice is type(None) else in_words(choice) for choice in inner)
    if origin is dict:
        return f"{in_words(inner[1])}, by name"
    if (section := section_of(kind)) is not None:
        return f"keys {', '.join(section.model_fields)}"
    if dataclasses.is_dataclass(kind):
        return f"keys {', '.join(field.name for field in dataclasses.fields(kind))}"
    if (entry := entry_of(kind)) is not None:
        return f"list of mappings with {', '.join(entry.model_fields)}"
    if origin is tuple:
        count = "" if Ellipsis in inner else f"{len(inner)} "
        words = in_words(inner[0])
        if words.startswith("one of "):
            return f"list of {count}words of {words.removeprefix('one of ')}"
        name = next((word for word in _WORDS.values() if words.startswith(word)), words)
        return f"list of {count}{name}s{words.removeprefix(name)}"
    limits = []
    for item in metadata:
        if isinstance(options := getattr(item, "func", None), partial):  # `one_of`
            return f"one of {', '.join(options.args[0])}"
        for name, text in _LIMITS.items():
            if (limit := getattr(item, name, None)) is not None:
                limits.append(text.format(f"{limit:g}" if isinstance(limit, float) else limit))
    return f"{_WORDS[kind]} {', '.join(limits)}".strip()


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section type that a field holds, or may hold; None if it holds another type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(filter(None, map(section_of, get_args(annotation))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def entry_of(annotation: Any) -> type[Section] | None:
    """Return the section type of the entries of a field that holds a list of sections; None for others."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key with its sections as prefix, and the sections of the top level."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or not prefix:
            yield f"{prefix}{name}"
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def problems_in(errors: Iterable[Mapping[str, Any]], whole: type[BaseModel]) -> dict[str, str]:
    """Return one line by each faulty key in a configuration that ``whole`` describes: key, value, and what
    would be right. The key is empty for a check over sections. ``errors``: pydantic's error list."""
    lines: dict[str, str] = {}
    for error in errors:
        location, keys = list(map(str, error["loc"])), []
        section: type[BaseModel] | None = whole
        field: FieldInfo | None = None
        while location and section is not None:  # below a key pydantic names types and entries
            around = section
            keys.append(location.pop(0))
            field = section.model_fields.get(keys[-1])
            section = section_of(field.annotation) if field is not None else None
            if field is not None and location and (entry := entry_of(field.annotation)) is not None:
                section, keys[-1] = entry, f"{keys[-1]}[{location.pop(0)}]"
        if not (key := ".".join(keys)):  # a check over sections names the keys itself
            line = _message(error)
        elif key in GONE:
            line = f"{key}={shown(error.get('input'))}: this key is gone; leave it out: {GONE[key]}"
        elif field is None:
            line = f"unknown key {key!r}; {_meant(keys, around, whole)}"
        else:
            line = _wrong_value(error, key, field, location)
        lines.setdefault(key, line)
    return lines


def _wrong_value(error: Mapping[str, Any], key: str, field: FieldInfo, below: list[str]) -> str:
    """Describe one faulty value; ``below``: the entry and the types that pydantic names below the key."""
    kind, value = error["type"], error.get("input")
    if get_origin(field.annotation) is dict and below:
        entry = f".{below[0]}"
    else:
        entry = next((f"[{part}]" for part in below if part.isdecimal()), "") if kind != "missing" else ""
    start = f"{key}{entry}={shown(value)}:"
    if kind == "value_error":
        return f"{f'{key}{entry}:' if isinstance(value, (dict, Section)) else start} {_message(error)}"
    section = section_of(field.annotation) or (entry_of(field.annotation) if key[-1] == "]" else None)
    if section is not None:
        first = next(iter(section.model_fields))
        return f"{key}={shown(value)}: is a section of keys; write them as {key}: {{{first}: ...}}"
    wanted = re.sub(
        r"\b(whole number|number|path|list)\b", r"a \1", in_words(field.annotation, field.metadata)
    )
    if kind == "missing" and not below:
        return f"{key} is missing; it must be {wanted}"
    in_quotes = kind in ("string_type", "path_type") and isinstance(value, bool | int | float)
    if in_quotes or (kind == "tuple_type" and isinstance(value, str | bool | int | float)):
        text = f'"{json.dumps(value)}"' if in_quotes else f"[{json.dumps(value)}]"
        what, how = ("text", "quotes") if in_quotes else ("a list", "brackets")
        by_override = "" if entry or "[" in key else f", or override '{key}={text}'"
        return f"{start} must be {what}; write it in {how}: {text}{by_override}"
    if kind == "literal_error" and (words := _choices(field.annotation))[1:]:
        return f"{start} {must_be_one_of(value, words)}"
    return f"{start} {f'{key} ' if entry else ''}must be {wanted}"


def _choices(kind: Any) -> list[str]:
    """Return the words that a type allows, at any depth."""
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    return [word for inner in get_args(kind) for word in _choices(inner)]


def _message(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _meant(keys: list[str], around: type[BaseModel], whole: type[BaseModel]) -> str:
    """Suggest what an unknown key means: a key of the section ``around`` it, of another one, or of other
    systems."""
    *parents, last = keys
    prefix = "".join(f"{parent}." for parent in parents)
    everywhere = list(all_keys(whole))
    same = [key for key in everywhere if plain(key.rpartition(".")[2]) == plain(last)]
    ours, here = key_called(last), list(around.model_fields)
    if same:
        meant = min(same, key=lambda key: not key.startswith(prefix))
    elif ours.partition("=")[0] in everywhere:
        meant = ours
    elif (near := nearest(last, here)) is not None:
        meant = prefix + near
    else:
        return f"known here: {', '.join(here)}"
    return f"did you mean {meant!r}?"
