"""Checks whether a model, a layout and a batch fit each other, and whether they can be executed."""

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape, Workload


def check_fit(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> None:
    """Raise `ValueError` if model or batch cannot be cut into equal parts as the layout requires."""
    for key in ("heads", "kv_heads", "ffn", "expert_ffn"):
        if (value := getattr(shape, key)) % layout.tp:
            raise ValueError(
                f"model.{key}={value} is not divisible by parallel.tp={layout.tp}; "
                f"set parallel.tp to one of {_divisors(value)}"
            )
    rows = -(-shape.vocabulary // layout.tp)
    if (layout.tp - 1) * rows >= shape.vocabulary:
        raise ValueError(
            f"model.vocabulary={shape.vocabulary} leaves a rank of parallel.tp={layout.tp} without rows; "
            f"set model.vocabulary to {rows * layout.tp}"
        )
    _check_experts_fit(shape, layout)
    _check_degrees_fit(shape, layout, workload)
    if shape.layers < layout.chunks:
        raise ValueError(
            f"model.layers={shape.layers} cannot fill {layout.chunks} chunks of parallel.pp="
            f"{layout.pp}; use at least {layout.chunks} layers, or a smaller parallel.pp"
        )
    layout.layers_of(0, shape.layers)
    _check_batch(shape, layout, workload)


def _check_experts_fit(shape: ModelShape, layout: ParallelLayout) -> None:
    if layout.ep == 1:
        return
    if not shape.experts:
        raise ValueError(
            f"parallel.ep={layout.ep} cuts experts, but model.experts=0; set parallel.ep to 1, or "
            f"model.family to moe and model.experts to a multiple of {layout.ep}"
        )
    if shape.experts % layout.ep:
        raise ValueError(
            f"parallel.ep={layout.ep} does not divide model.experts={shape.experts}; "
            f"set parallel.ep to one of {_divisors(shape.experts)}"
        )
    ranks = layout.data_ranks
    fitting = [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and 0 in (ep % layout.cp, layout.cp % ep)]
    if layout.ep not in fitting:
        raise ValueError(
            f"parallel.ep={layout.ep} does not divide parallel.dp x parallel.cp = {layout.dp} x {layout.cp}, "
            f"whose ranks share the experts; set parallel.ep to one of {', '.join(map(str, fitting))}"
        )
    if layout.replicas > 1:
        raise ValueError(
            f"parallel.shards={layout.shards} does not go with parallel.ep={layout.ep}; set parallel.shards "
            f"to 0"
        )


def _check_degrees_fit(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> None:
    degrees = layout.tensor_degrees
    if not degrees:
        return
    if len(degrees) != shape.layers:
        raise ValueError(
            f"parallel.tensor_degrees has {len(degrees)} degrees, and model.layers={shape.layers}; give one "
            f"for every layer"
        )
    groups = layout.tp // min(degrees)
    if workload.micro_batch % groups:
        raise ValueError(
            f"train.micro_batch={workload.micro_batch} is not divisible by the {groups} groups of "
            f"parallel.tp={layout.tp} ranks that layers of degree {min(degrees)} (parallel.tensor_degrees) "
            f"have, each with samples of its own; set train.micro_batch to a multiple of {groups}"
        )
    if shape.experts and layout.ep > 1 and layout.zero > 1 and layout.expert_replicas == 1:
        raise ValueError(
            f"parallel.tensor_degrees with experts over all ranks of parallel.dp x parallel.cp (parallel.ep="
            f"{layout.ep}) needs parallel.zero of 1 at most; set parallel.zero to 1, or lower parallel.ep"
        )


def _check_batch(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> None:
    if layout.cp > 1 and shape.sequence % (2 * layout.cp):
        raise ValueError(
            f"model.sequence={shape.sequence} is not divisible by 2 x parallel.cp={layout.cp}, as every rank "
            f"takes an early and a late piece of it; set model.sequence to a multiple of {2 * layout.cp}"
        )
    tokens = workload.micro_batch * shape.sequence // layout.cp
    if tokens % layout.tp:
        raise ValueError(
            f"train.micro_batch={workload.micro_batch} x model.sequence={shape.sequence} tokens are not "
            f"divisible by parallel.tp={layout.tp}, as sequence parallelism needs; change one of them"
        )
    samples = workload.micro_batch * layout.sample_ranks
    if workload.global_batch % samples:
        below = workload.global_batch // samples * samples
        near = " or ".join(str(n) for n in (below, below + samples) if n)
        raise ValueError(
            f"train.global_batch={workload.global_batch} is not divisible by train.micro_batch="
            f"{workload.micro_batch} x parallel.dp={layout.dp}; set train.global_batch to {near}"
        )


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
