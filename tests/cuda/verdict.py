"""What the model says of a step."""

from functools import cache
from typing import Any

from tests.cuda.checks import faults_of_logs
from tests.cuda.mutants import Mutant
from tests.cuda.replay import differences, faults_of_orders
from tests.cuda.steps import Case, recorded


def left(case: Case) -> dict[Any, Any]:
    """Losses, norms and states of all ranks, in the order in which the step is recorded."""
    return {key: value for rank in recorded(case)[1] for key, value in rank.left().items()}


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
    found = faults_of_logs(machine)
    if expected is not None and not found:
        left = {key: value for rank in ranks for key, value in rank.left().items()}
        found += [f"{key} is not what it should be" for key in differences(expected, left)]
    return found or (faults_of_orders(machine, range(orders)) if orders else [])
