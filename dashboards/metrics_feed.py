"""Feeds an `Exporter` from a run directory: what has been written since the last time."""

import asyncio
import json
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from aiohttp import web

from braid.dashboards.metrics import Exporter, PrometheusSink, Sink, layout_of
from braid.dashboards.run_files import GrowingLines, NotReadableError, file_facts, read_bytes, read_text
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
    """Reads every line of a growing file once, also if the file is cut or replaced.

    Lines that were read before are known by their places and checksums. Lines that are no newer than the time
    ``newest`` were there before reading began: they are left out by their times.
    """

    newest: float = -math.inf
    _begins: int = 0
    _ends: "array[int]" = field(default_factory=lambda: array("Q"))
    _marks: "array[int]" = field(default_factory=lambda: array("Q"))
    """Where the lines that were read end, and their checksums."""

    def _took(self, lines: list[bytes]) -> None:
        end = self._offset
        if not self._ends:
            self._begins = end
        for line in lines:
            end += len(line) + 1
            self._ends.append(end)
            self._marks.append(crc32(line + b"\n"))

    def _begin(self, inode: int, size: int) -> None:
        super()._begin(inode, size)
        standing = bisect_left(range(len(self._ends)), True, key=lambda n: self._line(n) is None)
        del self._ends[standing:], self._marks[standing:]
        if standing:
            self._offset, self._last = self._ends[-1], self._line(standing - 1) or b""
        elif self.newest > -math.inf:
            # ``behind - 1`` is where the last line that is not newer begins
            behind = bisect_right(range(size), self.newest, key=self._time)
            if behind:
                begin, self._last = self.next_line(behind - 1)
                self._offset = begin + len(self._last)

    def _line(self, number: int) -> bytes | None:
        """A line that was read, if it stands where it stood."""
        begin = self._ends[number - 1] if number else self._begins
        line = read_bytes(self.path, begin, self._ends[number] - begin)
        return line if crc32(line) == self._marks[number] else None

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
