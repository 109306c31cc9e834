"""What records say of the routing of tokens, from the sums of all ranks."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.actors.controller.records.reporting import build_report
from braid.actors.controller.records.routing import expert_numbers, tells_visits
from braid.actors.controller.records.run_records import RunDirectory
from braid.actors.stage.rank.messages import RoutingSums
from braid.jobs.training.display import experts_line, report_table
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from tests.actors.test_records import a_record
from tests.end_to_end.runs import small_config

SIZES = {"hidden": 8, "ffn": 16, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 4}
SHAPE = ModelShape(family="moe", vocabulary=32, sequence=16, experts=4, top_k=2, **SIZES)
TOKENS = 100


def sums(
    *visits: Sequence[int], layers: Sequence[int] = (0, 1), dropped: Sequence[int] = (0, 0), loss: float = 0.0
) -> RoutingSums:
    """Of one rank: a row of visits for each layer."""
    return RoutingSums(
        layers=tuple(layers),
        visits=np.array(visits, np.int64),
        dropped=np.array(dropped[: len(layers)], np.int64),
        losses=np.full((len(layers), 2), loss),
    )


def numbers(ranks: Sequence[RoutingSums], shape: ModelShape = SHAPE, layout: Any = None) -> Any:
    return expert_numbers(ranks, shape, layout or ParallelLayout(dp=len(ranks)), TOKENS, visits=True)


def test_ranks_and_stages_are_added_up() -> None:
    first, second = sums((30, 20, 30, 20), layers=[0]), sums((100, 0, 0, 0), layers=[1])
    found = numbers([first, first, second, second], layout=ParallelLayout(pp=2, dp=2))
    assert found.layers == (0, 1)
    assert found.visits == ((60, 40, 60, 40), (200, 0, 0, 0))
    assert (found.imbalance, found.worst_imbalance) == (pytest.approx(2.6), 4.0)
    own = -(0.6 * math.log(0.3) + 0.4 * math.log(0.2)) / math.log(4)
    assert found.entropy == pytest.approx(own / 2, abs=1e-5)
    assert found.worst_entropy == 0
    assert (found.unvisited, found.worst_unvisited) == (3, 3)
    assert (found.dropped, found.rank_imbalance, found.balance_loss, found.z_loss) == (None,) * 4


def test_dropped_visits_and_losses_where_the_model_has_them() -> None:
    shape = replace(SHAPE, capacity_factor=1.0, z_loss=0.1)
    rank = sums((50, 10, 20, 20), (25, 25, 25, 25), dropped=(25, 0), loss=3.0)
    found = numbers([rank, rank], shape, ParallelLayout(dp=2, ep=2))
    assert (found.dropped, found.worst_dropped) == (0.125, 0.25)
    assert found.z_loss == pytest.approx(2 * 2 * 3.0 / TOKENS)
    assert found.balance_loss is None
    assert found.rank_imbalance is None, "with a capacity all ranks compute as many rows"
    assert experts_line(asdict(found)).endswith(", 12.5% of visits dropped (last step)")


def test_the_fullest_rank_of_ep() -> None:
    """Rows of a rank come from its own group of ep: what is full in one may be empty in another."""
    rank = sums((30, 0, 10, 0), (1, 1, 1, 1))
    found = numbers([rank] * 4, layout=ParallelLayout(dp=2, ep=2, tp=2))
    assert (found.rank_imbalance, found.worst_rank_imbalance) == (1.25, 1.5)
    one, other = sums((10, 10, 0, 0), (5, 5, 5, 5)), sums((0, 0, 10, 10), (5, 5, 5, 5))
    layout = ParallelLayout(dp=4, ep=2)
    first, second = layout.mesh.groups(layout.mesh.factors_of("ep"))
    found = numbers([one if rank in first else other for rank in range(4)], layout=layout)
    assert found.imbalance == 1.0
    assert (found.rank_imbalance, found.worst_rank_imbalance) == (1.5, 2.0)
    assert experts_line(asdict(found)).endswith(", fullest rank 1.50 x the average (last step)")
    found = numbers([one if rank in (first[0], second[0]) else other for rank in range(4)], layout=layout)
    assert (found.rank_imbalance, found.worst_rank_imbalance) == (1.0, 1.0), "ranks of a group exchange rows"


def test_models_without_experts_leave_no_trace(tmp_path: Path) -> None:
    dense = replace(SHAPE, family="llama", experts=0, top_k=0)
    assert expert_numbers([None, None], dense, ParallelLayout(dp=2), TOKENS, visits=True) is None
    report = build_report(iter([a_record(1)]), small_config(tmp_path), complete=True)
    assert "experts" not in report
    assert "experts" not in list(report_table(report).columns[0].cells)


def test_records_and_the_report_hold_the_numbers(tmp_path: Path) -> None:
    config, path = small_config(tmp_path), []
    directory = RunDirectory(config, resume=False, overwrite=False)
    for step, full in enumerate((30, 60), start=1):
        found = numbers([sums((full, 20, 20, 20), (25, 25, 25, 25))])
        path.append(found)
        directory.append(a_record(step, experts=found), {"step": step})
    assert [record.experts for record in directory.records()] == path
    report = build_report(directory.records(), config, complete=True)
    section = json.loads(json.dumps(report))["experts"]
    assert section["last"]["worst_imbalance"] == 2.0
    assert section["mean"]["worst_imbalance"] == pytest.approx((30 * 4 / 90 + 2) / 2, abs=1e-4)
    assert section["mean"]["dropped"] is None
    assert "visits" not in section["last"]
    table = report_table(report)
    texts = dict(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert texts["experts"] == (
        "fullest 1.50 x the average (2.00 in the worst layer), entropy 94.8% of a balanced load's (last step)"
    )
    directory.close()


@pytest.mark.parametrize(("layers", "experts", "every"), [(32, 8, 1), (64, 256, 64)])
def test_records_stay_small(layers: int, experts: int, every: int) -> None:
    """All counts in every record, or in one of so many."""
    shape = replace(SHAPE, layers=layers, experts=experts)
    told = [step for step in range(1, 1001) if tells_visits(shape, step, 1001)]
    assert told == list(range(1, 1001, every))
    assert tells_visits(shape, 1001, 1001), "the last one always"
