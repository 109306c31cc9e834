"""Whole runs: through the controller and real processes, and the same by the plain PyTorch loop.

Shared by the end-to-end tests. The plain run knows nothing of ours but the order of samples and the initial
values: it reads the token files itself.
"""

import atexit
import json
import math
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from braid.actors.config import Config, ParallelConfig, TrainConfig, parse_config
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.planning import build_schedule, setting_of
from braid.actors.controller.ranks.group import WorkerError, WorkerGroup
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.run_records import Event, Finished, StepDone
from braid.actors.controller.records.span_files import SpanFiles
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.data.sample_order import sample_ids
from braid.actors.stage.data.token_files import read_index
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.assembly import DTYPES
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.actors.stage.state.parameters import Place
from braid.jobs.bench.plain_torch import (
    PlainModel,
    PlainTrainer,
    learning_rate,
    load_named,
)
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import prepare
from braid.kernels.operators.context_blocks import causal_order
from braid.scheduling.generate.named import SCHEDULES
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.plan.decide import simulate_setting
from braid.scheduling.plan.layouts import plan_of
from braid.scheduling.schedule.text import write
from tests.end_to_end.plain_experts import Counted, ExpertModel
from tests.scheduling.plans import cluster

BYTES_VOCABULARY = 257
"""Of the tokenizer ``bytes``."""

SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "sequence": 32},
    "train": {"steps": 20, "global_batch": 8, "micro_batch": 2, "warmup_steps": 5, "validation_samples": 8},
    "cluster": {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.25, "group_timeout_s": 60},
}
"""A run that any layout of up to four ranks can do; ranks share CPUs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    config: Config
    shape: ModelShape
    directory: Path
    events: tuple[Event, ...]

    @classmethod
    def of(cls, plan: RunPlan, events: Sequence[Event]) -> "Run":
        folder = plan.config.run_directory
        return cls(config=plan.config, shape=plan.shape, directory=folder, events=tuple(events))

    @property
    def records(self) -> list[StepRecord]:
        return [event.record for event in self.events if isinstance(event, StepDone)]

    @property
    def report(self) -> dict[str, Any]:
        (report,) = [event.report for event in self.events if isinstance(event, Finished)]
        return report

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def gradient_norms(self) -> list[float]:
        """Global gradient norm of every step, before clipping."""
        return [record.grad_norm for record in self.records]

    def parameters(self, step: int | None = None) -> dict[str, Tensor]:
        """Parameters by global name, from the checkpoint of a step: the last one."""
        step = len(self.records) if step is None else step
        reader = dcp.FileSystemReader(self.directory / "checkpoints" / f"step-{step}")
        state: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith("parameter.") and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.load(state, storage_reader=reader, no_dist=True)
        return {name.removeprefix("parameter."): tensor for name, tensor in state.items()}


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """The same run by the plain loop."""

    losses: list[float]
    gradient_norms: list[float]
    lr: list[float]
    validation: dict[str, float]
    """What the report says of it."""
    model: PlainModel
    counted: list[list[Counted]]
    """Of every step, what the router of every layer with experts did."""


def prepare_text(directory: Path, seed: int, files: int = 12) -> Path:
    """Tokenise some sources of the standard library, chosen by the seed, and return the data's folder."""
    sources = [p for p in Path(sysconfig.get_path("stdlib")).glob("*.py") if p.stat().st_size > 5_000]
    chosen = random.Random(seed).sample(sorted(sources), files)
    config = parse_config({"data": {"files": [str(path) for path in chosen], "validation_fraction": 0.1}})
    return prepare(DataRequest.of(config), directory / "data", map).output


def small_config(path: Path, **overrides: Mapping[str, Any]) -> Config:
    """`SMALL`, with sections changed by ``overrides``, in a run directory of its own under ``path``."""
    content = {key: {**SMALL.get(key, {}), **overrides.get(key, {})} for key in {*SMALL, *overrides}}
    path.mkdir(parents=True, exist_ok=True)
    name = f"run-{sum(1 for _ in path.iterdir())}"
    return parse_config({"name": name, "runs": str(path), **content})


def run_plan(config: Config, data: Path | str = "", **more: Any) -> RunPlan:
    """The plan of a run whose schedule needs no decisions; ``more``: other fields."""
    shape = config.check(BYTES_VOCABULARY)
    plan = {"schedule": write(build_schedule(config, shape)), "data": str(data), **more}
    return RunPlan(config=config, shape=shape, **plan)


class KeptRanks(ProcessLauncher):
    """A launcher whose ranks stay for the next run that wants as many: starting them takes most of a short
    run's time. A group that failed is ended and not used again."""

    _idle: ClassVar[dict[int, WorkerGroup]] = {}
    _files: ClassVar[SpanFiles] = SpanFiles(Path(), 0)
    """One object for all runs, as ranks that stay send to it."""

    @contextmanager
    def collector(self, files: Path, bytes_per_rank: int) -> Iterator[SpanFiles]:
        self._files.__init__(files, bytes_per_rank)  # type: ignore[misc]
        with closing(self._files):
            yield self._files

    def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> WorkerGroup:
        """Ranks that an earlier run has left, or new ones."""
        self._spans = self._files
        return _Lent(self._idle.pop(ranks, None) or super().start(ranks), self._idle)

    @classmethod
    def end(cls) -> None:
        while cls._idle:
            cls._idle.popitem()[1].shutdown()


atexit.register(KeptRanks.end)


