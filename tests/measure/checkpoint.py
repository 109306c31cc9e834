"""What a checkpoint costs training: saved in the background, and with training waiting for it.

One run of two ranks (tensor parallel, plain processes). In every round, in an order that is drawn, the same
number of steps runs three times: alone, after a synchronous save has been asked for, and after one in the
background. The stall is what the run itself tells of a save; the cost is how much longer the steps took than
alone, and counts what a save in the background takes from the steps beside it.
"""

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from braid.actors.config import CheckpointConfig, Config, parse_config
from braid.actors.controller.ranks.group import rendezvous
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.run_records import CheckpointSaved, Incident, RunDirectory
from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import CheckpointStore
from braid.actors.controller.state.saving import Saver, manifest_facts
from braid.actors.stage.rank.interface import Rank
from braid.jobs.bench.rounds import Spread, prepare_text
from tests.end_to_end.runs import run_plan

ALONE, SYNCHRONOUS, ASYNCHRONOUS = "alone", "synchronous", "asynchronous"
GENERATION = 1


class Leg(NamedTuple):
    """Some steps, after a save or without one."""

    seconds: float
    """From the begin to the end of steps and save."""
    stalled: float
    """Of these, how long training waited for the save; 0 without one."""


Round = dict[str, Leg]
"""One leg of each kind."""


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Medians and quartiles over at least one round, seconds; each is compared within itself, as load comes
    and goes: the cost of a save is its leg minus the same round's without one."""
    stalls = {kind: [legs[kind].stalled for legs in rounds] for kind in (SYNCHRONOUS, ASYNCHRONOUS)}
    costs = {kind: [legs[kind].seconds - legs[ALONE].seconds for legs in rounds] for kind in stalls}
    return {
        "rounds": len(rounds),
        "alone": asdict(Spread.of([legs[ALONE].seconds for legs in rounds])),
        "stall": {kind: asdict(Spread.of(values)) for kind, values in stalls.items()},
        "stall_ratio": asdict(Spread.of_ratios(stalls[ASYNCHRONOUS], stalls[SYNCHRONOUS])),
        "cost": {kind: asdict(Spread.of(values)) for kind, values in costs.items()},
    }


class Legs:
    """Ranks at work; ``stack`` ends them."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        plan = run_plan(config, prepare_text(config.runs))
        directory = RunDirectory(config, resume=False, overwrite=False)
        stack.callback(directory.close)
        self.group = ProcessLauncher(config).start(config.layout().ranks)
        stack.callback(self.group.shutdown)
        meeting = rendezvous(self.group, config.cluster.group_timeout_s, GENERATION)
        self.group.call_all(Rank.setup, plan, meeting)
        self.homes = Homes(CheckpointStore(directory.path / "checkpoints"), None, directory.identity.mark)
        self.savers = {
            kind: Saver(self.homes, directory, CheckpointConfig(keep=1, asynchronous=kind == ASYNCHRONOUS))
            for kind in (SYNCHRONOUS, ASYNCHRONOUS)
        }
        self.step = 0
        for saver in self.savers.values():
            stack.callback(saver.close)
            saver.goes_on(0, self.group, GENERATION, manifest_facts(config.layout(), {}, plan.shape))

    def leg(self, kind: str, steps: int) -> Leg:
        """Steps, after a save of some kind."""
        saver = self.savers.get(kind)
        told: list[CheckpointSaved | Incident] = []
        begin = time.perf_counter()
        if saver is not None:
            told += saver.begin(self.step)
        for _ in range(steps):
            self.group.call_all(Rank.train_step, self.step)
            self.step += 1
            if saver is not None:
                told += saver.look()
        if saver is not None:
            told += saver.finish()
        seconds = time.perf_counter() - begin
        return Leg(
            seconds, sum(event.stalled_seconds for event in told if isinstance(event, CheckpointSaved))
        )


def run(runs: Path, hidden: int, layers: int, rounds: int, steps: int) -> dict[str, Any]:
    content = {
        "name": "checkpoint",
        "runs": str(runs),
        "model": {"hidden": hidden, "layers": layers, "heads": 8, "sequence": 128},
        "data": {"validation_fraction": 0.0},
        "train": {"global_batch": 4, "micro_batch": 2, "steps": 10_000},
        "parallel": {"tp": 2},
        "cluster": {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.5},
        "checkpoint": {"keep": 1},
    }
    with ExitStack() as stack:
        legs = Legs(parse_config(content), stack)
        legs.leg(ASYNCHRONOUS, 2)  # warms up: files, memory, pages
        kinds = [ALONE, SYNCHRONOUS, ASYNCHRONOUS]
        taken = [{kind: legs.leg(kind, steps) for kind in random.sample(kinds, 3)} for _ in range(rounds)]
        size = sum(file.stat().st_size for file in Path(legs.homes.newest_good().path).iterdir())
        return {"checkpoint_bytes": size, "steps": steps, **summary(taken)}


def main() -> None:
    """Measure; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=4, help="after a save")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: /tmp)")
    asked = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="braid-bench-", dir=asked.pop("folder")) as name:
        print(json.dumps(run(Path(name), **asked), indent=1))


if __name__ == "__main__":
    main()
