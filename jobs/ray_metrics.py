"""A run's metrics through Ray's own agents, which its service discovery finds."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from braid.actors.config import Config
from braid.actors.controller.records import Event, Finished, Incident, Saved, Started, StepDone
from braid.dashboards.metrics import Exporter, RayMetrics, RaySink, Sink, layout_of
from braid.scheduling.yaml_text import parse_yaml


@contextlib.contextmanager
def ray_metrics(config: Config, module: RayMetrics) -> Iterator[Callable[[Event], None]]:
    """What takes the events of a run, for as long as the block lasts; ``module``: ``ray.util.metrics``."""
    sink = RaySink(module)
    try:
        yield EventFeed(config, sink).tell
    finally:
        sink.close()


class EventFeed:
    """Feeds an `Exporter` from the events of a run: a step counts as often as it ran, and here only.

    What a former command has done is no increase, so a run that is resumed begins with counters of 0.
    """

    def __init__(self, config: Config, sink: Sink) -> None:
        self._run = config.run_directory
        self._exporter = Exporter(sink, config.name, config.layout())

    def tell(self, event: Event) -> None:
        """Pass on an event of the run."""
        exporter = self._exporter
        match event:
            case Started():
                self._describe()
                exporter.event({"kind": "started"})
            case StepDone(record=record, ranks=ranks):
                exporter.metrics(asdict(record))
                exporter.ranks(ranks)
            case Saved(seconds=seconds):
                exporter.event({"kind": "saved", "seconds": seconds})
            case Incident(kind=kind) if kind != "failed":  # a file that was not written ends no run
                exporter.event({"kind": kind})
            case Finished():
                exporter.event({"kind": "finished"})

    def _describe(self) -> None:
        """What the ranks were told to do: another layout than before, perhaps."""
        with contextlib.suppress(OSError, ValueError):
            self._exporter.layout = layout_of(parse_yaml(_text(self._run / "config.yaml"), "config.yaml"))
        with contextlib.suppress(OSError, ValueError):
            self._exporter.predicted(json.loads(_text(self._run / "predicted.json")))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
