"""What a rank needs: parameters, gradients, optimizer, activations; and the FLOPs of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from braid.scheduling.code import Code
from braid.scheduling.operators import Part
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.sweep import histories

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


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


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters on the fullest rank of a tensor-parallel group."""

    dense: int
    """Shared by all data- and context-parallel ranks."""
    experts: int = 0
    """Shared by the data-parallel ranks that hold the same experts."""
    whole: int = 0
    """Of the dense ones, those that every tensor-parallel rank holds whole (norms, biases, the router)."""

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def chunk_parameters(shape: ModelShape, layout: ParallelLayout, chunk: int) -> Parameters:
    """Parameters of one chunk; a tied head counts here, though it may share its table with the embedding."""
    norm = shape.hidden * (2 if shape.biases else 1)
    per_layer = replace(shape, layers=2).parameters() - replace(shape, layers=1).parameters()
    replicated = 2 * norm + (2 * shape.hidden if shape.biases else 0) + shape.hidden * shape.experts
    experts = shape.experts * shape.hidden * shape.ffn * 3
    layers = len(layout.layers_of(chunk, shape.layers))
    whole = layers * replicated
    dense = layers * ((per_layer - replicated - experts) // layout.tp + replicated)
    table = -(-shape.vocabulary // layout.tp) * shape.hidden
    if layout.is_first(chunk):
        positions = shape.sequence * shape.hidden if shape.family == "gpt" else 0
        dense, whole = dense + table + positions, whole + positions
    if layout.is_last(chunk):
        dense, whole = dense + norm + table, whole + norm
    return Parameters(dense=dense, experts=layers * experts // (layout.tp * layout.ep), whole=whole)


def stage_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Parameters on the fullest tensor-parallel rank of a stage."""
    chunks = layout.chunks_of(stage)
    total = sum(chunk_parameters(shape, layout, chunk).total for chunk in chunks)
    if shape.tied_head:
        shared = min(sum(map(layout.is_first, chunks)), sum(map(layout.is_last, chunks)))
        total -= shared * -(-shape.vocabulary // layout.tp) * shape.hidden
    return total


def rank_memory(
    code: Code, shape: ModelShape, dtype: str, stage: int, zero: int = 0, gradient_width: int | None = None
) -> RankMemory:
    """Memory of a rank of ``stage``, with AdamW.

    gradient_width: bytes of a gradient; by default they are added up in at least single precision.

    zero: ZeRO stage; 1 cuts the optimizer's states over the ranks that share the parameters, 2 the gradients
    too, 3 the parameters too (one layer's worth more is gathered at a time).
    """
    layout, width = code.layout, DTYPE_BYTES[dtype]
    parameters = stage_parameters(shape, layout, stage)
    # The copies of a bidirectional pipeline are replicas: ZeRO cuts states over them too.
    shares = layout.dp * layout.cp * layout.copies
    states = state_bytes(parameters, width, shares, zero, gradient_width)
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

    Matrix multiplications with weights, logits and causal attention count; the rest does not.
    """
    qkv = shape.query_width + 2 * shape.kv_width
    mlp = shape.ffn * (3 if shape.gated else 2) * max(1, shape.top_k) + shape.experts
    weights = shape.layers * shape.hidden * (qkv + shape.query_width + mlp) + shape.hidden * shape.vocabulary
    attention = shape.layers * shape.sequence * shape.query_width
    return 3 * tokens * (2 * weights + 2 * attention)
