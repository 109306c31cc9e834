"""Ranks meet after an attempt in which some of them met nobody, whichever of them tried."""

from pathlib import Path

import pytest

from braid.actors.controller.group import WorkerError
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.stage.messages import Rendezvous, RunPlan
from tests.end_to_end.runs import BYTES_VOCABULARY, prepare_text, small_config


def test_ranks_meet_though_one_of_them_has_tried_alone(tmp_path: Path) -> None:
    """As where a link is cut while they meet, and one of them is new then."""
    config = small_config(tmp_path / "runs", parallel={"tp": 2}, cluster={"group_timeout_s": 2.0})
    shape = config.check(BYTES_VOCABULARY)
    schedule = build_schedule(config, shape).to_text()
    plan = RunPlan(
        config=config, shape=shape, schedule=schedule, data=str(prepare_text(tmp_path, 5, files=4))
    )
    group = ProcessLauncher(config).start(2)
    try:
        for generation in (1, 2, 3):
            port = group.call(0, "open_store", 2.0)
            meeting = Rendezvous(address=group.addresses[0], port=port, generation=generation, copies_shift=0)
            if generation < 3:
                with pytest.raises(WorkerError, match="timeout"):
                    group.call(0, "setup", plan, meeting)
                group.call_all("leave")
        group.call_all("setup", plan, meeting)
        losses = [result.loss_sum for result in group.call_all("train_step", 0)]
        assert sum(losses) > 0
    finally:
        group.shutdown()
