"""Decisions are kept: a restart neither searches nor simulates, and nothing stale is ever used."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, ConfigError
from braid.actors.controller import decisions, planning
from braid.actors.controller.combining import combine
from braid.actors.controller.decisions import Decisions, find_or_decide
from braid.actors.controller.planning import model_graphs
from braid.actors.controller.profiling import _profile_path
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.planning.work import known_schedule
from braid.jobs.training.train import Compared, plan_run
from braid.scheduling.cost.profile import Profile
from braid.scheduling.schedule.text import write
from tests.actors.test_profiling import VOCABULARY, config_of, samples_of

pytestmark = pytest.mark.slow


def profile_of(config: Config, oef: float = 0.75) -> Profile:
    parts = model_graphs(config, config.check(VOCABULARY))
    return combine([samples_of(config, random.Random(1), oef)], parts)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every search and every simulation fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(planning, "plan_run", fail)
    for name in ("decide", "outcome_of", "outcome_of_schedule"):
        monkeypatch.setattr(planning, name, fail)


def start(config: Config, profile: Profile) -> tuple[RunPlan, list[Any]]:
    """The plan that a command makes, with a profile that is there, and what it shows."""
    shown: list[Any] = []
    path = config.runs / "measured.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json(), encoding="utf-8")
    overlap = config.overlap.model_copy(update={"profile": path})
    launcher: Any = None
    config = config.model_copy(update={"overlap": overlap})
    made = plan_run(config, config.check(VOCABULARY), "data", launcher, shown.append)
    return made, [one for one in shown if isinstance(one, Compared)]


def decided(config: Config, profile: Profile) -> Decisions:
    return find_or_decide(config, config.check(VOCABULARY), profile)


def test_a_second_start_takes_what_the_first_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, overlap={"schedule": "auto"}, model={"layers": 1})
    profile = profile_of(config)
    first, chosen = start(config, profile)
    assert len(chosen) == 1
    assert first.config.overlap.schedule == chosen[0].rows[0].schedule
    assert set(first.files) == {"plan.yaml", "profile.json", "predicted.json", "trace/predicted.arrows"}
    forbid(monkeypatch)
    assert start(config, profile) == (first, chosen)
    train = config.train.model_copy(update={"steps": 1000, "lr": 0.5})
    longer = config.model_copy(update={"train": train})
    assert start(longer, profile)[0].schedule == first.schedule, "these decide nothing"


def test_decisions_that_are_not_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 32 that were used last stay; profiles do not count."""
    config = config_of(tmp_path, model={"layers": 1})
    profile, folder = profile_of(config), config.runs / "profiles"
    serial = decisions.SerialStep(seconds=1.0, alpha=0.5)
    some = Decisions(name="", candidates=(), schedule="", solo_ns={}, serial=serial, texts={}, spans="")
    monkeypatch.setattr(decisions, "decide", lambda *_: some)
    folder.mkdir(parents=True)
    measured, *files = [folder / f"{kind}{n}.json" for n, kind in enumerate(["", *32 * ["decisions-"]])]
    for age, file in enumerate((measured, *files)):
        file.write_text("{}")
        os.utime(file, (age, age))
    assert decided(config, profile) == some
    made = folder / f"decisions-{key_of(config, profile)}.json"
    assert {*folder.iterdir()} == {measured, *files[1:], made}
    os.utime(made, (0, 0))
    assert decided(config, profile) == some
    assert made.stat().st_mtime > 32, "used: the last to go"


def key_of(config: Config, profile: Profile) -> str:
    return decisions.decisions_key(config, config.check(VOCABULARY), profile)


def test_whatever_decides_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the sources of the planner."""
    config = config_of(tmp_path)
    profile = profile_of(config)
    slower = {name: 2 * ns for name, ns in profile.solo_ns.items()}
    others = (
        {"model": {"layers": 3}},
        {"parallel": {"tp": 4}},
        {"train": {"global_batch": 16}},
        {"train": {"reduce_dtype": "bf16"}},
        {"overlap": {"schedule": "dhelix"}},
        {"overlap": {"memory_slack": 0.1}},
    )
    keys = [key_of(config, profile), key_of(config, replace(profile, solo_ns=slower))]
    keys += [key_of(config_of(tmp_path, **sections), profile) for sections in others]
    assert Path(planning.__file__) in decisions.PLANNER
    assert any((folder / "plan" / "decide.py").is_file() for folder in decisions.PLANNER)
    source = tmp_path / "search.py"
    monkeypatch.setattr(decisions, "PLANNER", (*decisions.PLANNER, source))
    for text in ("WIDTH = 4", "WIDTH = 8"):
        source.write_text(text, encoding="utf-8")
        keys.append(key_of(config, profile))
    assert len(set(keys)) == len(keys)


DAMAGE: dict[str, Callable[[str], str]] = {
    "halved": lambda text: text[: len(text) // 2],
    "incomplete": lambda text: json.dumps({**json.loads(text), "spans": None}),
    "none": lambda text: "[]",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_made_anew(tmp_path: Path, damage: Callable[[str], str]) -> None:
    config = config_of(tmp_path, overlap={"schedule": "wavelet"})
    profile = profile_of(config)
    made = decided(config, profile)
    (path,) = (config.runs / "profiles").glob("decisions-*.json")
    whole = path.read_text(encoding="utf-8")
    assert damage(whole) != whole
    path.write_text(damage(whole), encoding="utf-8")
    assert decided(config, profile) == made
    assert path.read_text(encoding="utf-8") == whole


def test_a_printed_schedule_is_what_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    shape, profile = config.check(VOCABULARY), profile_of(config)
    with pytest.raises(ConfigError, match=r"schedule=braid is decided by measured costs, .* `braid profile`"):
        known_schedule(config, shape)
    kept = _profile_path(config, shape, ProcessLauncher(config))
    kept.parent.mkdir(parents=True)
    kept.write_text(profile.to_json(), encoding="utf-8")
    taken = decided(config, profile).schedule
    forbid(monkeypatch)
    assert write(known_schedule(config, shape)) == taken
    kept.rename(tmp_path / "given.json")
    overlap = config.overlap.model_copy(update={"profile": tmp_path / "given.json"})
    assert write(known_schedule(config.model_copy(update={"overlap": overlap}), shape)) == taken
