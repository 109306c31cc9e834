"""A Ray cluster that a command starts for itself: whom it serves, and what runs on it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.actors.config import parse_config
from braid.jobs import doors
from braid.jobs.data import corpus as corpus_module
from braid.jobs.data.prepare import prepare
from tests.end_to_end.command import BASE, processes_mentioning, write_corpus
from tests.jobs.corpora import DOCUMENTS, contents, corpus_of, hidden, write_lines

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.own_process]


def authentication() -> dict[str, str]:
    """What the environment says of it."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}


@pytest.fixture(scope="module")
def token() -> Iterator[Path]:
    """The file with the token of a cluster that this process is connected to."""
    from braid.jobs.session import ray_session

    with pytest.MonkeyPatch.context() as patch:
        for name in authentication():
            patch.delenv(name)
        with ray_session(parse_config({})):
            file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            yield file
        assert authentication() == {}
        assert not file.parent.exists()


def test_it_turns_strangers_away_and_tells_nobody_its_token(token: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    assert not doors._head_answers(address, doors._QUESTIONS[""])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert token.stat().st_mode & 0o077 == 0
    assert token.parent.stat().st_mode & 0o077 == 0
    assert processes_mentioning(str(token.parent)) != []
    secret = token.read_text()
    assert len(secret) == 64
    assert processes_mentioning(secret) == []
    files = [path for path in token.parent.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == [token]


@pytest.mark.usefixtures("token")
def test_it_listens_on_loopback_only() -> None:
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]


@pytest.mark.usefixtures("token")
def test_tasks_prepare_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from braid.jobs.data.prepare_ray import ray_map

    monkeypatch.setattr(corpus_module, "_SMALLEST_ITEM_BYTES", 300)
    corpus = corpus_of(write_lines(tmp_path / "a.jsonl", DOCUMENTS))
    bad = tmp_path / "bad.jsonl"
    bad.write_text((tmp_path / "a.jsonl").read_text() + "{")
    local = prepare(corpus, output=tmp_path / "local")
    remote = prepare(corpus, output=tmp_path / "remote", executor=ray_map)
    assert contents(remote.output) == contents(local.output)
    assert sorted(ray_map(abs, range(-20, 0), in_flight=3)) == list(range(1, 21))
    with pytest.raises(ValueError, match=r"^data.files: .*bad.jsonl:61 is not JSON") as fault:
        prepare(corpus_of(bad), output=tmp_path / "bad", executor=ray_map)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "bad").exists()
    assert not hidden(tmp_path)


@pytest.mark.usefixtures("token")
def test_training_runs_inside_a_task(tmp_path: Path) -> None:
    """Of an actor with two threads, neither of which hears signals."""
    data = {"files": [str(write_corpus(tmp_path))], "validation_fraction": 0.1}
    content = {**BASE, "runs": str(tmp_path / "runs"), "data": data, "telemetry": {"page": False}}

    @ray.remote(num_cpus=0, max_concurrency=2)
    class Task:
        def train(self) -> bool:
            import braid
            from braid.actors.config import parse_config

            return bool(braid.train(parse_config(content))["complete"])

    task = Task.remote()
    assert ray.get(task.train.remote())
    ray.kill(task)
