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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braid.actors.config import CheckpointConfig, Config, parse_config
from braid.actors.controller.group import WorkerGroup
from braid.actors.controller.homes import Homes
from braid.actors.controller.manifest import CheckpointStore
from braid.actors.controller.meeting import rendezvous
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.records import Incident, RunDirectory, Saved
from braid.actors.controller.saving import Saver, manifest_facts
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.jobs.benchmarks.cases import Spread, prepare_text
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.schedule_text import write

ALONE, SYNCHRONOUS, ASYNCHRONOUS = "alone", "synchronous", "asynchronous"
_GENERATION = 1


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Some steps, after a save or without one; seconds."""

    seconds: float
    """From the begin to the end of steps and save."""
    stalled: float
    """Of these, how long training waited for the save; 0 without one."""


Round = dict[str, Leg]
"""One leg of each kind."""


def run(
    *, hidden: int = 512, layers: int = 4, rounds: int = 7, steps: int = 4, folder: Path | None = None
) -> dict[str, Any]:
    """Measure. ``folder``: on the disk that checkpoints go to; by default a temporary one."""
    with (
        tempfile.TemporaryDirectory(prefix="braid-bench-", dir=folder) as name,
        _ranks(_config(Path(name), hidden, layers)) as legs,
    ):
        legs.leg(ASYNCHRONOUS, 2)  # warms up: files, memory, pages
        kinds = [ALONE, SYNCHRONOUS, ASYNCHRONOUS]
        found = [{kind: legs.leg(kind, steps) for kind in random.sample(kinds, 3)} for _ in range(rounds)]
        return {"checkpoint_bytes": legs.checkpoint_bytes, "steps": steps, **summary(found)}


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Medians and quartiles over at least one round, seconds; each is compared within itself, as load comes
    and goes: the cost of a save is its leg minus the same round's without one."""
    stalls = {kind: [one[kind].stalled for one in rounds] for kind in (SYNCHRONOUS, ASYNCHRONOUS)}
    costs = {kind: [one[kind].seconds - one[ALONE].seconds for one in rounds] for kind in stalls}
    return {
        "rounds": len(rounds),
        "alone": asdict(Spread.of([one[ALONE].seconds for one in rounds])),
        "stall": {kind: asdict(Spread.of(values)) for kind, values in stalls.items()},
        "stall_ratio": asdict(Spread.of_ratios(stalls[ASYNCHRONOUS], stalls[SYNCHRONOUS])),
        "cost": {kind: asdict(Spread.of(values)) for kind, values in costs.items()},
    }


def _config(runs: Path, hidden: int, layers: int) -> Config:
    return parse_config(
        {
            "name": "checkpoint",
            "runs": str(runs),
            "model": {"hidden": hidden, "layers": layers, "heads": 8, "sequence": 128},
            "data": {"validation_fraction": 0.0},
            "train": {"global_batch": 4, "micro_batch": 2, "steps": 10_000},
            "parallel": {"tp": 2},
            "cluster": {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.5},
            "checkpoint": {"keep": 1},
        }
    )


class _Legs:
    """Ranks at work."""

    def __init__(self, group: WorkerGroup, directory: RunDirectory, facts: dict[str, Any]) -> None:
        self._group, self._facts = group, facts
        self._homes = Homes(CheckpointStore(directory.path / "checkpoints"), None, directory.identity.mark)
        self._savers = {
            kind: Saver(self._homes, directory, CheckpointConfig(keep=1, asynchronous=background))
            for kind, background in ((SYNCHRONOUS, False), (ASYNCHRONOUS, True))
        }
        self._step = 0

    @property
    def checkpoint_bytes(self) -> int:
        """Of the newest checkpoint."""
        found = Path(self._homes.newest_good().path)
        return sum(file.stat().st_size for file in found.iterdir())

    def leg(self, kind: str, steps: int) -> Leg:
        """Steps, after a save of some kind."""
        saver = self._savers.get(kind)
        told: list[Saved | Incident] = []
        begin = time.perf_counter()
        if saver is not None:
            told += saver.begin(self._group, self._step, _GENERATION, self._facts)
        for _ in range(steps):
            self._group.call_all(Rank.train_step, self._step)
            self._step += 1
            if saver is not None:
                told += saver.look(self._group)
        if saver is not None:
            told += saver.finish(self._group)
        seconds = time.perf_counter() - begin
        return Leg(seconds=seconds, stalled=sum(e.stalled_seconds for e in told if isinstance(e, Saved)))

    def close(self) -> None:
        """Nothing is under way any more."""
        for saver in self._savers.values():
            saver.close()


@contextmanager
def _ranks(config: Config) -> Iterator[_Legs]:
    data = prepare_text(config.runs)
    shape = config.check(tokenizer_of(config).vocabulary)
    schedule = write(build_schedule(config, shape))
    plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))
    with ExitStack() as stack:
        directory = RunDirectory(config, resume=False, overwrite=False)
        stack.callback(directory.close)
        group = ProcessLauncher(config).start(config.layout().ranks)
        stack.callback(group.shutdown)
        group.call_all(Rank.setup, plan, rendezvous(group, config.cluster.group_timeout_s, _GENERATION))
        legs = _Legs(group, directory, manifest_facts(config.layout(), {}, shape))
        stack.callback(legs.close)
        yield legs


def main() -> None:
    """Measure; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=4, help="after a save")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: /tmp)")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
