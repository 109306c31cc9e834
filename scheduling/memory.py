"""What a rank needs: parameters, gradients, optimizer, activations; and the FLOPs of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from braid.scheduling.code import Code
from braid.scheduling.operators import Part
from braid.scheduling.spec import ModelShape
from braid.scheduling.sweep import histories

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}

ALIGNED: Final = 32
"""Elements that a share's length is a multiple of: transfers from odd addresses are slower."""


def share_elements(elements: int, ways: int) -> int:
    """Length of each of the equal shares of so many elements (ZeRO); what is not cut stays as it is."""
    return elements if ways == 1 else -(-elements // (ways * ALIGNED)) * ALIGNED


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes one rank of a pipeline stage needs, by what they hold."""

    stage: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Activations, and messages until they are waited for or used, when most are held."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def stage_parameters(code: Code, shape: ModelShape, stage: int) -> int:
    """Parameters on the fullest tensor-parallel rank of a stage."""
    layout = code.layout
    chunks = layout.chunks_of(stage)
    total = sum(code.parameters(chunk).total for chunk in chunks)
    if shape.tied_head:
        shared = min(sum(map(layout.is_first, chunks)), sum(map(layout.is_last, chunks)))
        total -= shared * -(-shape.vocabulary // layout.tp) * shape.hidden
    return total


def rank_memory(
    code: Code, shape: ModelShape, dtype: str, stage: int, gradient_width: int | None = None
) -> RankMemory:
    """Memory of a rank of ``stage``, with AdamW.

    gradient_width: bytes of a gradient; by default they are added up in at least single precision.
    """
    layout, width = code.layout, DTYPE_BYTES[dtype]
    parameters = stage_parameters(code, shape, stage)
    # The copies of a bidirectional pipeline are replicas: ZeRO cuts states over them too.
    shares = layout.dp * layout.cp * layout.copies
    states = state_bytes(parameters, width, shares, layout.zero, gradient_width)
    return RankMemory(
        stage=stage,
        parameter_bytes=states[0],
        gradient_bytes=states[1],
        optimizer_bytes=states[2],
        activation_bytes=max(held_during(code, stage, width), default=0),
    )


def held_during(code: Code, stage: int, width: int) -> tuple[int, ...]:
    """Most bytes of activations and messages during each instruction of a stage; ``width``: of one number.

    What operators of one pass hand each other counts, what kernels take while they run comes on top.
    """
    return histories(code, width)[stage].during


def state_bytes(
    parameters: int, width: int, shares: int, zero: int, gradient_width: int | None = None
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states of a rank under a ZeRO stage."""
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    optimizer = masters + 2 * parameters * main
    cut = [shares if zero >= level else 1 for level in (3, 2, 1)]
    gradients = parameters * (gradient_width or main)
    return parameters * width // cut[0], gradients // cut[1], optimizer // cut[2]


def message_bytes(parts: Mapping[str, Part], width: int) -> int:
    """Bytes of a message between stages: the input of any part that has one."""
    sizes = [part.values["x"].bytes(width) for part in parts.values() if "x" in part.inputs]
    return max(sizes, default=0)


def model_flops(shape: ModelShape, tokens: int) -> int:
    """FLOPs of a training step over ``tokens`` tokens, without recomputation: 3 x the forward pass.

    Matrix multiplications with weights, logits and causal attention count; the rest does not. A layer of the
    user's own counts as one of the family.
    """
    qkv = shape.query_width + 2 * shape.kv_width
    mlp, experts = shape.ffn * (3 if shape.gated else 2), shape.expert_layers
    widths = shape.layers * (qkv + shape.query_width + mlp) + experts * (
        mlp * (shape.top_k - 1) + shape.experts
    )
    weights = shape.hidden * (widths + shape.vocabulary)
    attention = shape.layers * shape.sequence * shape.query_width
    return 3 * tokens * (2 * weights + 2 * attention)
