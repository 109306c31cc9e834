"""The tokens of one micro-batch, as inputs of the executor and its graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from braid.kernels.operators.context_blocks import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Token ids of one micro-batch on the device: T inputs and T targets (the next tokens); None on a rank
    whose part of the model reads none."""

    tokens: Tensor | None
    targets: Tensor | None
    documents: Mapping[str, Documents] = field(default_factory=dict)
    """Documents of the samples, by name of the graph's input (`documents_seen`), if tokens attend to their
    own document only; empty if tokens attend to their whole sample."""
    weights: Tensor | None = None
    """T numbers: weights of the targets' losses, 0 for targets that do not count. None: all weights are 1."""
    token_numbers: Tensor | None = None
    """Numbers of this rank's t tokens, from which dropout draws; None: no dropout."""
