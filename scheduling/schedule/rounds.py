"""Determines which units of a block's passes run together, round after round.

Units run together if the schedule has a program for their combination; a unit without a partner runs by
itself at the begin or at the end of the block, backward passes first.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.units import chunk_units
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Block, Schedule, Side, Sides

Rounds = Callable[[Block], list[Sides]]
"""Function that returns, for a block, the (pass kind, unit) pairs that run together in each round, without
ends."""

_Together = Callable[[Sequence[PassKind]], set[tuple[str, ...]]]
"""Function that returns, for passes of the given kinds, the combinations of units that have a program."""


def rounds(schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...]) -> Rounds:
    """Return a function that tells which units run together in a block of the schedule, round by round.

    ``kinds``: kind of each model layer.
    """
    programs = combinations(schedule)
    return _rounds(lambda passes: programs.get(tuple(passes), set()), layout, kinds, schedule.unit_layers)


def rounds_of_all(
    units: Collection[str], layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int = 0
) -> Rounds:
    """Return the same function as `rounds`, but as if every combination of ``units`` had a program.

    Planning finds out with it which units meet in blocks.
    """
    return _rounds(lambda passes: set(product(units, repeat=len(passes))), layout, kinds, unit_layers)


def _rounds(together: _Together, layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int) -> Rounds:
    rounds_of: dict[tuple[object, ...], list[Sides]] = {}

    def of(block: Block) -> list[Sides]:
        movers = [pass_ for pass_ in block.passes if pass_.kind is not PassKind.END]
        key = tuple((pass_.kind, pass_.chunk) for pass_ in movers)
        if key not in rounds_of:
            units = []
            for pass_ in movers:
                names = [unit.name for unit in chunk_units(layout, kinds, pass_.chunk, unit_layers)]
                units.append(names if pass_.forward else names[::-1])
            passes = [pass_.kind for pass_ in movers]
            rounds_of[key] = [
                tuple(Side(passes[n], units[n][at]) for n, at in enumerate(positions) if at is not None)
                for positions in in_rounds(units, passes, together(passes))
            ]
        return rounds_of[key]

    return of


def combinations(schedule: Schedule) -> dict[tuple[PassKind, ...], set[tuple[str, ...]]]:
    """Return {kinds of the passes: combinations of units for which the schedule has a program}, without
    ends."""
    units: dict[tuple[PassKind, ...], set[tuple[str, ...]]] = {}
    for sides in schedule.programs:
        movers = [side for side in sides if side.kind is not PassKind.END]
        units.setdefault(tuple(side.kind for side in movers), set()).add(tuple(side.unit for side in movers))
    return units


def in_rounds(
    units: Sequence[Sequence[str]], kinds: Sequence[PassKind], together: set[tuple[str, ...]]
) -> Iterator[list[int | None]]:
    """Yield, for each round, the index of the unit that each pass runs, or None for a pass that rests.

    ``units``: each pass's units in running order; ``together``: combinations of units that have a program.
    """
    count = len(units)
    positions = [0] * count
    order = sorted(range(count), key=lambda n: kinds[n] is PassKind.FORWARD)

    def alone(n: int) -> list[int | None]:
        positions[n] += 1
        return [positions[n] - 1 if index == n else None for index in range(count)]

    if count > 1:
        columns = [{combination[n] for combination in together} for n in range(count)]
        for n in order:
            while positions[n] < len(units[n]) and units[n][positions[n]] not in columns[n]:
                yield alone(n)
        while all(positions[n] < len(units[n]) for n in range(count)) and (
            tuple(units[n][positions[n]] for n in range(count)) in together
        ):
            yield [*positions]
            positions = [position + 1 for position in positions]
    for n in order:
        while positions[n] < len(units[n]):
            yield alone(n)
