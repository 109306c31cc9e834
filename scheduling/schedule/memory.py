"""Memory of a rank: parameters, gradients, optimizer states, activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Part, Phase
from braid.scheduling.model.parameters import HeldTensor
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.buckets import (
    Buckets,
    flat_elements,
    flat_tensors,
    share_elements,
    share_ways,
)
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.states import ADAMW, OptimizerStates
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
    states: OptimizerStates = ADAMW,
) -> RankMemory:
    """Return the memory that a rank of ``stage`` needs, for the rank that needs most.

    ``reduce_dtype``: the dtype of the gradients that ranks exchange; they are summed in at least single
    precision. Matrices that Muon sends to other ranks during an update do not count.
    """
    parameters, gradients, optimizer = _states(code.buckets, code.layout, stage, dtype, states)
    return RankMemory(
        stage=stage,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=max(held_during(code, stage, DTYPE_BYTES[dtype], reduce_dtype), default=0),
    )


def _states(
    buckets: Buckets, layout: ParallelLayout, stage: int, dtype: str, kept: OptimizerStates
) -> tuple[int, int, int]:
    """Return a rank's bytes of (parameters, gradients, optimizer states), given its stage and dtype."""
    whole = share = frozen = 0
    main = sum_width(dtype)
    ranks = [0] * layout.share_ranks if layout.zero else [0]
    """Bytes of states beside masters, by position among the ranks that share parameters."""
    for chunk in layout.chunks_of(stage):
        for bucket in buckets.of(chunk):
            for axes, count in flat_elements(layout, bucket.parameters).items():
                ways = share_ways(layout, axes)
                share += share_elements(count, ways)
                whole += share_elements(count, ways) * ways
            for axes, count in flat_elements(layout, bucket.frozen).items():
                frozen += share_elements(count, share_ways(layout, axes) if layout.zero > 2 else 1)
            for axes, tensors in () if kept.uniform else flat_tensors(layout, bucket.parameters).items():
                ways = share_ways(layout, axes)
                each = _bytes_by_shard(tensors, ways, main, kept)
                ranks = [held + each[rank * ways // len(ranks)] for rank, held in enumerate(ranks)]
    zero, width = layout.zero, DTYPE_BYTES[dtype]
    masters = main if width < main else 0
    beside = share * kept.bytes(1, main) if kept.uniform else max(ranks)
    return (
        (frozen + (share if zero > 2 else whole)) * width,
        (share if zero > 1 else whole) * main,
        share * masters + beside,
    )


@lru_cache(maxsize=4096)
def _bytes_by_shard(
    tensors: tuple[HeldTensor, ...], ways: int, width: int, kept: OptimizerStates
) -> tuple[int, ...]:
    """Return the bytes of states beside master weights of each of the ``ways`` shards of a flat memory, which
    holds ``tensors`` one after the other; shards are cut wherever tensors begin."""
    ends = list(accumulate(tensor.elements for tensor in tensors))
    share = share_elements(ends[-1], ways)
    found = []
    for low in range(0, ways * share, share):
        held = [
            (min(end, low + share) - max(end - tensor.elements, low), tensor.matrix)
            for end, tensor in zip(ends, tensors, strict=True)
        ]
        found.append(sum(kept.bytes(count, width, matrix=matrix) for count, matrix in held if count > 0))
    return tuple(found)


def least_bytes(
    order: Sequence[Sequence[Block]],
    members: Mapping[int, Sequence[Part]],
    layout: ParallelLayout,
    dtype: str,
    states: OptimizerStates = ADAMW,
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
        most = max(most, peak + sum(_states(buckets, layout, stage, dtype, states)))
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


def state_bytes(
    parameters: int, width: int, shares: int, zero: int, states: OptimizerStates = ADAMW
) -> tuple[int, int, int]:
    """Return a rank's bytes of parameters, gradients and optimizer states under ZeRO stage ``zero``.

    ``parameters``: number held without ZeRO, all as matrices of hidden layers; ``width``: bytes each;
    ``shares``: ranks that shard them.
    """
    main = max(4, width)
    masters = 0 if width == main else parameters * main
    optimizer = masters + states.bytes(parameters, main, matrix=True)
    cut = [shares if zero >= level else 1 for level in (3, 2, 1)]
    return parameters * width // cut[0], parameters * main // cut[1], optimizer // cut[2]


def message_bytes(parts: Mapping[str, Part], width: int) -> int:
    """Return the bytes of a message between stages: the size of the input of a layer or the head."""
    sizes = [part.values["x"].bytes(width) for part in parts.values() if "x" in part.inputs]
    return max(sizes, default=0)
