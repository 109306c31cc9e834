"""Tells when a rank falls behind, and when telemetry loses something or cannot keep up; each thing once."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from braid.actors.controller.ranks.group import Collector
from braid.actors.controller.records.run_records import Incident, RunDirectory
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.trace.stragglers import LAST, STRETCH, Straggler, stragglers

_WATCH_SECONDS = 5.0


class Watch:
    """Looks at the ranks' numbers after every step."""

    def __init__(self, collector: Collector, directory: RunDirectory, layout: ParallelLayout) -> None:
        self._collector, self._directory = collector, directory
        self._looked = time.monotonic()
        self._told: set[str] = set()
        self._stages = [layout.coordinate(rank)["pp"] for rank in range(layout.ranks)]
        self._compute: deque[list[float]] = deque(maxlen=LAST)
        self._named: dict[int, int] = {}
        """Ranks that were named, with the last step in which they were slow."""
        self.slowest: Straggler | None = None
        """The rank that holds the others up most, if one does."""

    def look(self, step: int, generation: int, ranks: dict[str, Any]) -> Iterator[Incident]:
        self._compute.append(ranks["compute_seconds"])
        yield from self._stragglers(step, generation)
        if time.monotonic() - self._looked < _WATCH_SECONDS:
            return
        self._looked = time.monotonic()
        counts = self._collector.counts()
        texts = {
            "trouble": counts.trouble and f"spans cannot be written: {counts.trouble}",
            "lost": f"{counts.lost} spans were lost on their way or not written" if counts.lost else "",
            "records": self._directory.trouble,
            "dropped": "ranks record faster than spans are streamed, or nobody takes them: some are dropped"
            if any(ranks["dropped_spans"])
            else "",
            "sampled": "spans of some steps only, to stay within 1 % of the time"
            if max(ranks["sampled_every"]) > 1
            else "",
        }
        for kind, text in texts.items():
            if text and kind not in self._told:
                self._told.add(kind)
                yield self._directory.note("telemetry", step, generation, text)

    def _stragglers(self, step: int, generation: int) -> Iterator[Incident]:
        """Ranks that have become slow; a rank that recovers and slows down again is named again."""
        slow = {straggler.rank: straggler for straggler in stragglers(list(self._compute), self._stages)}
        for rank, straggler in slow.items():
            if rank not in self._named or step - self._named[rank] > STRETCH:
                text = f"rank {rank} computes {straggler.times:.2f} times as long as the others of its stage"
                yield self._directory.note(
                    "straggler", step, generation, text, rank=rank, times=straggler.times
                )
            self._named[rank] = step
        self.slowest = next(iter(slow.values()), None)
