"""Spans, measured or simulated, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process per rank; a lane for compute, one for each link, and one for waiting until a peer too has issued a
collective. Strands differ in colour; blocks stand above the operators that they hold; arrows lead from a
message between stages to the block that it arrives for.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.text.json_text import json_text
from braid.scheduling.trace.batches import Batch, begin_of
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label

LANES = {"block": 0, Stream.COMPUTE: 1, Stream.INTRA: 2, Stream.INTER: 3, "waiting": 4}
"""The thread that a kind of span is shown as."""
_LANE_NAMES = {0: "blocks", 1: "compute", 2: "intra-node", 3: "inter-node", 4: "waiting for a peer"}
_COLOURS = {
    ("alpha", "forward"): "thread_state_running",
    ("alpha", "backward"): "thread_state_iowait",
    ("beta", "forward"): "rail_animation",
    ("beta", "backward"): "rail_load",
}
"""Of Chrome's palette, whose names are all that the format has."""
_MESSAGE = "send "
_Key = tuple[int, int, int, str]
"""Step, micro-batch, chunk and direction: a block, whichever rank runs it."""


def perfetto_trace(batches: Sequence[Batch]) -> str:
    """The trace of some steps as JSON text; times in microseconds from the first span's begin."""
    begin = begin_of(batches)
    events: list[dict[str, Any]] = []
    sent: list[tuple[_Key, int, dict[str, Any]]] = []
    first: dict[_Key, list[tuple[int, dict[str, Any]]]] = {}
    for rank in sorted({batch.rank for batch in batches}):
        events += _names(rank)
    for batch in batches:
        seen: set[_Key] = set()
        for record in batch.records:
            label = batch.labels[record["label"]]
            event = _event(batch, record, label, begin)
            events.append(event)
            direction = DIRECTIONS[record["direction"]]
            key = batch.step, int(record["micro_batch"]), int(record["chunk"]), direction
            if label.operator.startswith(_MESSAGE):
                sent.append((key, batch.rank, event))
            elif record["micro_batch"] >= 0 and label.stream is Stream.COMPUTE and key not in seen:
                seen.add(key)
                first.setdefault(key, []).append((batch.rank, event))
    events += _arrows(sent, first)
    return json_text({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(batch: Batch, record: Any, label: Label, begin: int) -> dict[str, Any]:
    strand, direction = STRANDS[record["strand"]], DIRECTIONS[record["direction"]]
    kind = KINDS[record["kind"]]
    lane = LANES[label.stream] if kind == "operator" else LANES["waiting" if kind == "waiting" else "block"]
    event: dict[str, Any] = {
        "name": label.operator,
        "cat": ",".join(filter(None, (strand, direction))) or "step",
        "ph": "X",
        "pid": batch.rank,
        "tid": lane,
        "ts": (int(record["start_ns"]) - begin) / 1000,
        "dur": (int(record["end_ns"]) - int(record["start_ns"])) / 1000,
        "args": {
            "step": batch.step + 1,
            "strand": strand,
            "direction": direction,
            "micro_batch": int(record["micro_batch"]),
            "chunk": int(record["chunk"]),
            "layer": label.layer,
            "shapes": label.shapes,
            "bytes": label.bytes,
            "flops": label.flops,
            "alone_us": None if label.solo_ns is None else label.solo_ns / 1000,
        },
    }
    if kind == "waiting":
        event["args"]["waits for rank"] = int(record["peer"])
    if (strand, direction) in _COLOURS:
        event["cname"] = _COLOURS[strand, direction]
    return event


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for lane, name in _LANE_NAMES.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def _arrows(
    sent: list[tuple[_Key, int, dict[str, Any]]], first: dict[_Key, list[tuple[int, dict[str, Any]]]]
) -> Iterator[dict[str, Any]]:
    """From each message to the begin of the block that it is for, on the stage that it goes to.

    All ranks of a stage run the same blocks, and a rank sends to the rank at the same place of the next
    stage. Ranks of a stage follow each other, so that the place is the rank's among those that run the block.
    """
    senders: dict[_Key, list[int]] = {}
    for key, rank, _ in sent:
        senders.setdefault(key, []).append(rank)
    for number, (key, rank, event) in enumerate(sent):
        targets = [found for found in first.get(key, []) if found[0] not in senders[key]]
        if len(targets) != len(senders[key]):
            continue  # a rank's spans are missing
        target = sorted(targets, key=lambda found: found[0])[sorted(senders[key]).index(rank)][1]
        arrow = {"name": "message", "cat": "message", "id": number}
        yield {**arrow, "ph": "s", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]}
        yield {**arrow, "ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": target["ts"]}
