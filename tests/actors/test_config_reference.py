"""The reference of the configuration, ``docs/configuration.md``, is made from the sections and their source.

The meaning of a key is stated once, in the comment on its line or in the comment lines right above it.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic.fields import FieldInfo

from braid.actors.config import Config
from braid.actors.config.data import SetConfig
from braid.actors.config.model import Section
from braid.actors.config.wording import entry_of, in_words, section_of
from tests.architecture.test_config_size import leaves

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
_HEAD: Final = """\
# Configuration

Made from the source of `actors/config/` by `make golden`.
"""
_TABLE: Final = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n"


def reference() -> str:
    """Return the document: one table for the keys of the top level, then one per section."""
    return "\n".join([_HEAD, *tables(Config)])


def tables(config: type[Section]) -> Iterator[str]:
    """Yield headings, docstrings and tables of a configuration, the keys outside sections first."""
    sections = {name: section_of(info.annotation) for name, info in config.model_fields.items()}
    keys = {name: info for name, info in config.model_fields.items() if sections[name] is None}
    yield f"## Top level\n\n{inspect.getdoc(config)}\n\n{_TABLE}{''.join(_rows(config, '', keys))}"
    for name, section in sections.items():
        if section is not None:
            text = "\n\n".join(_docstrings(section, name))
            rows = "".join(_rows(section, f"{name}.", section.model_fields))
            yield f"## {name}\n\n{text}\n\n{_TABLE}{rows}"


def _rows(section: type[Section], prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Yield lines of a table, including the keys of nested sections."""
    kinds = (kind for kind in reversed(section.__mro__) if issubclass(kind, Section))
    meanings = {name: text for kind in kinds for name, text in _field_comments(kind).items()}
    for name, info in fields.items():
        if (inner := section_of(info.annotation)) is not None and not prefix.endswith("[]."):
            yield from _rows(inner, f"{prefix}{name}.", inner.model_fields)
            continue
        default = "" if info.is_required() else f"`{_yaml(info.get_default(call_default_factory=True))}`"
        cells = (
            in_words(info.annotation, info.metadata),
            default,
            meanings.get(name, ""),
        )
        escaped = (cell.replace("|", "\\|").replace("<", "\\<") for cell in cells)
        yield f"| `{prefix}{name}` | {' | '.join(escaped)} |\n"
        if (entry := entry_of(info.annotation)) is not None:
            yield from _rows(entry, f"{prefix}{name}[].", entry.model_fields)


def _docstrings(section: type[Section], name: str) -> Iterator[str]:
    """Yield the docstrings of a section and of nested sections."""
    yield inspect.getdoc(section) or ""
    for key, info in section.model_fields.items():
        if entry := entry_of(info.annotation):
            yield f"`{name}.{key}`: {inspect.getdoc(entry)}"
        if (inner := section_of(info.annotation)) is not None:
            yield from (f"`{name}.{key}`: {text}" for text in _docstrings(inner, f"{name}.{key}"))


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _field_comments(section: type[Section]) -> dict[str, str]:
    """Return, by field, the comment lines right above its line and then the comment on it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        code, _, comment = line.partition("# ")
        if field := re.match(r" +(\w+): ", code):
            comments[field[1]] = " ".join([*above, comment]).strip()
        above = [*above, comment] if comment and not code.strip() else []
    return comments


def test_the_document_is_what_the_code_says(update_golden: bool) -> None:
    if update_golden:
        DOCUMENT.write_text(reference(), encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), "run this test with --update-golden"


def test_every_key_has_one_row() -> None:
    rows = [line.split("`")[1] for line in reference().splitlines() if line.startswith("| `")]
    entries = [row for row in rows if "[]." in row]
    assert {row.partition("[]")[0] for row in entries} == {"data.mixture"}
    assert len(entries) == len(set(entries)) == len(SetConfig.model_fields)
    assert Counter(row for row in rows if row not in entries) == Counter(leaves())
