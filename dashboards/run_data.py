"""Reads a run directory as views for people, while it grows: description, steps, ranks, traces.

Only files with known names are read; missing ones are skipped, damaged ones are named in ``trouble``. Steps
count from 1 here, as in ``metrics.jsonl``; in traces they count from 0.
"""

import json
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from braid.dashboards.plan_view import effectiveness_view, schedule_view
from braid.dashboards.run_files import (
    GrowingLines,
    file_facts,
    flat,
    is_number,
    numbers_in,
    read_mapping,
    read_parsed,
    shown_config,
    tokens_per_second,
)
from braid.dashboards.timeline_view import Durations, predicted_durations, step_columns
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.cost.profile import parse_profile
from braid.scheduling.mesh.layout import AXES, ParallelLayout
from braid.scheduling.schedule.text import parse
from braid.scheduling.text.json_text import finite
from braid.scheduling.trace.arrays import length
from braid.scheduling.trace.batches import begin_of, read_batches
from braid.scheduling.trace.numbers import phases
from braid.scheduling.trace.stragglers import stragglers

T = TypeVar("T")
PREDICTED: Final = "trace/predicted.arrows"
_JSON: Final = [f"{name}.json" for name in ("model", "cluster", "profile", "predicted", "report")]
DESCRIPTIONS: Final = ("config.yaml", "schedule.txt", PREDICTED, *_JSON)
RANKS_AT_ONCE: Final = 16
"""Number of ranks in one timeline answer."""

_RANK_LINES: Final = 128
_RANKS_TAIL_BYTES: Final = 64 << 20
_SPAN_STEPS: Final = (4, 32)
"""Fewest and most steps whose spans are kept in memory."""


@dataclass(frozen=True)
class _Described:
    """The parts of a run that do not change from step to step."""

    content: dict[str, Any]
    layout: ParallelLayout | None
    ranks: int
    predicted: Durations


