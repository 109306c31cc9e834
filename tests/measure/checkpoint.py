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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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

ALONE, SYNCHRONOUS, ASYNCHRONOUS = "no save", "synchronous", "asynchronous"
_GENERATION = 1

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Some steps, after a save or without one; seconds."""

    seconds: float
    """From the begin to the end of steps and save."""
    stalled: float
    """Of these, how long training waited for the save; 0 without one."""


Round = dict[str, Leg]
"""One leg of each kind."""


@dataclass(frozen=True, kw_only=True)
class CheckpointBenchmark:
    """Medians and quartiles over the rounds; seconds."""

    checkpoint_bytes: int
    rounds: int
    steps: int
    """Of a leg."""
    alone: Spread
    """A leg without a save."""
    synchronous_stall: Spread
    asynchronous_stall: Spread
    stall_ratio: Spread
    """Asynchronous over synchronous, round by round."""
    synchronous_cost: Spread
    """A leg with a save minus the same round's without one."""
    asynchronous_cost: Spread

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def run(
    *,
    hidden: int = 512,
    layers: int = 4,
    rounds: int = 7,
    steps: int = 4,
    folder: Path | None = None,
    progress: Progress = lambda text: None,
) -> CheckpointBenchmark:
    """Measure. ``folder``: on the disk that checkpoints go to; by default a temporary one."""
    with (
        tempfile.TemporaryDirectory(prefix="braid-bench-", dir=folder) as name,
        _ranks(_config(Path(name), hidden, layers)) as legs,
    ):
        legs.leg(ASYNCHRONOUS, 2)  # warms up: files, memory, pages
        found: list[Round] = []
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            order = random.sample([ALONE, SYNCHRONOUS, ASYNCHRONOUS], 3)
            found.append({kind: legs.leg(kind, steps) for kind in order})
        return summary(found, steps, legs.checkpoint_bytes)


def summary(rounds: list[Round], steps: int, checkpoint_bytes: int) -> CheckpointBenchmark:
    """Sum up at least one round; each is compared within itself, as load comes and goes."""

    def stalls(kind: str) -> list[float]:
        return [one[kind].stalled for one in rounds]

    def cost(kind: str) -> Spread:
        return Spread.of([one[kind].seconds - one[ALONE].seconds for one in rounds])

    return CheckpointBenchmark(
        checkpoint_bytes=checkpoint_bytes,
        rounds=len(rounds),
        steps=steps,
        alone=Spread.of([one[ALONE].seconds for one in rounds]),
        synchronous_stall=Spread.of(stalls(SYNCHRONOUS)),
        asynchronous_stall=Spread.of(stalls(ASYNCHRONOUS)),
        stall_ratio=Spread.of_ratios(stalls(ASYNCHRONOUS), stalls(SYNCHRONOUS)),
        synchronous_cost=cost(SYNCHRONOUS),
        asynchronous_cost=cost(ASYNCHRONOUS),
    )


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


def show(console: Console, result: CheckpointBenchmark) -> None:
    """Print the table."""
    size, step_s = result.checkpoint_bytes / 2**20, result.alone.median / result.steps
    title = (
        f"a checkpoint of {size:.0f} MiB, two ranks on the CPU, {result.steps} steps of {step_s:.3f} s "
        f"after it; medians (quartiles) of {result.rounds} rounds"
    )
    table = Table(title=title, title_justify="left")
    for name in ("seconds", SYNCHRONOUS, ASYNCHRONOUS, "ratio"):
        table.add_column(name, justify="left" if name == "seconds" else "right")
    ratio = result.stall_ratio
    table.add_row(
        "training waits",
        _shown(result.synchronous_stall),
        _shown(result.asynchronous_stall),
        f"{ratio.median:.1%} ({ratio.low:.1%} to {ratio.high:.1%})",
    )
    table.add_row("steps take longer", _shown(result.synchronous_cost), _shown(result.asynchronous_cost), "")
    console.print(table)


def _shown(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--steps", type=int, default=4, help="after a save")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: /tmp)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    says = Console(stderr=True)
    result = run(
        hidden=chosen.hidden,
        layers=chosen.layers,
        rounds=chosen.rounds,
        steps=chosen.steps,
        folder=chosen.folder,
        progress=says.print,
    )
    if chosen.json:
        print(json.dumps(result.as_json()))
    else:
        show(Console(width=max(Console().width, 110)), result)


if __name__ == "__main__":
    main()
