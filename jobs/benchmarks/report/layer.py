"""Verdicts from the benchmark of one GPU (`braid.jobs.benchmarks.gpu`): bits, speed, predictions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from braid.jobs.benchmarks.gpu import FULL, QUICK, check_device, run, show
from braid.jobs.benchmarks.gpu_schedules import ScheduleTable, ScheduleTime
from braid.jobs.benchmarks.report.claims import GAINS, GRAPH_BITS, LAYER_BITS, NO_SLOWER, PREDICTED
from braid.jobs.benchmarks.report.findings import Finding, Sheet, Task, found, not_measured, timed

OURS: Final = "braid"
OTHERS: Final = ("wavelet", "dhelix")
NOISE: Final = 0.02
"""Times that differ by less are the same: so far medians of a few rounds are apart."""
NEAR: Final = 0.10
"""A prediction may be off by so much."""
_LEAST_COPIES: Final = 0.03
"""With a smaller share of communication in the serial schedule there is nothing to hide."""


def measure(task: Task, sheet: Sheet) -> None:
    """Run the benchmark without its two processes: the report has a part for ranks."""
    result = run(
        device=check_device(task.device), sizes=QUICK if task.quick else FULL, seed=task.seed, ranks=False
    )
    sheet.table("All tables of the benchmark", show(result).splitlines())
    sheet.data("benchmark", result.as_json())
    sheet.find(*verdicts(result.schedules, task.no_clock))


def verdicts(table: ScheduleTable, no_clock: str) -> Iterator[Finding]:
    """All verdicts; ``no_clock``: why times mean nothing, empty where they do."""
    for one in table.schedules:
        yield from _bits(one)
        if one.predicted_ns is not None:
            yield _predicted(one, no_clock)
    times = {one.schedule: one.eager_ns for one in table.schedules}
    if OURS in times:
        yield from no_slower(NO_SLOWER, times, no_clock)
        yield _gain(table, no_clock)
    for name, why in table.left_out.items():
        yield from (not_measured(claim, why, name) for claim in (LAYER_BITS, GRAPH_BITS, PREDICTED))
        if name == OURS:
            yield from (not_measured(claim, why) for claim in (NO_SLOWER, GAINS))


def _bits(one: ScheduleTime) -> Iterator[Finding]:
    check, name = one.check, one.schedule
    yield found(
        LAYER_BITS,
        check.repeatable and check.like_serial,
        name,
        numbers={
            "repeatable": check.repeatable,
            "like_serial": check.like_serial,
            "largest_difference": check.largest_difference,
        },
    )
    if check.graph_equal is None:
        yield not_measured(GRAPH_BITS, one.graph_note or "there is no graph", name)
    else:
        numbers = {"graph_ns": one.graph_ns, "eager_ns": one.eager_ns}
        yield found(GRAPH_BITS, check.graph_equal, name, numbers=numbers)


def _predicted(one: ScheduleTime, no_clock: str) -> Finding:
    assert one.predicted_ns is not None
    off = one.predicted_ns / one.eager_ns - 1
    numbers = {"predicted_ns": one.predicted_ns, "measured_ns": one.eager_ns, "off": round(off, 4)}
    return timed(PREDICTED, abs(off) <= NEAR, no_clock, one.schedule, numbers=numbers)


def no_slower(
    claim: str, times_ns: Mapping[str, int], no_clock: str, others: Sequence[str] = OTHERS
) -> Iterator[Finding]:
    """Ours against each of the others; ``times_ns``: by schedule."""
    ours = times_ns[OURS]
    for name in others:
        if name in times_ns:
            numbers = {"braid_ns": ours, "other_ns": times_ns[name], "speed_up": times_ns[name] / ours}
            yield timed(
                claim, ours <= times_ns[name] * (1 + NOISE), no_clock, f"than {name}", numbers=numbers
            )


def _gain(table: ScheduleTable, no_clock: str) -> Finding:
    serial = table.serial()
    ours = next(one for one in table.schedules if one.schedule == OURS)
    share = serial.communication_ns / serial.eager_ns
    numbers = {
        "speed_up": serial.eager_ns / ours.eager_ns,
        "limit": serial.eager_ns / table.limit_ns if table.limit_ns else None,
        "share_of_copies": share,
        "hidden": ours.hidden_fraction,
        "graph_ns": ours.graph_ns,
    }
    if share < _LEAST_COPIES and not no_clock:
        return not_measured(GAINS, "the copies take too small a share", numbers=numbers)
    return timed(GAINS, ours.eager_ns < serial.eager_ns, no_clock, numbers=numbers)
