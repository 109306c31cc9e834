"""Sets what processes of ranks begin with, wherever they start: variables, and this machine's GPUs."""

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config

_DEFAULTS: Final[Mapping[str, str]] = {
    # A rank whose peer is lost must live: it holds copies in memory. NCCL's watchdog would end its process on
    # the first error of a collective, and its monitor when an abort takes long; ranks watch each other.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A kernel that is loaded when it is first launched waits for the device, on which a collective may wait
    # for the rank that loads.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams that share a hardware queue wait for each other. A rank of a pipeline has up to 25 streams; with
    # eight queues, CUDA's default, steps of several stages can come to a standstill (tests/cuda).
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Blocks grow in place, so that memory of many sizes does not fall to pieces.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # NCCL registers the buffers of collectives in graphs, which goes wrong with memory that grows in place.
    "NCCL_GRAPH_REGISTER": "0",
}


_DETERMINISTIC: Final[Mapping[str, str]] = {
    # NCCL and cuBLAS choose algorithms, and with them orders of sums, by size and by what is free.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "8",
    "NCCL_MAX_NCHANNELS": "8",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def default_environment(outside: Mapping[str, str], *, deterministic: bool) -> dict[str, str]:
    """Return the variables that are set for every rank, unless the environment ``outside`` has them."""
    defaults = {**_DEFAULTS, **(_DETERMINISTIC if deterministic else {})}
    return {key: value for key, value in defaults.items() if key not in outside}


def rank_environment(config: "Config", outside: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set for ranks: defaults that the environment ``outside`` lacks, then
    those that ``cluster.env`` gives a value. Inherited variables (`inherited`) may be secret and are handed
    over separately."""
    chosen = default_environment(outside, deterministic=config.train.deterministic)
    given = {name: value for name, value in config.cluster.env.items() if value is not None}
    return {**chosen, "OMP_NUM_THREADS": str(config.cluster.threads_per_rank), **given}


_MOST_FILES: Final = 1 << 20


def allow_open_files() -> None:
    """Raise this process's limit of open files, also for its children: shards and sockets are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_DRIVER: Final = Path("/proc/driver/nvidia/gpus")


def gpus_here(environment: Mapping[str, str], driver: Path = _DRIVER) -> int:
    """Count NVIDIA GPUs of this machine that processes may see, without loading torch."""
    there = len(list(driver.iterdir())) if driver.is_dir() else 0
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    return there if chosen is None else min(there, len([gpu for gpu in chosen.split(",") if gpu.strip()]))
