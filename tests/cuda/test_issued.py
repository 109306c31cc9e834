"""What the runtime really issues, against what is said of it without torch (`tests.cuda.issued`)."""

import pytest

from tests.cuda.entries import Kernel
from tests.cuda.issued import Start, issued
from tests.cuda.log import RankLog
from tests.cuda.steps import Case, recorded

Issued = tuple[str, tuple[int, ...], int | None]
"""A kernel: what it is, its members, and the elements of this rank's part; of sums, None."""


def by_the_runtime(log: RankLog) -> list[Issued]:
    """In the host's order."""
    found: list[Issued] = []
    for call in (entry.call for entry in log.entries if isinstance(entry, Kernel)):
        if call.kind != "messages":
            found.append((call.kind, call.of.ranks, None if call.kind == "all_reduce" else call.shape[1]))
        for (kind, peer, _), (_, elements) in zip(call.peers, call.shape, strict=False):
            found.append((kind, tuple(sorted((log.rank, call.of.ranks[peer]))), elements))
    return found


def as_said(program: list[object], rank: int) -> list[Issued]:
    """The same of a program."""
    found: list[Issued] = []
    for call in (call for action in program if isinstance(action, Start) for call in action.calls):
        members = call.group.ranks if call.peer is None else tuple(sorted((rank, call.peer)))
        found.append((call.kind, members, None if call.kind == "all_reduce" else call.elements))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(schedule="wavelet", tp=2),
        Case(schedule="interleaved", pp=2, dp=2),
        Case(schedule="braid:w", tp=2, pp=2, ends=True),
        Case(schedule="intra_batch", tp=2, pp=2, dp=2),
        Case(schedule="dhelix", tp=2, pp=2, gpt=True),
        Case(schedule="ddp", tp=2, dp=2),
        Case(schedule="ddp", tp=2, dp=2, zero=1),
        Case(schedule="megatron", pp=2, dp=2, zero=1),
        Case(schedule="ddp", tp=2, dp=2, zero=2, least=4096),
        Case(schedule="ddp", tp=2, dp=2, zero=3, least=4096),
        Case(schedule="megatron", pp=2, dp=2, zero=3, least=4096, tied=True),
        Case(schedule="megatron:folded", pp=2, dp=2, zero=2, tied=True),
        Case(schedule="braid:w", tp=2, pp=2, dp=2, zero=3, ends=True),
        Case(schedule="ddp", dp=4, zero=3, shards=2, least=4096),
        Case(schedule="braid:together_2", dp=2),
        Case(schedule="braid:v", pp=2, dp=2),
        Case(schedule="megatron", cp=2),
        Case(schedule="dhelix", cp=4, ring=True),
        Case(schedule="wavelet", tp=2, cp=2, ring=True),
        Case(schedule="expert_overlap", pp=2, dp=2, ep=2, capacity=True),
        Case(schedule="braid:w", tp=2, dp=2, ep=2, capacity=True),
        Case(schedule="megatron", dp=4, ep=2, capacity=True, zero=3, least=4096),
        Case(schedule="ddp", dp=2, cp=2, ep=2, capacity=True, zero=2, least=4096),
    ],
    ids=lambda case: case.name,
)
def test_the_runtime_issues_what_is_said_of_it(case: Case) -> None:
    machine, _ = recorded(case)
    with case.cut():
        programs = issued(case.code, case.shape)
    for log in machine.ranks:
        assert by_the_runtime(log) == as_said(list(programs[log.rank]), log.rank), log.rank
