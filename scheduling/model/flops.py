"""Useful FLOPs of a training step, from which the model FLOPs utilization (MFU) follows."""

from braid.scheduling.model.shape import ModelShape


def model_flops(shape: ModelShape, tokens: int) -> int:
    """Return the FLOPs of a training step over ``tokens`` tokens: 3 x the forward pass, no recomputation.

    Matrix products with weights, logits and causal attention count, other operators do not. A user's layer
    counts as a layer of the family. Frozen weights (`ModelShape.lora`) have no gradients: 2 x for them.
    """
    qkv = shape.query_width + 2 * shape.kv_width
    mlp, experts = shape.ffn * (3 if shape.gated else 2), shape.expert_layers
    visited = 3 * shape.expert_width * (shape.top_k + shape.shared_experts)
    widths = shape.layers * (qkv + shape.query_width + mlp) + experts * (visited - mlp + shape.experts)
    weights = shape.hidden * (widths + shape.vocabulary)
    attention = shape.layers * shape.sequence * shape.query_width
    trained, frozen = (weights, 0) if shape.lora is None else (shape.adapter_parameters(), weights)
    return 3 * tokens * (2 * trained + 2 * attention) + 2 * tokens * 2 * frozen
