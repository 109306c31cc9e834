"""Run directories made by simulating: for tests of what is shown, at any number of ranks, without training.

Everything in them says so (`SIMULATED`). One rank is simulated per pipeline stage; the others of the stage
get its spans, every rank and step a little faster or slower.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from braid.actors.controller.decisions import prediction
from braid.actors.controller.records.reporting import overlap_fields, rank_fields
from braid.actors.stage.rank.messages import SerialStep, StepResult
from braid.scheduling.cost.engine import RankRun
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.model.shape import Workload
from braid.scheduling.plan.decide import Outcome, simulate_setting
from braid.scheduling.plan.space import with_schedule
from braid.scheduling.schedule.text import write
from braid.scheduling.trace.batches import RECORD, Batch, Labels, Records, batches_of, encode_all, head
from braid.scheduling.trace.numbers import numbers_of_records
from braid.scheduling.trace.spans import KINDS, Label
from tests.dashboards.lines import metrics_line

SIMULATED = "simulated"
BEGIN_NS = 1_750_000_000_000_000_000
"""Of the first step, on the wall clock."""
SHAPE = replace(model_preset("mistral-7b-v0.1"), layers=16, sequence=2048)
EXPERTS = 8
LATE = 0.05
LAYOUTS = {
    2: ParallelLayout(tp=2),
    8: ParallelLayout(tp=2, pp=2, dp=2),
    256: ParallelLayout(tp=8, pp=4, dp=8),
}
"""By number of ranks."""


@cache
def outcome(ranks: int) -> Outcome:
    """The simulated step of a layout of so many ranks on A40s, schedule ``braid``."""
    layout = LAYOUTS[ranks]
    workload = Workload(global_batch=8 * layout.dp, micro_batch=1)
    serial = Setting(model=SHAPE, layout=layout, workload=workload)
    return simulate_setting(with_schedule(serial, "braid"), _cluster(ranks))


@cache
def predicted(ranks: int) -> dict[str, Any]:
    made = outcome(ranks)
    serial = simulate_setting(with_schedule(made.setting, "megatron"), _cluster(ranks)).numbers
    alpha = serial.exposed_seconds / serial.step_seconds
    step = SerialStep(seconds=serial.step_seconds, alpha=alpha)
    return {**prediction(made, step), "source": SIMULATED}


def _cluster(ranks: int) -> Any:
    spec = cluster_preset("a40", max(1, ranks // 8))
    return spec if ranks >= spec.gpus_per_node else replace(spec, nodes=1, gpus_per_node=ranks)


@dataclass
class MadeUpRun:
    """A run directory that grows by `step`; ``slow``: ranks that take 1.5 times as long."""

    path: Path
    ranks: int
    name: str = "made-up"
    steps: int = 20
    slow: tuple[int, ...] = ()
    seed: int = 0
    begin_ns: int = BEGIN_NS
    operator: str = ""
    """A name to give to one operator, to see it escaped."""
    experts: bool = False
    """Whether steps have numbers of a mixture of experts, too."""
    late: int | None = None
    """A rank for which all others wait at the end of every step, for `LATE` of it."""
    done: int = 0

    def __post_init__(self) -> None:
        self._outcome = outcome(self.ranks)
        self._random = np.random.default_rng(self.seed)
        self._clock = self.begin_ns
        self._stages = [self._stage(stage) for stage in range(self.layout.pp)]
        self._describe()

    @property
    def layout(self) -> ParallelLayout:
        return self._outcome.setting.layout

    def _describe(self) -> None:
        made, setting = self._outcome, self._outcome.setting
        cluster = _cluster(self.ranks)
        (self.path / "trace").mkdir(parents=True, exist_ok=True)
        config = {
            "name": self.name,
            "train": {"steps": self.steps, "global_batch": setting.workload.global_batch},
            "parallel": {axis: getattr(self.layout, axis) for axis in ("dp", "tp", "pp", "cp")},
            "overlap": {"schedule": "braid"},
            "note": SIMULATED,
        }
        nodes = [rank // cluster.gpus_per_node for rank in range(self.ranks)]
        where = [
            {"address": f"10.0.0.{node + 1}", "node": f"{SIMULATED}-{node:02d}", "process": 1000 + rank}
            for rank, node in enumerate(nodes)
        ]
        for name, text in (
            ("config.yaml", yaml.safe_dump(config)),
            ("model.json", json.dumps(asdict(SHAPE))),
            ("cluster.json", json.dumps({"launcher": SIMULATED, "ranks": where})),
            ("schedule.txt", write(made.code.schedule)),
            ("profile.json", made.bench.profile.to_json()),
            ("predicted.json", json.dumps(predicted(self.ranks))),
        ):
            (self.path / name).write_text(text, encoding="utf-8")
        spans = encode_all(batches_of(made.simulation.spans()))
        (self.path / "trace" / "predicted.arrows").write_bytes(spans)
        self.note("started", 0, f"{self.ranks} ranks, {SIMULATED}")

    def note(self, kind: str, step: int, text: str) -> None:
        line = {"time": self._clock / 1e9, "kind": kind, "step": step, "generation": 1, "text": text}
        self._append("events.jsonl", line)

    def _append(self, name: str, content: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def _stage(self, stage: int) -> Batch:
        """What every rank of a stage does in a step, times from the step's begin."""
        simulation = self._outcome.simulation
        rank = simulation.ranks[stage]
        number = self.layout.rank_at({"pp": stage, "dp": 0, "cp": 0, "tp": 0})
        (batch,) = [one for one in batches_of(simulation.spans()) if one.rank == number]
        labels: dict[Label, int] = {}
        for row, (record, solo_ns) in enumerate(zip(batch.records, _solo_ns(rank), strict=True)):
            known = batch.labels[record["label"]]
            label = replace(
                known,
                operator=self.operator if self.operator and not row else known.operator,
                axis="tp" if known.stream is Stream.INTRA else "",
                shapes=f"({SIMULATED})",
                solo_ns=round(solo_ns),
            )
            record["label"] = labels.setdefault(label, len(labels))
        blocks = np.zeros(len(rank.blocks), RECORD)
        for record, run in zip(blocks, rank.blocks, strict=True):
            kind, (block, *_) = 1 + run.stretch.paired, run.stretch.passes
            record["start_ns"], record["end_ns"] = round(run.start), round(run.start + run.course.duration)
            label = Label(operator=KINDS[kind], stream=Stream.COMPUTE)
            record["label"], record["kind"] = labels.setdefault(label, len(labels)), kind
            record["micro_batch"], record["chunk"] = block.micro_batch, block.chunk
        return replace(batch, labels=Labels(labels), records=np.concatenate([batch.records, blocks]))

    def step(self) -> None:
        """Add a step: a batch of spans per rank, a line of numbers, a line of the ranks'."""
        self.done += 1
        results = [self._result(rank) for rank in range(self.ranks)]
        seconds = max(result.seconds for result in results)
        self._clock += round(seconds * 1e9)
        times = {"seconds": seconds, "wall_seconds": seconds, "time": self._clock / 1e9}
        self._append("ranks.jsonl", {"step": self.done, "time": times["time"], **rank_fields(results)})
        overlap = overlap_fields([result.overlap for result in results])
        line = {**metrics_line(self.done, self.ranks), **times, **overlap}
        # An expert of the first layer gets no visit.
        visits = [[1000 * expert + layer + self.done for expert in range(EXPERTS)] for layer in range(6)]
        visits[0][1] = 0
        layers = list(range(len(visits)))
        experts = {**line["experts"], "unvisited": 1, "layers": layers, "visits": visits}
        self._append("metrics.jsonl", {**line, "experts": experts if self.experts else None})

    def _result(self, rank: int) -> StepResult:
        """What a rank tells of a step, whose spans are written."""
        stage = self.layout.coordinate(rank)["pp"]
        batch = self._stages[stage]
        factor = 1.0 + 0.04 * float(self._random.random()) + (0.5 if rank in self.slow else 0.0)
        records = self._waiting(rank, batch)
        for name in ("start_ns", "end_ns"):
            records[name] = self._clock + np.rint(records[name] * factor).astype(np.int64)
        step = self.done - 1
        batch = replace(batch, rank=rank, step=step, generation=1, sequence=step, records=records)
        with (self.path / "trace" / f"rank-{rank:05d}.0000.arrows").open("ab") as file:
            file.write(batch.encode() if step else head() + batch.encode())
        peak = self._outcome.simulation.memory[stage].total_bytes
        return StepResult(
            loss_sum=0.0,
            gradient_norm=0.0,
            lr=0.0,
            seconds=float(records["end_ns"].max() - self._clock) / 1e9,
            overlap=numbers_of_records(records, batch.labels),
            peak_bytes=peak,
            lifetime_peak_bytes=peak,
        )

    def _waiting(self, rank: int, stage: Batch) -> Records:
        """The stage's records, and what the rank waits for the late one; times from the step's begin."""
        records = stage.records.copy()
        if self.late is None or rank == self.late:
            return records
        wait = np.zeros(1, RECORD)
        wait["start_ns"] = records["end_ns"].max()
        wait["end_ns"] = wait["start_ns"] * (1 + LATE)
        wait["kind"], wait["peer"] = KINDS.index("waiting"), self.late
        wait["label"] = next(n for n, label in enumerate(stage.labels.all) if label.stream is Stream.INTRA)
        return np.concatenate([records, wait])

    def finish(self) -> None:
        self.note("finished", self.done, "complete")
        (self.path / "report.json").write_text(json.dumps({"complete": True}), encoding="utf-8")


def _solo_ns(rank: RankRun) -> Iterator[float]:
    """Solo time of every span of a stage, in the order of `Simulation.spans`."""
    for executed in (rank.executed, *(run.course.executed for run in rank.blocks)):
        yield from (one.price.ns for one in executed)


def made_up(path: Path, ranks: int, steps: int, **options: Any) -> MadeUpRun:
    run = MadeUpRun(path, ranks, steps=steps, **options)
    for _ in range(steps):
        run.step()
    run.finish()
    return run
