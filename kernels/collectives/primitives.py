"""Collectives over flattened tokens: asynchronous, lines as arguments, one name for all torch versions.

Each prepares what it needs on the current stream and returns a `Launch`: the tensor that will hold the result
and a function that issues the collective, perhaps on another stream. The input must stay alive, and the
result unread, until that work is done and `Launch.finish` was called. ``x`` is (tokens, ...).

On CPU, gathers and scatters are messages between all pairs of ranks: gloo builds reduce-scatter on
all-reduce, which moves twice the bytes, and its collectives copy more than its messages do (docs/log.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Block until it is complete; raises `RuntimeError` if it failed."""


@dataclass(frozen=True)
class Launch:
    """A transfer that is ready to go."""

    result: Tensor
    issue: Callable[[], Work]
    finish: Callable[[], object] | None = None
    """What remains to be computed once the work is done, before the result may be read."""
    sends: int = 0
    """Bytes that this rank sends, where whoever issues has to write them (CPU)."""


@dataclass(frozen=True)
class Line:
    """The ranks that a collective spans, and the connections between them.

    On CPU messages to later ranks take one process group and messages to earlier ranks another. gloo guards
    a connection with one lock, which its thread tries in an endless loop when something arrives while another
    thread sends; where both share a CPU, the sender cannot go on before the kernel ends the loop's time
    slice. With both directions on one connection that was 3 ms for every other exchange (docs/log.md).
    """

    group: dist.ProcessGroup
    upward: dist.ProcessGroup | None = None
    """For messages to ranks that come later in the group; None: ``group``, as the others."""

    def toward(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one rank to another, by their numbers in it."""
        return self.upward if self.upward is not None and source < target else self.group


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed these and warns about the old names, older versions have only those."""


def all_gather(x: Tensor, line: Line) -> Launch:
    """Concatenate the tokens of all ranks of the line, in rank order: (t, ...) -> (t x ranks, ...)."""
    group = line.group
    x = x.contiguous()
    y = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    if x.device.type != "cpu":
        return Launch(y, lambda: started(_gather(y, x, group=group, async_op=True)))
    parts, rank = y.chunk(group.size()), group.rank()
    own = parts[rank]
    sends = x.nbytes * (group.size() - 1)
    return Launch(y, lambda: _exchange([x] * group.size(), parts, line), lambda: own.copy_(x), sends)


def reduce_scatter(x: Tensor, line: Line) -> Launch:
    """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...).

    On CPU the sum is in rank order.
    """
    x = x.contiguous()
    group = line.group
    ranks = group.size()
    y = torch.empty((x.shape[0] // ranks, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if x.device.type != "cpu":
        return Launch(y, lambda: started(_scatter(y, x, group=group, async_op=True)))
    parts = x.chunk(ranks)
    own = group.rank()
    arrived = [parts[own] if peer == own else torch.empty_like(y) for peer in range(ranks)]

    def total() -> None:
        torch.add(arrived[0], arrived[1], out=y)
        for part in arrived[2:]:
            y.add_(part)

    return Launch(y, lambda: _exchange(parts, arrived, line), total, x.nbytes - y.nbytes)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Launch:
    """Sum over the ranks, in place."""
    return Launch(x, lambda: started(dist.all_reduce(x, group=group, async_op=True)), sends=x.nbytes)


def send(x: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> Launch:
    """Send to one rank, named by its number in the whole run."""
    x = x.contiguous()
    return Launch(x, lambda: started(dist.isend(x, rank, group=group, tag=tag)), sends=x.nbytes)


def receive(x: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> Launch:
    """Receive into ``x`` from one rank."""
    return Launch(x, lambda: started(dist.irecv(x, rank, group=group, tag=tag)))


def swap(x: Tensor, peer: int, line: Line) -> Launch:
    """Send ``x`` to a rank of the line (by its number there) and receive as much from it."""
    x = x.contiguous()
    y = torch.empty_like(x)
    own = line.group.rank()

    def issue() -> Work:
        arriving = started(dist.irecv(y, group=line.toward(peer, own), group_src=peer))
        return _All([arriving, started(dist.isend(x, group=line.toward(own, peer), group_dst=peer))])

    return Launch(y, issue, sends=x.nbytes)


def started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call; torch returns none to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work


@dataclass(frozen=True)
class _All:
    """Several works as one."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], line: Line) -> Work:
    """Send ``outgoing[peer]`` to every other rank of the line and receive ``incoming[peer]`` from it.

    Messages between two ranks of a group arrive in the order in which they were sent, so exchanges need no
    tags as long as all ranks start them in one order, as they do collectives.
    """
    rank, ranks = line.group.rank(), line.group.size()
    works = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        inward, outward = line.toward(source, rank), line.toward(rank, target)
        works.append(started(dist.irecv(incoming[source], group=inward, group_src=source)))
        works.append(started(dist.isend(outgoing[target], group=outward, group_dst=target)))
    return _All(works)
