"""All keys of the configuration in words: ``docs/configuration.md``, made from the sections and their source.

What a key means is said once, in the comment on its line or in the comment lines right above it.
"""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from textwrap import dedent
from typing import Any, Final

from pydantic.fields import FieldInfo

from braid.actors.config import Config
from braid.actors.config.model import Section
from braid.actors.config.wording import in_words

_HEAD: Final = """\
# Configuration

Made from the source of `actors/config/` by `python -m braid.actors.config.reference > docs/configuration.md`.
"""
_TABLE: Final = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n"


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
