"""Which units of a block's passes go together, one round after the other.

Those for whose combination the schedule has a program; what has no partner goes by itself, at the begin and
at the end of the block, backward passes first.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.units import chunk_units
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Block, Schedule, Side, Sides

Rounds = Callable[[Block], list[Sides]]
"""Tells which units of a block's passes go together, one round after the other; without ends."""

_Together = Callable[[Sequence[PassKind]], set[tuple[str, ...]]]
"""The units that go together in passes of these kinds."""


def rounds(schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...]) -> Rounds:
    """Those of a schedule; ``kinds``: of the model's layers."""
    known = combinations(schedule)
    return _rounds(lambda passes: known.get(tuple(passes), set()), layout, kinds, schedule.unit_layers)


def rounds_of_all(
    units: Collection[str], layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int = 0
) -> Rounds:
    """Those of a schedule with a program for every combination of ``units``: they show which ones meet."""
    return _rounds(lambda passes: set(product(units, repeat=len(passes))), layout, kinds, unit_layers)


def _rounds(together: _Together, layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int) -> Rounds:
    known: dict[tuple[object, ...], list[Sides]] = {}

    def of(block: Block) -> list[Sides]:
        movers = [one for one in block.passes if one.kind is not PassKind.END]
        key = tuple((one.kind, one.chunk) for one in movers)
        if key not in known:
            units = []
            for one in movers:
                names = [unit.name for unit in chunk_units(layout, kinds, one.chunk, unit_layers)]
                units.append(names if one.forward else names[::-1])
            passes = [one.kind for one in movers]
            known[key] = [
                tuple(Side(passes[n], units[n][at]) for n, at in enumerate(places) if at is not None)
                for places in in_rounds(units, passes, together(passes))
            ]
        return known[key]

    return of


def combinations(schedule: Schedule) -> dict[tuple[PassKind, ...], set[tuple[str, ...]]]:
    """Units that some program has side by side, by the kinds of their passes; ends left out."""
    found: dict[tuple[PassKind, ...], set[tuple[str, ...]]] = {}
    for sides in schedule.programs:
        movers = [side for side in sides if side.kind is not PassKind.END]
        found.setdefault(tuple(side.kind for side in movers), set()).add(tuple(side.unit for side in movers))
    return found


def in_rounds(
    units: Sequence[Sequence[str]], kinds: Sequence[PassKind], together: set[tuple[str, ...]]
) -> Iterator[list[int | None]]:
    """Which units of several passes go together: positions in each, None where a pass has no part."""
    count = len(units)
    places = [0] * count
    order = sorted(range(count), key=lambda n: kinds[n] is PassKind.FORWARD)

    def alone(n: int) -> list[int | None]:
        places[n] += 1
        return [places[n] - 1 if other == n else None for other in range(count)]

    if count > 1:
        columns = [{one[n] for one in together} for n in range(count)]
        for n in order:
            while places[n] < len(units[n]) and units[n][places[n]] not in columns[n]:
                yield alone(n)
        while all(places[n] < len(units[n]) for n in range(count)) and (
            tuple(units[n][places[n]] for n in range(count)) in together
        ):
            yield [*places]
            places = [place + 1 for place in places]
    for n in order:
        while places[n] < len(units[n]):
            yield alone(n)
