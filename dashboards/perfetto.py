"""Converts spans, measured or simulated, to a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process, with a lane for compute, one for each link, and one for waiting until a peer, too, has
issued a collective. A span's category is its strand and direction; blocks are shown above the operators that
they contain; arrows lead from a message between stages to the block that needs it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.text.json_text import json_text
from braid.scheduling.trace.batches import Batch, begin_of
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label

_NAMES: Final = ("blocks", "compute", "intra-node", "inter-node", "waiting for a peer")
"""Names of the lanes of a rank, by lane number."""
_LANES: Final = {"block": 0, "paired block": 0, "waiting": 4}
_STREAMS: Final = {Stream.COMPUTE: 1, Stream.INTRA: 2, Stream.INTER: 3}
_Key = tuple[int, int, int, str]
"""Step, micro-batch, chunk and direction: identifies a block, whichever rank runs it."""
_Event = dict[str, Any]


def perfetto_trace(batches: Sequence[Batch]) -> str:
    """Return the trace of some steps as JSON text; times in microseconds from the first span's begin."""
    begin = begin_of(batches)
    events = [name for rank in sorted({batch.rank for batch in batches}) for name in _names(rank)]
    sent: dict[_Key, list[_Event]] = defaultdict(list)
    first: dict[_Key, dict[int, _Event]] = defaultdict(dict)
    """For each block, by rank, the event with which it begins."""
    for batch in batches:
        for record in batch.records:
            label = batch.labels[record["label"]]
            event = _event(batch, record, label, begin)
            events.append(event)
            direction = DIRECTIONS[record["direction"]]
            key = batch.step, int(record["micro_batch"]), int(record["chunk"]), direction
            if label.operator.startswith("send "):
                sent[key].append(event)
            elif record["micro_batch"] >= 0 and label.stream is Stream.COMPUTE:
                first[key].setdefault(batch.rank, event)
    return json_text({"traceEvents": [*events, *_arrows(sent, first)], "displayTimeUnit": "ms"})


def _event(batch: Batch, record: Any, label: Label, begin: int) -> _Event:
    strand, direction = STRANDS[record["strand"]], DIRECTIONS[record["direction"]]
    kind = KINDS[record["kind"]]
    event: _Event = {
        "name": label.operator,
        "cat": ",".join(filter(None, (strand, direction))) or "step",
        "ph": "X",
        "pid": batch.rank,
        "tid": _STREAMS[label.stream] if kind == "operator" else _LANES[kind],
        "ts": (int(record["start_ns"]) - begin) / 1000,
        "dur": (int(record["end_ns"]) - int(record["start_ns"])) / 1000,
        "args": {
            "step": batch.step + 1,
            "strand": strand,
            "direction": direction,
            **{name: int(record[name]) for name in ("micro_batch", "chunk")},
            **{name: getattr(label, name) for name in ("layer", "shapes", "bytes", "flops")},
            "alone_us": None if label.solo_ns is None else label.solo_ns / 1000,
        },
    }
    if kind == "waiting":
        event["args"]["waits for rank"] = int(record["peer"])
    return event


def _names(rank: int) -> Iterator[_Event]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for lane, name in enumerate(_NAMES):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def _arrows(
    sent: Mapping[_Key, list[_Event]], first: Mapping[_Key, Mapping[int, _Event]]
) -> Iterator[_Event]:
    """Yield arrows from each message to the begin of the block that needs it, on the receiving stage.

    All ranks of a stage run the same blocks, and a rank sends to the rank at the same position of the next
    stage. Ranks of a stage are numbered consecutively, so the position is the rank's index among those that
    run the block.
    """
    number = 0
    for key, messages in sent.items():
        senders = {event["pid"] for event in messages}
        targets = [event for rank, event in sorted(first.get(key, {}).items()) if rank not in senders]
        if len(targets) != len(messages):
            continue  # a rank's spans are missing
        for event, target in zip(sorted(messages, key=lambda event: event["pid"]), targets, strict=True):
            arrow = {"name": "message", "cat": "message", "id": number}
            number += 1
            yield {**arrow, "ph": "s", **{name: event[name] for name in ("pid", "tid", "ts")}}
            yield {**arrow, "ph": "f", "bp": "e", **{name: target[name] for name in ("pid", "tid", "ts")}}
