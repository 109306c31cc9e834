"""Ranks meet after an attempt in which one of them met nobody."""

from pathlib import Path

import pytest

from braid.actors.controller.group import WorkerError
from braid.actors.controller.meeting import rendezvous
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.scheduling.schedule_text import write
from tests.end_to_end.runs import BYTES_VOCABULARY, prepare_text, small_config


def test_ranks_meet_though_one_of_them_has_tried_alone(tmp_path: Path) -> None:
    """As where a link is cut while they meet, and one of them is new then."""
    data = prepare_text(tmp_path, 5, files=4)
    config = small_config(tmp_path / "runs", parallel={"tp": 2})
    shape = config.check(BYTES_VOCABULARY)
    schedule = write(build_schedule(config, shape))

    def plan(timeout_s: float) -> RunPlan:
        cluster = config.cluster.model_copy(update={"group_timeout_s": timeout_s})
        patient = config.model_copy(update={"cluster": cluster})
        return RunPlan(config=patient, shape=shape, schedule=schedule, data=str(data))

    group = ProcessLauncher(config).start(2)

    try:
        for generation in (1, 2):
            with pytest.raises(WorkerError, match="timeout"):
                group.call(0, Rank.setup, plan(1.0), rendezvous(group, 60.0, generation))
            group.call_all(Rank.leave)
        group.call_all(Rank.setup, plan(60.0), rendezvous(group, 60.0, 3))
        assert sum(result.loss_sum for result in group.call_all(Rank.train_step, 0)) > 0
    finally:
        group.shutdown()
