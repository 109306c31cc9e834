"""The device that a rank computes on."""

import torch


def device_of(choice: str, rank: int) -> torch.device:
    """The CPU, or the rank's GPU: the only one that Ray shows it, or its own among those of the machine."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0 or 1 < count <= rank:
        raise ValueError(
            f"cluster.device={choice!r}: rank {rank} finds {count} GPUs; lower the parallel degrees"
        )
    device = torch.device("cuda", rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def hardware(device: torch.device) -> str:
    """What this rank computes on, in words: part of a profile's identity."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            models = {line.partition(":")[2].strip() for line in info if line.startswith("model name")}
    except OSError:
        models = set()
    return f"CPU {' + '.join(sorted(models)) or 'unknown'}, {torch.get_num_threads()} thread(s)"
