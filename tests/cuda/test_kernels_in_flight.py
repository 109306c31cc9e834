"""The model finds what is made up to be wrong, and says where."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.cuda.actions import Action, Call, Compute, Group, Start, Synchronise, Wait, unequal
from tests.cuda.kernels_in_flight import deadlock
from tests.cuda.programs import EAGER, EXPERTS, programs

PAIR, OTHER = Group("pair", (0, 1)), Group("other", (0, 1))


def summed(name: str, group: Group = PAIR, elements: int = 8, side: str = "") -> list[Action]:
    """A sum, waited for at once."""
    return [Start(name, side or group.name, (Call("all_reduce", group, elements, what=name),)), Wait(name)]


def message(kind: str, name: str, peer: int) -> Start:
    """A message that one rank sends to the other, on a channel for each direction."""
    group = Group("down" if (kind == "send") is (peer == 1) else "up", (0, 1))
    return Start(name, f"{kind} {group.name}", (Call(kind, group, 8, peer),))


def test_two_communicators_used_in_opposite_orders() -> None:
    """Each on a side stream of its own they stand where one kernel finds room, on a common one always."""
    (a, wait_a), (b, wait_b) = summed("a", PAIR), summed("b", OTHER)
    apart = [a, b, wait_a, wait_b], [b, a, wait_b, wait_a]
    assert unequal(apart) is None
    assert deadlock(apart, replace(EAGER, slots=2)) is None
    assert deadlock(apart, replace(EAGER, slots=1)) == (
        "a circle (eager, 1 slots (first issued 0)):\n"
        "  rank 0: a (all_reduce of 8 on pair) runs until rank 1 runs a (all_reduce of 8 on pair)\n"
        "  rank 1: a (all_reduce of 8 on pair) finds no slot free beside b (all_reduce of 8 on other)\n"
        "  rank 1: b (all_reduce of 8 on other) runs until rank 0 runs b (all_reduce of 8 on other)\n"
        "  rank 0: b (all_reduce of 8 on other) finds no slot free beside a (all_reduce of 8 on pair)"
    )
    first, second = summed("a", PAIR, side="common"), summed("b", OTHER, side="common")
    assert deadlock([[*first, *second], [*second, *first]], EAGER) is not None


def test_two_issues_swapped_on_one_rank() -> None:
    a, b = summed("a", elements=8), summed("b", elements=16)
    assert unequal([[*a, *b], [*b, *a]]) == (
        "call 0: rank 0 issues all_reduce of 8 on pair: a, rank 1 issues all_reduce of 16 on pair: b"
    )
    alike = summed("c", elements=8)
    assert unequal([[*a, *alike], [*alike, *a]]) is not None, "NCCL would mix up their data"


def test_an_issue_that_is_left_out_or_of_another_size() -> None:
    a, b = summed("a"), summed("b")
    assert (
        unequal([[*a, *b], a])
        == "call 1: rank 0 issues all_reduce of 8 on pair: b, rank 1 issues nothing more"
    )
    assert deadlock([[*a, *b], a], EAGER) == (
        "no end (eager):\n"
        "  rank 0: computation waits for b\n"
        "  rank 0: b (all_reduce of 8 on pair) runs until rank 1 issues its part\n"
        "  rank 1: its host has issued everything"
    )
    assert unequal([a, summed("a", elements=9)]) == (
        "call 0: rank 0 issues all_reduce of 8 on pair: a, rank 1 issues all_reduce of 9 on pair: a"
    )


def test_a_receive_issued_after_what_it_feeds() -> None:
    sends = [message("send", "x", 1), Wait("x"), Synchronise("the end")]
    late = [Wait("x"), Compute("reads x"), message("receive", "x", 0), Synchronise("the end")]
    assert deadlock([sends, late], EAGER) == (
        "no end (eager):\n"
        "  rank 0: its host waits for the end\n"
        "  rank 0: computation waits for x\n"
        "  rank 0: x (send to rank 1 of 8 on down) runs until rank 1 issues its part\n"
        "  rank 1: its host waits for x, which it has not issued"
    )


def test_an_answer_awaited_before_the_question() -> None:
    """Each rank waits for what it receives before it sends what the other one waits for."""
    ranks = [
        [message("receive", "y", 1), Wait("y"), Compute("reads y"), message("send", "x", 1), Wait("x")],
        [message("receive", "x", 0), Wait("x"), Compute("reads x"), message("send", "y", 0), Wait("y")],
    ]
    found = deadlock(ranks, EAGER)
    assert found is not None
    assert found.startswith("a circle")
    assert "rank 0: computation waits for y" in found
    assert "rank 1: computation waits for x" in found


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("megatron", {"tp": 2}),
        ("dualpipev", {"tp": 2}),
        ("megatron", {"cp": 4, "context": "ring"}),
        ("expert_overlap", {"dp": 2, "ep": 2, "model": EXPERTS}),
    ],
    ids=["tp", "tp of a V", "ring", "experts"],
)
def test_every_start_that_one_rank_leaves_out_or_swaps_is_found(name: str, over: dict[str, Any]) -> None:
    """Of the ranks of one stage, one issues otherwise than the linked code says. A collective that changes
    places with messages is equal to the others' of its kind, and stands still."""
    ranks = [*programs(name, 2, 4, **over)]
    own = [*ranks[1]]
    starts = [n for n, action in enumerate(own) if isinstance(action, Start)]
    for place, at in enumerate(starts[::5]):
        start = own[at]
        assert isinstance(start, Start)
        gone = Wait(start.name)
        ranks[1] = [action for action in own if action not in (start, gone)]
        assert unequal(ranks) is not None, start
        assert place % 4 or deadlock(ranks, EAGER) is not None, start
    alike = [(a, b) for a, b in pairwise(starts) if on(own[a]) == on(own[b])]
    assert len(alike) > 15
    for a, b in alike[::5]:
        ranks[1] = [*own]
        ranks[1][a], ranks[1][b] = own[b], own[a]
        assert unequal(ranks) is not None or deadlock(ranks, EAGER) is not None, own[a]


def on(action: Action) -> Group:
    """The group of what a start issues."""
    assert isinstance(action, Start)
    return action.calls[0].group


def test_nothing_here_loads_torch() -> None:
    told = "import sys, tests.cuda.issued, tests.cuda.profiled; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
