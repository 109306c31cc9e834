"""The space that planning searches: schedules, and the choices that each leaves open."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from braid.scheduling.generate.named import PIPELINES, SCHEDULES, PairMethod, ScheduleName
from braid.scheduling.generate.partitions import WAYS, mega_scale
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import Placement

AUTO = "auto"
"""Name that a user sets as schedule so that all of `searched_schedules` are compared."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Limits on which of a schedule's open choices planning tries."""

    unit_layers: tuple[int, ...] = (0, 4)
    """Values to try for the most layers in a unit (0: every part is a unit). A search of about a second
    orders units of 4 layers well."""
    every_pipeline: bool = True
    """Whether to try all pipelines; else only the first one, with the usual hop and whole collectives."""


EVERYTHING = Space()
PART_BY_PART = Space(unit_layers=(0,))
"""Space for modelled clusters, without units of several layers: ordering each takes seconds."""
COARSE = Space(unit_layers=(0,), every_pipeline=False)
"""Space for ranking many layouts quickly: one pipeline, no units of several layers."""


def searched_schedules(setting: Setting) -> Iterator[Setting]:
    """Yield the setting under every schedule that suits its layout and batch; ``auto`` compares these.

    Schedules whose pipelines planning does not search are yielded once for each of their pipelines.
    """
    layout = setting.layout
    for name, kind in SCHEDULES.items():
        if layout.tp == 1 and kind.cuts_collectives:
            continue  # nothing to cut
        if layout.ep == 1 and kind.pairs is PairMethod.EXCHANGES:
            continue  # nothing to exchange
        if layout.data_ranks == 1 and name == "ddp":
            continue  # nothing to sum over replicas
        further = () if kind.searched or layout.pp == 1 else kind.more  # the same on one stage
        for named in (ScheduleName(name, pipeline) for pipeline in ("", *further)):
            if layout.pp == 1 and named.placement_on(1) is not Placement.LINEAR:
                continue  # pipelines of one stage are all the same
            with suppress(ValueError):  # this layout or number of micro-batches has no such schedule
                yield with_schedule(setting, named)


def with_schedule(setting: Setting, name: ScheduleName | str) -> Setting:
    """Return the setting under another schedule, with the placement of chunks that the schedule needs.

    Units, partitions and bucket distances are reset. ``name``: a `ScheduleName` or its text.
    """
    schedule, pipeline, hop = named = ScheduleName.parse(str(name))
    return replace(
        setting,
        schedule=schedule,
        layout=replace(setting.layout, placement=named.placement_on(setting.layout.pp)),
        pipeline=pipeline,
        partitions=(),
        unit_layers=0,
        hop=hop,
        distances=(0, 0),
    )


def variants(setting: Setting, space: Space) -> Iterator[Setting]:
    """Yield the setting once for each combination of its schedule's open choices.

    Choices: pipeline, slots of time per message (hop), pieces of collectives, layers of a unit, and how many
    buckets early gathers start.
    """
    kind, layout = setting.kind, setting.layout
    partitions = [setting.partitions]
    if kind.cuts_collectives and not setting.partitions and layout.tp > 1:
        partitions = [mega_scale(ways) for ways in WAYS if ways <= setting.sizes().local_tokens]
    lengths = (setting.unit_layers,) if setting.unit_layers or not kind.searched else space.unit_layers
    pipelines = (setting.pipeline,) if setting.pipeline else kind.pipelines_on(layout) or kind.pipelines[:1]
    distances: tuple[tuple[int, int], ...] = (setting.distances,)
    if space.every_pipeline:
        distances = kind.distances(layout.zero)
    else:
        pipelines = pipelines[:1]
    for cut, length, pipeline in product(partitions, lengths, pipelines):
        any_hop = layout.pp > 1 and not setting.hop and space.every_pipeline
        for hop, ahead in product(PIPELINES[pipeline].hops if any_hop else (setting.hop,), distances):
            yield replace(
                setting, partitions=cut, unit_layers=length, pipeline=pipeline, hop=hop, distances=ahead
            )
