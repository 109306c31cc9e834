"""Lines as the files of a run hold them, with every field; the numbers are made up, and differ by step."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from braid.actors.controller.records.routing import ExpertNumbers

BEGIN = 1_760_000_000.0
"""Unix time at which step 0 ended."""

_PARTS = ("communication", "exposed", "slowdown", "launch_gap", "bubble")
COSTS = {f"{name}_seconds": 0.25 / 2**n for n, name in enumerate(_PARTS)}
"""What a step's communication costs."""

PREDICTED: dict[str, Any] = {
    "source": "measured",
    "hidden_fraction": 0.8,
    "alpha": 0.4,
    "limit_speedup": 1.67,
}
PREDICTED |= {"step_seconds": 0.45, "serial_seconds": 0.65, **COSTS}
"""What ``predicted.json`` holds."""

KINDS = "started saved restarted resized straggler telemetry save-failed failed finished"
EVENTS: list[dict[str, Any]] = [
    {"time": BEGIN, "kind": kind, "step": 1, "generation": 0, "text": kind} for kind in KINDS.split()
]
"""One line of ``events.jsonl`` of every kind."""
EVENTS[1]["seconds"] = 0.25

_OF_ROUTERS = [one.name for one in fields(ExpertNumbers) if one.name not in ("layers", "visits")]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def metrics_line(step: int, ranks: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - 0.1 * step,
        "grad_norm": 1.0 + 0.1 * step,
        "lr": 1e-3 / step,
        "seconds": 0.5 + 0.01 * step,
        "wall_seconds": 0.6 + 0.01 * step,
        "tokens": 4096,
        **COSTS,
        "hidden_fraction": 0.75,
        "waiting_seconds": 0.015,
        "exposed_by_axis": {"pp": 0.0125, "tp": 0.05},
        "peak_bytes": [1_000_000_000 + 1_000 * rank for rank in range(ranks)],
        "validation_loss": 4.0,
        "validation_bits_per_byte": 2.0,
        "validation_losses": {"web": 4.5, "code": 3.0},
        "time": BEGIN + 0.5 * step,
        "generation": 0,
        "mfu": 0.375,
        "experts": {
            **{name: 1.25 / 2**n + 0.01 * step for n, name in enumerate(_OF_ROUTERS)},
            "layers": [0, 1],
            "visits": [[1024, 1024], [0, 2048]],
        },
    }


def ranks_line(step: int, ranks: int) -> dict[str, Any]:
    """A line of ``ranks.jsonl``; hidden is communication less exposed, as it must be."""
    communication = [0.25 + 0.001 * rank + 0.01 * step for rank in range(ranks)]
    exposed = [0.0625 + 0.001 * rank for rank in range(ranks)]
    return {
        "step": step,
        "time": BEGIN + 0.5 * step,
        "seconds": [0.5 + 0.01 * rank for rank in range(ranks)],
        **{name: [seconds] * ranks for name, seconds in COSTS.items()},
        "communication_seconds": communication,
        "hidden_seconds": [c - e for c, e in zip(communication, exposed, strict=True)],
        "exposed_seconds": exposed,
        "waiting_seconds": [0.015] * ranks,
        "waits_for": [[[(rank + 1) % ranks, "dispatch", 0.01]] for rank in range(ranks)],
        "compute_seconds": [0.4] * ranks,
        "peak_bytes": [1_000_000_000 + 1_000 * rank for rank in range(ranks)],
        "dropped_spans": [10 * step] * ranks,
        "sampled_every": [1] * ranks,
    }
