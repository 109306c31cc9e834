"""Who is found to be in trouble while a call waits: silence, no progress, and whom it is laid to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.controller import steps
from braid.actors.controller.ranks.health import Trouble, Vigil
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import RunDirectory
from braid.actors.controller.records.span_files import SpanCounts
from braid.actors.controller.steps import Watch
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.trace.stragglers import LAST
from tests.end_to_end.runs import small_config

SILENCE, STALL, LIMIT = 5.0, 6.0, 20.0
SECONDS = st.integers(0, 8).map(lambda quarters: quarters / 4)
"""Sums of them are exact."""
EVENTS = st.tuples(
    st.integers(0, 3), st.none() | st.integers(0, 2) | st.sampled_from(["done", "busy"]), SECONDS
)
"""A rank, its progress (None: it does not count) or what else happens, and the seconds before."""


@given(
    st.lists(EVENTS, max_size=40),
    st.integers(0, 48).map(lambda quarters: quarters / 4),
    st.sets(st.integers(0, 3)),
    st.booleans(),
    st.none() | st.just(LIMIT),
)
def test_verdicts_agree_with_the_whole_history(
    events: list[tuple[int, int | str | None, float]],
    rest: float,
    awake: set[int],
    steady: bool,
    limit: float | None,
) -> None:
    """By the definition: silent since its last beat; stalled since the last beat with something new.

    Ranks that have not answered yet are starting, those that are done owe no answer, and what the controller
    is busy with itself, as reading a large answer, is no time at all.
    """
    watched = Vigil(range(4), awake, 100.0, SILENCE, STALL if steady else None, limit)
    listened = advanced = busy = 0.0
    heard, progress, left = dict.fromkeys(awake, 0.0), dict[int, int | None](), set(range(4))
    for rank, what, pause in [*events, (0, "rest", rest)]:
        if what == "busy":
            watched.forgive(pause)
            busy += pause
            continue
        listened += pause
        if what == "done" and rank in left:
            watched.done(rank, 100.0 + listened + busy)
            left.remove(rank)
            heard.pop(rank, None)
            progress.pop(rank, None)
            advanced = listened
        elif not isinstance(what, str):
            watched.beat(rank, what, 100.0 + listened + busy)  # perhaps an answer that was on its way
            if rank in left:
                heard[rank] = listened
                advanced = listened if what is None or progress.get(rank) != what else advanced
                progress[rank] = what
    silent = [rank for rank in sorted(heard) if listened - heard[rank] > SILENCE]
    trouble = watched.verdict(100.0 + listened + busy)
    found = trouble and (trouble.rank, trouble.seconds, trouble.silent)
    if silent:
        assert found == (silent[0], listened - heard[silent[0]], True)
    elif steady and left and listened - advanced > STALL:
        assert trouble is not None
        assert (trouble.seconds, trouble.silent) == (listened - advanced, False)
        done = {rank: known or 0 for rank, known in progress.items()}
        assert done.get(trouble.rank, 0) == min(done.values(), default=0)
    elif limit and left and listened > limit:
        assert found == (min(left), listened, False)
    else:
        assert trouble is None


def test_a_rank_that_falls_silent_is_named() -> None:
    watched = Vigil(range(3), range(3), 100.0, SILENCE, STALL)
    for rank in (0, 2):
        watched.beat(rank, 1, 104.0)
    told = "has not answered for 5.2 s (failure.silence_s=5)"
    assert watched.verdict(105.25) == Trouble(1, told, pytest.approx(5.25), silent=True)


def test_what_is_waited_for_is_told() -> None:
    """By the rank furthest behind first, by a few of thousands, and only while they wait."""
    watched = Vigil(range(2000), range(2000), 100.0, SILENCE, STALL)
    for now, awaits in ((101.0, "parameters.0 dp"), (107.0, "gradients.0 dp")):
        for rank in range(2000):
            watched.beat(rank, 5 if rank == 1234 else 7, now, awaits if rank != 1 or now < 107 else "")
    trouble = watched.verdict(107.5)
    assert trouble is not None
    assert trouble.text.startswith("no rank has got on for 6.5 s: a link may be cut")
    waiting = (f"; rank {rank} waits for gradients.0 dp" for rank in (1234, 0, 2, 3))
    assert trouble.text.endswith("or a rank may hang" + "".join(waiting))


# -- what is told of the ranks' numbers, once each ----------------------------------------------------------


def line(compute: list[float], dropped: int = 0, every: int = 1) -> dict[str, Any]:
    return {
        "compute_seconds": compute,
        "dropped_spans": [dropped] * len(compute),
        "sampled_every": [every] * len(compute),
    }


def test_each_trouble_is_told_once_and_slow_ranks_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(steps, "_WATCH_SECONDS", 0.0)
    directory = RunDirectory(small_config(tmp_path), resume=False, overwrite=False)
    collector: Any = SimpleNamespace(target=None, counts=lambda: SpanCounts(lost=3))
    watch = Watch(collector, directory, ParallelLayout(pp=2, dp=2))
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
