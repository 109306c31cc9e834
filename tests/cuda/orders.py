"""Orders in which the kernels that are ready take the free slots of their devices."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.cuda.actions import Call


@dataclass(frozen=True)
class Order:
    """Which of the kernels that are ready takes a free slot: the one with the least `key`."""

    name: str
    number: int = 0
    """Of the rank that is ``ahead``, else the seed of what is left to chance."""

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def keys(self) -> Callable[[int, Call, int, bool], float]:
        """A key of a kernel: its rank, call, number among its rank's, and whether nobody runs it yet."""
        chance = random.Random(self.number).random
        match self.name:
            case "first issued":
                return lambda rank, call, issued, alone: issued
            case "last issued":
                return lambda rank, call, issued, alone: -issued
            case "messages first":
                return lambda rank, call, issued, alone: issued - 1e9 * (call.peer is not None)
            case "messages last":
                return lambda rank, call, issued, alone: issued + 1e9 * (call.peer is not None)
            case "by turns":
                return lambda rank, call, issued, alone: issued - 1e9 * ((call.peer is not None) == rank % 2)
            case "alone first":
                return lambda rank, call, issued, alone: chance() - alone
            case "ahead":
                return lambda rank, call, issued, alone: chance() - alone - 9 * (rank == self.number)
        return lambda rank, call, issued, alone: chance()


FIRST_ISSUED = Order("first issued")


def orders(ranks: int, seeds: int) -> Iterator[Order]:
    """Greedy orders, and random ones; ``alone first`` and ``ahead`` (one rank before all others) fill slots
    with what has to wait."""
    yield from map(Order, ("first issued", "last issued", "messages first", "messages last", "by turns"))
    yield from (Order("ahead", rank) for rank in range(ranks))
    yield from (Order(name, seed) for seed in range(seeds) for name in ("alone first", "random"))
