"""Parameters by global name: the slice of a global tensor that a rank holds, and its initial value.

Checkpoints, initial values and sums of gradients use global names (``layers.3.qkv.q.weight``), never ranks;
one local parameter may hold slices of several global tensors (fused q, k, v; gate and up).
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
    """A tensor of the whole model: its name, shape, and initialisation.

    ``deviation``: standard deviation of a distribution around 0, normal or ``uniform``; None: every element
    is ``constant``.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float | None = None
    uniform: bool = False
    constant: float = 0.0
    adapter: bool = False
    """Whether it belongs to an adapter; if the model has adapters, only these are trained."""
    sign_rate: float = 0.0
    """Size of a step against the sign of the gradient, for the bias that balances experts; the gradient of
    this bias does not come from the loss and is not part of the norm. 0: AdamW updates the parameter."""

    hidden: bool = True
    """Whether rows and columns of a matrix are hidden values; False where one of both are tokens, positions
    or experts (embedding, head, router)."""

    @property
    def matrix(self) -> bool:
        """Whether the last two dimensions are a matrix of hidden layers, which Muon updates; earlier
        dimensions count matrices (experts)."""
        return self.hidden and len(self.shape) > 1

    def initial(self, seed: int) -> Tensor:
        """Return the initial value (float32, CPU), a pure function of the seed and the name."""
        return self.initial_box(seed, (0,) * len(self.shape), self.shape)

    def initial_box(self, seed: int, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of `initial`; large tensors are drawn in tiles, little beyond the box."""
        if self.deviation is None:
            return torch.full(tuple(sizes), self.constant)
        source = f"{seed}/{self.name}"
        if math.prod(self.shape) <= _DRAWN_WHOLE:
            return self._spread(_drawn(source, self.shape))[_box(offsets, sizes)] * self.deviation
        box = torch.empty(*sizes)
        tiles = [1] * (len(sizes) - 2) + [_TILE] * min(2, len(sizes))
        for tile in product(*map(_tiles, offsets, sizes, tiles)):
            first = [number * size for number, size in zip(tile, tiles, strict=True)]
            ends = zip(self.shape, first, tiles, strict=True)
            shape = [min(size, extent - begin) for extent, begin, size in ends]
            drawn = self._spread(_drawn(f"{source}/{'/'.join(map(str, tile))}", shape))
            common = [
                (max(at, begin), min(at + size, begin + extent))
                for at, size, begin, extent in zip(offsets, sizes, first, drawn.shape, strict=True)
            ]
            drawn_slices, box_slices = (
                tuple(slice(low - at, high - at) for (low, high), at in zip(common, begins, strict=True))
                for begins in (first, offsets)
            )
            box[box_slices] = drawn[drawn_slices]
        return box * self.deviation

    def _spread(self, normal: Tensor) -> Tensor:
        """Return numbers of standard deviation 1: the given normal ones, or uniform ones in equal order."""
        return torch.erf(normal / 2**0.5) * 3**0.5 if self.uniform else normal


_DRAWN_WHOLE = 1 << 20
"""Greatest number of elements of a tensor that is drawn whole (10 ms) rather than in tiles."""
_TILE = 256
"""Number of elements of a tile along each of the last two dimensions; 1 along other dimensions."""


def _tiles(offset: int, size: int, tile: int) -> range:
    """Return the numbers of the tiles that a box touches along one dimension."""
    return range(offset // tile, -(-(offset + size) // tile))


def adapter_of(matrix: GlobalParameter, rank: int) -> tuple[GlobalParameter, GlobalParameter]:
    """Return both factors of a matrix's adapter, rank x inputs and outputs x rank.

    They begin as in `peft`: the first is uniform within 1 / sqrt(inputs), the second is 0.
    """
    name, (outputs, inputs) = matrix.name.removesuffix(".weight"), matrix.shape
    first = GlobalParameter(
        name=f"{name}.lora_a",
        shape=(rank, inputs),
        deviation=(3 * inputs) ** -0.5,
        uniform=True,
        adapter=True,
    )
    return first, GlobalParameter(name=f"{name}.lora_b", shape=(outputs, rank), adapter=True)


def _drawn(source: str, shape: Sequence[int]) -> Tensor:
    digest = hashlib.sha256(source.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class Place:
    """A rank's position in the mesh, from which its slices of parameters follow."""

    mesh: MeshShape
    position: Position

    @classmethod
    def of(cls, mesh: MeshShape, rank: int) -> "Place":
        return cls(mesh, mesh.position(rank))

    def index(self, group: Collection[str]) -> int:
        """Return the rank's index in its group of ranks along the given factors."""
        return self.mesh.index(self.position, group)

    def on(self, axis: str) -> int:
        """Return the rank's index along an axis."""
        return self.index(self.mesh.factors_of(axis))

    def differs(self, factors: Iterable[str]) -> bool:
        """Tell whether this rank's coordinate along any of the factors is not 0."""
        return any(self.position[name] for name in factors)


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """A box of a global tensor, and its position in a rank's local parameter, where the box is contiguous.

    A local parameter may hold slices of several global tensors, one after the other.
    """

    source: GlobalParameter
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int = 0
    """Index of the slice's first element in the local parameter as a flat tensor."""
    factors: tuple[str, ...] = ()
    """Mesh factors that cut the global tensor; ranks along others hold the same slice."""

    def of_global(self, tensor: Tensor) -> Tensor:
        """Return this slice of the global tensor, a view."""
        return tensor[_box(self.offsets, self.sizes)]

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return the part of the local tensor that holds this slice, a view."""
        return tensor.view(-1)[self.begin : self.begin + math.prod(self.sizes)].view(self.sizes)


@dataclass(frozen=True, kw_only=True)
class OperatorModule:
    """A compute operator, and the slices of global tensors that each of its parameters (attributes) holds."""

    module: ComputeOperator
    slices: Mapping[str, tuple[ParameterSlice, ...]] = field(default_factory=dict)
    parts: Mapping[str, ComputeOperator] = field(default_factory=dict)
    """Further operators by name suffix; attention, for example, may consist of several operators."""


def main_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of parameters of ``dtype`` are added up over passes and ranks."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(kw_only=True, eq=False)
class StageParameter:
    """A parameter as one rank holds it.

    ``shared``: the first and the last stage both hold the parameter (a tied head in an unfolded pipeline), so
    gradients are summed over both stages. ``trained``: whether it has gradients and optimizer states.
    """

    tensor: nn.Parameter
    slices: tuple[ParameterSlice, ...]
    chunk: int
    bucket: int = 0
    """Number of the bucket in the chunk (see `braid.scheduling.schedule.buckets`)."""
    shared: bool = False
    trained: bool = True
    operators: list[tuple[ComputeOperator, str]] = field(default_factory=list)
    """Operators that compute with the parameter, each with the name that the operator gives the parameter."""

    def __post_init__(self) -> None:
        self._gradient: Tensor | None = None
        self.shape = self.tensor.shape
        """Shape of the parameter, valid also while the tensor has no memory."""

    @property
    def gradient(self) -> Tensor:
        """The tensor that adds up the gradient, of the parameter's shape and the same or a wider dtype."""
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
        """The mesh factors along which the parameter is cut."""
        return tuple(dict.fromkeys(name for piece in self.slices for name in piece.factors))

    def summed_over(self, mesh: MeshShape) -> tuple[str, ...]:
        """Return the mesh factors over which the gradient is summed: ranks along these factors hold equal
        parameters and process different data. "pp" is left out: stages process the same data with parameters
        of their own."""
        cut = self.factors
        return tuple(name for name, size in mesh.factors if size > 1 and name != "pp" and name not in cut)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.slices[0].source.shape) > 1

    @property
    def matrix(self) -> bool:
        """Whether it holds matrices of hidden layers, which Muon updates."""
        return self.slices[0].source.matrix

    @property
    def sign_rate(self) -> float:
        return self.slices[0].source.sign_rate

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameter with its slices of the initial values of the global tensors."""
        for piece in self.slices:
            initial = piece.source.initial_box(seed, piece.offsets, piece.sizes)
            piece.of_local(self.tensor).copy_(initial)


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and length of part ``index`` when ``total`` rows are divided as `torch.chunk` does."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


def cut(
    sources: Sequence[GlobalParameter], place: Place, cuts: Mapping[int, tuple[str, ...]]
) -> tuple[ParameterSlice, ...]:
    """Return a rank's slices of global tensors, one after the other in one local parameter.

    ``cuts``: for each dimension that is cut, the mesh factors that cut it.
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
            if size > 1 and any(name in group for group in cuts.values())
        )
        slices.append(
            ParameterSlice(source=source, offsets=offsets, sizes=sizes, begin=begin, factors=factors)
        )
        begin += math.prod(sizes)
    return tuple(slices)


def cut_by_row(
    sources: Sequence[GlobalParameter], place: Place, cuts: Mapping[int, tuple[str, ...]]
) -> tuple[ParameterSlice, ...]:
    """Cut like `cut`, but interleave rows: first row 0 of every tensor, then row 1 of every tensor, ..."""
    wholes = cut(sources, place, cuts)
    if len(wholes) == 1:
        return wholes
    slices, begin = [], 0
    for row in range(wholes[0].sizes[0]):
        for slice_ in wholes:
            offsets, sizes = (slice_.offsets[0] + row, *slice_.offsets[1:]), (1, *slice_.sizes[1:])
            slices.append(replace(slice_, offsets=offsets, sizes=sizes, begin=begin))
            begin += math.prod(sizes)
    return tuple(slices)


def whole(source: GlobalParameter) -> tuple[ParameterSlice, ...]:
    """Return the slices of a parameter that every rank holds whole: one slice."""
    return (ParameterSlice(source=source, offsets=(0,) * len(source.shape), sizes=source.shape),)
