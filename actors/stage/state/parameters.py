"""Parameters by global name: what slice of which global tensor a rank holds, and how it begins.

Checkpoints, initial values and gradient reduction speak of global names (``layers.3.qkv.q.weight``), never of
ranks; one local parameter may hold slices of several global tensors (fused q, k, v; gate and up).
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor, nn

from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.mesh.mesh import MeshShape, Position

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights (GPT-2's choice)."""


@dataclass(frozen=True, kw_only=True)
class GlobalParameter:
    """A tensor of the whole model: name, shape, and how it is initialised.

    ``deviation`` is that of a normal distribution around 0; without one, every element is ``constant``.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float | None = None
    constant: float = 0.0
    sign_rate: float = 0.0
    """The step that it takes against the sign of its gradient, which is none of the loss and no part of the
    norm: the bias that balances experts. 0: AdamW updates it."""

    def initial(self, seed: int) -> Tensor:
        """The initial value (float32, CPU): a pure function of the seed and the name."""
        return self.initial_box(seed, (0,) * len(self.shape), self.shape)

    def initial_box(self, seed: int, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of it. Large tensors are drawn in tiles, so that ranks draw little more than they hold."""
        if self.deviation is None:
            return torch.full(tuple(sizes), self.constant)
        source = f"{seed}/{self.name}"
        if math.prod(self.shape) <= _DRAWN_WHOLE:
            return _drawn(source, self.shape)[_box(offsets, sizes)] * self.deviation
        box = torch.empty(*sizes)
        tiles = [1] * (len(sizes) - 2) + [_TILE] * min(2, len(sizes))
        for tile in product(*map(_tiles, offsets, sizes, tiles)):
            first = [number * size for number, size in zip(tile, tiles, strict=True)]
            drawn = _drawn(f"{source}/{'/'.join(map(str, tile))}", [*map(_rest, self.shape, first, tiles)])
            common = [
                (max(at, begin), min(at + size, begin + extent))
                for at, size, begin, extent in zip(offsets, sizes, first, drawn.shape, strict=True)
            ]
            there, here = (
                tuple(slice(low - at, high - at) for (low, high), at in zip(common, begins, strict=True))
                for begins in (first, offsets)
            )
            box[here] = drawn[there]
        return box * self.deviation


_DRAWN_WHOLE = 1 << 20
"""Elements; 10 ms."""
_TILE = 256
"""Elements along the last two dims; along others, one."""