class RunData:
    """Views of one run directory, for one caller at a time; call `refresh` first."""

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()  # the directory may itself be a link; files in it may not
        self.directory = directory
        self._reader = secrets.token_hex(8)
        """Random id that distinguishes this server from others, as version numbers start anew with each."""
        self._facts: dict[str, tuple[int, int, int] | None] = {}
        self._version = 0
        self._described = _Described({}, None, 0, {})
        self._metrics = GrowingLines(directory / "metrics.jsonl")
        self._ranks = GrowingLines(directory / "ranks.jsonl", most=_RANKS_TAIL_BYTES)
        self._events = GrowingLines(directory / "events.jsonl")
        self._rows: list[dict[str, Any]] = []
        """Numbers of every step (`step_row`)."""
        self._visits: dict[str, Any] | None = None
        """Visits of every expert, from the newest step that records them."""
        self._rank_lines: deque[dict[str, Any]] = deque(maxlen=_RANK_LINES)
        self._event_lines: list[dict[str, Any]] = []
        self._trace = TraceFolder(directory / "trace")
        self._trace_due = 0.0
        self._trace_version = 0

    def check(self) -> None:
        if not self.directory.is_dir():
            raise ValueError(f"{self.directory} is no directory; give a run's, such as runs/NAME")
        known = ("config.yaml", "metrics.jsonl", "events.jsonl")
        if not any(file_facts(self.directory / name) for name in known):
            raise ValueError(
                f"{self.directory} holds no run: none of {', '.join(known)} is there; "
                f"give a run's directory, such as runs/NAME"
            )

    def refresh(self) -> dict[str, Any]:
        """Read new content. Return version numbers, each of which changes with some content, so that a page
        knows what to request again."""
        self._refresh_descriptions()
        changed = self._refresh_steps()
        self._refresh_trace(at_once=changed)
        traced = self._traced()
        return {
            "reader": self._reader,
            "state": self._version,
            "metrics": [self._metrics.epoch, len(self._rows)],
            "ranks": [self._ranks.epoch, self._rank_lines[-1]["step"] if self._rank_lines else 0],
            "events": [self._events.epoch, len(self._event_lines)],
            "trace": [self._trace_version, *(traced[:1] + traced[-1:])],
        }

    def _refresh_descriptions(self) -> None:
        facts = {name: file_facts(self.directory / name) for name in DESCRIPTIONS}
        if facts != self._facts:
            if (self._facts.get("config.yaml") or facts["config.yaml"]) != facts["config.yaml"]:
                # The run began anew: span files with old names may have other content now.
                self._trace, self._trace_due = TraceFolder(self.directory / "trace"), 0.0
                self._trace_version += 1
            self._facts = facts
            self._version += 1
            self._described = _describe(self.directory)

    def _refresh_steps(self) -> bool:
        """Read new lines about steps, ranks and events; return whether there is a new step."""
        anew, steps = self._metrics.refresh()
        if anew:
            self._rows, self._visits = [], None
        for line in steps:
            if isinstance(line.get("step"), int):
                self._rows.append(step_row(line))
                experts = line.get("experts")
                if isinstance(experts, dict) and experts.get("visits"):
                    names = ("layers", "visits")
                    self._visits = {"step": line["step"], **{name: experts.get(name) for name in names}}
        anew, ranks = self._ranks.refresh()
        if anew:
            self._rank_lines.clear()
        self._rank_lines.extend(line for line in ranks if isinstance(line.get("step"), int))
        anew, events = self._events.refresh()
        self._event_lines = events if anew else [*self._event_lines, *events]
        return bool(steps)

    def _refresh_trace(self, *, at_once: bool) -> None:
        """Read new spans, but spend at most a twentieth of the time on looking through the folder."""
        now = time.monotonic()
        if (now < self._trace_due and not at_once) or (self.directory / "trace").is_symlink():
            return
        ranks = max(1, self._described.ranks)
        self._trace.keep = min(max(1024 // ranks, _SPAN_STEPS[0]), _SPAN_STEPS[1])
        if self._trace.refresh():
            self._trace_version += 1
        self._trace_due = time.monotonic() + 20 * (time.monotonic() - now)

    def _traced(self) -> list[int]:
        """Return the steps, counted from 1, that every rank with a trace has; if there is none, the steps of
        any rank."""
        steps = [set(steps) for steps in self._trace.ranks.values() if steps]
        whole = set.intersection(*steps) if steps else set()
        return [step + 1 for step in sorted(whole or set().union(*steps))]

    def state(self) -> dict[str, Any]:
        """Return what the page shows of a whole run: configuration, layout, plan and report, and the steps
        with spans."""
        return {**self._described.content, "traced": self._traced()}

    def metrics(self, after: int, epoch: int) -> dict[str, Any]:
        """Return the numbers of all steps after ``after``; of all steps if the file began anew since
        ``epoch``."""
        anew = epoch != self._metrics.epoch
        after = 0 if anew else after
        rows = self._rows[bisect_right(self._rows, after, key=itemgetter("step")) :]
        visits = self._visits if self._visits is not None and self._visits["step"] > after else None
        events = self._event_lines[-1000:]
        return {"epoch": self._metrics.epoch, "anew": anew, "rows": rows, "visits": visits, "events": events}

    def ranks(self) -> dict[str, Any]:
        """Return all ranks' numbers of the newest step, which ranks are slow, and the mean seconds of compute
        per step."""
        lines = list(self._rank_lines)
        newest = lines[-1] if lines else None
        layout, ranks = self._described.layout, len(numbers_in(newest or {}, "seconds"))
        stages = [0] * ranks
        if layout is not None and layout.ranks == ranks:
            stages = [layout.coordinate(rank)["pp"] for rank in range(ranks)]
        computed = [numbers_in(line, "compute_seconds") for line in lines]
        means = {line["step"]: fmean(row) for line, row in zip(lines, computed, strict=True) if row}
        return {
            "line": newest,
            "stragglers": [dict(vars(straggler)) for straggler in stragglers(computed, stages)],
            "compute": means,
        }

    def timeline(self, step: int, first_rank: int) -> dict[str, Any] | None:
        """Return the columns of a step for `RANKS_AT_ONCE` ranks (`timeline_view`); None if no rank has the
        step."""
        batches = self._trace.step(step - 1)
        chosen = [batch for batch in batches if 0 <= batch.rank - first_rank < RANKS_AT_ONCE]
        if not chosen:
            return None
        return step_columns(chosen, begin_of(batches), self._described.predicted, self._trace.damage)


def compact_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False, default=str)


def step_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in a line of ``metrics.jsonl``; ``peak_bytes`` is the largest over the ranks."""
    row = {name: value for name, value in flat(line).items() if value is None or is_number(value)}
    peak_bytes = max(numbers_in(line, "peak_bytes"), default=None)
    return {**row, "peak_bytes": peak_bytes, "tokens_per_second": tokens_per_second(line)}


def _describe(directory: Path) -> _Described:
    """Read all descriptions; report and skip files that cannot be read."""
    trouble: list[str] = []

    def tried(read: Callable[..., T], name: str, *arguments: Any) -> T | None:
        try:
            return read(directory / name, *arguments)
        except ValueError as error:
            trouble.append(str(error))
            return None

    def mapping(name: str) -> dict[str, Any]:
        content = finite(tried(read_parsed, name, json.loads))
        return content if isinstance(content, dict) else {}

    config = shown_config(finite(tried(read_mapping, "config.yaml") or {}))
    model, predicted, report = (mapping(f"{name}.json") for name in ("model", "predicted", "report"))
    schedule = tried(read_parsed, "schedule.txt", parse)
    profile = tried(read_parsed, "profile.json", lambda text: parse_profile(text, "profile.json"))
    spans = (tried(read_batches, PREDICTED) or []) if file_facts(directory / PREDICTED) else []
    layout = _layout(config.get("parallel"))
    cluster = _cluster(mapping("cluster.json"), layout)
    if predicted:
        busy = [length(phases(batch).computing) / 1e9 for batch in spans]
        predicted["compute_seconds"] = fmean(busy) if busy else None
    content = {
        "name": str(config.get("name") or directory.name),
        "config": config,
        "model": model or None,
        "cluster": cluster,
        "layout": None if layout is None else {axis: layout.degree(axis) for axis in (*AXES, "ep")},
        "predicted": predicted or None,
        "complete": report.get("complete"),
        "schedule": None if schedule is None else schedule_view(schedule, profile),
        "effectiveness": None if profile is None else effectiveness_view(profile),
        "trouble": trouble,
    }
    ranks = len(cluster["ranks"]) or (layout.ranks if layout else 0)
    return _Described(content, layout, ranks, predicted_durations(spans))


def _layout(parallel: Any) -> ParallelLayout | None:
    if not isinstance(parallel, dict):
        return None
    try:
        pp, dp, cp, tp, ep = (int(parallel.get(axis, 1)) for axis in (*AXES, "ep"))
        return ParallelLayout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    except (TypeError, ValueError):
        return None


def _cluster(content: dict[str, Any], layout: ParallelLayout | None) -> dict[str, Any]:
    """Return every rank's location and its place in the mesh; plain processes are listed by address and
    process id."""
    rows = content.get("ranks")
    if not isinstance(rows, list):
        places = zip(content.get("addresses") or (), content.get("processes") or (), strict=False)
        rows = [{"address": address, "process": process} for address, process in places]
    mesh = None if layout is None else replace(layout, ep=1).mesh  # ep takes its ranks from dp and cp
    ranks = []
    for rank, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        place = mesh.position(rank) if mesh is not None and mesh.ranks == len(rows) else {}
        address = str(row.get("address") or "")
        node = str(row.get("node") or address or "this machine")
        ranks.append({"node": node, "address": address, "process": row.get("process"), "place": dict(place)})
    return {"launcher": str(content.get("launcher") or ""), "ranks": ranks}
