"""Differences between the hosts' clocks, so that all spans share one time axis.

NTP makes hosts agree to milliseconds; a trace needs microseconds. The first rank of every host asks rank 0
for the time, as NTP does: rank 0 reads its clock between question and reply, so the error is at most half of
the time between them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from braid.actors.stage.rank.groups import Groups

_QUESTIONS = 16
"""Number of questions that each host asks; the reply that arrived soonest counts."""


@dataclass(frozen=True)
class Difference:
    """Difference of two clocks and its uncertainty, in nanoseconds."""

    ahead_ns: int
    unsure_ns: int

    @property
    def told_ns(self) -> int:
        """The difference of the clocks in nanoseconds; 0 if it is within the uncertainty."""
        return self.ahead_ns if abs(self.ahead_ns) > self.unsure_ns else 0


def clock_ahead_ns(rank: int, hosts: Sequence[str], groups: Groups | None) -> int:
    """Return by how many nanoseconds this host's clock is ahead of rank 0's. All ranks call it together.

    Messages go over the default group, on the CPU.
    """
    firsts = sorted(hosts.index(host) for host in set(hosts))
    if len(firsts) < 2 or groups is None:
        return 0
    ahead_ns = 0
    for asking in firsts[1:]:
        if rank == asking:
            ahead_ns = min(
                (ask() for _ in range(_QUESTIONS)), key=lambda difference: difference.unsure_ns
            ).told_ns
        elif rank == 0:
            for _ in range(_QUESTIONS):
                answer(asking)
    of_firsts = groups.gather(ahead_ns)
    return int(of_firsts[hosts.index(hosts[rank])])


def ask() -> Difference:
    """Ask rank 0 for the time; return how far this host's clock is ahead."""
    begin = time.time_ns()
    answer_ns = torch.zeros(1, dtype=torch.int64)
    dist.send(answer_ns, 0)
    dist.recv(answer_ns, 0)
    end = time.time_ns()
    return Difference((begin + end) // 2 - int(answer_ns), (end - begin + 1) // 2)


def answer(rank: int) -> None:
    """Answer one question of rank ``rank`` with the time; called by rank 0."""
    answer_ns = torch.zeros(1, dtype=torch.int64)
    dist.recv(answer_ns, rank)
    answer_ns.fill_(time.time_ns())
    dist.send(answer_ns, rank)
