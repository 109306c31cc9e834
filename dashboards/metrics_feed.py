"""Feeds an `Exporter` from a run directory: what has been written since the last time."""

import asyncio
import contextlib
import json
import math
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from braid.dashboards.metrics import Exporter, PrometheusSink, RaySink
from braid.dashboards.run_files import GrowingLines, file_facts, read_bytes, read_parsed
from braid.scheduling.text.yaml_text import parse_yaml


class MetricsFeed:
    """The files of one run, each line told once; one feed for a sink, or counters would count twice.

    A run that goes back some steps cuts its files: the steps that run again are told again, others are not.
    """

    def __init__(self, run: Path, sink: PrometheusSink | RaySink, since: float = -math.inf) -> None:
        """Lines with a ``time`` up to ``since`` (Unix time in seconds) are history and not told."""
        self._run = run
        self._exporter = Exporter(sink, str(_mapping(run / "config.yaml").get("name", run.name)))
        self._facts: dict[str, tuple[int, int, int] | None] = {}
        files = ("events.jsonl", "metrics.jsonl", "ranks.jsonl")
        self._files = {name: _NewLines(run / name, newest=since) for name in files}

    def refresh(self) -> None:
        """Pass on what is new; files that are missing or half written are left for later."""
        for path in (self._run / "config.yaml", self._run / "predicted.json"):
            if (facts := file_facts(path)) != self._facts.get(path.name):
                self._facts[path.name] = facts
                self._exporter.take(path.name, _mapping(path))
        for name, lines in self._files.items():
            for batch in lines.batches():
                for line in batch:
                    self._exporter.take(name, line)


@dataclass
class _NewLines(GrowingLines):
    """Reads every line of a growing file once, also if the file is cut or replaced.

    Lines that were read before are known by their places and checksums. Lines that are no newer than the time
    ``newest`` were there before reading began: they are left out by their times.
    """

    newest: float = -math.inf
    _edges: "array[int]" = field(default_factory=lambda: array("Q"))
    """Where the lines that were read begin, and where the last one ends."""
    _marks: "array[int]" = field(default_factory=lambda: array("Q"))
    """Checksums of the lines that were read."""

    def _took(self, lines: list[bytes]) -> None:
        if not self._marks:
            self._edges = array("Q", [self._offset])
        for line in lines:
            self._edges.append(self._edges[-1] + len(line) + 1)
            self._marks.append(crc32(line + b"\n"))

    def _begin(self, inode: int, size: int) -> None:
        super()._begin(inode, size)
        standing = bisect_left(range(len(self._marks)), True, key=lambda n: self._line(n) is None)
        del self._edges[standing + 1 :], self._marks[standing:]
        if standing:
            self._offset, self._last = self._edges[-1], self._line(standing - 1) or b""
        elif self.newest > -math.inf:
            # ``behind - 1`` is where the last line that is not newer begins
            behind = bisect_right(range(size), self.newest, key=self._time)
            if behind:
                begin, self._last = self.next_line(behind - 1)
                self._offset = begin + len(self._last)

    def _line(self, number: int) -> bytes | None:
        """A line that was read, if it stands where it stood."""
        begin, end = self._edges[number : number + 2]
        line = read_bytes(self.path, begin, end - begin)
        return line if crc32(line) == self._marks[number] else None

    def _time(self, offset: int) -> float:
        """The time of the first line from there on; lines stand in order of time."""
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
        return web.Response(
            body=generate_latest(sink.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    return web.get("/metrics", metrics, allow_head=False)


@contextlib.contextmanager
def told_to_ray(run: Path, module: Any, every_s: float = 5.0) -> Iterator[None]:
    """Tell Ray what a run does from now on, while the block lasts; ``module``: ``ray.util.metrics``."""
    sink, over = RaySink(module), threading.Event()
    feed = MetricsFeed(run, sink, since=time.time())

    def tell() -> None:
        while not over.wait(every_s):
            feed.refresh()
            sink.refresh()

    thread = threading.Thread(target=tell, name="braid-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        feed.refresh()


def _mapping(path: Path) -> dict[str, Any]:
    """The mapping in a file of YAML, as JSON is too; an empty one where there is none."""
    try:
        content = read_parsed(path, lambda text: parse_yaml(text, path.name))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
