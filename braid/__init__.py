"""Braid trains transformer language models on Ray and hides communication behind computation.

The public names below are imported on first use, so that ``import braid`` pulls in neither torch nor ray.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ModelShape": "braid.scheduling.spec",
    "ParallelLayout": "braid.scheduling.spec",
    "Schedule": "braid.scheduling.schedule",
    "load_config": "braid.actors.config",
    "train": "braid.jobs.train",
}

__all__ = ["ModelShape", "ParallelLayout", "Schedule", "__version__", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'braid' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(_PUBLIC[name]), name)
