"""What was decided, as plain containers for the page: schedule, pairing, overlap effectiveness."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_files import NotReadableError, read_text
from braid.scheduling.effectiveness import effectiveness
from braid.scheduling.operations import Compute, PassKind, Start, Wait
from braid.scheduling.profile import Profile, parse_profile
from braid.scheduling.schedule import Program, Schedule, Sides
from braid.scheduling.schedule_text import parse
from braid.scheduling.units import measured_key

_MOST_ACTIONS: Final = 600
_MOST_PAIRS: Final = 4
_MOST_CELLS: Final = 4000


def read_schedule(directory: Path) -> Schedule | None:
    """The run's schedule; None without one, `NotReadableError` for a damaged one."""
    text = read_text(directory / "schedule.txt")
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise NotReadableError(f"schedule.txt: {error}") from None


def read_profile(directory: Path) -> Profile | None:
    """The costs that were planned with; None without them, `NotReadableError` for damaged ones."""
    text = read_text(directory / "profile.json")
    if text is None:
        return None
    try:
        return parse_profile(text, "profile.json")
    except ValueError as error:
        raise NotReadableError(str(error)) from None


def schedule_view(schedule: Schedule, profile: Profile | None) -> dict[str, Any]:
    """The schedule's outline and its longest programs of several passes, operators with their solo times.

    Those of a forward beside a backward pass come first.
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
        "partitions": [str(one) for one in schedule.partitions],
        "pairs": [
            {"sides": [str(side) for side in sides], "actions": _actions(sides, program, profile)}
            for sides, program in several[:_MOST_PAIRS]
        ],
    }


def _actions(sides: Sides, program: Program, profile: Profile | None) -> list[dict[str, Any]]:
    """The program in its order of issue, each operator with what it takes alone."""
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
                "left": side.kind is PassKind.END,
                "ns": solo.get(measured_key(side.unit, operator)),
            }
        )
    return made


def effectiveness_view(profile: Profile) -> dict[str, Any] | None:
    """The table of overlap effectiveness; None where the profile does not say, or says too much."""
    try:
        found = effectiveness(profile)
    except ValueError:
        return None
    cells = len(found.rows) * len(found.columns)
    return asdict(found) if 0 < cells <= _MOST_CELLS else None