class _Lent:
    """A group that goes back instead of ending."""

    def __init__(self, group: WorkerGroup, idle: dict[int, WorkerGroup]) -> None:
        self._group, self._idle = group, idle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def shutdown(self) -> None:
        """Leave the run's process groups and wait for the next run."""
        try:
            self._group.call_all(Rank.leave)
        except WorkerError:
            self._group.shutdown()
        else:
            self._idle[len(self._group.addresses)] = self._group


def trained(plan: RunPlan, until: int | None = None, *, resume: bool = False, launcher: Any = None) -> Run:
    """A run through `Controller` and processes, which may be others than those that are kept."""
    config, options = plan.config, RunOptions(resume=resume, until=until)
    return Run.of(plan, list(Controller(plan, launcher or KeptRanks(config), options).run()))


def run_layout(path: Path, data: Path, /, until: int | None = None, **overrides: Mapping[str, Any]) -> Run:
    """Train, perhaps only ``until`` a step; ``overrides`` come by section: ``parallel={"tp": 2}``."""
    return trained(run_plan(small_config(path, **overrides), data), until)


def planned(path: Path, overrides: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The section ``overlap`` with a plan on modelled costs, where its schedule needs decisions."""
    overlap = overrides["overlap"]
    if not SCHEDULES[overlap["schedule"]].decided:
        return overlap
    config = small_config(path, **overrides)
    spec = cluster(gpus=config.layout().ranks, intra=4e8)
    setting = setting_of(config, config.shape(BYTES_VOCABULARY))
    file = config.run_directory.with_suffix(".yaml")
    file.write_text(plan_of(simulate_setting(setting, spec), spec).to_yaml(), encoding="utf-8")
    return {**overlap, "plan": str(file)}


def whole_model(shape: ModelShape, device: str = "meta", **more: Any) -> StageModel:
    """The model of a run of one rank, without values."""
    layout, found = ParallelLayout(), {"dtype": torch.float32, "micro_batch": 1, **more}
    sizes = PartSizes(shape, layout, found.pop("micro_batch"))
    place, where = Place.of(layout.mesh, 0), torch.device(device)
    return StageModel(shape=shape, layout=layout, place=place, sizes=sizes, device=where, **found)


def initial_parameters(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    pieces = [piece for parameter in whole_model(shape).parameters for piece in parameter.slices]
    return {piece.source.name: piece.source.initial(seed) for piece in pieces}


def windows(data: Path, split: str, sequence: int) -> Tensor:
    """All samples of a split, samples x (sequence + 1) tokens, read without our reader."""
    dtype = json.loads((data / "index.json").read_text())["dtype"]
    shards = [np.fromfile(file, dtype=dtype) for file in sorted(data.glob(f"{split}-*.bin"))]
    tokens = torch.from_numpy(np.concatenate(shards).astype(np.int64))
    return tokens.unfold(0, sequence + 1, sequence)


def validated(data: Path, sequence: int, samples: int) -> Tensor:
    """The windows of a validation: so many of the split at equal distances, or all if it has fewer."""
    found = windows(data, "validation", sequence)
    count = min(samples, len(found))
    return found[[number * len(found) // count for number in range(count)]]


def expected_validation(nats_per_token: float, held_out: Tensor) -> dict[str, float]:
    """What a report says of validation windows: with the tokenizer ``bytes``, all tokens but ends are one."""
    targets = held_out[:, 1:]
    bits = nats_per_token / math.log(2) * targets.numel() / (targets < 256).sum().item()
    return {"loss": nats_per_token, "bits_per_byte": bits}


def tokens_of_ranks(shape: ModelShape, parallel: ParallelConfig, micro_batch: int) -> list[Tensor]:
    """Places of a micro-batch's flattened tokens that each rank of cp and tp routes to experts."""
    places = torch.arange(micro_batch * shape.sequence).view(micro_batch, shape.sequence)
    own = (causal_order(parallel.cp, rank, shape.sequence).own for rank in range(parallel.cp))
    return [part for one in own for part in places[:, one].flatten().chunk(parallel.tp)]


def plain_steps(
    trainer: PlainTrainer, train: TrainConfig, data: Path, sequence: int
) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of every step, on the samples that a run takes."""
    samples = windows(data, "train", sequence)
    for step in range(train.steps):
        ids = sample_ids(train.seed, len(samples), step * train.global_batch, train.global_batch)
        yield trainer.step(step, samples[ids].split(train.micro_batch))


def run_plain(config: Config, data: Path, trainer_of: Callable[..., PlainTrainer] = PlainTrainer) -> PlainRun:
    """Do what ``config`` says in this process, one rank, with the plain loop or another one."""
    shape, train = config.check(BYTES_VOCABULARY), config.train
    dtype = DTYPES[train.dtype]
    groups = tokens_of_ranks(shape, config.parallel, train.micro_batch)
    model = ExpertModel(shape, dtype, groups) if shape.experts else PlainModel(shape, dtype)
    if config.data.document_mask:
        model.end_of_document = read_index(data).end_of_document
        model.restart_positions = config.data.restart_positions
    initial = initial_parameters(shape, train.seed)
    load_named(model, {name: value for name, value in initial.items() if not name.endswith("router.bias")})
    trainer = trainer_of(model, train)
    results, counted = [], []
    for result in plain_steps(trainer, train, data, shape.sequence):
        results.append(result)
        counted.append(model.take_counted() if isinstance(model, ExpertModel) else [])
    validation = validated(data, shape.sequence, train.validation_samples)
    return PlainRun(
        losses=[loss for loss, _ in results],
        gradient_norms=[norm for _, norm in results],
        lr=[learning_rate(train, step) for step in range(train.steps)],
        validation=expected_validation(trainer.mean_loss(validation.split(train.micro_batch)), validation),
        model=model,
        counted=counted,
    )
