"""Which runs of a block's passes go together, one round after the other.

Those for whose combination the schedule has a program; what has no partner goes by itself, at the begin and
at the end of the block, backward passes first.
"""

from collections.abc import Callable, Iterator, Sequence

from braid.scheduling.fusion import chunk_runs
from braid.scheduling.schedule import Block, PassKind, Schedule, Side, Sides
from braid.scheduling.spec import ParallelLayout


def rounds(schedule: Schedule, layout: ParallelLayout, layers: int) -> Callable[[Block], list[Sides]]:
    """What tells which runs of a block's passes go together, one round after the other; without ends."""
    known_together = combinations(schedule)
    known: dict[tuple[object, ...], list[Sides]] = {}

    def of(block: Block) -> list[Sides]:
        movers = [one for one in block.passes if one.kind is not PassKind.END]
        key = tuple((one.kind, one.chunk) for one in movers)
        if key not in known:
            runs = []
            for one in movers:
                names = [run.name for run in chunk_runs(layout, layers, one.chunk, schedule.fused)]
                runs.append(names if one.forward else names[::-1])
            kinds = [one.kind for one in movers]
            known[key] = [
                tuple(Side(kinds[n], runs[n][at]) for n, at in enumerate(places) if at is not None)
                for places in in_rounds(runs, kinds, known_together.get(tuple(kinds), set()))
            ]
        return known[key]

    return of


def combinations(schedule: Schedule) -> dict[tuple[PassKind, ...], set[tuple[str, ...]]]:
    """Runs that some program has side by side, by the kinds of their passes; ends left out."""
    found: dict[tuple[PassKind, ...], set[tuple[str, ...]]] = {}
    for sides in schedule.programs:
        movers = [side for side in sides if side.kind is not PassKind.END]
        found.setdefault(tuple(side.kind for side in movers), set()).add(tuple(side.run for side in movers))
    return found


def in_rounds(
    runs: Sequence[Sequence[str]], kinds: Sequence[PassKind], together: set[tuple[str, ...]]
) -> Iterator[list[int | None]]:
    """Which runs of several passes go together: positions in each, None where a pass has no part."""
    count = len(runs)
    places = [0] * count
    order = sorted(range(count), key=lambda n: kinds[n] is PassKind.FORWARD)

    def alone(n: int) -> list[int | None]:
        places[n] += 1
        return [places[n] - 1 if other == n else None for other in range(count)]

    if count > 1:
        columns = [{one[n] for one in together} for n in range(count)]
        for n in order:
            while places[n] < len(runs[n]) and runs[n][places[n]] not in columns[n]:
                yield alone(n)
        while all(places[n] < len(runs[n]) for n in range(count)) and (
            tuple(runs[n][places[n]] for n in range(count)) in together
        ):
            yield [*places]
            places = [place + 1 for place in places]
    for n in order:
        while places[n] < len(runs[n]):
            yield alone(n)
