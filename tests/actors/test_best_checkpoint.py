"""``checkpoint.keep_best``: the state of the lowest validation loss is saved, and stays over resumes."""

import json
import math
import os
import random
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from braid.actors.config import ConfigError, parse_config
from braid.actors.controller.state.manifest import CheckpointStore
from tests.actors.saved import publish
from tests.actors.test_saver import Run

SEED = int(os.environ["BRAID_TEST_SEED"])


class Validated(Run):
    """A run whose steps are validated."""

    def validated(self, losses: Mapping[int, float | None]) -> None:
        for step, loss in losses.items():
            self.told += self.saver.step_done(step, loss)
        self.finish()


def kept(store: CheckpointStore) -> dict[int, float | None]:
    """Steps of the checkpoints that are there, with their losses."""
    texts = {step: (store.directory / f"step-{step}" / "manifest.json").read_text() for step in store.steps()}
    return {step: json.loads(text)["validation_loss"] for step, text in texts.items()}


LOSSES = {1: None, 2: 5.0, 3: None, 4: 3.0, 5: None, 6: 4.0, 7: None, 8: 3.5, 9: None, 10: math.nan}


def test_the_best_state_is_saved_and_stays(tmp_path: Path) -> None:
    with closing(Validated(tmp_path, every=5, keep=1, keep_best=True)) as run:
        run.validated(LOSSES)
        assert run.saved == [2, 4, 5, 10], "as often as asked, and where the loss is lower than ever"
        assert kept(run.homes.store) == {4: 3.0, 10: None}
        run.validated({12: 2.0, 15: None})
        assert kept(run.homes.store) == {12: 2.0, 15: None}, "another one is the best now"


def test_without_the_key_nothing_is_kept_for_its_loss(tmp_path: Path) -> None:
    with closing(Validated(tmp_path, every=5, keep=1)) as run:
        run.validated(LOSSES)
        assert run.saved == [5, 10]
        assert kept(run.homes.store) == {10: None}


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_over_failures_and_resumes(tmp_path: Path, seed: int) -> None:
    """Whatever comes: the lowest loss since the state that the run went on from is that of a checkpoint."""
    random.seed(seed)
    with closing(Validated(tmp_path, every=4, keep=2, keep_best=True)) as run:
        losses: dict[int, float] = {}
        done = 0
        for _ in range(5):
            for step in range(done + 1, done + random.randint(2, 9)):
                loss = round(random.uniform(1, 2), 3) if random.random() < 0.5 else None
                run.validated({step: loss})
                losses.pop(step, None)
                if loss is not None:
                    losses[step] = loss
                done = step
                if losses:
                    best = run.homes.store.best(run.homes.run)
                    assert best is not None
                    assert best.validation_loss == min(losses.values())
            done = run.homes.store.steps()[-1] if run.homes.store.steps() else 0
            losses = {step: loss for step, loss in losses.items() if step <= done}
            run.saver.abandon()
            run.saver.goes_on(done, run.ranks, 2, {"layout": {}, "data": {}, "shape": {}})


def test_the_mirror_keeps_it_too(tmp_path: Path) -> None:
    mirror = f"memory://{uuid.uuid4()}/copies"
    with closing(Validated(tmp_path, every=1, keep=1, keep_best=True, mirror=mirror)) as run:
        for step, loss in {1: 2.0, 2: 1.0, 3: 3.0, 4: None}.items():
            run.validated({step: loss})
        assert run.mirrored == [2, 4]


def test_best_of_other_runs_and_of_damaged_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, loss, run in ((1, 3.0, "a"), (2, 1.0, "b"), (3, 2.0, "a"), (4, 2.0, "a"), (5, 0.5, "a")):
        publish(store, step, validation_loss=loss, run=run)
    (tmp_path / "step-5" / "manifest.json").write_text("{")
    (tmp_path / "step-9").mkdir()
    best = store.best("a")
    assert best is not None
    assert (best.step, best.validation_loss) == (3, 2.0), "of equal ones the first"
    assert (store.best("a", newest=2) or best).step == 1
    assert store.best("a", newest=0) is None


@pytest.mark.parametrize(("train", "data"), [({}, {}), ({"validate_every": 5}, {"validation_fraction": 0.0})])
def test_without_validations_there_is_no_best(train: dict[str, int], data: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"keep_best=true does not go with .*=0.* above 0"):
        parse_config({"checkpoint": {"keep_best": True}, "train": train, "data": data})
