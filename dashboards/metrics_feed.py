"""Feeds an `Exporter` from a run directory with lines written since the last call."""

import asyncio
import contextlib
import json
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from braid.dashboards.metrics import Exporter, PrometheusSink, RaySink
from braid.dashboards.run_files import GrowingLines, file_facts, objects, read_mapping


class MetricsFeed:
    """Reads the files of one run and passes on each line once; a sink needs a single feed, or counters count
    twice.

    A run that goes back some steps truncates its files: steps that run again are passed on again, others are
    not.
    """

    def __init__(self, run: Path, sink: PrometheusSink | RaySink, since: float = -math.inf) -> None:
        """Lines found at the first reading, with a ``time`` up to ``since`` (Unix time in seconds), are
        history and are not passed on."""
        self._run, self._since = run, since
        name = run.name
        with contextlib.suppress(ValueError):
            name = str(read_mapping(run / "config.yaml").get("name", name))
        self._exporter = Exporter(sink, name)
        self._facts: dict[str, tuple[int, int, int] | None] = {}
        self._files = [GrowingLines(run / f"{name}.jsonl") for name in ("events", "metrics", "ranks")]
        self._seen: set[int] = set()
        """Hashes of all lines that were read, since a truncated file is read again."""

    def refresh(self) -> None:
        """Pass on new lines; missing or half-written files are left for later."""
        for path in (self._run / "config.yaml", self._run / "predicted.json"):
            if (facts := file_facts(path)) != self._facts.get(path.name):
                self._facts[path.name] = facts
                with contextlib.suppress(ValueError):
                    self._exporter.take(path.name, read_mapping(path))
        for file in self._files:
            for batch in file.batches():
                for line in objects(self._new(file.path.name, batch)):
                    self._exporter.take(file.path.name, line)
        self._since = -math.inf

    def _new(self, name: str, lines: list[bytes]) -> list[bytes]:
        """Return lines that were not read before and are not history; lines are in order of time."""
        marks = [hash((name, line)) for line in lines]
        new = [line for line, mark in zip(lines, marks, strict=True) if mark not in self._seen]
        self._seen.update(marks)
        return new if self._since == -math.inf else new[bisect_right(new, self._since, key=_time) :]


def _time(line: bytes) -> float:
    try:
        return float(json.loads(line)["time"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def metrics_route(run: Path, since: float = -math.inf) -> web.RouteDef:
    """Return the route ``GET /metrics``: a run in Prometheus' text format. Files are read at each request."""
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
    """Pass a run's new metrics to Ray for the length of the block; ``module``: ``ray.util.metrics``."""
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
