"""The tokens of one micro-batch, as the executor and its graph take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from braid.kernels.operators.context_blocks import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Token ids of one micro-batch on the device: inputs and their successors, each T long."""

    tokens: Tensor
    targets: Tensor
    documents: Mapping[str, Documents] = field(default_factory=dict)
    """Which of them attend to each other, where that is not all of a sample; by what parts of the model read
    (`documents_seen`)."""
    counted: Tensor | None = None
    """T booleans: whose loss counts; the others only fill the micro-batch up. None: all."""
