"""What telemetry costs a run, and how many spans its stream carries.

The price: a run that records spans and streams them into files for some steps and not for others, by turns; a
step is what the controller needs from one to the next. The stream: processes that push spans through ring and
pipe into files, as ranks do, as fast as they can and at a given rate.
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from braid.actors.config import Config, load_config, parse_config
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.group import WorkerGroup
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.run_records import StepDone
from braid.actors.controller.records.span_files import SpanFiles
from braid.actors.stage.measure.span_stream import ConnectionSink, SpanStream
from braid.actors.stage.rank.interface import Rank
from braid.jobs.bench.rounds import Spread, prepare_text
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.batches import RECORD, Labels
from braid.scheduling.trace.spans import Label
from tests.end_to_end.command import ROOT
from tests.end_to_end.runs import run_plan
from tests.spans import read_folder

ON, OFF = "with", "without"
TURN = 5
"""Steps in a row with or without telemetry: longer than the stream waits before it sends a batch."""
PER_STEP = 2000
"""Spans that a made-up step has."""


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


def measure_throughput(folder: Path, *, ranks: int, rate: float | None, seconds: float) -> dict[str, Any]:
    """Processes push made-up steps through ring, pipe and collector into files; spans a second.

    ``rate``: of all ranks together; None: as many as they can.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with contextlib.closing(SpanFiles(folder / f"stream-{rate}", 64 << 20)) as files:
        processes = []
        for number, (ours, theirs) in enumerate(context.Pipe(duplex=False) for _ in range(ranks)):
            files.receive(ours)
            given = (number, theirs, rate and rate / ranks, seconds, results)
            processes.append(context.Process(target=push, args=given))
            processes[-1].start()
            theirs.close()
        found = [results.get(timeout=seconds + 60) for _ in processes]
        for process in processes:
            process.join()
    counts = files.counts()
    took, dropped, grown = zip(*found, strict=True)
    return {
        "ranks": ranks,
        "asked_per_second": rate,
        "written_per_second": counts.written / max(took),
        "dropped": sum(dropped),
        "lost": counts.lost,
        "grown_bytes": max(grown),
    }


def push(rank: int, target: Connection, rate: float | None, seconds: float, results: Any) -> None:
    """One process."""
    labels = Labels(Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n % 8) for n in range(200))
    records = np.zeros(PER_STEP, RECORD)
    records["label"] = np.arange(PER_STEP) % len(labels)
    stream = SpanStream(rank, 1, ConnectionSink(target), budget=float("inf"))
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    step = 0
    while (passed := time.perf_counter() - begin) < seconds:
        if rate is not None and step * PER_STEP > rate * passed:
            time.sleep(0.001)
            continue
        records = records.copy()
        records["start_ns"] = time.time_ns()
        records["end_ns"] = records["start_ns"] + 1000
        stream.put(labels, records, step)
        step += 1
        if rate is None:
            time.sleep(0)
    stream.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.put((time.perf_counter() - begin, stream.dropped, grown * 1024))


def main() -> None:
    """Measure; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    demo = ROOT / "jobs" / "recipes" / "demo.yaml"
    parser.add_argument("config", type=Path, nargs="?", default=demo, help="a run's YAML file")
    parser.add_argument("--steps", type=int, default=60, help="steps of each side")
    parser.add_argument("--seconds", type=float, default=5.0, help="for how long spans are pushed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as name:
        price = measure_price(load_config(chosen.config), Path(name), chosen.steps)
        streams = [
            measure_throughput(Path(name), ranks=2, rate=rate, seconds=chosen.seconds)
            for rate in (None, 200_000.0)
        ]
    print(json.dumps({"price": price, "throughput": streams}, indent=1))


if __name__ == "__main__":
    main()
