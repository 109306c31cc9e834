"""Reads and writes YAML by the core schema of version 1.2, as people expect it.

PyYAML follows version 1.1, in which ``off``, ``yes`` and ``on`` are truth values, ``2026-11-23`` is a date,
``010`` is eight, ``1:30`` is ninety and ``1e-3`` is a text. In this module ``true`` and ``false`` are the
only truth values, ``010`` is ten, ``1e-3`` is a number, and the other examples are texts.
"""

import re
from functools import cache
from typing import Any

_TAG = "tag:yaml.org,2002:"
_KINDS = (
    ("bool", re.compile("true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        "-+.0123456789",
    ),
    ("null", re.compile("~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("merge", re.compile("<<"), "<"),  # a feature of version 1.1 that is in wide use
)
"""Types of plain scalars: (tag, pattern of the whole text, characters with which the text may begin)."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text to mappings, lists and scalars, without running any code.

    Raises `ValueError` that names ``where``, the source, and both lines of a key that a mapping has twice.
    """
    import yaml  # here, so that pairings can be searched for where PyYAML is not installed

    loader = _loader()(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _check_keys(node: Any, seen: set[int]) -> None:
    """Raise `yaml.YAMLError` if a mapping has a key twice; PyYAML would silently drop the first value."""
    import yaml

    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _check_keys(entry, seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"{key.value!r} stands in line {lines[name]} and again in line {line}; keep one of them"
                )
            lines[name] = line
        _check_keys(value, seen)


def write_yaml(content: Any, width: int | None = None) -> str:
    """Return ``content`` as YAML that `parse_yaml` and readers of version 1.1 read alike; strings are quoted
    where these would differ."""
    import yaml

    return yaml.dump(content, Dumper=_dumper(), sort_keys=False, width=width)


@cache
def _loader() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's; here none of 1.1

    _resolve(Loader)
    Loader.add_constructor(f"{_TAG}int", lambda loader, node: _whole(loader.construct_scalar(node)))
    return Loader


def _whole(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    _resolve(Dumper)  # in addition to the rules of 1.1: a text that either reads as another type is quoted
    return Dumper


def _resolve(kind: Any) -> None:
    for name, pattern, first in _KINDS:
        kind.add_implicit_resolver(_TAG + name, re.compile(f"(?:{pattern.pattern})$"), list(first))
