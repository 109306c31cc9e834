"""Run directories made by simulating: for tests of what is shown, at any number of ranks, without training.

Everything in them says so (`SIMULATED`). One rank is simulated per pipeline stage; the others of the stage
get its spans, every rank and step a little faster or slower.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from braid.actors.controller.routing import ExpertNumbers, expert_numbers, tells_visits
from braid.actors.stage.messages import RoutingSums
from braid.scheduling.operators import Stream
from braid.scheduling.planner.decide import Outcome, evaluate
from braid.scheduling.planner.space import with_schedule
from braid.scheduling.presets.library import cluster_preset
from braid.scheduling.record_numbers import numbers_of_records
from braid.scheduling.schedule_text import write
from braid.scheduling.setting import Setting
from braid.scheduling.simulator.engine import RankRun
from braid.scheduling.span_batches import RECORD, Batch, Labels, Records, batches_of, encode_all, head
from braid.scheduling.spec import ModelShape, ParallelLayout, Workload
from braid.scheduling.trace import DIRECTIONS, KINDS, STRANDS, Label, OverlapNumbers

SIMULATED = "simulated"
BEGIN_NS = 1_750_000_000_000_000_000
"""Of the first step, on the wall clock."""
SHAPE = ModelShape(
    family="llama",
    hidden=4096,
    ffn=11008,
    layers=16,
    heads=32,
    kv_heads=32,
    head_dim=128,
    vocabulary=32000,
    sequence=2048,
)
MIXTURE = replace(SHAPE, family="moe", layers=6, experts=8, top_k=2, capacity_factor=1.25, balance_loss=0.01)
LATE = 0.05
LAYOUTS = {
    2: ParallelLayout(tp=2),
    8: ParallelLayout(tp=2, pp=2, dp=2),
    256: ParallelLayout(tp=8, pp=4, dp=8),
}
"""By number of ranks."""


@dataclass
class _Stage:
    """What every rank of a stage does in a step, times from the step's begin."""

    labels: Labels
    records: Records


