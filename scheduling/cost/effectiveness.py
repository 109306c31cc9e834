"""Overlap effectiveness (DHelix equation 1) of layers' compute operators beside communication, as a table."""

from dataclasses import dataclass

from braid.scheduling.cost.profile import Profile


@dataclass(frozen=True)
class Measured:
    """An operator with its solo time; alike: further collectives with equal effects."""

    name: str
    ns: int
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effectiveness:
    """Compute operators (rows) beside communication (columns): from 1, hidden at no cost, to -1."""

    source: str
    rows: tuple[Measured, ...]
    columns: tuple[Measured, ...]
    values: tuple[tuple[float, ...], ...]


def effectiveness(profile: Profile) -> Effectiveness:
    """The table of layers' operators; pairs that were not measured alone have the value of their classes.

    `ValueError` where the profile does not say.
    """
    # Pieces of operators are timed alone and have no class: they have no row.
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
            Measured(names[first], profile.solo_ns[first], tuple(names[key] for key in more))
            for first, *more in alike.values()
        ),
        tuple(zip(*alike, strict=True)),
    )
