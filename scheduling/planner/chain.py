"""Chains of operators around a collective: their dims, what cutting along one means, and their time."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from braid.scheduling.cluster import Gpu


class Role(StrEnum):
    """What cutting an operator along a dim means (Centauri table 3)."""

    CONTRACTION = "contraction"
    """Summed over: every piece gives a partial result of full size, which has to be added up."""
    NONE_SPLIT = "none_split"
    """Coupled along the dim (a norm, a softmax): not to be cut."""
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Dim:
    """A named tensor dim as one operator sees it; equal names in a chain are the same dim."""

    name: str
    size: int
    role: Role = Role.OTHER


@dataclass(frozen=True, kw_only=True)
class ChainOperator:
    """A computation that depends on a collective's output, or that a collective's input depends on."""

    name: str
    dims: tuple[Dim, ...]
    flops: int
    traffic_bytes: int
    """Read from and written to memory."""
    output_bytes: int

    def role(self, dim: str) -> Role | None:
        """How the operator takes a cut along a dim; None if it does not have the dim."""
        return next((d.role for d in self.dims if d.name == dim), None)


def matmul(name: str, rows: Dim, contraction: Dim, columns: Dim, element_bytes: int = 2) -> ChainOperator:
    """``[A, B] x [B, C]``; the roles of the dims given are replaced by those of table 3."""
    a, b, c = rows.size, contraction.size, columns.size
    return ChainOperator(
        name=name,
        dims=(
            Dim(name=rows.name, size=a),
            Dim(name=contraction.name, size=b, role=Role.CONTRACTION),
            Dim(name=columns.name, size=c),
        ),
        flops=2 * a * b * c,
        traffic_bytes=(a * b + b * c + a * c) * element_bytes,
        output_bytes=a * c * element_bytes,
    )


def pointwise(
    name: str, rows: Dim, columns: Dim, element_bytes: int = 2, coupled: bool = False
) -> ChainOperator:
    """An operator over ``[A, B]``, one read and one write; ``coupled`` along B: SwiGLU, softmax, norms."""
    elements = rows.size * columns.size
    role = Role.NONE_SPLIT if coupled else Role.OTHER
    return ChainOperator(
        name=name,
        dims=(Dim(name=rows.name, size=rows.size), Dim(name=columns.name, size=columns.size, role=role)),
        flops=0,
        traffic_bytes=2 * elements * element_bytes,
        output_bytes=elements * element_bytes,
    )


def compute_ns(gpu: Gpu, flops: float, traffic_bytes: float) -> int:
    """Time of an operator with its launch: bound by arithmetic at its size's efficiency, or by memory."""
    ns = traffic_bytes / (gpu.memory_bytes_per_s * gpu.memory_efficiency) * 1e9
    if flops:
        ns = max(ns, flops / (gpu.peak_flops_per_s * gpu.gemm.at(flops)) * 1e9)
    return round(gpu.launch_ns + ns)


def chain_ns(gpu: Gpu, chain: Iterable[ChainOperator], share: float = 1.0) -> int:
    """Time of a share of every operator of a chain."""
    return sum(compute_ns(gpu, op.flops * share, op.traffic_bytes * share) for op in chain)
