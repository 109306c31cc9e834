"""Times transfers outside layers: sums and gathers over replicas, stages of collectives inside and between
nodes, messages between pipeline stages."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.rank.messages import MESSAGE, SUM, Together
from braid.actors.stage.run.streams import Streams, Transfer
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.mesh import beyond

_ALONG: Final = ("tp", "pp", "dp", "edp", "ep", "replica")
"""Axes over which gradients or their squares are summed."""

_LARGE: Final = 2**18
"""Number of elements of a sum that shows the rate of a link: about a bucket, or what a slow link transfers in
a fortieth of a second."""


class LinkTimes:
    """Measures transfers on one rank; all ranks call the same methods at the same time."""

    def __init__(self, mesh: Mesh, streams: Streams, model: StageModel) -> None:
        self._mesh, self._streams = mesh, streams
        context = model.context
        self._shape = context.sizes.local_tokens, model.shape.hidden
        self._like = torch.empty(0, device=context.device, dtype=context.dtype)
        self._factors = [str(factor) for factor in mesh.topology.factors()]
        self._beyond = [beyond(degree) for degree in mesh.layout.own_degrees if degree > 1]
        # As many gradients as a message has elements: a whole layer's would take as long as many operators.
        elements = self._shape[0] * self._shape[1]
        axes = {SUM: "dp", **{f"{factor}/sum": factor for factor in self._factors}}
        self._sums = {
            name: (axis, torch.zeros(elements, device=context.device))
            for name, axis in axes.items()
            if axis in mesh.lines
        }
        # Neighbouring stages swap messages in pairs; with an odd number of stages the last has no partner.
        paired = mesh.layout.pp > 1 and mesh.layout.pp % 2 == 0
        self._message = self._like.new_zeros(self._shape if paired else 0)
        self.names = [*self._sums, *([MESSAGE] if paired else [])]
        """Names of the transfers that `start` can begin at any time: sums of gradients, and a message."""

    @property
    def axes(self) -> list[str]:
        """All axes and factors along which ranks exchange data."""
        return [*self._mesh.place.mesh.axes, *self._factors]

    def start(self, name: str) -> Transfer:
        """Start the transfer that ``name``, one of `names`, stands for."""
        if name == MESSAGE:
            peer = self._mesh.position["pp"] ^ 1
            launch, stream = self._mesh.neighbours.swap(self._message, peer), self._mesh.stream_to(peer)
            return self._streams.start(stream, launch, awaited_next=False, lane="profile")
        axis, gradients = self._sums[name]
        launch = self._mesh.lines[axis].all_reduce(gradients)
        return self._streams.start(self._mesh.stream(axis), launch, awaited_next=False, lane="data")

    def meet(self) -> None:
        """Let the ranks of the tensor-parallel group, and all replicas, begin together."""
        self._streams.lead()
        for axis in ("tp", "dp"):
            if axis in self._mesh.lines:
                self._mesh.lines[axis].align()

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of `names`: a sum inside nodes, and the sum between nodes of the same axis."""
        inside, between = self._factors[1::2], self._factors[::2]
        return [(f"{inner}/sum", f"{outer}/sum") for inner, outer in zip(inside, between, strict=True)]

    def both(self, start: Callable[[str], Transfer], names: tuple[str, str]) -> Together:
        """Time two transfers over different links that are started together, the second one first."""
        self.meet()
        begin = self._streams.mark()
        second, first = transfers = [start(name) for name in reversed(names)]
        for transfer in transfers:
            self._streams.wait(transfer)
        ends = [self._streams.between(begin, transfer.end) for transfer in (first, second)]
        for transfer in transfers:
            transfer.take()
        return Together(operator_ns=ends[0], other_ns=ends[1], both_ns=max(ends))

    def alone(self, rounds: int) -> dict[str, list[tuple[int, int]]]:
        """Time transfers of two sizes; return pairs (payload bytes, nanoseconds), by axis and kind.

        Gradients and parameters are transferred in buckets, far larger than a message of few tokens: a rate
        measured with messages alone would be the rate of copies into buffers.
        """
        measured: dict[str, list[tuple[int, int]]] = defaultdict(list)
        elements = self._shape[0] * self._shape[1]
        lines, shared = self._mesh.lines, ("dp", "edp", *self._factors)
        for _ in range(rounds):
            for count in (elements, max(1, elements // 8)):
                message = self._like.new_zeros(count)
                if self._mesh.layout.pp > 1:
                    measured["pp/send_receive"].append((message.nbytes, self._there_and_back(message)))
            for count in (max(elements, _LARGE), max(1, elements // 8)):
                x = self._like.new_zeros(count)
                for axis in (axis for axis in (*_ALONG, *self._beyond, *self._factors) if axis in lines):
                    ns = self._time(axis, lines[axis].all_reduce(x))
                    measured[f"{axis}/all_reduce"].append((x.nbytes, ns))
                for axis in (axis for axis in ("tp", *shared) if axis in lines):
                    line = lines[axis]
                    share = x[: -(-count // line.size)]
                    ns = self._time(axis, line.all_gather(share))
                    measured[f"{axis}/all_gather"].append((share.nbytes * line.size, ns))
                    if axis in shared:
                        whole = x[: max(1, count // line.size) * line.size]
                        ns = self._time(axis, line.reduce_scatter(whole))
                        measured[f"{axis}/reduce_scatter"].append((whole.nbytes, ns))
        return dict(measured)

    def _time(self, axis: str, launch: Launch) -> int:
        self._streams.lead()
        # All groups along the axis share the links between nodes: all ranks begin together.
        for line in (*self._mesh.lines.values(), self._mesh.lines[axis]):
            line.align()
        begin = self._streams.mark()
        transfer = self._streams.start(self._mesh.stream(axis), launch, awaited_next=True)
        self._streams.result_of(transfer)
        return self._streams.between(begin, self._streams.mark())

    def _there_and_back(self, x: Tensor) -> int:
        """Return half of a round trip's time between neighbouring stages; 0 for a stage without neighbour."""
        stage, stages = self._mesh.position["pp"], self._mesh.layout.pp
        other = stage ^ 1
        self._streams.lead()
        self._mesh.lines["pp"].align()
        if other >= stages:
            return 0
        line = self._mesh.neighbours
        begin = self._streams.mark()
        out, back = partial(line.send, x, other, 0), partial(line.receive, x, other, 0)
        for turn in (out, back) if stage < other else (back, out):
            transfer = self._streams.start(self._mesh.stream_to(other), turn(), awaited_next=True)
            self._streams.result_of(transfer)
        return self._streams.between(begin, self._streams.mark()) // 2