def outcome(ranks: int) -> Outcome:
    """The simulated step of a layout of so many ranks on A40s, schedule ``braid``."""
    layout = LAYOUTS[ranks]
    micro_batches = 8 * layout.dp
    serial = Setting(
        model=SHAPE,
        layout=layout,
        workload=Workload(global_batch=micro_batches, micro_batch=1),
    )
    return evaluate(with_schedule(serial, "braid"), _cluster(ranks))


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
    experts: ModelShape | None = None
    """A mixture of experts whose numbers its steps have beside; they get more balanced."""
    late: int | None = None
    """A rank for which all others wait at the end of every step, for `LATE` of it."""
    done: int = 0

    def __post_init__(self) -> None:
        self._outcome = outcome(self.ranks)
        self._random = np.random.default_rng(self.seed)
        self._stages = [self._stage(stage) for stage in range(self._outcome.setting.layout.pp)]
        self._clock = self.begin_ns
        self._describe()

    @property
    def layout(self) -> ParallelLayout:
        """Of the run."""
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
        serial = evaluate(with_schedule(setting, "megatron"), cluster).numbers
        alpha = serial.exposed_seconds / serial.step_seconds
        numbers = made.numbers
        names = ("step_seconds", "hidden_fraction", "communication_seconds", "exposed_seconds")
        names += ("slowdown_seconds", "launch_gap_seconds", "bubble_seconds")
        predicted = {
            "source": SIMULATED,
            **{name: getattr(numbers, name) for name in names},
            "serial_seconds": serial.step_seconds,
            "alpha": alpha,
            "limit_speedup": min(1 / alpha, 1 / (1 - alpha)) if alpha else None,
        }
        self._write("config.yaml", yaml.safe_dump(config))
        self._write("model.json", json.dumps(asdict(SHAPE)))
        self._write("cluster.json", json.dumps({"launcher": SIMULATED, "ranks": where}))
        self._write("schedule.txt", write(made.code.schedule))
        self._write("profile.json", made.bench.profile.to_json())
        self._write("predicted.json", json.dumps(predicted))
        (self.path / "trace" / "predicted.arrows").write_bytes(
            encode_all(batches_of(made.simulation.spans()))
        )
        self.note("started", 0, f"{self.ranks} ranks, {SIMULATED}")

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def note(self, kind: str, step: int, text: str) -> None:
        """Add an event."""
        line = {"time": self.begin_ns / 1e9, "kind": kind, "step": step, "generation": 1, "text": text}
        self._append("events.jsonl", {**line, "time": getattr(self, "_clock", self.begin_ns) / 1e9})

    def _append(self, name: str, content: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def _stage(self, stage: int) -> _Stage:
        simulation = self._outcome.simulation
        rank = simulation.ranks[stage]
        number = self.layout.rank_at({"pp": stage, "dp": 0, "cp": 0, "tp": 0})
        spans = [span for span in simulation.spans() if span.rank == number]
        labels: dict[Label, int] = {}
        records = np.zeros(len(spans) + len(rank.blocks), RECORD)
        for row, (span, solo_ns) in enumerate(zip(spans, _solo_ns(rank), strict=True)):
            label = Label(
                operator=self.operator if self.operator and not row else span.operator,
                stream=span.stream,
                axis="tp" if span.stream is Stream.INTRA else "",
                layer=span.layer,
                bytes=span.bytes,
                flops=span.flops,
                shapes=f"({SIMULATED})",
                solo_ns=round(solo_ns),
            )
            record = records[row]
            record["label"] = labels.setdefault(label, len(labels))
            for name in ("start_ns", "end_ns", "micro_batch", "chunk"):
                record[name] = getattr(span, name)
            record["strand"] = STRANDS.index(span.strand if span.direction else "")
            record["direction"] = DIRECTIONS.index(span.direction)
        for row, run in enumerate(rank.blocks, start=len(spans)):
            kind, (block, *_) = 1 + run.stretch.paired, run.stretch.passes
            record = records[row]
            record["start_ns"], record["end_ns"] = round(run.start), round(run.start + run.course.duration)
            label = Label(operator=KINDS[kind], stream=Stream.COMPUTE)
            record["label"], record["kind"] = labels.setdefault(label, len(labels)), kind
            record["micro_batch"], record["chunk"] = block.micro_batch, block.chunk
        return _Stage(Labels(labels), records)

    def step(self) -> None:
        """Add a step: a batch of spans per rank, a line of numbers, a line of the ranks'."""
        found: list[OverlapNumbers] = []
        seconds: list[float] = []
        for rank in range(self.ranks):
            stage = self._stages[self.layout.coordinate(rank)["pp"]]
            factor = 1.0 + 0.04 * float(self._random.random()) + (0.5 if rank in self.slow else 0.0)
            records = self._waiting(rank, stage)
            for name in ("start_ns", "end_ns"):
                records[name] = self._clock + np.rint(records[name] * factor).astype(np.int64)
            found.append(numbers_of_records(records, stage.labels))
            seconds.append(float(records["end_ns"].max() - self._clock) / 1e9)
            batch = Batch(
                rank=rank,
                step=self.done,
                generation=1,
                sequence=self.done,
                labels=stage.labels,
                records=records,
            )
            with (self.path / "trace" / f"rank-{rank:05d}.0000.arrows").open("ab") as file:
                file.write(batch.encode() if self.done else head() + batch.encode())
        self._clock += round(max(seconds) * 1e9)
        self.done += 1
        self._lines(found, seconds)

    def _waiting(self, rank: int, stage: _Stage) -> Records:
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

    def _lines(self, found: list[OverlapNumbers], seconds: list[float]) -> None:
        fields = (
            "communication",
            "hidden",
            "exposed",
            "slowdown",
            "launch_gap",
            "bubble",
            "waiting",
            "compute",
        )
        ranks = {f"{name}_seconds": [getattr(one, f"{name}_ns") / 1e9 for one in found] for name in fields}
        means = {name: float(np.mean(values)) for name, values in ranks.items()}
        peaks = [memory.total_bytes for memory in self._outcome.simulation.memory]
        peak_bytes = [peaks[self.layout.coordinate(rank)["pp"]] for rank in range(self.ranks)]
        setting = self._outcome.setting
        shared = {"step": self.done, "time": self._clock / 1e9}
        loss = 2.0 + 8.4 * 0.93**self.done + 0.05 * float(self._random.random())
        metrics = {
            **shared,
            "loss": loss,
            "grad_norm": 1.0 + float(self._random.random()),
            "lr": 3e-4,
            "seconds": max(seconds),
            "tokens": setting.workload.global_batch * SHAPE.sequence,
            **{name: means[name] for name in means if name not in ("hidden_seconds", "compute_seconds")},
            "hidden_fraction": means["hidden_seconds"] / means["communication_seconds"],
            "peak_bytes": peak_bytes,
            "validation_loss": loss if self.done % 5 == 0 else None,
            "validation_bits_per_byte": loss / 2.8 if self.done % 5 == 0 else None,
            "generation": 1,
            "mfu": (self._outcome.numbers.mfu or 0.0) * self._outcome.numbers.step_seconds / max(seconds),
        }
        if self.experts is not None:
            metrics["experts"] = asdict(self._routed(self.experts))
        axes = sorted({axis for one in found for axis in one.exposed_by_axis_ns})
        sums = {axis: sum(one.exposed_by_axis_ns.get(axis, 0) for one in found) for axis in axes}
        metrics["exposed_by_axis"] = {axis: ns / self.ranks / 1e9 for axis, ns in sums.items()}
        waits = [[[wait.peer, wait.operator, wait.ns / 1e9] for wait in one.peer_waits] for one in found]
        nothing = [0] * self.ranks
        lists = {
            "seconds": seconds,
            **ranks,
            "waits_for": waits,
            "peak_bytes": peak_bytes,
            "dropped_spans": nothing,
        }
        self._append("ranks.jsonl", {**shared, **lists, "sampled_every": [1] * self.ranks})
        self._append("metrics.jsonl", metrics)

    def _routed(self, shape: ModelShape) -> ExpertNumbers:
        """Visits of one rank, with an expert of the first layer that gets none."""
        layers, tokens = shape.expert_layers, 1 << 18
        lean = self._leanings(layers, shape.experts) * (0.3 + 0.7 * 0.9**self.done)
        lean[0, 1] = -np.inf
        chances = np.exp(lean) / np.exp(lean).sum(1, keepdims=True)
        visits = self._random.multinomial(tokens * shape.top_k, chances)
        room = visits.sum(1, keepdims=True) / shape.experts * (shape.capacity_factor or np.inf)
        sums = RoutingSums(
            layers=tuple(range(layers)),
            visits=visits,
            dropped=np.maximum(visits - room, 0).sum(1).astype(np.int64),
            losses=np.tile(np.array([shape.balance_loss, shape.z_loss]) * tokens, (layers, 1)),
        )
        told = tells_visits(shape, self.done, self.steps)
        found = expert_numbers([sums], shape, ParallelLayout(), tokens, visits=told)
        assert found is not None
        return found

    def _leanings(self, layers: int, experts: int) -> NDArray[np.float64]:
        """Of every router to every expert, the same in all steps."""
        return np.random.default_rng(self.seed).normal(0, 1.2, (layers, experts))

    def finish(self) -> None:
        """Write what a complete run ends with."""
        self.note("finished", self.done, "complete")
        self._write("report.json", json.dumps({"complete": True}))


def _solo_ns(rank: RankRun) -> Iterator[float]:
    """Solo time of every span of a stage, in the order of `Simulation.spans`."""
    for executed in (rank.executed, *(run.course.executed for run in rank.blocks)):
        yield from (one.price.ns for one in executed)


def made_up(path: Path, ranks: int, steps: int, **options: Any) -> MadeUpRun:
    """A finished made-up run of so many steps."""
    run = MadeUpRun(path, ranks, steps=steps, **options)
    for _ in range(steps):
        run.step()
    run.finish()
    return run
