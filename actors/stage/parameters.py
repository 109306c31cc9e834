"""Parameters by global name: what slice of which global tensor a rank holds, and how it begins.

Checkpoints, initial values and gradient reduction speak of global names (``layers.3.qkv.q.weight``), never of
ranks; one local parameter may hold slices of several global tensors (fused q, k, v; gate and up).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from braid.kernels.operators.operator import ComputeOperator


@dataclass(frozen=True, kw_only=True)
class GlobalParameter:
    """A tensor of the whole model: name, shape, and how it is initialised.

    ``deviation`` is that of a normal distribution around 0; without one, every element is ``constant``.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float | None = None
    constant: float = 0.0

    def initial(self, seed: int) -> Tensor:
        """The initial value (float32, CPU): a pure function of the seed and the name."""
        if self.deviation is None:
            return torch.full(self.shape, self.constant)
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(self.shape, generator=generator) * self.deviation


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """``length`` rows (along ``dim``) of a global tensor from ``offset``, at ``local_offset`` of dim ``dim``
    of the local parameter. A replicated parameter is one slice of full length."""

    source: GlobalParameter
    dim: int = 0
    offset: int = 0
    length: int
    local_offset: int = 0

    def of_global(self, tensor: Tensor) -> Tensor:
        """This slice of the global tensor, a view."""
        return tensor.narrow(self.dim, self.offset, self.length)

    def of_local(self, tensor: Tensor) -> Tensor:
        """The part of the local tensor that holds this slice, a view."""
        return tensor.narrow(self.dim, self.local_offset, self.length)


@dataclass(frozen=True, kw_only=True)
class OperatorModule:
    """A compute operator with the global names of its parameters, by attribute."""

    module: ComputeOperator
    slices: Mapping[str, tuple[ParameterSlice, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StageParameter:
    """A parameter as one rank holds it.

    ``replicated``: every tensor-parallel rank holds the same slice but sees the gradient of its own tokens
    only, so gradients are summed over ``tp``. ``shared``: held by the first and the last stage (a tied head
    in an unfolded pipeline), so gradients are summed over the two.
    """

    tensor: nn.Parameter
    slices: tuple[ParameterSlice, ...]
    chunk: int
    replicated: bool
    shared: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: matrices yes, norms and biases no."""
        return len(self.slices[0].source.shape) > 1

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameter with its slices of the global initial values."""
        for piece in self.slices:
            initial = piece.of_global(piece.source.initial(seed))
            piece.of_local(self.tensor).copy_(initial)


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of part ``index`` when ``total`` rows are cut like `torch.chunk` does."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


def stack_slices(
    sources: list[GlobalParameter], tp: int, tp_rank: int, dim: int = 0
) -> tuple[ParameterSlice, ...]:
    """This rank's slices of several global tensors, one after the other in one local parameter."""
    slices = []
    local = 0
    for source in sources:
        offset, length = split_evenly(source.shape[dim], tp, tp_rank)
        slices.append(
            ParameterSlice(source=source, dim=dim, offset=offset, length=length, local_offset=local)
        )
        local += length
    return tuple(slices)


def whole(source: GlobalParameter) -> tuple[ParameterSlice, ...]:
    """A parameter that every rank holds whole."""
    return (ParameterSlice(source=source, length=source.shape[0]),)
