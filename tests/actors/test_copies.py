"""Copies of ranks' states in memory, with real ranks: whatever is lost comes back bit for bit.

Where lost ranks cannot be replaced, survivors write what they hold of all: a checkpoint like any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import CheckpointConfig
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import CheckpointSaved, Incident, RunDirectory
from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import CheckpointStore
from braid.actors.controller.state.saving import Saver, manifest_facts
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.state.checkpoint import read_tensors
from tests.actors.ranks import Probed, Ranks, started

pytestmark = pytest.mark.slow


def test_an_older_step_is_gone_back_to(tmp_path: Path, data: Path) -> None:
    """Copies of every second step; what came later is forgotten, so that it cannot be mistaken for new."""
    sections: dict[str, Any] = {"parallel": {"tp": 2}}
    with started(tmp_path, data, wait=True, checkpoint={"copies_every": 2}, **sections) as ranks:
        ranks.begin(1)
        states = ranks.train(range(5))
        assert {one.own for one in ranks.all(Rank.copies_held)} == {(2, 4)}
        ranks.all(Probed.spoil)
        assert not set(ranks.all(Probed.digest)) & set(states[3])
        ranks.all(Rank.restore_copies, 2, [0, 1])
        assert ranks.all(Probed.digest) == states[1]
        for one in ranks.all(Rank.copies_held):
            assert (one.own, one.partners) == ((2,), (2,))
        assert ranks.train(range(2, 5)) == states[2:]


# -- rescue --------------------------------------------------------------------------------------------------


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
        facts = manifest_facts(config.layout(), FACTS, ranks.plan.shape)
        self.saver.goes_on(0, ranks.group, 1, facts)
        ranks.begin(shift)
        ranks.train(range(steps))

    def rescue(self) -> list[CheckpointSaved | Incident]:
        """What is told of it."""
        return list(self.saver.rescue(self._ranks.group, self._ranks.plan.config, self._steps, 1))


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
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path) == (3, found.path)
    assert isinstance(told, Incident)
    assert told.kind == "rescued"
    assert (found.manifest.step, found.manifest.data) == (3, FACTS)
    assert again == [], "a checkpoint is as new"
    ours, theirs = read_tensors(Path(found.path)), read_tensors(everything)
    assert set(ours) == set(theirs)
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    assert all(tensor.any() for name, tensor in ours.items() if name.startswith("exp_avg_sq")), "they move"
    assert [line["kind"] for line in read_lines(run.directory.path / "events.jsonl")] == ["saved", "rescued"]
