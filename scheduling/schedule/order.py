"""Orders in which operators are issued, from which programs are made, and their form in plans.

An order belongs to the passes of one program (`Sides`). Its steps are operators in the order of issue, and
barriers; or segments: operators of every pass that run together, with a barrier behind each segment of
several passes. As text:

    F:layer|B:layer: [0:qkv, 1:mlp_out.dgrad, barrier, 0:attention, ...]
    F:layer|B:layer: [qkv attention | mlp_scatter.grad, ...]
    B:layer: [mlp_out.dgrad, ...]
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from braid.scheduling.schedule.operations import Barrier
from braid.scheduling.schedule.schedule import Sides
from braid.scheduling.schedule.text import parse_sides, parse_step, write_sides, write_step


class Issue(NamedTuple):
    """Step of an order: issue an operator of the program's pass number ``turn``."""

    turn: int
    operator: str


class OrderSegment(NamedTuple):
    """Step of an order: operators that run together between two barriers, one tuple of names per pass."""

    operators: tuple[tuple[str, ...], ...]

    @property
    def issues(self) -> tuple[Issue, ...]:
        """The segment's operators one by one; those of later passes come first, since a backward pass frees
        memory."""
        numbered = list(enumerate(self.operators))
        return tuple(Issue(turn, name) for turn, names in reversed(numbered) for name in names)


Order = tuple[Issue | OrderSegment | Barrier, ...]
Orders = Mapping[Sides, Order]


def write_orders(orders: Orders) -> dict[str, list[str]]:
    """Return orders in the form of a plan: the text of a program's passes -> list of its steps as texts."""
    return {
        write_sides(sides): [_written(step, len(sides)) for step in order] for sides, order in orders.items()
    }


def _written(step: Issue | OrderSegment | Barrier, passes: int) -> str:
    match step:
        case Issue(turn, operator):
            return write_step(turn, operator, several=passes > 1)
        case OrderSegment(operators):
            return " | ".join(map(" ".join, operators)).strip()
        case Barrier():
            return "barrier"


def parse_orders(content: Any, where: str = "orders") -> dict[Sides, Order]:
    """Parse the result of `write_orders`; raise `ValueError` that names the wrong key below ``where``."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}={content!r} must hold keys and values")
    orders = {}
    for key, steps in content.items():
        if not isinstance(steps, list | tuple) or not all(isinstance(step, str) for step in steps):
            raise ValueError(f"{where}.{key}={steps!r} must be a list of steps")
        try:
            sides = parse_sides(str(key))
            orders[sides] = tuple(_parsed(step, len(sides)) for step in steps)
        except ValueError as error:
            raise ValueError(f"{where}.{key}: {error}") from None
    return orders


def _parsed(step: str, passes: int) -> Issue | OrderSegment | Barrier:
    if step == "barrier":
        return Barrier()
    if "|" not in step and " " not in step:
        return Issue(*parse_step(step, passes))
    columns = tuple(tuple(column.split()) for column in step.split("|"))
    if len(columns) != passes:
        raise ValueError(f"segment {step!r} must be written 'OPERATORS | OPERATORS', one per pass")
    return OrderSegment(columns)
