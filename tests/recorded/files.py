"""Recorded cases as files: JSON with sorted names and one line per case, so that differences are of cases."""

import argparse
import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SCHEDULES: Final = (
    *("megatron", "megatron:eager_1f1b", "megatron:folded", "interleaved"),
    *("intra_batch", "wavelet", "dhelix"),
    *("braid", "braid:eager_w", "braid:twins", "braid:v", "dualpipev", "zbv"),
)
"""The schedules (`ScheduleName`) that are recorded; written out, as the code's own list may change."""

REFUSED: Final = "refused"
"""Key of the message where a case was refused; such a case has no other key."""

Case = Mapping[str, Any]


def read_cases(path: Path) -> dict[str, Case]:
    """Cases by name; `ValueError` if the file is no such record, `OSError` if it cannot be read."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(isinstance(case, dict) for case in content.values()):
        raise ValueError(f"{path} does not hold an object of objects")
    return content


def write_cases(path: Path, cases: Mapping[str, Case]) -> None:
    """Write all cases, in place of what was there; floats are written so that they read back exactly."""
    lines = (f"{json.dumps(name)}: {json.dumps(cases[name], sort_keys=True)}" for name in sorted(cases))
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(beside, path)


def chosen(names: Iterable[str], pattern: str | None) -> list[str]:
    """The names that hold a pattern (``*`` and ``?`` as in file names); all without one."""
    return [name for name in names if pattern is None or fnmatch.fnmatchcase(name, f"*{pattern}*")]


def asked(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What a command that records or compares was asked."""
    parser = argparse.ArgumentParser(description=description)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="record to this file")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two records")
    parser.add_argument("--only", help="only cases whose names hold this pattern")
    return parser.parse_args(arguments)


def both(given: argparse.Namespace, always: Sequence[str] = ()) -> list[dict[str, Case]]:
    """The two records to compare: what was asked for, and what is ``always`` read."""
    records = map(read_cases, given.compare)
    return [
        {name: one[name] for name in one if name in always or name in chosen(one, given.only)}
        for one in records
    ]
