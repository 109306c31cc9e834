"""The data's section of the configuration: files, a data set of the Hub, or a mixture of sets."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from braid.actors.config.model import Section
from braid.actors.config.paths import PYTHON_STDLIB


class DataConfig(Section):
    """The corpus. `PYTHON_STDLIB` among the files stands for the sources of Python's standard library."""

    # paths, patterns, folders or URLs; python-stdlib: Python's sources
    files: tuple[str, ...] = (PYTHON_STDLIB,)
    exclude: tuple[str, ...] = ()  # patterns of files to leave out
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"  # auto: by the ending of each file
    # bytes, or a Hugging Face tokenizer.json or its folder; default: that of model.initial, else bytes
    tokenizer: str | None = None
    end_token: str | None = None  # ends documents; default: what the files beside the tokenizer say
    text_field: str = "text"  # of JSON lines and Parquet: where the text is
    encoding_errors: Literal["strict", "replace", "skip"] = "strict"  # of files that are no UTF-8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02  # of documents, kept from training
    directory: Path | None = None  # where tokens go; default: <runs>/data/<fingerprint>
    document_mask: bool = False  # tokens attend to those of their own document only
    restart_positions: bool = False  # count positions from the begin of each document, with document_mask
