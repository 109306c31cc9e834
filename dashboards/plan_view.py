"""What was decided, as plain containers for the page: schedule, pairing, overlap effectiveness."""

from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_files import NotReadableError, read_text
from braid.scheduling.fusion import split_place
from braid.scheduling.profile import Profile, parse_profile
from braid.scheduling.schedule import Barrier, Direction, PairProgram, Schedule, Start, Wait, is_late
from braid.scheduling.schedule_parser import parse

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
    """The schedule's outline and its longest pair programs, operators with their solo times."""
    longest = sorted(schedule.pairs.items(), key=lambda item: -len(item[1]))[:_MOST_PAIRS]
    return {
        "name": schedule.name,
        "stages": len(schedule.stages),
        "chunks": schedule.chunks,
        "micro_batches": schedule.micro_batches,
        "strands": [strand.value for strand in schedule.strands],
        "fused": schedule.fused,
        "split": schedule.split,
        "pairs": [
            {"forward": names[0], "backward": names[1], "actions": _actions(names, program, profile)}
            for names, program in longest
        ],
    }


def _actions(names: tuple[str, str], program: PairProgram, profile: Profile | None) -> list[dict[str, Any]]:
    """The program in its order of issue, each operator with what it takes alone."""
    solo = {} if profile is None else profile.solo_ns
    made: list[dict[str, Any]] = []
    for action in program[:_MOST_ACTIONS]:
        if isinstance(action, Barrier):
            made.append({"verb": "barrier"})
            continue
        part = names[0 if action.side is Direction.FORWARD else 1]
        verb = "start" if isinstance(action, Start) else "wait" if isinstance(action, Wait) else "compute"
        made.append(
            {
                "verb": verb,
                "operator": action.operator,
                "side": None if action.side is None else action.side.value,
                "stream": action.stream.value if isinstance(action, Start) else None,
                "late": is_late(action),
                "ns": solo.get(_key(part, action.operator)),
            }
        )
    return made


def _key(part: str, operator: str) -> str:
    name = operator.removesuffix(".again")
    place = split_place(name)
    return f"{part}/{name}" if place is None else f"{place[1]}/{place[2]}"


def effectiveness_view(profile: Profile, part: str = "layer") -> dict[str, Any] | None:
    """Overlap effectiveness (DHelix equation 1) of a layer's compute operators (rows) beside communication.

    Collectives with equal effects are one column. None where the profile does not say.
    """
    keys = [key for key in profile.solo_ns if key.startswith(f"{part}/")]
    links = [key for key in keys if profile.classes.get(key) in ("intra", "inter")]
    compute = [key for key in keys if key not in links and profile.solo_ns[key] > 0]
    alike: dict[tuple[float, ...], list[str]] = {}
    try:
        for link in links:
            alike.setdefault(tuple(profile.effect(row, link) for row in compute), []).append(link)
    except ValueError:
        return None
    if not compute or not alike or len(compute) * len(alike) > _MOST_CELLS:
        return None
    return {
        "source": profile.source,
        "rows": [{"name": key.partition("/")[2], "ns": profile.solo_ns[key]} for key in compute],
        "columns": [
            {
                "name": same[0].partition("/")[2],
                "alike": [key.partition("/")[2] for key in same[1:]],
                "ns": profile.solo_ns[same[0]],
            }
            for same in alike.values()
        ],
        "values": [list(row) for row in zip(*alike, strict=True)],
    }
