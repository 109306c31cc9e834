"""Parquet files of a corpus. pyarrow is imported in functions: text needs none of it, and it loads slowly."""

from typing import Any

from braid.actors.config import ConfigError
from braid.actors.config.urls import file_system, is_url

_TEXTS = {"string", "large_string", "string_view", "binary", "large_binary", "null"}
"""Arrow's types that hold text."""


def choices(names: list[str]) -> str:
    if not names:
        return "which has no field at all; exclude the file"
    listed = ", ".join(repr(name) for name in names[:12]) + (", ..." if len(names) > 12 else "")
    return f"which has {listed}; set data.text_field to the one that holds the text"


def open_parquet(path: str, text_field: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`; `ValueError` if it cannot be read or has no text of that name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # a small buffer streams a column chunk instead of reading it whole
        files, place = file_system("data.files", path) if is_url(path) else (None, path)
        file = pq.ParquetFile(place, filesystem=files, buffer_size=1 << 20, pre_buffer=False)
    except ConfigError:
        raise
    except (OSError, pa.ArrowException) as fault:
        raise broken_parquet(path, fault) from None
    schema = file.schema_arrow
    if text_field not in schema.names:
        raise ValueError(f"data.text_field: {text_field!r} is not in {path!r}, {choices(schema.names)}")
    kind = schema.field(text_field).type
    if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in _TEXTS:
        raise ValueError(
            f"data.text_field: {text_field!r} has type {kind} in {path!r}; name a column of text"
        )
    return file


def broken_parquet(path: str, fault: Exception) -> ValueError:
    reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    return ValueError(f"data.files: {path!r} is not readable Parquet ({reason}); repair or exclude it")
