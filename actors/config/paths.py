"""The paths of a configuration: one table of all keys that hold one, and one reader for all of them; and the
file systems behind URLs, whose packages are loaded when they are needed.

`expanded` replaces homes (``~``) and variables (``$NAME``, ``${NAME}``) by those of the user who runs the
command. Paths of the configuration's own files (weights, layers, the mirror) begin at the configuration's
folder; paths that a run reads and writes begin where the command runs. `anchored` makes either absolute.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from braid.actors.config.model import ConfigError
from braid.actors.config.variables import looks_secret
from braid.scheduling.text.suggestions import nearest

PYTHON_STDLIB: Final = "python-stdlib"
"""Entry of ``data.files`` for the sources of Python's standard library, which every machine has."""
BYTES: Final = "bytes"
"""Value of ``data.tokenizer`` that names no file."""

BESIDE_THE_FILE: Final = ("model.layer", "model.initial", "checkpoint.mirror")
"""Keys whose relative paths begin at the folder of the configuration file."""
_PATHS: Final = (
    *("runs", "model.layer", "model.initial", "data.files", "data.tokenizer", "data.directory"),
    *("data.hub.id", "data.mixture.files", "data.mixture.hub.id", "data.chat_template"),
    "data.mixture.chat_template",
    *("overlap.schedule_file", "overlap.plan", "overlap.profile", "checkpoint.mirror"),
)
_PATTERNS: Final = ("data.exclude", "data.mixture.exclude")
"""Keys with relative patterns that match below any folder."""
_WORDS: Final = {
    *(("data.files", PYTHON_STDLIB), ("data.mixture.files", PYTHON_STDLIB)),
    ("data.tokenizer", BYTES),
}
"""Values that are not paths."""
_ON_THE_HUB: Final = ("data.tokenizer", "model.initial")
"""Keys whose value may be the name of a repository on the Hugging Face Hub."""
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_URL: Final = re.compile("(?:file|local):(?://)?")

C = TypeVar("C", bound=BaseModel)

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expanded(config: C) -> C:
    """Return a copy with every ``~`` and ``$NAME`` in paths replaced; raise `ConfigError`, which names one
    that cannot be."""
    return _mapped(config, (*_PATHS, *_PATTERNS), _expand)


def anchored(config: C, base: Path, keys: Iterable[str] = _PATHS) -> C:
    """Return a copy with the relative paths of ``keys`` resolved from ``base``; absolute ones stay as they
    are.

    URLs and names on the Hub have their own roots, and paths that are not expanded yet stay as they are.
    """

    def anchor(key: str, path: str) -> str:
        elsewhere = path.startswith(("~", "$")) or is_url(path) or is_hub_name(key, path, base)
        return path if elsewhere else os.path.normpath(base / path)

    return _mapped(config, keys, anchor)


def is_hub_name(key: str, value: str, base: Path = Path()) -> bool:
    """Return whether a key's value is a repository of the Hugging Face Hub, such as ``org/name``, and not the
    path of a file or folder from ``base`` on."""
    named = key in _ON_THE_HUB and _HUB_NAME.fullmatch(value) and not value.endswith(".json")
    return bool(named) and not (base / value).exists()


def _mapped(config: C, keys: Iterable[str], change: Callable[[str, str], str]) -> C:
    """Return a copy with ``change(key, path)`` in place of every path; keys that were not set stay unset."""
    for key in keys:
        config = _changed(config, key.split("."), partial(_in_text, key, partial(change, key)))
    return config


def _changed(value: Any, names: Sequence[str], change: Callable[[str], str]) -> Any:
    """Return a copy of a section, a list or a value, after applying ``change`` to every text of the key that
    ``names`` leads to."""
    match value:
        case BaseModel():
            old = getattr(value, names[0])
            new = _changed(old, names[1:], change)
            return value if new == old else value.model_copy(update={names[0]: new})
        case tuple():
            return tuple(_changed(entry, names, change) for entry in value)
        case dict():
            return {name: _changed(entry, names, change) for name, entry in value.items()}
        case Path():
            return Path(change(str(value)))
        case str():
            return change(value)
    return value


def _in_text(key: str, change: Callable[[str], str], text: str) -> str:
    """Return a key's text after applying ``change`` to the path or URL in it."""
    if key == "model.layer":  # file.py:Class; package.module:Class has no path
        file, _, name = text.rpartition(":")
        return f"{change(file)}:{name}" if file.endswith(".py") else text
    on_hub = key.endswith("hub.id") and not text.startswith((".", "/", "~", "$"))
    if on_hub or (key, text) in _WORDS:
        return text
    scheme = _FILE_URL.match(text) if key != "data.tokenizer" else None
    start = scheme.end() if scheme else 0
    return text[:start] + change(text[start:])


def _expand(key: str, path: str) -> str:
    def value(variable: re.Match[str]) -> str:
        name = variable[1] or variable[2]
        if not os.environ.get(name):
            raise ConfigError(
                f"{key}={path!r}: the variable {name} is not set here, or empty; set it, or write "
                f"the path out"
            )
        if name != "PWD" and looks_secret(name, ""):  # that one is a folder, not a password
            raise ConfigError(
                f"{key}={path!r}: {name} looks like a secret, and a configuration is written down and "
                f"shown; write the path without it"
            )
        return os.environ[name]

    whole = os.path.expanduser(_VARIABLE.sub(value, path))
    if whole.startswith("~"):
        home, *_ = path.split("/")
        raise ConfigError(f"{key}={path!r}: {home} is nobody's home here; write the path out, or ./{path}")
    return whole


EXTRA = "object-stores"
"""Name of this package's extra that supports S3, Google's and Azure's object stores."""
_IN_EXTRA = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl")


def is_url(place: str) -> bool:
    """Return whether a place is a URL instead of a path."""
    return "://" in place or "::" in place


def checked_address(address: str, schemes: Sequence[str], variables: Sequence[str] = ()) -> str:
    """Return the address of a tool; raise `ValueError` for another scheme, a missing host, or a password in
    it. ``variables``: from which the tool takes user and password."""
    scheme, _, rest = address.partition(":")
    parts = urlsplit(address)
    if scheme not in schemes or not rest:
        raise ValueError(f"must begin with {' or '.join(f'{name}:' for name in schemes)}")
    if scheme in ("http", "https") and not parts.hostname:
        raise ValueError("names no host; write it as http://HOST:PORT")
    if parts.password is not None:
        instead = f" and set {' and '.join(variables)}" if variables else ""
        raise ValueError(
            f"has a password, and a configuration is written down and shown; leave it out{instead}"
        )
    return address


def check_protocol(key: str, url: str) -> None:
    """Raise `ConfigError` if a URL's protocol is unknown; the protocol's package need not be installed
    here."""
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    if protocol not in (known := fsspec.available_protocols()):
        near = nearest(protocol, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{key}={url!r}: no file system is called {protocol!r}{hint}")


def file_system(key: str, url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raise `ConfigError`, which names the key
    and the remedy."""
    import fsspec

    check_protocol(key, url)
    try:
        files, place = fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = fsspec.utils.get_protocol(url)
        remedy = f"; pip install 'braid[{EXTRA}]'" if protocol in _IN_EXTRA else ""
        raise ConfigError(f"{key}={url!r}: {error}{remedy}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={url!r}: {error}") from None
    return files, str(place)