def _tiles(offset: int, size: int, tile: int) -> range:
    """The tiles that a box touches along a dim."""
    return range(offset // tile, -(-(offset + size) // tile))


def _rest(extent: int, begin: int, tile: int) -> int:
    """What a tile has along a dim."""
    return min(tile, extent - begin)


def _drawn(source: str, shape: Sequence[int]) -> Tensor:
    digest = hashlib.sha256(source.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh."""

    mesh: MeshShape
    position: Position

    @classmethod
    def of(cls, mesh: MeshShape, rank: int) -> "Place":
        """That of a rank."""
        return cls(mesh, mesh.position(rank))

    def index(self, group: Collection[str]) -> int:
        """The rank's number in its group over some factors."""
        return self.mesh.index(self.position, group)

    def on(self, axis: str) -> int:
        """The rank's number along an axis."""
        return self.index(self.mesh.factors_of(axis))

    def differs(self, factors: Iterable[str]) -> bool:
        """Whether another rank comes first along one of the factors."""
        return any(self.position[name] for name in factors)


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """A box of a global tensor, and where it stands in a rank's local parameter, one element after the other.

    A local parameter may hold slices of several global tensors, one behind the other.
    """

    source: GlobalParameter
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the box, by dim."""
    begin: int = 0
    """The first element of the local parameter, as a flat tensor, that the slice has."""
    factors: tuple[str, ...] = ()
    """The factors of the mesh that the global tensor is cut over: along all others, ranks hold the same."""

    def of_global(self, tensor: Tensor) -> Tensor:
        """This slice of the global tensor, a view."""
        return tensor[_box(self.offsets, self.sizes)]

    def of_local(self, tensor: Tensor) -> Tensor:
        """The part of the local tensor that holds this slice, a view."""
        return tensor.view(-1)[self.begin : self.begin + math.prod(self.sizes)].view(self.sizes)


@dataclass(frozen=True, kw_only=True)
class OperatorModule:
    """A compute operator with the global names of its parameters, by attribute."""

    module: ComputeOperator
    slices: Mapping[str, tuple[ParameterSlice, ...]] = field(default_factory=dict)
    parts: Mapping[str, ComputeOperator] = field(default_factory=dict)
    """Of operators whose names begin with its own, by what those add: attention may be several."""


def main_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of parameters of ``dtype`` are added up and summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(kw_only=True, eq=False)
class StageParameter:
    """A parameter as one rank holds it.

    ``shared``: held by the first and the last stage (a tied head in an unfolded pipeline), so gradients are
    summed over the two.
    """

    tensor: nn.Parameter
    slices: tuple[ParameterSlice, ...]
    chunk: int
    bucket: int = 0
    """Of the chunk (`braid.scheduling.schedule.buckets`)."""
    shared: bool = False
    operators: list[tuple[ComputeOperator, str]] = field(default_factory=list)
    """Those that compute with it, and its name there."""

    def __post_init__(self) -> None:
        self._gradient: Tensor | None = None
        self.shape = self.tensor.shape
        """Also while the tensor has no memory."""

    @property
    def gradient(self) -> Tensor:
        """Where its gradient is added up: its shape, perhaps a wider dtype."""
        assert self._gradient is not None, f"no gradient is kept of {self.slices[0].source.name}"
        return self._gradient

    @gradient.setter
    def gradient(self, total: Tensor | None) -> None:
        self._gradient = total
        for operator, name in self.operators:
            if total is None:
                operator.gradients.pop(name, None)
            else:
                operator.gradients[name] = total

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that it is cut over."""
        return tuple(dict.fromkeys(name for piece in self.slices for name in piece.factors))

    def summed_over(self, mesh: MeshShape) -> tuple[str, ...]:
        """Factors that its gradient is summed over: it is equal along them, and the data differs.

        Stages see the same data, and have parameters of their own.
        """
        cut = self.factors
        return tuple(name for name, size in mesh.factors if size > 1 and name != "pp" and name not in cut)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: matrices yes, norms and biases no."""
        return len(self.slices[0].source.shape) > 1

    @property
    def sign_rate(self) -> float:
        """`GlobalParameter.sign_rate`."""
        return self.slices[0].source.sign_rate

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameter with its slices of the global initial values."""
        for piece in self.slices:
            initial = piece.source.initial_box(seed, piece.offsets, piece.sizes)
            piece.of_local(self.tensor).copy_(initial)


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of part ``index`` when ``total`` rows are cut like `torch.chunk` does."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


def cut(
    sources: Sequence[GlobalParameter], place: Place, cuts: Mapping[int, tuple[str, ...]]
) -> tuple[ParameterSlice, ...]:
    """A rank's slices of global tensors, one after the other in one local parameter.

    ``cuts``: which dim is cut over which factors; everything else about the parameter follows from it.
    """
    slices, begin = [], 0
    for source in sources:
        boxes = [
            split_evenly(extent, place.mesh.size(cuts.get(dim, ())), place.index(cuts.get(dim, ())))
            for dim, extent in enumerate(source.shape)
        ]
        offsets, sizes = zip(*boxes, strict=True)
        factors = tuple(
            name
            for name, size in place.mesh.factors
            if size > 1 and any(name in own for own in cuts.values())
        )
        slices.append(
            ParameterSlice(source=source, offsets=offsets, sizes=sizes, begin=begin, factors=factors)
        )
        begin += math.prod(sizes)
    return tuple(slices)


def cut_by_row(
    sources: Sequence[GlobalParameter], place: Place, cuts: Mapping[int, tuple[str, ...]]
) -> tuple[ParameterSlice, ...]:
    """As `cut`, but row by row: the first row of every tensor, then the second one of every tensor, ..."""
    wholes = cut(sources, place, cuts)
    if len(wholes) == 1:
        return wholes
    slices, begin = [], 0
    for row in range(wholes[0].sizes[0]):
        for one in wholes:
            offsets, sizes = (one.offsets[0] + row, *one.offsets[1:]), (1, *one.sizes[1:])
            slices.append(replace(one, offsets=offsets, sizes=sizes, begin=begin))
            begin += math.prod(sizes)
    return tuple(slices)


def whole(source: GlobalParameter) -> tuple[ParameterSlice, ...]:
    """A parameter that every rank holds whole."""
    return (ParameterSlice(source=source, offsets=(0,) * len(source.shape), sizes=source.shape),)
