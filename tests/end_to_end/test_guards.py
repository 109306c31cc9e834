"""Gradients that are no numbers and losses that leap: repeated, skipped or the end, on all ranks alike."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import Event, Incident, StepDone
from braid.actors.controller.steps import Stepper
from braid.actors.stage.rank.messages import Fault, RunPlan
from tests.actors.stand_ins import losses
from tests.end_to_end.runs import KeptRanks, Run, run_plan, small_config, trained

pytestmark = pytest.mark.slow

STEPS, HIT = 8, 5
"""The gradients of the step after five are hit."""


def hit(rank: int, step: int = HIT, name: str = "000-nan") -> Fault:
    return Fault(name=name, kind="nan", rank=rank, step=step, phase="backward")


def controller_of(
    path: Path, data: Path, faults: Sequence[Fault], **sections: Any
) -> tuple[Controller, RunPlan]:
    train = {"steps": STEPS, "validation_samples": 2, **sections.pop("train", {})}
    keeping = {"every": 1, "keep": 99, **sections.pop("checkpoint", {})}
    config = small_config(path, train=train, checkpoint=keeping, **sections)
    plan = run_plan(config, data, faults=tuple(faults))
    return Controller(plan, KeptRanks(config), RunOptions()), plan


def run(path: Path, data: Path, faults: Sequence[Fault] = (), **sections: Any) -> Run:
    controller, plan = controller_of(path, data, faults, **sections)
    done = Run.of(plan, list(controller.run()))
    for fault in faults:
        assert (plan.config.run_directory / "faults" / fault.name).exists(), "it fired"
    return done


def guards(of: Run) -> list[tuple[int, str]]:
    return [(event.step, event.text) for event in of.events if isinstance(event, Incident)]


def differing(ours: Run, our_step: int, theirs: Run, their_step: int) -> list[str]:
    """Names of parameters that are not the same bit for bit."""
    mine, others = ours.parameters(our_step), theirs.parameters(their_step)
    return [name for name, tensor in mine.items() if not torch.equal(tensor, others[name])]


def test_a_step_is_repeated_and_nothing_is_lost(tmp_path: Path, data: Path) -> None:
    broken = run(tmp_path, data, [hit(rank=1)], parallel={"pp": 2})
    whole = run(tmp_path, data, parallel={"pp": 2})
    assert guards(broken) == [(HIT + 1, "gradients of step 6 were no numbers; the step was repeated")]
    assert guards(whole) == []
    assert broken.losses == whole.losses
    assert broken.gradient_norms == whole.gradient_norms
    assert differing(broken, STEPS, whole, STEPS) == []
    assert [r.samples for r in broken.records] == [r.samples for r in whole.records]


def test_a_step_is_skipped_on_all_ranks(tmp_path: Path, data: Path) -> None:
    sections: dict[str, Any] = {"parallel": {"dp": 2}, "failure": {"on_nan": "skip"}}
    broken = run(tmp_path, data, [hit(rank=0)], **sections)
    whole = run(tmp_path, data, **sections)
    says = "gradients of step 6 were no numbers; the step was skipped on all ranks"
    assert guards(broken) == [(HIT + 1, says)]
    assert broken.losses[: HIT + 1] == whole.losses[: HIT + 1]
    assert differing(broken, HIT, whole, HIT) == []
    assert differing(broken, HIT + 1, broken, HIT) == [], "the step changed nothing"
    assert len(differing(broken, HIT + 2, broken, HIT + 1)) > 0, "the next one did"
    assert [record.step for record in broken.records] == list(range(1, STEPS + 1))
    assert [r.samples for r in broken.records] == [r.samples for r in whole.records]
    assert all(torch.isfinite(tensor).all() for tensor in broken.parameters().values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    return run(tmp_path_factory.mktemp("whole"), data, parallel={"tp": 2})


def test_the_run_ends_with_one_message(tmp_path: Path, data: Path, whole: Run) -> None:
    sections: dict[str, Any] = {"parallel": {"tp": 2}, "failure": {"on_nan": "stop"}}
    controller, plan = controller_of(tmp_path, data, [hit(rank=1)], **sections)
    events: list[Event] = []
    with pytest.raises(WorkerError) as ended:
        events.extend(controller.run())
    assert ended.value.user_error, "a message for the user, without a trace"
    assert ended.value.user_message.startswith("the gradient norm of step 6 is nan; the run ends as")
    assert "resume=True goes on" in ended.value.user_message
    assert [event.record.step for event in events if isinstance(event, StepDone)] == list(range(1, HIT + 1))
    # It goes on from there, as the message says: the fault has fired.
    rest = trained(plan, resume=True)
    first = rest.records[0].step
    assert [record.step for record in rest.records] == list(range(first, STEPS + 1))
    assert rest.losses == whole.losses[first - 1 :]
    assert first <= HIT + 1


def test_a_loss_that_leaps_is_looked_at_twice(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, whole: Run
) -> None:
    """Once by mistake: repeated, as if nothing had been. Twice: it belongs to the data."""
    odd = Stepper._odd
    leaps = {6: 1, 7: 2}

    def wrong(self: Stepper, step: int, loss: float, *rest: Any) -> list[str]:
        if leaps.get(step, 0):
            leaps[step] -= 1
            loss *= 10
        return odd(self, step, loss, *rest)

    monkeypatch.setattr(Stepper, "_odd", wrong)
    sections = {"checkpoint": {"copies_every": 1, "every": 0}, "failure": {"spike": 3.0}}
    controller, plan = controller_of(tmp_path, data, (), parallel={"tp": 2}, **sections)
    events = list(controller.run())
    assert losses(events) == whole.losses
    told = [(event.kind, event.text) for event in events if isinstance(event, Incident)]
    assert [kind for kind, _ in told] == ["restarted", "restarted", "guard"]
    assert re.search("the loss of step 7 is .*it is repeated; no rank is lost", told[0][1])
    assert re.search("the loss of step 8 is .*twice: it belongs to the data", told[2][1])
    lines = read_lines(plan.config.run_directory / "incidents.jsonl")
    assert {(line["restored_from"], line["steps_lost"]) for line in lines} == {("copies in memory", 0)}
