"""The device that a rank computes on."""

from collections.abc import Sequence

import torch


def local_rank(rank: int, hosts: Sequence[str]) -> int:
    """Return a rank's number on its host; ``hosts``: host of each rank, empty for a single host."""
    return hosts[:rank].count(hosts[rank]) if hosts else rank


def device_of(choice: str, number: int) -> torch.device:
    """Return the device of a rank: the CPU, or a GPU. Ray shows a rank one GPU alone; otherwise GPU
    ``number`` of the host is taken. Raise `ValueError` if the host lacks it."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0 or 1 < count <= number:
        raise ValueError(
            f"cluster.device={choice!r}: rank {number} of its host finds {count} GPUs; lower the parallel "
            f"degrees, or use more hosts"
        )
    return torch.device("cuda", number if count > 1 else 0)


def hardware(device: torch.device) -> str:
    """Return a description of the rank's device, which is part of a profile's identity."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            models = {line.partition(":")[2].strip() for line in info if line.startswith("model name")}
    except OSError:
        models = set()
    return f"CPU {' + '.join(sorted(models)) or 'unknown'}, {torch.get_num_threads()} thread(s)"


def set_arithmetic(*, deterministic: bool, tf32: bool) -> None:
    """Choose kernels with equal bits in every run, and TF32 in fp32 matrix products."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32 = tf32
