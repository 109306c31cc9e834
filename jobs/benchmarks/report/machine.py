"""What the machine is: GPUs, driver, versions. Nothing is claimed here; a report without it says nothing."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from braid.actors.stage.devices import hardware
from braid.jobs.benchmarks.report.findings import Sheet, Task

_ASKED: Final = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "power.default_limit",
    "clocks.max.sm",
    "clocks.max.mem",
    "clocks.sm",
    "temperature.gpu",
    "utilization.gpu",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)
"""Of `nvidia-smi`, for every GPU."""


def measure(task: Task, sheet: Sheet) -> None:
    """Write down all that can be told."""
    sheet.data("versions", versions())
    sheet.data("host", host())
    sheet.data("gpus", gpus() if task.on_gpu else [])
    sheet.data("nvidia_smi", nvidia_smi() if task.on_gpu else {})
    if task.on_gpu and (topology := printed("nvidia-smi", "topo", "-m")):
        sheet.table("How the GPUs are joined", topology.splitlines())


def versions() -> dict[str, Any]:
    """Of what Braid runs on; None for what is not there."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": _driver(),
        **{name: _installed(name) for name in ("triton", "numpy", "liger_kernel")},
    }


def host() -> dict[str, Any]:
    """The computer around the GPUs."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": hardware(torch.device("cpu")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "load": os.getloadavg(),
    }


def gpus() -> list[dict[str, Any]]:
    """What torch says of every GPU."""
    found = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": card.name,
                "compute_capability": f"{card.major}.{card.minor}",
                "memory_bytes": card.total_memory,
                "multiprocessors": card.multi_processor_count,
                "reaches": _reached_from(number),
            }
        )
    return found


def _reached_from(number: int) -> list[int]:
    """Other GPUs whose memory this one can address."""
    others = (other for other in range(torch.cuda.device_count()) if other != number)
    return [other for other in others if torch.cuda.can_device_access_peer(number, other)]


def nvidia_smi() -> Mapping[str, Any]:
    """Clocks, power limit and modes, GPU by GPU; ``note`` says why there are none."""
    if shutil.which("nvidia-smi") is None:
        return {"note": "nvidia-smi is not installed"}
    text = printed("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    if not rows or any(len(row) != len(_ASKED) for row in rows):
        return {"note": f"nvidia-smi gave no table: {text.strip()[:200]}"}
    return {"gpus": [dict(zip(_ASKED, row, strict=True)) for row in rows]}


def printed(*command: str) -> str:
    """What a program prints within ten seconds; empty where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _driver() -> str | None:
    """The NVIDIA driver's version, as the kernel knows it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
