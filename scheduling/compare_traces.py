"""Two traces of one schema, operator by operator: what was predicted against what was measured."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from braid.scheduling.chrome_trace import ROWS
from braid.scheduling.operators import Stream
from braid.scheduling.trace import Span, length_ns, merge, overlap_ns


@dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """An operator in both traces; medians over ranks, micro-batches and layers. Counts are per rank that runs
    it."""

    operator: str
    stream: str
    """``intra`` where all of its executions were inside nodes, ``inter`` where one was not."""
    first_count: int
    second_count: int
    first_ns: float
    second_ns: float
    difference_ns: float
    """Of all executions, by all ranks of the trace: what the operator adds to the difference of the steps."""


@dataclass(frozen=True, kw_only=True)
class TraceTotals:
    """A trace of one step: means over its ranks."""

    ranks: int
    step_ns: float
    compute_ns: float
    communication_ns: float
    hidden_fraction: float


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """Two traces side by side; operators in the order of what they add to the difference."""

    first: TraceTotals
    second: TraceTotals
    operators: tuple[OperatorDifference, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def compare_traces(first: Iterable[Span], second: Iterable[Span]) -> TraceComparison:
    """Set two traces against each other; `ValueError` if one of them is empty."""
    spans = list(first), list(second)
    for which, found in zip(("first", "second"), spans, strict=True):
        if not found:
            raise ValueError(f"the {which} trace holds no spans")
    by_name = [_by_name(found) for found in spans]
    ranks = [len({span.rank for span in found}) for found in spans]
    rows = []
    for operator in sorted(set(by_name[0]) | set(by_name[1])):
        alike = [own.get(operator, []) for own in by_name]
        times = [[span.end_ns - span.start_ns for span in own] for own in alike]
        counts = [len(own) // max(1, len({span.rank for span in own})) for own in alike]
        totals = [sum(own) / count for own, count in zip(times, ranks, strict=True)]
        rows.append(
            OperatorDifference(
                operator=operator,
                stream=max(span.stream.value for own in alike for span in own),
                first_count=counts[0],
                second_count=counts[1],
                first_ns=median(times[0]) if times[0] else 0.0,
                second_ns=median(times[1]) if times[1] else 0.0,
                difference_ns=totals[1] - totals[0],
            )
        )
    rows.sort(key=lambda row: -abs(row.difference_ns))
    return TraceComparison(first=_totals(spans[0]), second=_totals(spans[1]), operators=tuple(rows))


def _by_name(spans: Iterable[Span]) -> Mapping[str, list[Span]]:
    """By operator alone: of one axis, some groups may lie inside nodes and others between them."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.operator].append(span)
    return found


def _totals(spans: list[Span]) -> TraceTotals:
    ranks = sorted({span.rank for span in spans})
    step = compute = communication = hidden = 0
    for rank in ranks:
        own = [span for span in spans if span.rank == rank]
        busy = merge((s.start_ns, s.end_ns) for s in own if s.stream is Stream.COMPUTE)
        moving = merge((s.start_ns, s.end_ns) for s in own if s.stream is not Stream.COMPUTE)
        step += max(span.end_ns for span in own) - min(span.start_ns for span in own)
        compute += length_ns(busy)
        communication += length_ns(moving)
        hidden += overlap_ns(busy, moving)
    return TraceTotals(
        ranks=len(ranks),
        step_ns=step / len(ranks),
        compute_ns=compute / len(ranks),
        communication_ns=communication / len(ranks),
        hidden_fraction=hidden / communication if communication else 1.0,
    )


def read_trace(path: Path) -> list[Span]:
    """The spans of a Chrome trace that Braid wrote; `ValueError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"trace {path} is not valid JSON: {error}") from None
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError(
            f"trace {path} has no traceEvents; give one that Braid wrote (simulate --trace, runs/NAME/trace)"
        )
    streams = {row: stream for stream, row in ROWS.items()}
    spans = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            labels = event["args"]
            start = round(event["ts"] * 1000)
            spans.append(
                Span(
                    rank=event["pid"],
                    step=0,
                    strand=labels["strand"],
                    micro_batch=labels["micro_batch"],
                    chunk=labels["chunk"],
                    layer=labels["layer"],
                    operator=event["name"],
                    stream=streams[event["tid"]],
                    start_ns=start,
                    end_ns=start + round(event["dur"] * 1000),
                    bytes=labels["bytes"],
                    flops=labels["flops"],
                )
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"trace {path}: an event is not one of Braid's ({error})") from None
    return spans
