"""What a layer costs the host in one micro-batch: operators, dispatches, events, collectives, Python calls.

Counted on the model of the machine, as the difference between a model with one layer more and one without.
Read the difference before you renew the golden file.
"""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.cuda.entries import Kernel, Made, Operator, Recorded, Waited
from tests.cuda.steps import Case, counting_calls, recorded

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "launches.json"
MICRO_BATCHES = 4


def counts(schedule: str) -> dict[str, float]:
    """Of one layer and micro-batch, both passes, tp 2, spans not recorded."""
    _step(schedule, 2)  # what is made once is made now
    few, many = (_step(schedule, layers) for layers in (2, 3))
    return {key: (many[key] - few[key]) / MICRO_BATCHES for key in many}


def _step(schedule: str, layers: int) -> Counter[str]:
    case = Case(schedule=schedule, tp=2, micro_batches=MICRO_BATCHES, layers=layers)
    found, calls = Counter[str](), Counter[str]()
    machine, _ = recorded(case, lambda rank: nullcontext() if rank.log.rank else counting_calls(calls))
    found["python"], found["views"] = calls.total(), machine.ranks[0].views
    kinds = {Recorded: "events", Waited: "waits", Kernel: "collectives", Made: "allocations"}
    for entry in machine.ranks[0].entries:
        if isinstance(entry, Operator):
            found["dispatches" if entry.results or entry.writes else "views"] += 1
        elif type(entry) in kinds:
            found[kinds[type(entry)]] += 1
    return found


@pytest.mark.parametrize("schedule", ["megatron", "braid:w"])
def test_a_layer_costs_the_host_no_more_than_it_did(schedule: str, update_golden: bool) -> None:
    found = counts(schedule)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if update_golden:
        golden[schedule] = found
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    wanted = golden[schedule]
    assert found.pop("python") == pytest.approx(wanted.pop("python"), rel=0.1), "versions of Python differ"
    assert found == wanted
