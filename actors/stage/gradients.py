"""Gradient buffers in buckets, their reduction over the axes that share parameters, and their norm."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.parameters import StageParameter
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import all_reduce
from braid.scheduling.operators import Stream
from braid.scheduling.trace import Label


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters of one chunk in one flat buffer, reduced over ``groups`` in order."""

    chunk: int
    buffer: Tensor
    groups: tuple[dist.ProcessGroup, ...]


class GradientBuckets:
    """Owns ``main_grad`` of every parameter: fp32 for narrower parameters, else the parameter's dtype."""

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
        does the number of data-parallel ranks (design section 10, rule 4). Twice the memory of gradients.
        """
        self._deterministic = deterministic
        self.parameters = parameters
        self._streams = streams
        self._recorder = recorder
        self._pending: dict[int, list[Transfer]] = {}
        self.buckets = [
            self._fill(chunk, members, _groups(members[0], mesh))
            for (chunk, _, _), members in _partition(parameters, bucket_bytes)
        ]
        self._labels = [
            Label(operator=f"gradients.{number}", stream=Stream.INTER, bytes=bucket.buffer.nbytes)
            for number, bucket in enumerate(self.buckets)
        ]
        self._norm = _GlobalNorm(parameters, mesh)

    def _fill(
        self, chunk: int, members: list[StageParameter], groups: tuple[dist.ProcessGroup, ...]
    ) -> Bucket:
        like = members[0].tensor
        dtype = torch.float64 if self._deterministic else main_gradient_dtype(like.dtype)
        buffer = torch.zeros(sum(p.tensor.numel() for p in members), dtype=dtype, device=like.device)
        offset = 0
        for parameter in members:
            tensor = parameter.tensor
            tensor.main_grad = buffer[offset : offset + tensor.numel()].view(tensor.shape)  # type: ignore[attr-defined]
            offset += tensor.numel()
        return Bucket(chunk, buffer, groups)

    def start_reduce(self, chunk: int) -> None:
        """Begin to sum the gradients of a chunk; reductions that others depend on finish here."""
        pending = self._pending[chunk] = []
        for number, bucket in enumerate(self.buckets):
            if bucket.chunk != chunk:
                continue
            for position, group in enumerate(bucket.groups):
                last = position == len(bucket.groups) - 1
                label = self._labels[number]
                launch = all_reduce(bucket.buffer, group)
                transfer = self._streams.start(Stream.INTER, launch, awaited_next=not last)
                self._recorder.transfer(label, None, transfer)
                if last:
                    pending.append(transfer)
                else:
                    self._streams.wait(transfer)
                    transfer.take()

    def wait_reduce(self, chunk: int) -> None:
        """Finish what `start_reduce` began."""
        for transfer in self._pending.pop(chunk):
            self._streams.wait(transfer)
            transfer.take()

    def norm(self) -> Tensor:
        """Global gradient norm over all axes, each parameter counted once; 0-dim float64."""
        return self._norm()

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


def _groups(parameter: StageParameter, mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    groups = []
    if parameter.replicated:
        groups.append(mesh.group("tp"))
    if parameter.shared and mesh.ends is not None:
        groups.append(mesh.ends)
    if mesh.layout.dp > 1:
        groups.append(mesh.group("dp"))
    return tuple(groups)


def _partition(
    parameters: list[StageParameter], bucket_bytes: int
) -> Iterator[tuple[tuple[int, bool, bool], list[StageParameter]]]:
    """Parameters of one chunk that are reduced over the same groups, in buckets of bounded size."""

    def kind(p: StageParameter) -> tuple[int, bool, bool]:
        return p.chunk, p.replicated, p.shared

    for key, members in groupby(sorted(parameters, key=kind), key=kind):
        bucket: list[StageParameter] = []
        size = 0
        for parameter in members:
            tensor = parameter.tensor
            nbytes = tensor.numel() * main_gradient_dtype(tensor.dtype).itemsize
            if bucket and size + nbytes > bucket_bytes:
                yield key, bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += nbytes
        yield key, bucket


class _GlobalNorm:
    """Sums squares per global parameter, then over the parameters in one fixed order, so that layouts that
    compute the same gradients bit for bit also clip them by the same factor."""

    def __init__(self, parameters: list[StageParameter], mesh: Mesh) -> None:
        device = parameters[0].tensor.device
        first_tp, first_stage = mesh.position["tp"] == 0, mesh.position["pp"] == 0
        counted = [p for p in parameters if (first_tp or not p.replicated) and (first_stage or not p.shared)]
        pieces = [(piece.source.name, p, piece) for p in counted for piece in p.slices]
        names = _all_names([name for name, _, _ in pieces], mesh)
        self._views = [piece.of_local(p.tensor.main_grad) for _, p, piece in pieces]  # type: ignore[attr-defined]
        places = {name: place for place, name in enumerate(names)}
        self._index = torch.tensor([places[name] for name, _, _ in pieces], device=device)
        self._squares = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._groups = [mesh.group(axis) for axis in ("tp", "pp") if mesh.layout.degree(axis) > 1]

    def __call__(self) -> Tensor:
        squares = self._squares.zero_()
        if self._views:
            norms = torch.stack(torch._foreach_norm(self._views)).to(torch.float64)
            squares.index_add_(0, self._index, norms * norms)
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sum().sqrt()


def _all_names(mine: list[str], mesh: Mesh) -> list[str]:
    if mesh.layout.ranks == 1:
        return sorted(set(mine))
    gathered: list[list[str]] = [[] for _ in range(mesh.layout.ranks)]
    dist.all_gather_object(gathered, mine)
    return sorted({name for names in gathered for name in names})
