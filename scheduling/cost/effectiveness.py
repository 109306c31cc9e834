"""Overlap effectiveness (DHelix equation 1) of layers' compute operators with communication, as a table."""

from dataclasses import dataclass

from braid.scheduling.cost.profile import Profile


@dataclass(frozen=True)
class Measured:
    """An operator and its solo time in ns; ``alike``: further collectives with equal effects."""

    name: str
    ns: int
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effectiveness:
    """A table of compute operators (rows) and communication (columns); values from 1 (hidden) to -1."""

    source: str
    rows: tuple[Measured, ...]
    columns: tuple[Measured, ...]
    values: tuple[tuple[float, ...], ...]


def effectiveness(profile: Profile) -> Effectiveness:
    """Return the table of layers' operators; pairs that were not measured have their classes' value.

    `ValueError` where the profile has neither.
    """
    # Pieces of operators are timed alone and have no class, and so no row.
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
