"""Where the paths of a configuration begin: one table of all keys that hold one, and one rule.

What belongs to the configuration (weights, layers, the mirror) begins at the configuration's folder; what a
run reads and writes begins where the command runs. `anchored` makes any of them absolute.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from braid.actors.config.urls import is_url

PYTHON_STDLIB: Final = "python-stdlib"
"""Among ``data.files``: the sources that every machine with Python has, its standard library."""
BYTES: Final = "bytes"
"""The ``data.tokenizer`` that is no file."""

BESIDE_THE_FILE: Final = ("model.layer", "model.initial", "checkpoint.mirror")
"""Keys whose relative paths begin at the folder of the configuration file."""

C = TypeVar("C", bound=BaseModel)


def _at(base: Path, place: str) -> str:
    """``~`` is the home of whoever reads it, and is left to him."""
    return place if place.startswith("~") else os.path.normpath(base / place)


def _layer(base: Path, reference: str | dict[str, str]) -> str | dict[str, str]:
    """``file.py:Class``, or several by name; a module has no path."""
    if not isinstance(reference, str):
        return {name: f"{_layer(base, one)}" for name, one in reference.items()}
    place, _, name = reference.rpartition(":")
    return f"{_at(base, place)}:{name}" if place.endswith(".py") else reference


def _url(base: Path, url: str) -> str:
    """A path, or a URL of a file; those of other file systems have roots of their own."""
    scheme = next((s for s in ("file://", "file:", "local://", "local:") if url.startswith(s)), "")
    place = url.removeprefix(scheme)
    return url if is_url(place) else scheme + _at(base, place)


def _files(base: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if name == PYTHON_STDLIB else _url(base, name) for name in names)


def _tokenizer(base: Path, name: str) -> str:
    return name if name == BYTES else _at(base, name)


def _path(base: Path, path: Path) -> Path:
    return Path(os.path.normpath(base / path))


_PATHS: Mapping[str, Callable[[Path, Any], Any]] = {
    "runs": _path,
    "model.layer": _layer,
    "model.initial": _path,
    "data.files": _files,
    "data.tokenizer": _tokenizer,
    "data.directory": _path,
    "overlap.schedule_file": _path,
    "overlap.plan": _path,
    "overlap.profile": _path,
    "checkpoint.mirror": _url,
}


def anchored(config: C, base: Path, keys: Iterable[str] = tuple(_PATHS)) -> C:
    """The same with the relative paths of ``keys`` taken from ``base``; absolute ones stay as they are."""
    for key in keys:
        config = _changed(config, key.split("."), partial(_PATHS[key], base))
    return config


def _changed(section: C, path: list[str], change: Callable[[Any], Any]) -> C:
    """A copy in which one value was changed; a key that was not given stays so."""
    name, *below = path
    value = getattr(section, name)
    if value is None:
        return section
    new = _changed(value, below, change) if below else change(value)
    return section if new == value else section.model_copy(update={name: new})
