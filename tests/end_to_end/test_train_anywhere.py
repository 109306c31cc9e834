"""``braid.train`` where Python programs call it: a thread, a notebook. (Ray: test_private_cluster.py.)"""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.actors.config import Config, parse_config
from braid.actors.controller.records import Finished, Incident
from tests.end_to_end.command import BASE, write_corpus

pytestmark = pytest.mark.slow


def config(folder: Path, **telemetry: Any) -> Config:
    """A run of four steps."""
    data = {"files": [str(write_corpus(folder))], "validation_fraction": 0.1}
    return parse_config({**BASE, "runs": str(folder / "runs"), "data": data, "telemetry": telemetry})


def test_in_a_thread_with_a_sink_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases without a key: nobody can give it one here."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    events: list[Any] = []
    run = config(tmp_path, wandb="online", page=True)
    thread = threading.Thread(target=lambda: braid.train(run, show=events.append))
    thread.start()
    thread.join()
    assert [event.complete for event in events if isinstance(event, Finished)] == [True]
    told = [event.text for event in events if isinstance(event, Incident) and event.kind == "telemetry"]
    assert len(told) == 1
    assert told[0].startswith("telemetry.wandb gets no more numbers of this run, which goes on: No API key")


def test_beside_a_running_event_loop(tmp_path: Path) -> None:
    """As a cell of a notebook runs: in the main thread, called by a coroutine."""
    before = signal.getsignal(signal.SIGINT)

    async def cell() -> dict[str, Any]:
        return braid.train(config(tmp_path, page=False))

    assert asyncio.run(cell())["complete"]
    assert signal.getsignal(signal.SIGINT) is before
