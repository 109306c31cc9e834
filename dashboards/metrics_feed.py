"""Feeds an `Exporter` from a run directory: what has been written since the last time."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from braid.dashboards.metrics import Exporter, PrometheusSink, Sink, layout_of


class MetricsFeed:
    """The files of one run, read from where they were left."""

    def __init__(self, run: Path, sink: Sink) -> None:
        config = _content(run / "config.yaml", yaml.safe_load)
        self._run = run
        self._exporter = Exporter(sink, str(config.get("name", run.name)), layout_of(config))
        self._read: dict[str, int] = {}
        self._predicted = False

    def refresh(self) -> None:
        """Pass on what is new; files that are missing or half written are left for later."""
        if not self._predicted and (predicted := _content(self._run / "predicted.json", json.loads)):
            self._exporter.predicted(predicted)
            self._predicted = True
        for name, take in (
            ("events.jsonl", self._exporter.event),
            ("metrics.jsonl", self._exporter.metrics),
            ("ranks.jsonl", self._exporter.ranks),
        ):
            for line in self._lines(name):
                take(line)

    def _lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        try:
            with (self._run / name).open("rb") as file:
                file.seek(self._read.get(name, 0))
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        for text in whole.splitlines():
            try:
                content = json.loads(text)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def metrics_route(run: Path) -> web.RouteDef:
    """``GET /metrics``: a run in Prometheus' text format. Files are read when somebody asks."""
    sink = PrometheusSink()
    feed = MetricsFeed(run, sink)
    reading = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        async with reading:
            await asyncio.to_thread(feed.refresh)
        body, kind = sink.render()
        return web.Response(body=body, headers={"Content-Type": kind})

    return web.get("/metrics", metrics, allow_head=False)


def _content(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A file's mapping; an empty one where there is none."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
