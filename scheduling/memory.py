"""What a rank needs: parameters, gradients, optimizer, activations; and the FLOPs of a step."""

from collections.abc import Mapping
from dataclasses import dataclass

from braid.scheduling.operators import Part
from braid.scheduling.schedule import Direction, Schedule
from braid.scheduling.spec import ModelShape, ParallelLayout

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes one rank of a pipeline stage needs, by what they hold."""

    stage: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Saved activations at the moment when most are held."""
    working_bytes: int
    """Largest value that lives only within one part (logits, a gathered gradient)."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.working_bytes
        )


def stage_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> int:
    """Parameters on the fullest tensor-parallel rank of a stage."""
    one_layer = ModelShape(**{**vars(shape), "layers": 1})
    none = one_layer.parameters()
    two_layers = ModelShape(**{**vars(shape), "layers": 2})
    per_layer = two_layers.parameters() - none
    norm = shape.hidden * (2 if shape.biases else 1)
    replicated = 2 * norm + (2 * shape.hidden if shape.biases else 0)
    sharded = (per_layer - replicated) // layout.tp + replicated
    layers = shape.layers // layout.chunks
    rows = -(-shape.vocabulary // layout.tp) * shape.hidden
    chunks = layout.chunks_of(stage)
    total = len(chunks) * layers * sharded
    if 0 in chunks:
        total += rows + (shape.sequence * shape.hidden if shape.family == "gpt" else 0)
    if layout.chunks - 1 in chunks:
        shares_table = shape.tied_head and 0 in chunks
        total += norm + (0 if shares_table else rows)
    return total


def rank_memory(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    dtype: str,
    stage: int,
) -> RankMemory:
    """Memory of a rank of ``stage`` under a schedule, with AdamW and whole optimizer states."""
    width = DTYPE_BYTES[dtype]
    parameters = stage_parameters(shape, layout, stage)
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    return RankMemory(
        stage=stage,
        parameter_bytes=parameters * width,
        gradient_bytes=parameters * main,
        optimizer_bytes=masters + 2 * parameters * main,
        activation_bytes=_peak_saved(schedule, layout, shape, parts, width, stage),
        working_bytes=_largest_value(layout, parts, width, stage),
    )


def _peak_saved(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    width: int,
    stage: int,
) -> int:
    """Saved bytes when most are held, walking the stage's blocks in order."""
    saved = {name: part.saved_bytes(width) for name, part in parts.items()}
    layers = shape.layers // layout.chunks
    held = peak = 0
    for block in schedule.blocks(stage):
        size = layers * saved["layer"]
        size += saved["embedding"] if block.chunk == 0 else 0
        size += saved["head"] if block.chunk == layout.chunks - 1 else 0
        held += size if block.direction is Direction.FORWARD else -size
        peak = max(peak, held)
    return peak


def _largest_value(layout: ParallelLayout, parts: Mapping[str, Part], width: int, stage: int) -> int:
    present = {"layer"} | {
        name
        for name, chunk in (("embedding", 0), ("head", layout.chunks - 1))
        if chunk in layout.chunks_of(stage)
    }
    return max(
        value.elements * value.precision.bytes_each(width)
        for name in present
        for value in parts[name].values.values()
    )


def model_flops(shape: ModelShape, tokens: int) -> int:
    """FLOPs of a training step over ``tokens`` tokens, without recomputation: 3 x the forward pass.

    Matrix multiplications with weights, logits and causal attention count; the rest does not.
    """
    qkv = shape.query_width + 2 * shape.kv_width
    mlp = shape.ffn * (3 if shape.gated else 2)
    weights = shape.layers * shape.hidden * (qkv + shape.query_width + mlp) + shape.hidden * shape.vocabulary
    attention = shape.layers * shape.sequence * shape.query_width
    return 3 * tokens * (2 * weights + 2 * attention)
