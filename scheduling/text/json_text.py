"""Writes JSON that every reader accepts: NaN and infinities, which standard JSON lacks, become null."""

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """Return a copy of ``value`` with None for NaN and infinities; keys become text, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, on one line unless ``indent`` gives the spaces per level."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)
