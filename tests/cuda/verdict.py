"""What the model says of a step."""

from functools import cache
from typing import Any

import torch

from tests.cuda.checks import faults_of_communicators, faults_of_memory
from tests.cuda.machine import Machine
from tests.cuda.mutants import Mutant
from tests.cuda.replay import Replay, same
from tests.cuda.steps import Case, recorded


def left(case: Case) -> dict[Any, Any]:
    """Losses, norms and states of all ranks, in the order in which the step is recorded."""
    _, ranks = recorded(case)
    found: dict[Any, Any] = {}
    for rank in ranks:
        found |= {(rank.log.rank, key): value for key, value in rank.found.items()}
        found |= {(rank.log.rank, key): x.detach().clone() for key, x in rank.state().items()}
    return found


@cache
def left_without_faults(case: Case) -> dict[Any, Any]:
    """The same of a case that shows a mutant: whole, it has no fault, or every mutant would be found."""
    wanted = left(case)
    assert faults(case, 0 if case.graph else 3, wanted) == []
    return wanted


def faults_of_mutant(mutant: Mutant) -> list[str]:
    """What is said of a mutant; AssertionError where that is no fault of the runtime's."""
    expected = left_without_faults(mutant.case)
    with mutant.apply():
        found = faults(mutant.case, 30, expected)
    broken = ("TypeError", "AttributeError", "NameError", "AssertionError")
    assert not any(fault.startswith(broken) for fault in found), f"the mutant itself is broken: {found}"
    return found


def faults(case: Case, orders: int = 0, expected: dict[Any, Any] | None = None) -> list[str]:
    """Everything that is wrong with a step: static checks, so many orders, what it should have left."""
    try:
        machine, ranks = recorded(case)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = [fault for log in machine.ranks for fault in faults_of_memory(log)]
    found += faults_of_communicators(machine)
    if expected is not None and not found:
        for rank in ranks:
            for key, value in {**rank.found, **rank.state()}.items():
                wanted = expected[rank.log.rank, key]
                equal = torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
                if not equal:
                    found.append(f"rank {rank.log.rank}: {key} is not what it should be")
    if orders and not found:
        found += faults_of_orders(machine, orders)
    return found


def faults_of_orders(machine: Machine, orders: int) -> list[str]:
    """Orders that cannot run, or leave other bits."""
    try:
        replay = Replay(machine)
        first = replay.run(None)
        return [
            f"order {seed} leaves other bits" for seed in range(orders) if not same(first, replay.run(seed))
        ]
    except RuntimeError as error:
        return [str(error)]
