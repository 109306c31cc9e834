"""Parquet files as a corpus has them: what is in them, and how they are cut.

pyarrow is imported where it is used: text needs none of it, and it takes a while to load.
"""

from collections.abc import Iterator
from typing import Any

from braid.actors.config import ConfigError
from braid.actors.config.urls import file_system, is_url


def choices(names: list[str]) -> str:
    """What an error says of the fields that there are."""
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
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(
        check(text) for check in (*checks, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
    ):
        raise ValueError(
            f"data.text_field: {text_field!r} has type {kind} in {path!r}; name a column of text"
        )
    return file


def broken_parquet(path: str, fault: Exception) -> ValueError:
    """What to tell of a file that pyarrow cannot read."""
    reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    return ValueError(f"data.files: {path!r} is not readable Parquet ({reason}); repair or exclude it")


def row_groups(path: str, target: int, text_field: str) -> Iterator[tuple[int, int, int]]:
    """The file's row groups from its first to its last, as (first, last + 1, bytes) of ``target`` bytes or
    a little more."""
    with open_parquet(path, text_field) as file:
        groups, metadata = file.num_row_groups, file.metadata
        start, size = 0, 0
        for group in range(groups):
            size += metadata.row_group(group).total_byte_size
            if size >= target or group == groups - 1:
                yield start, group + 1, size
                start, size = group + 1, 0
