"""How much a layer costs the host: read the difference before you renew the golden file."""

import json

import pytest

from tests.cuda.launches import GOLDEN, SCHEDULES, counts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_costs_the_host_no_more_than_it_did(schedule: str, update_golden: bool) -> None:
    found = counts(schedule)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if update_golden:
        golden[schedule] = found
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    wanted = golden[schedule]
    assert found.pop("python") == pytest.approx(wanted.pop("python"), rel=0.1), "versions of Python differ"
    assert found == wanted
