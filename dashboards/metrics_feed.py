"""Feeds an `Exporter` from a run directory: what has been written since the last time."""

import asyncio
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from braid.dashboards.metrics import Exporter, PrometheusSink, Sink, layout_of
from braid.dashboards.run_files import GrowingLines, NotReadableError, file_facts, read_text
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.yaml_text import parse_yaml


class MetricsFeed:
    """The files of one run, each line told once; one feed for a sink, or counters would count twice.

    A run that goes back some steps cuts its files: the steps that run again are told again, others are not.
    """

    def __init__(self, run: Path, sink: Sink, since: float = -math.inf) -> None:
        """Lines with a ``time`` up to ``since`` (Unix time in seconds) are history and not told."""
        name = str(_content(run / "config.yaml", _config).get("name", run.name))
        self._exporter = exporter = Exporter(sink, name, ParallelLayout())
        self._described: tuple[tuple[Path, Callable[[str], Any], Callable[[dict[str, Any]], None]], ...] = (
            (run / "config.yaml", _config, self._lay_out),
            (run / "predicted.json", json.loads, exporter.predicted),
        )
        self._facts: dict[Path, tuple[int, int, int] | None] = {}
        self._files = tuple(
            (_NewLines(run / name, newest=since), take)
            for name, take in (
                ("events.jsonl", exporter.event),
                ("metrics.jsonl", exporter.metrics),
                ("ranks.jsonl", exporter.ranks),
            )
        )

    def refresh(self) -> None:
        """Pass on what is new; files that are missing or half written are left for later."""
        for path, parse, tell in self._described:
            if (facts := file_facts(path)) != self._facts.get(path):
                self._facts[path] = facts
                tell(_content(path, parse))
        for lines, take in self._files:
            for batch in lines.batches():
                for line in batch:
                    take(line)

    def _lay_out(self, config: Mapping[str, Any]) -> None:
        self._exporter.layout = layout_of(config)


@dataclass
class _NewLines(GrowingLines):
    """Of a file that was cut or replaced, only lines that are newer than those that were read before it."""

    newest: float = -math.inf

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """See `GrowingLines`."""
        for batch in super().batches():
            self.newest = max([self.newest, *(line["time"] for line in batch if "time" in line)])
            yield batch

    def _begin(self, inode: int, size: int) -> None:
        super()._begin(inode, size)
        if self.newest > -math.inf:
            # one into the last line of before
            behind = bisect_right(range(size), self.newest, key=self._time)
            if behind:
                begin, self._last = self.next_line(behind - 1)
                self._offset = begin + len(self._last)

    def _time(self, offset: int) -> float:
        """Of the first line from there on: they stand in order of time."""
        try:
            return float(json.loads(self.next_line(offset)[1])["time"])
        except (ValueError, KeyError, TypeError):
            return math.inf


def metrics_route(run: Path, since: float = -math.inf) -> web.RouteDef:
    """``GET /metrics``: a run in Prometheus' text format. Files are read when somebody asks."""
    sink = PrometheusSink()
    feed = MetricsFeed(run, sink, since)
    reading = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        async with reading:
            await asyncio.to_thread(feed.refresh)
        body, kind = sink.render()
        return web.Response(body=body, headers={"Content-Type": kind})

    return web.get("/metrics", metrics, allow_head=False)


def _config(text: str) -> Any:
    return parse_yaml(text, "config.yaml")


def _content(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A file's mapping; an empty one where there is none."""
    try:
        content = parse(read_text(path) or "")
    except (NotReadableError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
