"""By how much the clocks of hosts differ, so that their spans stand on one axis of time.

Hosts agree through NTP, to milliseconds; what a trace shows takes microseconds. The first rank of every host
asks rank 0 for the time, as NTP does: the answer was given at some moment between question and reply, at most
half of their distance away from its middle.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

_QUESTIONS = 16
"""To each host; the quickest answer counts."""


class Gathers(Protocol):
    """What tells all ranks something."""

    def gather(self, own: Any) -> list[Any]:
        """What every rank gives, in rank order."""


@dataclass(frozen=True)
class Difference:
    """Of two clocks, in nanoseconds."""

    ahead_ns: int
    unsure_ns: int

    @property
    def told_ns(self) -> int:
        """0 where they may be equal, as far as can be told."""
        return self.ahead_ns if abs(self.ahead_ns) > self.unsure_ns else 0


def clock_ahead_ns(rank: int, hosts: Sequence[str], groups: Gathers | None) -> int:
    """By how much this host's clock is ahead of that of rank 0's. All ranks call this together.

    Messages go over the default group, on the CPU.
    """
    firsts = sorted(hosts.index(host) for host in set(hosts))
    if len(firsts) < 2 or groups is None:
        return 0
    own = 0
    for asking in firsts[1:]:
        if rank == asking:
            own = min((ask() for _ in range(_QUESTIONS)), key=lambda one: one.unsure_ns).told_ns
        elif rank == 0:
            for _ in range(_QUESTIONS):
                answer(asking)
    of_firsts = groups.gather(own)
    return int(of_firsts[hosts.index(hosts[rank])])


def ask() -> Difference:
    """Ask rank 0."""
    begin = time.time_ns()
    there = torch.zeros(1, dtype=torch.int64)
    dist.send(there, 0)
    dist.recv(there, 0)
    end = time.time_ns()
    return Difference((begin + end) // 2 - int(there), (end - begin + 1) // 2)


def answer(rank: int) -> None:
    """As rank 0, tell a rank the time."""
    there = torch.zeros(1, dtype=torch.int64)
    dist.recv(there, rank)
    there.fill_(time.time_ns())
    dist.send(there, rank)
