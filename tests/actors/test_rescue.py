"""Where lost ranks cannot be replaced, survivors write what they hold of all: a checkpoint like any other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.actors.config import CheckpointConfig
from braid.actors.controller.homes import Homes
from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.manifest import CheckpointStore
from braid.actors.controller.records import Incident, RunDirectory, Saved
from braid.actors.controller.rescue import rescue
from braid.actors.controller.saving import Saver, manifest_facts
from braid.actors.stage.checkpoint import read_tensors
from braid.actors.stage.rank import Rank
from tests.actors.ranks import Ranks, started

pytestmark = pytest.mark.slow

GPT = {"family": "gpt", "kv_heads": 4}
FACTS = {"data": "a test's"}


class Run:
    """The controller's side of ranks that a test drives, which have trained so many steps."""

    def __init__(self, ranks: Ranks, shift: int, steps: int) -> None:
        config = ranks.plan.config
        self._ranks, self._steps = ranks, steps
        self.directory = RunDirectory(config, resume=False, overwrite=True)
        self.homes = Homes(CheckpointStore(self.directory.path / "checkpoints"), None, "")
        self.saver = Saver(self.homes, self.directory, CheckpointConfig())
        ranks.begin(shift)
        ranks.train(range(steps))

    def rescue(self) -> list[Saved | Incident]:
        """What is told of it."""
        plan, group = self._ranks.plan, self._ranks.group
        facts = manifest_facts(plan.config.layout(), FACTS, plan.shape)
        return list(rescue(group, plan.config, self.saver, self.directory, 1, self._steps, facts))


@contextmanager
def trained(
    path: Path, data: Path, shift: int, steps: int, parallel: dict[str, int], model: dict[str, Any]
) -> Iterator[tuple[Ranks, Run]]:
    """Ranks whose copies have arrived."""
    sections = {"parallel": parallel, "model": model, "checkpoint": {"copies_every": 1}}
    with started(path, data, wait=True, **sections) as ranks:
        run = Run(ranks, shift, steps)
        try:
            yield ranks, run
        finally:
            run.saver.close()
            run.directory.close()


@pytest.mark.parametrize(
    ("parallel", "model", "shift", "lost"),
    [
        ({"tp": 2}, {}, 1, [1]),  # 257 rows of the vocabulary: uneven slices
        ({"pp": 3}, {"layers": 3}, 2, [0]),  # the rank that others meet at
        ({"dp": 2, "tp": 2}, GPT, 1, [0, 1, 2]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_survivors_write_what_all_ranks_had(
    tmp_path: Path,
    data: Path,
    parallel: dict[str, int],
    model: dict[str, Any],
    shift: int,
    lost: list[int],
) -> None:
    everything = tmp_path / "everything"
    everything.mkdir()
    with trained(tmp_path / "run", data, shift, 3, parallel, model) as (ranks, run):
        ranks.all(Rank.save, str(everything), 3)  # by all ranks, in the ordinary way
        ranks.kill(lost)
        saved, told = run.rescue()
        found = run.homes.newest_of(ranks.plan.shape)
        again = run.rescue()
    assert isinstance(saved, Saved)
    assert (saved.step, saved.path) == (3, found.path)
    assert isinstance(told, Incident)
    assert told.kind == "rescued"
    assert (found.manifest.step, found.manifest.data) == (3, FACTS)
    assert again == [], "a checkpoint is as new"
    same(read_tensors(Path(found.path)), read_tensors(everything))
    assert [line["kind"] for line in read_lines(run.directory.path / "events.jsonl")] == ["saved", "rescued"]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """All tensors, bit for bit; moments have moved."""
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert all(tensor.any() for name, tensor in ours.items() if name.startswith("exp_avg_sq"))


def test_without_a_copy_of_every_rank_there_is_nothing_to_write(tmp_path: Path, data: Path) -> None:
    """Rank 1 of three has its own state and rank 0's, rank 2's is lost."""
    with trained(tmp_path, data, 1, 2, {"pp": 3}, {"layers": 3}) as (ranks, run):
        ranks.kill([0, 2])
        assert run.rescue() == []
    assert not run.homes.steps()


def test_what_cannot_be_written_is_told(tmp_path: Path, data: Path) -> None:
    """A survivor that dies, too: the run goes on from the newest checkpoint."""
    with trained(tmp_path, data, 1, 2, {"tp": 2}, {}) as (ranks, run):
        ranks.kill([1])
        (run.directory.path / "checkpoints").write_text("in the way")
        (told,) = run.rescue()
    assert isinstance(told, Incident)
    assert told.kind == "failed"
    assert "copies in memory could not be written as a checkpoint" in told.text
