"""The tokens of one micro-batch, as inputs of the executor and its graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from braid.kernels.operators.context_blocks import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Token ids of one micro-batch on the device: inputs and their successors, each of T elements."""

    tokens: Tensor
    targets: Tensor
    documents: Mapping[str, Documents] = field(default_factory=dict)
    """Documents within samples, outside which tokens do not attend, by input name (`documents_seen`); empty
    where tokens attend to their whole sample."""
    counted: Tensor | None = None
    """T booleans: whether a token's loss counts (False for padding). None: all count."""
