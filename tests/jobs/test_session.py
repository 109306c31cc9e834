"""Where Ray cannot be loaded, started or joined: one line with the remedy."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import ConfigError, parse_config
from braid.jobs import session
from braid.jobs.session import ray_session

ray = pytest.importorskip("ray")


def fails(*words: Any, **settings: Any) -> None:
    raise Exception("no node came up\nwith all its details")


def not_started(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setattr(ray, "init", fails)


def not_joined(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    patch.setattr(session, "_check_reachable", lambda *words: None)
    patch.setattr(session, "check_cluster", lambda *words: None)
    patch.setattr(ray, "init", fails)


def not_loaded(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "ray.py").write_text("raise OSError('a library of it is gone')")
    patch.delitem(sys.modules, "ray")
    patch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (not_started, "Ray does not start on this machine (no node came up); see that /dev/shm"),
        (
            not_joined,
            "$RAY_ADDRESS (10.0.0.1:6379): cannot join this Ray cluster (no node came up); see `ray",
        ),
        (not_loaded, "needs Ray, which cannot be loaded (a library of it is gone); install it"),
    ],
)
def test_ray_that_does_not_come(
    broken: Callable[[pytest.MonkeyPatch, Path], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    broken(monkeypatch, tmp_path)
    with pytest.raises(ConfigError) as refused, ray_session(parse_config({})):
        pass
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
