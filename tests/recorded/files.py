"""Recorded cases as files: JSON with sorted names and one line per case, so that differences are of cases."""

import argparse
import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def compare(
    old: Mapping[str, Case], new: Mapping[str, Case], unlike: Callable[[Case, Case], str]
) -> Iterator[str]:
    """A line about every case that differs, schedule by schedule; ``unlike``: in what, or nothing."""
    for name in sorted({*old, *new}, key=lambda name: name.rpartition(": ")[::-1]):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            yield f"{name}: only in the {'new' if before is None else 'old'} record"
        elif (REFUSED in before) != (REFUSED in after):
            which, case = ("old", before) if REFUSED in before else ("new", after)
            yield f"{name}: refused in the {which} record: {case[REFUSED]}"
        elif REFUSED not in before and (text := unlike(before, after)):
            yield f"{name}: {text}"


def command(what: str, record: Callable[[Path, str | None], int], unlike: Callable[[Case, Case], str]) -> int:
    """Record, or compare two records; the exit code: 1 where they differ, else 0 or what recording says."""
    parser = argparse.ArgumentParser(description=f"Record {what}, or compare two records.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="record to this file")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two records")
    parser.add_argument("--only", help="only cases whose names hold this pattern")
    given = parser.parse_args()
    if given.out is not None:
        return record(given.out, given.only)
    records = [read_cases(path) for path in given.compare]
    old, new = ({name: one[name] for name in chosen(one, given.only)} for one in records)
    lines = list(compare(old, new, unlike))
    print("\n".join(lines) if lines else f"equal: {len(old)} cases")
    return 1 if lines else 0
