"""Reads a run for Python: its configuration, its report, and its records as data frames of pandas
(docs/python.md has all columns). Seconds have names that end with ``seconds`` or are called ``time``; trace
times are nanoseconds."""

import html
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from braid.dashboards.run_data import RunData, step_row
from braid.dashboards.run_files import (
    PAGE_ADDRESS,
    GrowingLines,
    is_under_way,
    read_mapping,
    read_parsed,
    shown_config,
)
from braid.dashboards.timeline_picture import timeline_svg
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.trace.batches import Batch, begin_of
from braid.scheduling.trace.numbers import numbers_of_records
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS

if TYPE_CHECKING:
    from pandas import DataFrame

_LOOPBACK_PAGE: Final = re.compile(r"http://127\.0\.0\.1:\d{1,5}/?")
_OF_LABELS: Final = ("operator", "stream", "layer", "axis", "bytes", "flops", "solo_ns")


@dataclass(frozen=True)
class Run:
    """A run's directory, read when asked: frames of a run under way grow."""

    directory: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The configuration, with all defaults; of ``cluster.env`` the names alone."""
        return shown_config(read_mapping(self.directory / "config.yaml"))

    @property
    def report(self) -> Mapping[str, Any] | None:
        """The content of ``report.json``; None while the run has not ended."""
        return read_parsed(self.directory / "report.json", json.loads)

    @property
    def page(self) -> str | None:
        """Address of the live page on this machine; None if the run is not under way, or has no page."""
        address = read_parsed(self.directory / PAGE_ADDRESS, str.strip) or ""
        return address if _LOOPBACK_PAGE.fullmatch(address) and is_under_way(self.directory) else None

    def steps(self) -> "DataFrame":
        """Return one row per step, by ``step``, which counts from 1."""
        rows = [step_row(line) for line in self._lines("metrics.jsonl")]
        return _frame(rows, ["step", "loss", "grad_norm", "lr", "seconds", "tokens"]).set_index("step")

    def validations(self) -> "DataFrame":
        """Return one row per validation, by ``step``: the step's columns that begin with ``validation``."""
        steps = self.steps()
        names = [name for name in steps.columns if name.startswith("validation")]
        return steps[names].dropna(how="all")

    def spans(self, step: int | None = None) -> "DataFrame":
        """Return one row per span of a step on all ranks; by default of the newest step with spans. Raise
        `ValueError` for a step without spans."""
        traces = self._traces()
        batches = traces.step(self._with_spans(traces, step))
        begin = begin_of(batches)
        return _pandas().concat([_spans(batch, begin) for batch in batches], ignore_index=True)

    def overlap(self) -> "DataFrame":
        """Return one row per step and rank of the steps whose spans are kept: the numbers of overlap
        (docs/design.md, Numbers of overlap), in nanoseconds."""
        traces = self._traces()
        rows = []
        for step in traces.steps:
            for batch in traces.step(step):
                numbers = numbers_of_records(batch.records, batch.labels)
                facts = asdict(numbers)
                by_axis = {f"exposed_{axis}_ns": ns for axis, ns in facts.pop("exposed_by_axis_ns").items()}
                del facts["peer_waits"]
                shares = {"exposed_ns": numbers.exposed_ns, "hidden_fraction": numbers.hidden_fraction}
                rows.append({"step": step + 1, "rank": batch.rank, **facts, **shares, **by_axis})
        return _frame(rows, []).set_index(["step", "rank"])

    def timeline(self, step: int | None = None) -> str:
        """Return a picture (SVG) of what all ranks did in a step; by default the newest step with spans."""
        traces = self._traces()
        chosen = self._with_spans(traces, step)
        return timeline_svg({f"step {chosen + 1}": (traces, chosen)})

    def incidents(self) -> "DataFrame":
        """Return one row per event of the run (``events.jsonl``): all incidents, the begin and the end."""
        return _frame(self._lines("events.jsonl"), ["time", "kind", "step", "generation", "text"])

    def failures(self) -> "DataFrame":
        """Return one row per failure or change of the number of ranks that the run survived
        (``incidents.jsonl``), with its cost."""
        return _frame(self._lines("incidents.jsonl"), ["time", "kind", "step", "text"])

    def checkpoints(self) -> "DataFrame":
        """Return one row per checkpoint in the run's directory: ``path``, ``bytes`` and ``time``, by
        ``step``."""
        rows = []
        for path in self.directory.glob("checkpoints/step-*/manifest.json"):
            content: Any = read_parsed(path, json.loads)
            if content and path.parent.name.removeprefix("step-").isdecimal():  # others are incomplete
                size = sum(length for length, _ in content["files"].values())
                facts = {"step": content["step"], "path": str(path.parent), "bytes": size}
                rows.append({**facts, "time": path.stat().st_mtime})
        rows.sort(key=lambda row: row["step"])
        return _frame(rows, ["step", "path", "bytes", "time"]).set_index("step")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return GrowingLines(self.directory / name).refresh()[1]

    def _traces(self) -> TraceFolder:
        traces = TraceFolder.of_run(self.directory, keep=1 << 30)
        _ = traces.newest  # raises an error if there are none
        return traces

    def _with_spans(self, traces: TraceFolder, step: int | None) -> int:
        """Return a step (by default the newest one with spans) counted from 0; raise `ValueError` if
        it has no spans."""
        if step is None:
            return traces.newest
        if not isinstance(step, int) or step - 1 not in traces.steps:
            kept = f"spans are kept of steps {traces.steps[0] + 1} to {traces.newest + 1}"
            raise ValueError(f"step={step!r} of {self.directory} has no spans; {kept}")
        return step - 1

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its numbers and loss curve; the live page while it trains."""
        lines = self._lines("metrics.jsonl")
        losses = [line["loss"] for line in lines if isinstance(line.get("loss"), int | float)]
        report = self.report
        state = (
            "under way" if is_under_way(self.directory) else "ended" if report is None else "stopped early"
        )
        facts = {"run": str(self.directory), "state": "complete" if report and report["complete"] else state}
        if lines:
            facts |= {"steps": str(lines[-1]["step"]), "loss": f"{losses[-1]:.4f}" if losses else "-"}
        if report and report["validation"]["loss"] is not None:
            facts["validation loss"] = f"{report['validation']['loss']:.4f}"
        if report:
            facts["speed"] = f"{report['tokens_per_s']:,.0f} tokens/s"
            facts["layout"] = f"{report['layout']['described']}, schedule {report['layout']['schedule']}"
        if report and report["overlap"] and report["overlap"]["communication_seconds"]:
            facts["communication hidden"] = f"{report['overlap']['hidden_fraction']:.0%}"
        shown = facts_html(facts) + curve_svg(losses)
        return shown + (frame_html(self.page) if self.page else "")


def load_run(path: Path | str) -> Run:
    """Return the run in a directory such as ``runs/first``. Raise `ValueError` if it holds none."""
    if not isinstance(path, Path | str):
        raise ValueError(f"path={path!r} must be the path of a run's directory, such as runs/first")
    RunData(Path(path)).check()
    return Run(Path(path).resolve())


def _spans(batch: Batch, begin_ns: int) -> "DataFrame":
    """Return a rank's spans of a step; ``begin_ns``: the step's begin, from which times count."""
    records, labels = batch.records, batch.labels.all
    columns: dict[str, Any] = {
        "rank": batch.rank,
        "kind": [KINDS[number] for number in records["kind"]],
        "start_ns": records["start_ns"] - begin_ns,
        "end_ns": records["end_ns"] - begin_ns,
        "strand": [STRANDS[number] for number in records["strand"]],
        "direction": [DIRECTIONS[number] for number in records["direction"]],
        **{name: records[name].astype(int) for name in ("micro_batch", "chunk", "peer")},
    }
    for name in _OF_LABELS:
        values = [math.nan if (value := getattr(label, name)) is None else value for label in labels]
        columns[name] = [values[number] for number in records["label"]]
    columns["stream"] = list(map(str, columns["stream"]))
    return _pandas().DataFrame(columns)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> "DataFrame":
    """Return rows as a frame with at least these columns, which come first."""
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    return _pandas().DataFrame(list(rows), columns=list(names))


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise ValueError(
            "data frames of a run need pandas, which is not installed: pip install 'braid[frames]'"
        ) from None


def facts_html(facts: Mapping[str, str]) -> str:
    """Return names and values as a table."""
    rows = (f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table>{''.join(rows)}</table>"


def curve_svg(values: Sequence[float], width: int = 480, height: int = 120) -> str:
    """Return a series as a line in an SVG picture, with its greatest and least value as text."""
    known = [(number, value) for number, value in enumerate(values) if math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = (end(value for _, value in known) for end in (min, max))
    x, y = (width - 80) / (len(values) - 1), (height - 20) / ((high - low) or 1.0)
    points = " ".join(f"{number * x:.1f},{10 + (high - value) * y:.1f}" for number, value in known)
    texts = "".join(
        f'<text x="{width - 74}" y="{place}" font-size="11" fill="currentColor">{value:.4g}</text>'
        for value, place in ((high, 14), (low, height - 6))
    )
    line = f'<polyline points="{points}" fill="none" stroke="#3b76c4" stroke-width="1.5"/>'
    return f'<svg role="img" aria-label="loss" width="{width}" height="{height}">{line}{texts}</svg>'


def frame_html(address: str) -> str:
    """Return a frame with a live page."""
    return f'<iframe src="{html.escape(address)}" width="100%" height="720" style="border:0"></iframe>'
