"""What the report claims, sentence by sentence, and the parts in which the claims are looked into."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENDS: Final = "Every part of this report runs to its end."

STREAM_BITS: Final = (
    "On the device's streams every schedule gives the bits of the serial one, every time it runs."
)
SANITIZED: Final = "PyTorch's stream sanitizer finds no access to memory that no event orders."
MEMORY_CHECKED: Final = "compute-sanitizer memcheck finds no wrong access by executor and Triton kernels."
RACES_CHECKED: Final = "compute-sanitizer racecheck finds no race in shared memory in them."

LAYER_BITS: Final = "Every schedule of a whole layer gives the bits of the serial one, every time it runs."
GRAPH_BITS: Final = "Replayed from a CUDA graph, a schedule gives the same bits."
NO_SLOWER: Final = "braid is no slower than the other schedules."
GAINS: Final = "braid is faster than the serial schedule where there are copies to hide."
PREDICTED: Final = "The search predicts the time of a paired block within 10 %."

EXACT_LOSSES: Final = "In fp32 Braid's losses are those of a plain PyTorch loop within 0.001 %."
LOSSES: Final = "At full size Braid's losses are those of a plain PyTorch loop within 1 %."
TRITON_LOSSES: Final = "With Triton's kernels Braid's losses are the same within 1 %."
STEP_GRAPH_BITS: Final = "Steps that are captured as a CUDA graph give the losses of eager ones, to the bit."
STEP_GRAPH_SPEED: Final = "Steps that are captured as a CUDA graph take no longer than eager ones."
PLAIN_SPEED: Final = "One GPU trains no slower with Braid than in a plain eager PyTorch loop."
COMPILED_SPEED: Final = (
    "With kernels chosen one GPU trains no slower with Braid than in a plain loop under torch.compile."
)

RANK_BITS: Final = (
    "Over two ranks every schedule gives losses and gradient norms of the serial one, to the bit."
)
RANK_LOSSES: Final = "Two ranks give the losses of one rank within 1 %."
RANK_SPEED: Final = "Over two ranks braid is no slower than the other schedules."
RANK_PREDICTED: Final = "The planner predicts the time of a step over two ranks within 10 %."

KERNEL_RIGHT: Final = (
    "A Triton kernel gives what PyTorch gives in a wider dtype, within what its own can hold."
)
KERNEL_FAST: Final = "A Triton kernel is no slower than the best of its rivals."

SANITIZER: Final = "compute-sanitizer"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some claims that are looked into together, in a process of its own."""

    name: str
    title: str
    module: str
    """Under ``braid.jobs.benchmarks.report``: its ``measure(task, sheet)`` is called."""
    claims: tuple[str, ...] = ()
    least_s: float = 20.0
    """With less time left it is not begun."""
    most_s: float = 180.0
    """Longer it does not take unless something is wrong."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its process begins with."""
    under: tuple[str, ...] = ()
    """A program of NVIDIA's, and its options, that runs the process."""
    sanitizes: bool = False
    """Whether the verdict is in what the process prints (`braid.jobs.benchmarks.report.sanitizers`)."""
    gpu_only: str = ""
    """Why it is not run on a CPU; empty where it is."""


_NEEDS_GPU: Final = "needs a CUDA device"

PARTS: Final = (
    Part(name="machine", title="The machine", module="machine", least_s=5, most_s=60),
    Part(name="streams", title="Streams", module="streams", claims=(STREAM_BITS,)),
    Part(
        name="sanitizer",
        title="Streams under PyTorch's sanitizer",
        module="streams",
        claims=(SANITIZED,),
        environment={"TORCH_CUDA_SANITIZER": "1"},
        sanitizes=True,
        gpu_only=_NEEDS_GPU,
    ),
    Part(
        name="layer",
        title="Overlap in one layer",
        module="layer",
        claims=(LAYER_BITS, GRAPH_BITS, NO_SLOWER, GAINS, PREDICTED),
        most_s=300,
    ),
    Part(
        name="training",
        title="Training on one GPU",
        module="training",
        claims=(
            EXACT_LOSSES,
            LOSSES,
            TRITON_LOSSES,
            STEP_GRAPH_BITS,
            STEP_GRAPH_SPEED,
            PLAIN_SPEED,
            COMPILED_SPEED,
        ),
        most_s=420,
    ),
    Part(
        name="ranks",
        title="Two ranks",
        module="ranks",
        claims=(RANK_BITS, RANK_LOSSES, RANK_SPEED, RANK_PREDICTED),
        least_s=60,
        most_s=360,
    ),
    Part(
        name="kernels",
        title="Triton's kernels",
        module="kernels",
        claims=(KERNEL_RIGHT, KERNEL_FAST),
        least_s=60,
        most_s=600,
    ),
    Part(
        name="memcheck",
        title="Under compute-sanitizer memcheck",
        module="tiny",
        claims=(MEMORY_CHECKED,),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        under=(SANITIZER, "--tool", "memcheck", "--target-processes", "all"),
        sanitizes=True,
        gpu_only=_NEEDS_GPU,
    ),
    Part(
        name="racecheck",
        title="Under compute-sanitizer racecheck",
        module="tiny",
        claims=(RACES_CHECKED,),
        under=(SANITIZER, "--tool", "racecheck", "--target-processes", "all"),
        sanitizes=True,
        gpu_only=_NEEDS_GPU,
    ),
)
"""In the order in which they are run: what says most about Braid comes first, should time run out."""


def named(names: str) -> tuple[Part, ...]:
    """Parts by name, comma-separated; all of them for nothing. `ValueError` for others."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--parts {name}: use some of {', '.join(known)}, separated by commas")
    return tuple(part for part in PARTS if not wanted or part.name in wanted)
