"""What is around a run: who calls it, a thread or a notebook (Ray: test_private_cluster.py), and secrets."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from braid import TrainingResult, train
from braid.actors.config import Config, parse_config
from braid.actors.controller.records.run_records import Finished, Incident
from braid.dashboards.metrics_feed import metrics_route
from braid.dashboards.report import report_html
from braid.dashboards.server import make_app
from tests.end_to_end.command import BASE, braid, write_config, write_corpus


def config(folder: Path, **telemetry: Any) -> Config:
    """A run of four steps."""
    data = {"files": [str(write_corpus(folder))], "validation_fraction": 0.1}
    return parse_config({**BASE, "runs": str(folder / "runs"), "data": data, "telemetry": telemetry})


@pytest.mark.slow
def test_in_a_thread_with_a_sink_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases without a key: nobody can give it one here."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    events: list[Any] = []

    class Keeps:
        def on_event(self, event: Any) -> None:
            events.append(event)

    run = config(tmp_path, wandb="online", page=True)
    thread = threading.Thread(target=lambda: train(run, callbacks=[Keeps()]))
    thread.start()
    thread.join()
    assert [event.complete for event in events if isinstance(event, Finished)] == [True]
    told = [event.text for event in events if isinstance(event, Incident) and event.kind == "telemetry"]
    assert len(told) == 1
    assert told[0].startswith("telemetry.wandb gets no more numbers of this run, which goes on: No API key")


@pytest.mark.slow
def test_beside_a_running_event_loop(tmp_path: Path) -> None:
    """As a cell of a notebook runs: in the main thread, called by a coroutine."""
    before = signal.getsignal(signal.SIGINT)

    async def cell() -> TrainingResult:
        return train(config(tmp_path, page=False))

    assert asyncio.run(cell()).complete
    assert signal.getsignal(signal.SIGINT) is before


# -- a secret in the environment reaches nothing that a run writes or shows ----------------------------------


CANARY = "canary-7f3b9a52c1"
TOKEN = "token-canary-55d0c9e8a1"


@pytest.mark.slow
def test_a_canary_is_found_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAFANA_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "BRAID_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    write_corpus(tmp_path)
    telemetry = {"tensorboard": True, "wandb": "offline"}
    config = write_config(tmp_path, parallel={"tp": 2}, train={"steps": 3}, telemetry=telemetry)
    done = braid(tmp_path, "train", str(config))
    assert done.code == 0, done.errors
    run = tmp_path / "runs" / "run"
    shown = [done.output, done.errors, report_html(run), *asyncio.run(_answers(run))]
    assert not [text[:200] for text in shown if CANARY in text or TOKEN in text]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


async def _answers(run: Path) -> list[str]:
    """What the page's server says, to who has the token and who has not."""
    app = make_app(run, token=TOKEN, extra_routes=[metrics_route(run)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found = []
        async with aiohttp.ClientSession() as session:
            for path in ("/", "/api/state", "/api/metrics", "/api/ranks", "/metrics"):
                for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
                    async with session.get(address + path, headers=headers) as answer:
                        assert answer.status == (200 if headers else 401)
                        found.append(f"{dict(answer.headers)} {await answer.text()}")
        return found
    finally:
        await runner.cleanup()
