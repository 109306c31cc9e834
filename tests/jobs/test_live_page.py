"""The page's process beside a training: what it says holds nobody up, and it does not outlive its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.jobs.training.page import LivePage
from tests.end_to_end.command import environment, processes_mentioning

pytestmark = pytest.mark.slow

PARENT = """
import sys, time
from pathlib import Path
from braid.jobs.training.page import LivePage
print(LivePage().open(Path(sys.argv[1])), flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has begun, and a step of before the command that shows it."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("name: run\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "tokens": 64, "seconds": 0.5, "time": 1.7e9}\n')
    return path


@pytest.fixture
def page() -> Iterator[LivePage]:
    made = LivePage()
    yield made
    made.close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_page_that_says_a_lot_goes_on(run: Path, page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tells on standard error of every module that it loads: far more than a pipe holds."""
    monkeypatch.setenv("PYTHONVERBOSE", "2")
    url = page.open(run)
    assert "<title>" in get(url)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 2, "tokens": 64, "seconds": 0.5, "time": {time.time()}}}\n')
    text = get(f"{url}metrics")
    assert 'braid_step{run="run"} 2.0' in text
    assert 'braid_tokens_total{run="run"} 64.0' in text, "of this command only"
    process = page._process
    page.close()
    page.close()
    assert process is not None
    assert process.returncode is not None


def test_the_reason_is_told(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"the live page did not start: cannot listen on .*:{port}: "):
            LivePage(port).open(run)
    with pytest.raises(ValueError, match=r"the live page did not start: .*is no directory"):
        LivePage().open(run / "none")


def test_it_ends_with_its_parent(run: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(run)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert "<title>" in get(url)
        os.kill(parent.pid, signal.SIGKILL)
    assert processes_mentioning(str(run), patience=30) == []
