"""A secret in the environment reaches nothing that a run writes or shows."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from braid.dashboards.metrics_feed import metrics_route
from braid.dashboards.report import report_html
from braid.dashboards.server import make_app
from tests.end_to_end.command import braid, write_config, write_corpus

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
