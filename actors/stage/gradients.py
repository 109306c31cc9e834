"""Gradient buffers in buckets, their reduction over the axes that share parameters, and their norm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.parameters import StageParameter
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.code import name_of
from braid.scheduling.schedule import Reduce
from braid.scheduling.trace import Label


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters of one chunk in one flat buffer, summed over some axes."""

    chunk: int
    buffer: Tensor
    axes: tuple[str, ...]
    parts: Mapping[int, Tensor]
    """By part of the chunk, its elements of the buffer."""


class GradientBuckets:
    """Owns all sums of gradients: fp32 for narrower parameters, else the parameter's dtype."""

    def __init__(
        self,
        parameters: list[StageParameter],
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        bucket_bytes: int,
        *,
        deterministic: bool = False,
    ) -> None:
        """``deterministic``: sums of fp32 gradients are kept in float64, where they are exact as long as the
        terms of an element lie within a factor of 2^25 or so; no order of summation then changes them, nor
        does the number of data-parallel ranks (docs/design.md, The runtime). Twice the memory of gradients.
        """
        self._deterministic = deterministic
        self.parameters = parameters
        self._streams = streams
        self._recorder = recorder
        self._mesh = mesh
        self._pending: dict[Reduce, list[Transfer]] = {}
        self.buckets = [
            self._fill(chunk, members, axes)
            for (chunk, axes), members in _partition(parameters, mesh, bucket_bytes)
        ]
        self._labels: dict[tuple[Reduce, int], Label] = {}
        self._norm = _GlobalNorm(parameters, mesh)

    def _fill(self, chunk: int, members: list[StageParameter], axes: tuple[str, ...]) -> Bucket:
        like = members[0].tensor
        dtype = torch.float64 if self._deterministic else main_gradient_dtype(like.dtype)
        buffer = torch.zeros(sum(p.tensor.numel() for p in members), dtype=dtype, device=like.device)
        offset, parts = 0, {}
        for part, alike in groupby(members, key=lambda parameter: parameter.part):
            begin = offset
            for parameter in alike:
                tensor = parameter.tensor
                parameter.gradient = buffer[offset : offset + tensor.numel()].view(tensor.shape)
                offset += tensor.numel()
            parts[part] = buffer[begin:offset]
        return Bucket(chunk, buffer, axes, parts)

    def start(self, reduce: Reduce) -> None:
        """Begin to sum, over an axis, the gradients of a chunk or of a part that are shared along it, or the
        squares."""
        pending = self._pending[reduce] = []
        for buffer in self._summed(reduce):
            label = self._label(reduce, buffer)
            launch = self._mesh.shared(reduce.axis).all_reduce(buffer)
            transfer = self._streams.start(label.stream, launch, awaited_next=False, lane="data")
            self._recorder.transfer(label, None, transfer)
            pending.append(transfer)

    def _summed(self, reduce: Reduce) -> list[Tensor]:
        if reduce.chunk is None:
            return [self._norm.squares]
        alike = [b for b in self.buckets if b.chunk == reduce.chunk and reduce.axis in b.axes]
        if reduce.part is None:
            return [bucket.buffer for bucket in alike]
        return [bucket.parts[reduce.part] for bucket in alike if reduce.part in bucket.parts]

    def _label(self, reduce: Reduce, buffer: Tensor) -> Label:
        key = reduce, buffer.numel()
        if key not in self._labels:
            stream = self._mesh.stream(reduce.axis)
            self._labels[key] = Label(
                operator=name_of(reduce), stream=stream, bytes=buffer.nbytes, shapes=str(buffer.numel())
            )
        return self._labels[key]

    def wait(self, reduce: Reduce) -> None:
        """Finish what `start` began."""
        for transfer in self._pending.pop(reduce):
            self._streams.wait(transfer)
            transfer.take()

    def square(self) -> None:
        """Square and add up this rank's gradients, parameter by parameter; sums over axes follow."""
        self._norm.square()

    def norm(self) -> Tensor:
        """Global gradient norm, each parameter counted once, after all sums; 0-dim float64."""
        return self._norm.squares.sum().sqrt()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.buffer.mul_(factor)

    def zero(self) -> None:
        """Clear all gradients."""
        for bucket in self.buckets:
            bucket.buffer.zero_()


def main_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of parameters of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _axes(parameter: StageParameter, mesh: Mesh) -> tuple[str, ...]:
    """What a parameter's gradient is summed over: factors, and stages that hold it too (`gradient_axes`)."""
    stages = ("ends",) * parameter.shared + ("copies",) * (mesh.layout.copies > 1)
    return (*reversed(parameter.summed_over(mesh.place.mesh)), *stages)


def _partition(
    parameters: list[StageParameter], mesh: Mesh, bucket_bytes: int
) -> Iterator[tuple[tuple[int, tuple[str, ...]], list[StageParameter]]]:
    """Parameters of one chunk that are summed over the same axes, in buckets of bounded size."""

    def kind(p: StageParameter) -> tuple[int, int, tuple[str, ...]]:
        axes = _axes(p, mesh)
        return p.chunk, len(axes), axes

    for (chunk, _, axes), group in groupby(sorted(parameters, key=kind), key=kind):
        bucket: list[StageParameter] = []
        size = 0
        for parameter in group:
            tensor = parameter.tensor
            nbytes = tensor.numel() * main_gradient_dtype(tensor.dtype).itemsize
            if bucket and size + nbytes > bucket_bytes:
                yield (chunk, axes), bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += nbytes
        yield (chunk, axes), bucket


class _GlobalNorm:
    """Sums squares per global parameter, then over the parameters in one fixed order, so that layouts that
    compute the same gradients bit for bit also clip them by the same factor."""

    def __init__(self, parameters: list[StageParameter], mesh: Mesh) -> None:
        device = parameters[0].tensor.device
        first_stage, first_copy = mesh.position["pp"] == 0, mesh.layout.chunks_per_copy
        # Ranks along all other factors hold the same, and each of them sums up everything.
        cut = {name for parameter in parameters for name in parameter.factors}
        counted = [
            p
            for p in parameters
            if not mesh.place.differs(cut.intersection(p.summed_over(mesh.place.mesh)))
            and (first_stage or not p.shared)
            and p.chunk < first_copy
        ]
        pieces = [(piece.source.name, p, piece) for p in counted for piece in p.slices]
        names = _all_names([name for name, _, _ in pieces], mesh)
        self._views = [piece.of_local(p.gradient) for _, p, piece in pieces]
        places = {name: place for place, name in enumerate(names)}
        self._index = torch.tensor([places[name] for name, _, _ in pieces], device=device)
        self.squares = torch.zeros(len(names), dtype=torch.float64, device=device)

    def square(self) -> None:
        squares = self.squares.zero_()
        if self._views:
            norms = torch.stack(torch._foreach_norm(self._views)).to(torch.float64)
            squares.index_add_(0, self._index, norms * norms)


def _all_names(mine: list[str], mesh: Mesh) -> list[str]:
    ranks = mesh.place.mesh.ranks
    if ranks == 1:
        return sorted(set(mine))
    assert mesh.groups is not None
    return sorted({name for names in mesh.groups.gather(mine) for name in names})
