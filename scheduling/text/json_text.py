"""JSON that every reader takes: it has no NaN and no infinities, which become null."""

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities; keys become text, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON, on one line unless there is an indent."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)
