"""Which short runs are recorded: schedules, layouts, models, recomputation, number formats."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.end_to_end.command import ROOT, overlap_of
from tests.recorded.files import SCHEDULES

MICRO_BATCH: Final = 2
"""Samples."""
MICRO_BATCHES: Final = 12
"""Of a replica in a step: a multiple of the stages, and more than twice as many."""

BASE: Final[Mapping[str, Any]] = {
    "runs": "runs",
    "model": {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "sequence": 32},
    "data": {"files": ["corpus.txt"], "validation_fraction": 0.1, "directory": "data"},
    "train": {"steps": 3, "micro_batch": MICRO_BATCH, "warmup_steps": 2, "validation_samples": 8, "seed": 11},
    "cluster": {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.25},
    "telemetry": {"progress": False, "page": False},
}
"""The configuration of every run."""

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"family": "llama"},
    "gpt": {"family": "gpt", "kv_heads": 4},
    "tied gpt": {"family": "gpt", "kv_heads": 4, "tied_head": True},
    "llama of 8": {"family": "llama", "layers": 8},
    "own layer": {"layer": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"},
}

LAYOUTS: Final[Mapping[str, Mapping[str, int]]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A short run."""

    model: str
    layout: str
    schedule: str
    recompute: str = "none"
    dtype: str = "fp64"
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the configuration, by dotted name."""

    @property
    def name(self) -> str:
        """What the run is, with the schedule at the end."""
        more = [f"{key.rpartition('.')[2]} {value}" for key, value in self.keys.items()]
        parts = (self.model, self.layout, self.dtype, f"recompute {self.recompute}", *more)
        return f"{', '.join(parts)}: {self.schedule}"

    def content(self) -> dict[str, Any]:
        """The configuration."""
        replicas = LAYOUTS[self.layout].get("dp", 1)
        sections: dict[str, Any] = json.loads(json.dumps(BASE))
        sections["model"].update(MODELS[self.model])
        sections["train"].update(
            dtype=self.dtype, recompute=self.recompute, global_batch=MICRO_BATCHES * MICRO_BATCH * replicas
        )
        sections["parallel"] = dict(LAYOUTS[self.layout])
        sections["overlap"] = overlap_of(self.schedule)
        for key, value in self.keys.items():
            section, _, last = key.partition(".")
            sections[section][last] = value
        return sections


def training_cases() -> dict[str, Training]:
    """All runs by name."""
    return {case.name: case for case in _cases()}


def _cases() -> Iterator[Training]:
    pipelines = [name for name in SCHEDULES if name != "intra_batch"]
    one_stage = [name for name in SCHEDULES if name not in ("megatron:eager_1f1b", "interleaved")]
    yield from _runs("llama", "tp2", one_stage)
    yield from _runs("llama", "pp2", pipelines)
    yield from _runs("llama", "tp2 pp2", SCHEDULES)
    alone = ("megatron", "megatron:folded", "wavelet", "braid", "braid:twins", "zbv")
    yield from _runs("llama", "one rank", alone)
    yield from _runs("llama", "dp2", ("megatron", "braid", "braid:twins"))
    some = ("megatron", "intra_batch", "wavelet", "dhelix", "braid", "braid:twins", "braid:v")
    yield from _runs("llama", "dp2 tp2", some)
    others = [
        name for name in pipelines if name not in ("megatron:folded", "wavelet", "braid:twins", "dualpipev")
    ]
    yield from _runs("llama", "dp2 pp2", others)

    yield from _runs("gpt", "tp2", ("megatron", "intra_batch", "braid", "braid:twins"))
    yield from _runs("gpt", "tp4", ("intra_batch",))
    yield from _runs("gpt", "pp2", ("megatron", "interleaved", "braid:eager_w", "zbv"))
    yield from _runs("gpt", "tp2 pp2", ("dhelix", "braid", "braid:v", "dualpipev"))
    yield from _runs("tied gpt", "pp2", ("megatron", "megatron:folded", "braid", "braid:v", "zbv"))
    yield from _runs("tied gpt", "tp2 pp2", ("braid",))
    yield from _runs("llama of 8", "tp2", ("braid",))
    yield from _runs("llama of 8", "pp2", ("megatron", "interleaved", "braid:eager_w"))

    yield from _runs("llama", "tp2", ("megatron", "braid"), recompute="selective")
    yield from _runs("llama", "tp2", ("megatron", "dhelix"), recompute="fine")
    yield from _runs("llama", "tp2", ("megatron", "intra_batch", "wavelet", "braid:twins"), recompute="full")
    yield from _runs("llama", "pp2", ("megatron:folded", "braid", "braid:eager_w", "zbv"), recompute="full")
    yield from _runs("llama", "tp2 pp2", ("interleaved", "braid:v"), recompute="full")
    yield from _runs("llama", "tp2 pp2", ("braid", "dualpipev"), recompute="fine")
    yield from _runs("llama", "pp2", ("braid:v",), recompute="selective")

    yield from _runs("llama", "tp2", ("megatron", "intra_batch", "braid", "braid:twins"), dtype="fp32")
    yield from _runs("llama", "pp2", ("megatron:folded", "zbv"), dtype="fp32")
    yield from _runs("llama", "tp2 pp2", ("braid:v",), dtype="fp32")

    yield from _runs("llama", "tp2", ("auto",))
    yield from _runs("llama", "tp2 pp2", ("braid",), keys={"overlap.memory_slack": 0.02})
    yield from _runs("llama", "dp2 tp2", ("braid",), keys={"train.deterministic_reduction": True})

    yield from _runs("own layer", "tp2", ("megatron", "braid"))
    yield from _runs("own layer", "tp2", ("intra_batch",), recompute="full")
    yield from _runs("own layer", "tp2 pp2", ("braid:eager_w",))

    # refused
    yield from _runs("llama", "pp2", ("interleaved", "braid:v"), keys={"train.global_batch": 3 * MICRO_BATCH})
    yield from _runs("llama", "tp2", ("intra_batch",), keys={"model.sequence": 31})


def _runs(model: str, layout: str, schedules: Iterable[str], **more: Any) -> Iterator[Training]:
    for schedule in schedules:
        yield Training(model=model, layout=layout, schedule=schedule, **more)
