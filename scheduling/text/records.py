"""Converts dataclasses from and to plain mappings (YAML, JSON); an error names the key that is wrong.

Every file that planning reads (clusters, profiles, plans) goes through `from_mapping`, so that a missing, a
misspelt, a zero or a NaN value gives one message with key, value and remedy, and never a silent default.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from braid.scheduling.text.suggestions import hint, must_be_one_of

Record = TypeVar("Record")


def file_text(path: Path, what: str, remedy: str = "") -> str:
    """Return the text of a file; raise `ValueError` that names ``what`` it is, the file and the remedy if it
    cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{what} {path} cannot be read: {reason}" + (remedy and f"; {remedy}")) from None


def from_mapping(kind: type[Record], content: Any, where: str) -> Record:
    """Build a dataclass of type ``kind`` from a mapping; raise `ValueError` that names a wrong key below
    ``where``.

    Numbers must be finite. The dataclass checks its own rules in ``__post_init__``; the `ValueError` that it
    raises is raised again with ``where`` in front.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must hold keys and values, found {content!r}")
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    for key in content:
        if key not in fields:
            meant = hint(str(key), fields) or f"known here: {', '.join(fields)}"
            raise ValueError(f"{where}: unknown key {key!r}; {meant}")
    values = {}
    for name, field in fields.items():
        if name in content:
            values[name] = _value(hints[name], content[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{name} is missing; give it {_expected(hints[name])}")
    try:
        return kind(**values)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from None


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        chosen = [argument for argument in arguments if argument is not type(None)]
        return _value(chosen[0], value, where)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{where}={value!r} must be a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{where}={value!r} must have {len(kinds)} entries")
        return tuple(_value(k, v, f"{where}[{n}]") for n, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r} must hold keys and values")
        return {
            _value(arguments[0], k, where): _value(arguments[1], v, f"{where}.{k}") for k, v in value.items()
        }
    if hasattr(kind, "from_plain"):
        return kind.from_plain(value, where)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return from_mapping(kind, value, where)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [member.value for member in kind]
        if value not in choices:
            raise ValueError(f"{where}={value!r} {must_be_one_of(value, choices)}")
        return kind(value)
    if isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{where}={value!r} must be {_expected(kind)}")
    if kind in (int, float) and isinstance(value, str):
        value = number(value)
    if kind is float and isinstance(value, int | float):
        try:
            as_float = float(value)
        except OverflowError:
            as_float = math.inf
        if not math.isfinite(as_float):
            raise ValueError(f"{where}={value!r} must be a finite number")
        return as_float
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind):
        remedy = "; write it in quotes" if kind is str and isinstance(value, int | float) else ""
        raise ValueError(f"{where}={value!r} must be {_expected(kind)}{remedy}")
    return value


def number(text: Any) -> Any:
    """Return the number that a text such as ``1_000`` stands for; return any other value unchanged."""
    if not isinstance(text, str):
        return text
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return text


def _expected(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "a value")


def to_mapping(record: Any) -> Any:
    """Convert a dataclass to plain dictionaries, lists and scalars, including default values.

    This inverts `from_mapping`.
    """
    if hasattr(record, "to_plain"):
        return record.to_plain()
    if dataclasses.is_dataclass(record):
        return {
            field.name: to_mapping(getattr(record, field.name))
            for field in dataclasses.fields(record)
            if field.init
        }
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, Mapping):
        return {to_mapping(key): to_mapping(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_mapping(value) for value in record]
    return record


def require_positive(record: Any, names: Sequence[str], *, zero: bool = False) -> None:
    """Raise `ValueError` unless the named fields of a record are above zero (with ``zero``: at least
    zero)."""
    for name in names:
        value = getattr(record, name)
        if not (value > 0 or (zero and value == 0)):
            wanted = "zero or more" if zero else "greater than zero"
            raise ValueError(f"{name}={value!r} must be {wanted}")


def require_fraction(record: Any, names: Sequence[str]) -> None:
    """Raise `ValueError` unless the named fields of a record are above 0 and at most 1."""
    for name in names:
        value = getattr(record, name)
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value!r} must be above 0 and at most 1")
