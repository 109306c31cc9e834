"""What telemetry costs a run: a run that records spans and streams them into files for some steps and not for
others, by turns; a step is what the controller needs from one to the next.
"""

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from braid.actors.config import Config, load_config, parse_config
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.group import WorkerGroup
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.run_records import StepDone
from braid.actors.stage.rank.interface import Rank
from braid.jobs.bench.rounds import Spread, prepare_text
from tests.end_to_end.command import ROOT
from tests.end_to_end.runs import run_plan
from tests.spans import read_folder

ON, OFF = "with", "without"
TURN = 5
"""Steps in a row with or without telemetry: longer than the stream waits before it sends a batch."""


class KeepingLauncher(ProcessLauncher):
    """Keeps the ranks it has started, to speak to them between steps."""

    group: WorkerGroup

    def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> WorkerGroup:
        self.group = super().start(ranks, avoid)
        return self.group


def measure_price(config: Config, folder: Path, steps: int) -> dict[str, Any]:
    """One run whose ranks record and stream spans for `TURN` steps of every `2 x TURN`, drawn which.

    Both kinds of steps run in the same processes: two runs side by side differ by some percent for reasons of
    their own, such as which core a rank's threads are on. The first turns do not count.
    """
    turns = -(-steps // TURN)
    content = config.model_dump(mode="json")
    content["runs"] = str(folder)
    content["telemetry"]["spans"] = True
    content["train"] |= {"steps": 2 * TURN * (turns + 1), "validate_every": 0}
    content["data"]["validation_fraction"] = 0.0
    if config.overlap.needs_profile:
        content["overlap"]["schedule"] = "wavelet"  # two strands, and nothing to measure first
    content["cluster"] |= {"launcher": "processes", "cpus_per_rank": 0.25}
    plan = run_plan(parse_config(content), prepare_text(folder))
    launcher = KeepingLauncher(plan.config)
    events = Controller(plan, launcher, RunOptions()).run()
    with contextlib.closing(events):  # type: ignore[type-var]
        next(events)  # started
        seconds: dict[str, list[float]] = {ON: [], OFF: []}
        draw = random.Random(config.train.seed)
        for turn in range(turns + 1):
            for name in draw.sample([ON, OFF], 2):
                launcher.group.call_all(Rank.record_spans, name == ON)
                for _ in range(TURN):
                    begin = time.perf_counter()
                    event = next(events)
                    passed = time.perf_counter() - begin
                    while not isinstance(event, StepDone):
                        event = next(events)
                    if turn:
                        seconds[name].append(passed)
    traces = read_folder(folder / config.name)
    return {
        "case": config.name,
        "steps": turns * TURN,
        "spans_per_step": sum(len(batch.records) for batch in traces.step(traces.newest)),
        ON: asdict(Spread.of(seconds[ON])),
        OFF: asdict(Spread.of(seconds[OFF])),
        "ratio": asdict(Spread.of_ratios(seconds[ON], seconds[OFF])),
    }


def main() -> None:
    """Measure; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    demo = ROOT / "jobs" / "recipes" / "demo.yaml"
    parser.add_argument("config", type=Path, nargs="?", default=demo, help="a run's YAML file")
    parser.add_argument("--steps", type=int, default=60, help="steps of each side")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as name:
        print(json.dumps(measure_price(load_config(chosen.config), Path(name), chosen.steps), indent=1))


if __name__ == "__main__":
    main()
