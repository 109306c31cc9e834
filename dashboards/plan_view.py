"""Converts decisions to plain containers for the page: schedule, pairing, overlap effectiveness."""

from dataclasses import asdict
from typing import Any, Final

from braid.scheduling.cost.effectiveness import effectiveness
from braid.scheduling.cost.profile import Profile
from braid.scheduling.schedule.operations import Compute, Start, Wait
from braid.scheduling.schedule.schedule import Program, Schedule, Sides
from braid.scheduling.schedule.text import operator_key

_MOST_ACTIONS: Final = 600
_MOST_PAIRS: Final = 4
_MOST_CELLS: Final = 4000


def schedule_view(schedule: Schedule, profile: Profile | None) -> dict[str, Any]:
    """Return the schedule's outline and its longest programs of several passes, with operators' solo times.

    Programs of a forward beside a backward pass come first.
    """
    several = [(sides, program) for sides, program in schedule.programs.items() if len(sides) > 1]
    several.sort(key=lambda item: (len({side.kind.direction for side in item[0]}) == 1, -len(item[1])))
    return {
        "name": schedule.name,
        "stages": len(schedule.stages),
        "chunks": schedule.chunks,
        "micro_batches": schedule.micro_batches,
        "strands": [strand.value for strand in schedule.strands],
        "unit_layers": schedule.unit_layers,
        "partitions": [str(partition) for partition in schedule.partitions],
        "pairs": [
            {"sides": [str(side) for side in sides], "actions": _actions(sides, program, profile)}
            for sides, program in several[:_MOST_PAIRS]
        ],
    }


def _actions(sides: Sides, program: Program, profile: Profile | None) -> list[dict[str, Any]]:
    """Return a program's actions in order of issue, each operator with its solo time."""
    solo = {} if profile is None else profile.solo_ns
    made: list[dict[str, Any]] = []
    for action in program[:_MOST_ACTIONS]:
        if not isinstance(action, Compute | Start | Wait):
            made.append({"verb": "barrier"})
            continue
        side, operator = sides[action.turn], str(action.what)
        made.append(
            {
                "verb": type(action).__name__.lower(),
                "operator": operator,
                "turn": action.turn,
                "side": side.kind.value,
                "stream": action.stream.value if isinstance(action, Start) and action.stream else None,
                "ns": solo.get(str(operator_key(side.unit, operator))),
            }
        )
    return made


def effectiveness_view(profile: Profile) -> dict[str, Any] | None:
    """Return the table of overlap effectiveness; None if the profile does not have it, or it is too large."""
    try:
        table = effectiveness(profile)
    except ValueError:
        return None
    cells = len(table.rows) * len(table.columns)
    return asdict(table) if 0 < cells <= _MOST_CELLS else None
