"""Braid trains transformer language models on Ray and hides communication behind computation.

The public names below are imported on first use, so that ``import braid`` pulls in neither torch nor ray.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_RECORDS = "braid.actors.controller.records.run_records"

_PUBLIC = {
    "Callback": "braid.jobs.training.callbacks:Callback",
    "CheckpointSaved": f"{_RECORDS}:CheckpointSaved",
    "ClusterSpec": "braid.scheduling.mesh.cluster:ClusterSpec",
    "Config": "braid.actors.config:Config",
    "ConfigError": "braid.actors.config:ConfigError",
    "Finished": f"{_RECORDS}:Finished",
    "Incident": f"{_RECORDS}:Incident",
    "ModelShape": "braid.scheduling.model.shape:ModelShape",
    "ParallelLayout": "braid.scheduling.model.shape:ParallelLayout",
    "Plan": "braid.scheduling.plan.plan:Plan",
    "Run": "braid.dashboards.frames:Run",
    "Schedule": "braid.scheduling.schedule.schedule:Schedule",
    "Search": "braid.scheduling.plan.layouts:Search",
    "Setting": "braid.scheduling.generate.setting:Setting",
    "Started": f"{_RECORDS}:Started",
    "StepDone": f"{_RECORDS}:StepDone",
    "StepRecord": "braid.actors.controller.records.step_record:StepRecord",
    "StopTraining": "braid.jobs.training.callbacks:StopTraining",
    "StoppedError": "braid.actors.controller.ranks.group:StoppedError",
    "TrainingResult": "braid.jobs.training.train:TrainingResult",
    "WorkerError": "braid.actors.controller.ranks.group:WorkerError",
    "load_cluster": "braid.scheduling.model.presets.library:load_cluster",
    "load_config": "braid.actors.config:load_config",
    "load_run": "braid.dashboards.frames:load_run",
    "model_preset": "braid.scheduling.model.presets.library:model_preset",
    "plan": "braid.scheduling.plan.layouts:plan_layout",
    "progress": "braid.jobs.training.notebook:progress",
    "simulate": "braid.scheduling.plan.decide:simulate_setting",
    "train": "braid.jobs.training.train:train",
}

__all__ = [
    "Callback",
    "CheckpointSaved",
    "ClusterSpec",
    "Config",
    "ConfigError",
    "Finished",
    "Incident",
    "ModelShape",
    "ParallelLayout",
    "Plan",
    "Run",
    "Schedule",
    "Search",
    "Setting",
    "Started",
    "StepDone",
    "StepRecord",
    "StopTraining",
    "StoppedError",
    "TrainingResult",
    "WorkerError",
    "__version__",
    "load_cluster",
    "load_config",
    "load_run",
    "model_preset",
    "plan",
    "progress",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'braid' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)
