"""Copies of ranks' states in memory, with real ranks: whatever is lost comes back bit for bit.

Where lost ranks cannot be replaced, survivors write what they hold of all: a checkpoint like any other.
"""

from contextlib import ExitStack
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
from tests.actors.ranks import Probed, started

pytestmark = pytest.mark.slow


def test_an_older_step_is_gone_back_to(tmp_path: Path, data: Path) -> None:
    """Copies of every second step; what came later is forgotten, so that it cannot be mistaken for new.

    The first stage gets its state back from its partner, whose own has another size.
    """
    sections: dict[str, Any] = {"parallel": {"pp": 3}, "model": {"layers": 3}, "train": {"global_batch": 12}}
    with started(tmp_path, data, wait=True, checkpoint={"copies_every": 2}, **sections) as ranks:
        ranks.begin(2)
        states = ranks.train(range(5))
        assert {one.own for one in ranks.all(Rank.copies_held)} == {(2, 4)}
        ranks.all(Probed.spoil)
        assert not set(ranks.all(Probed.digest)) & set(states[3])
        ranks.all(Rank.restore_copies, 2, [2, 1, 2])
        assert ranks.all(Probed.digest) == states[1]
        for one in ranks.all(Rank.copies_held):
            assert (one.own, one.partners) == ((2,), (2,))
        assert ranks.train(range(2, 5)) == states[2:]


def test_survivors_write_what_all_ranks_had(tmp_path: Path, data: Path) -> None:
    """Three of four ranks are lost, the one that others meet at among them."""
    everything, facts = tmp_path / "everything", {"data": "a test's"}
    everything.mkdir()
    model, checkpoint = {"family": "gpt", "kv_heads": 4}, {"copies_every": 1}
    sections: dict[str, Any] = {"parallel": {"dp": 2, "tp": 2}, "model": model, "checkpoint": checkpoint}
    with started(tmp_path / "run", data, wait=True, **sections) as ranks, ExitStack() as stack:
        config, shape = ranks.plan.config, ranks.plan.shape
        directory = RunDirectory(config, resume=False, overwrite=True)
        stack.callback(directory.close)
        homes = Homes(CheckpointStore(directory.path / "checkpoints"), None, "")
        saver = Saver(homes, directory, CheckpointConfig())
        stack.callback(saver.close)
        saver.goes_on(0, ranks.group, 1, manifest_facts(config.layout(), facts, shape))
        ranks.begin(1)
        ranks.train(range(3))
        ranks.all(Rank.save, str(everything), 3)  # by all ranks, in the ordinary way
        ranks.kill([0, 1, 2])
        saved, told = saver.rescue(ranks.group, config, 3, 1)
        found = homes.newest_of(shape)
        assert list(saver.rescue(ranks.group, config, 3, 1)) == [], "a checkpoint is as new"
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path) == (3, found.path)
    assert isinstance(told, Incident)
    assert told.kind == "rescued"
    assert (found.manifest.step, found.manifest.data) == (3, facts)
    ours, theirs = read_tensors(Path(found.path)), read_tensors(everything)
    assert set(ours) == set(theirs)
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    assert all(tensor.any() for name, tensor in ours.items() if name.startswith("exp_avg_sq")), "they move"
    assert [line["kind"] for line in read_lines(directory.path / "events.jsonl")] == ["saved", "rescued"]
