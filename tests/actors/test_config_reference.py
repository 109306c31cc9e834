"""The reference of the configuration: complete, and as the code says."""

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from braid.actors.config.data import SetConfig
from braid.actors.config.model import Positive, Section
from braid.actors.config.reference import reference, tables
from tests.architecture.test_config_size import leaves
from tests.architecture.test_imports import loaded_after

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


class Inner(Section):
    """What is inside."""

    deep: tuple[float, float] = (1.0, 2.5)


class Made(Section):
    """A section that no run has."""

    wide: Positive | None = None  # so many <things> | of them
    # said above,
    # in two lines
    share: Annotated[float, Field(ge=0, lt=0.5)] = 0.25  # and beside
    silent: bool = True
    inner: Inner = Inner()


class MadeConfig(Section):
    """A configuration."""

    alone: str = "x"
    made: Made = Made()


MADE = r"""## made

A section that no run has.

`made.inner`: What is inside.

| key | value | default | meaning |
| --- | --- | --- | --- |
| `made.wide` | whole number at least 1, or null | `null` | so many \<things> \| of them |
| `made.share` | number at least 0, \< 0.5 | `0.25` | said above, in two lines and beside |
| `made.silent` | true or false | `true` |  |
| `made.inner.deep` | list of 2 numbers | `[1.0, 2.5]` |  |
"""


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


def test_a_key_is_rendered_with_its_comment() -> None:
    top, made = tables(MadeConfig)
    assert top.endswith("| `alone` | text | `x` |  |\n")
    assert made == MADE


def test_importing_loads_neither_torch_nor_ray() -> None:
    assert not loaded_after("import braid.actors.config.reference") & {"torch", "ray"}
