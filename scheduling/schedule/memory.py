"""Memory of a rank: parameters, gradients, optimizer states, activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Part, Phase
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.buckets import Buckets, flat_elements, share_elements, share_ways
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.sweep import histories

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def sum_width(dtype: str) -> int:
    """Return bytes per element of the buffer in which gradients of a ``dtype`` model are summed (at least
    4)."""
    return max(4, DTYPE_BYTES[dtype])


def sent_width(dtype: str, reduce_dtype: str | None) -> int:
    """Return bytes per gradient element that ranks send when they sum gradients.

    ``reduce_dtype``: dtype to which gradients are rounded before they are sent, None if they are not.
    """
    return DTYPE_BYTES[reduce_dtype] if reduce_dtype else sum_width(dtype)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory that one rank of a pipeline stage needs, in bytes, by what it holds."""

    stage: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Peak bytes of activations, received messages, whole buckets of which ranks keep only shards (ZeRO), and
    rounded copies of gradients."""

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def rank_memory(
    code: Code,
    shape: ModelShape,
    dtype: str,
    stage: int,
    reduce_dtype: str | None = None,
) -> RankMemory:
    """Return the memory that a rank of ``stage`` needs with AdamW, for the tensor-parallel rank that needs
    most.

    ``reduce_dtype``: the dtype of the gradients that ranks exchange; they are summed in at least single
    precision.
    """
    parameters, gradients, optimizer = _states(code.buckets, code.layout, stage, dtype)
    return RankMemory(
        stage=stage,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=max(held_during(code, stage, DTYPE_BYTES[dtype], reduce_dtype), default=0),
    )


def _states(buckets: Buckets, layout: ParallelLayout, stage: int, dtype: str) -> tuple[int, int, int]:
    """Return a rank's bytes of (parameters, gradients, optimizer states), given its stage and dtype."""
    whole = share = frozen = 0
    for chunk in layout.chunks_of(stage):
        for bucket in buckets.of(chunk):
            for axes, count in flat_elements(layout, bucket.parameters).items():
                ways = share_ways(layout, axes)
                share += share_elements(count, ways)
                whole += share_elements(count, ways) * ways
            for axes, count in flat_elements(layout, bucket.frozen).items():
                frozen += share_elements(count, share_ways(layout, axes) if layout.zero > 2 else 1)
    zero, width, main = layout.zero, DTYPE_BYTES[dtype], sum_width(dtype)
    masters = main if width < main else 0
    return (
        (frozen + (share if zero > 2 else whole)) * width,
        (share if zero > 1 else whole) * main,
        share * (masters + 2 * main),
    )


def least_bytes(
    order: Sequence[Sequence[Block]],
    members: Mapping[int, Sequence[Part]],
    layout: ParallelLayout,
    dtype: str,
) -> int:
    """Return a lower bound of the memory that the fullest rank needs, in bytes.

    It counts parameters, gradients, optimizer states, and values that passes keep for later passes. It needs
    no linked code, so it sorts out pipelines early; `rank_memory` counts everything. ``order``: blocks of
    every stage; ``members``: parts of every chunk.
    """
    width, buckets = DTYPE_BYTES[dtype], Buckets(members, layout)
    saved = {chunk: sum(part.saved_bytes(width) for part in parts) for chunk, parts in members.items()}
    late = {chunk: sum(_late_bytes(part, width) for part in parts) for chunk, parts in members.items()}
    most = 0
    for stage, blocks in enumerate(order):
        held, peak = 0, 0
        for block in blocks:
            for pass_ in block.passes:
                match pass_.kind:
                    case PassKind.FORWARD:
                        held += saved[pass_.chunk]
                    case PassKind.BACKWARD:
                        held -= saved[pass_.chunk]
                    case PassKind.INPUT:
                        held += late[pass_.chunk] - saved[pass_.chunk]
                    case PassKind.WEIGHT:
                        held -= late[pass_.chunk]
            peak = max(peak, held)
        most = max(most, peak + sum(_states(buckets, layout, stage, dtype)))
    return most


def _late_bytes(part: Part, width: int) -> int:
    """Return the bytes of the part's values that its weight-gradient operators read, if they run as a later
    pass of their own."""
    late = [op for op in part.backward.operators if op.phase is Phase.WEIGHT_GRADIENT]
    names = {name for op in late for name in op.reads} - {name for op in late for name in op.writes}
    owners = {part.values[name].alias_of or name for name in names} - set(part.constants)
    return sum(part.values[name].bytes(width) for name in owners)


def held_during(
    code: Code,
    stage: int,
    width: int,
    reduce_dtype: str | None = None,
) -> tuple[int, ...]:
    """Return a stage's peak bytes of activations and messages during each of its instructions.

    ``width``: bytes per activation element.

    Gathered parameters, gradients before they become shares (ZeRO), copies rounded to ``reduce_dtype`` and
    values between the operators of a pass count; workspaces of kernels do not.
    """
    rounded = DTYPE_BYTES[reduce_dtype] if reduce_dtype else 0
    return histories(code, width, rounded)[stage].during


def state_bytes(parameters: int, width: int, shares: int, zero: int) -> tuple[int, int, int]:
    """Return a rank's bytes of parameters, gradients and optimizer states under ZeRO stage ``zero``.

    ``parameters``: number held without ZeRO; ``width``: bytes each; ``shares``: ranks that shard them.
    """
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    optimizer = masters + 2 * parameters * main
    cut = [shares if zero >= level else 1 for level in (3, 2, 1)]
    return parameters * width // cut[0], parameters * main // cut[1], optimizer // cut[2]


def message_bytes(parts: Mapping[str, Part], width: int) -> int:
    """Return the bytes of a message between stages: the size of the input of a layer or the head."""
    sizes = [part.values["x"].bytes(width) for part in parts.values() if "x" in part.inputs]
    return max(sizes, default=0)
