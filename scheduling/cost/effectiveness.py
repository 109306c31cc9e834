"""Tabulates the overlap effectiveness (DHelix equation 1) of layers' compute operators with communication."""

from dataclasses import dataclass

from braid.scheduling.cost.profile import Profile


@dataclass(frozen=True)
class Measured:
    """Row or column of the table: an operator's name and solo time in ns.

    ``alike``: names of other collectives with the same values, which share the column.
    """

    name: str
    ns: int
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effectiveness:
    """Table of overlap effectiveness: compute operators (rows) by collectives (columns).

    ``values``: one tuple per row; 1 means hidden entirely, 0 no gain, below 0 a loss. ``source``: the
    profile's.
    """

    source: str
    rows: tuple[Measured, ...]
    columns: tuple[Measured, ...]
    values: tuple[tuple[float, ...], ...]


def effectiveness(profile: Profile) -> Effectiveness:
    """Return the table for the layers' operators in a profile.

    Pairs that were not measured have the value of their classes. Raises `ValueError` if that is missing too.
    """
    # Pieces of operators are timed only alone and have no class, so they get no row.
    names = {key: name for key, name in profile.layer_operators.items() if key in profile.classes}
    links = [key for key in names if profile.classes.get(key) in ("intra", "inter")]
    compute = [key for key in names if key not in links and profile.solo_ns[key] > 0]
    alike: dict[tuple[float, ...], list[str]] = {}
    for link in links:
        alike.setdefault(tuple(profile.effect(row, link) for row in compute), []).append(link)
    return Effectiveness(
        profile.source,
        tuple(Measured(names[key], profile.solo_ns[key]) for key in compute),
        tuple(
            Measured(names[first], profile.solo_ns[first], tuple(names[key] for key in others))
            for first, *others in alike.values()
        ),
        tuple(zip(*alike, strict=True)),
    )
