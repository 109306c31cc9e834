"""What the controller tells of the ranks' numbers, once each."""

from pathlib import Path
from typing import Any

from braid.actors.controller import watch as module
from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.records import RunDirectory
from braid.actors.controller.span_files import SpanCounts
from braid.actors.controller.watch import Watch
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.stragglers import LAST
from tests.end_to_end.runs import small_config


class Counted:
    """A collector that has lost something."""

    target = None

    def counts(self) -> SpanCounts:
        """Three spans were lost."""
        return SpanCounts(lost=3)


def line(compute: list[float], dropped: int = 0, every: int = 1) -> dict[str, Any]:
    return {
        "compute_seconds": compute,
        "dropped_spans": [dropped] * len(compute),
        "sampled_every": [every] * len(compute),
    }


def test_each_trouble_is_told_once_and_slow_ranks_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.0)
    directory = RunDirectory(small_config(tmp_path), resume=False, overwrite=False)
    watch = Watch(Counted(), directory, ParallelLayout(pp=2, dp=2))
    told = []
    for step in range(1, 4 * LAST):
        slow = LAST < step < 3 * LAST and step != 2 * LAST + 5
        told += watch.look(step, 1, line([1.0, 1.0, 2.0, 3.5 if slow else 2.0], dropped=step // 30))
    kinds = [event.kind for event in told]
    assert kinds.count("straggler") == 1
    (straggler,) = [event for event in told if event.kind == "straggler"]
    assert straggler.text.startswith("rank 3 computes 1.75 times as long")
    assert LAST < straggler.step < 2 * LAST
    texts = [event.text for event in told if event.kind == "telemetry"]
    assert len(texts) == 2
    assert "3 spans were lost" in texts[0]
    assert "some are dropped" in texts[1]
    lines = read_lines(directory.path / "events.jsonl")
    assert [one["kind"] for one in lines] == kinds
    assert next(one for one in lines if one["kind"] == "straggler")["rank"] == 3
    directory.close()
