"""Braid trains transformer language models on Ray and hides communication behind computation.

The public names below are imported on first use, so that ``import braid`` pulls in neither torch nor ray.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ClusterSpec": "braid.scheduling.mesh.cluster:ClusterSpec",
    "ModelShape": "braid.scheduling.model.shape:ModelShape",
    "ParallelLayout": "braid.scheduling.model.shape:ParallelLayout",
    "Plan": "braid.scheduling.plan.plan:Plan",
    "Schedule": "braid.scheduling.schedule.schedule:Schedule",
    "Search": "braid.scheduling.plan.layouts:Search",
    "Setting": "braid.scheduling.generate.setting:Setting",
    "evaluate": "braid.scheduling.plan.decide:evaluate",
    "load_cluster": "braid.scheduling.model.presets.library:load_cluster",
    "load_config": "braid.actors.config:load_config",
    "model_preset": "braid.scheduling.model.presets.library:model_preset",
    "plan": "braid.scheduling.plan.layouts:plan_layout",
    "simulate": "braid.scheduling.cost.simulate:simulate",
    "train": "braid.jobs.training.train:train",
}

__all__ = [
    "ClusterSpec",
    "ModelShape",
    "ParallelLayout",
    "Plan",
    "Schedule",
    "Search",
    "Setting",
    "__version__",
    "evaluate",
    "load_cluster",
    "load_config",
    "model_preset",
    "plan",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'braid' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)
