"""The paths of a configuration: one table of all keys that hold one, and one reader for all of them.

`expanded` replaces homes (``~``) and variables (``$NAME``, ``${NAME}``) by those of whoever runs the command.
What belongs to the configuration (weights, layers, the mirror) begins at the configuration's folder; what a
run reads and writes begins where the command runs. `anchored` makes any of them absolute.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from braid.actors.config.model import ConfigError
from braid.actors.config.urls import is_url
from braid.actors.config.variables import looks_secret

PYTHON_STDLIB: Final = "python-stdlib"
"""Among ``data.files``: the sources that every machine with Python has, its standard library."""
BYTES: Final = "bytes"
"""The ``data.tokenizer`` that is no file."""

BESIDE_THE_FILE: Final = ("model.layer", "model.initial", "checkpoint.mirror")
"""Keys whose relative paths begin at the folder of the configuration file."""

C = TypeVar("C", bound=BaseModel)


At = Callable[[str], str]
"""What becomes of one path or URL."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def _expand(key: str, place: str) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise ConfigError(
                f"{key}={place!r}: the variable {name} is not set here, or empty; set it, or write "
                f"the path out"
            )
        if name != "PWD" and looks_secret(name, ""):  # that one is a folder, not a password
            raise ConfigError(
                f"{key}={place!r}: {name} looks like a secret, and a configuration is written down and "
                f"shown; write the path without it"
            )
        return os.environ[name]

    whole = os.path.expanduser(_VARIABLE.sub(value, place))
    if whole.startswith("~"):
        home, *_ = place.split("/")
        raise ConfigError(f"{key}={place!r}: {home} is nobody's home here; write the path out, or ./{place}")
    return whole


def _anchor(base: Path, place: str) -> str:
    """URLs have roots of their own, and what is not expanded is left to whoever reads it."""
    return place if place.startswith(("~", "$")) or is_url(place) else os.path.normpath(base / place)


def _layer(at: At, reference: str | dict[str, str]) -> str | dict[str, str]:
    """``file.py:Class``, or several by name; a module has no path."""
    if not isinstance(reference, str):
        return {name: f"{_layer(at, one)}" for name, one in reference.items()}
    place, _, name = reference.rpartition(":")
    return f"{at(place)}:{name}" if place.endswith(".py") else reference


def _url(at: At, url: str) -> str:
    """A path, or a URL, also one of a file of this machine."""
    scheme = next((s for s in ("file://", "file:", "local://", "local:") if url.startswith(s)), "")
    return scheme + at(url.removeprefix(scheme))


def _files(at: At, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if name == PYTHON_STDLIB else _url(at, name) for name in names)


def _tokenizer(at: At, name: str) -> str:
    return name if name == BYTES else at(name)


def _path(at: At, path: Path) -> Path:
    return Path(at(str(path)))


_PATHS: Mapping[str, Callable[[At, Any], Any]] = {
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
_PATTERNS: Final = {"data.exclude": _files}
"""Keys whose relative patterns begin anywhere."""


def expanded(config: C) -> C:
    """The same with every ``~`` and ``$NAME`` in paths replaced; `ConfigError` names those that cannot be."""
    for key, read in {**_PATHS, **_PATTERNS}.items():
        config = _changed(config, key.split("."), partial(read, partial(_expand, key)))
    return config


def anchored(config: C, base: Path, keys: Iterable[str] = tuple(_PATHS)) -> C:
    """The same with the relative paths of ``keys`` taken from ``base``; absolute ones stay as they are."""
    for key in keys:
        config = _changed(config, key.split("."), partial(_PATHS[key], partial(_anchor, base)))
    return config


def _changed(section: C, path: list[str], change: Callable[[Any], Any]) -> C:
    """A copy in which one value was changed; a key that was not given stays so."""
    name, *below = path
    value = getattr(section, name)
    if value is None:
        return section
    new = _changed(value, below, change) if below else change(value)
    return section if new == value else section.model_copy(update={name: new})
