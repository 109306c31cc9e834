"""Buckets: the parameters of a chunk that are summed, gathered and let go of together.

A layer's parameters are cut at its modules, so that the gradients of a projection travel while the layer's
other half still computes, and the parameters of a layer's first half are there before those of its second
are needed. Modules with few parameters share the bucket of the next one with many.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.operators import Parameters, Part
from braid.scheduling.model.units import chunk_units, members_of

LEAST_ELEMENTS: Final = 1 << 17
"""A bucket with fewer parameters takes the next modules of its part too: half a MiB of fp32 gradients take
longer on most links than a collective's latency."""

ALIGNED: Final = 32
"""Elements that a share's length is a multiple of: transfers from odd addresses are slower."""

SUMMED: Final = ("dp", "replica", "edp")
"""Axes over which replicas sum gradients: of other samples or tokens (cp is a part of dp), of other shards of
the same parameters, of the same experts."""
SHARDED: Final = ("dp", "edp")
"""Axes among these whose ranks hold shards (ZeRO)."""

BucketKey = tuple[int, int]
"""Chunk, and number of the bucket in it."""


@dataclass(frozen=True)
class BucketSpec:
    """Consecutive modules with parameters, of one part of a chunk."""

    part: int
    """Of the chunk, in the order of the forward pass."""
    modules: tuple[str, ...]
    parameters: Parameters
    """Of them, on the fullest rank of a tensor-parallel group."""


class Buckets:
    """Those of all chunks of a model, in the order of the forward pass, and in which one a module's are.

    ``members``: the parts of every chunk. A table that embedding and head of one stage share is in the
    bucket of the embedding.
    """

    def __init__(self, members: Mapping[int, Sequence[Part]], layout: ParallelLayout) -> None:
        self._layout = layout
        self._of: dict[int, tuple[BucketSpec, ...]] = {}
        self._homes: dict[tuple[int, int, str], BucketKey] = {}
        known: dict[tuple[object, ...], tuple[BucketSpec, ...]] = {}
        for chunk, parts in members.items():
            table = 0 if 0 in members and not layout.ends_apart else None
            key = *map(id, parts), table is None
            if key not in known:
                known[key] = tuple(_cut(parts, shares_table=table is not None))
            self._of[chunk] = known[key]
            for number, bucket in enumerate(known[key]):
                for module in bucket.modules:
                    self._homes[chunk, bucket.part, module] = chunk, number
            if table is not None and layout.is_last(chunk):
                self._homes.update(
                    ((chunk, len(parts) - 1, module), (table, 0))
                    for module, held in parts[-1].modules.items()
                    if held.tied
                )

    def of(self, chunk: int) -> tuple[BucketSpec, ...]:
        """The buckets of a chunk; none of one that there is not."""
        return self._of.get(chunk, ())

    def home(self, chunk: int, part: int, module: str) -> BucketKey | None:
        """The bucket that has a module's parameters; None for one that has none."""
        return self._homes.get((chunk, part, module))

    def axes(self, chunk: int) -> tuple[str, ...]:
        """Axes over which the gradients of a chunk are summed, one after the other.

        ``tp``: parameters that every tensor-parallel rank holds whole, each with its own tokens, and inside
        it ranks that hold the same of layers with a degree of their own; ``ends``: a table that is held by
        the first and the last stage; then the axes of replicas (`SUMMED`).
        """
        layout = self._layout
        flat = (flat_elements(layout, bucket.parameters) for bucket in self.of(chunk))
        axes = {axis for elements in flat for together in elements for axis in together}
        ordered = ("tp", *(beyond(degree) for degree in layout.own_degrees if degree > 1), "ends", *SUMMED)
        wanted = {*axes, "replica"} & {*layout.mesh.axes, "ends"}
        return tuple(axis for axis in ordered if axis in wanted)

    @property
    def keys(self) -> tuple[BucketKey, ...]:
        """All of them."""
        return tuple((chunk, number) for chunk, own in self._of.items() for number in range(len(own)))


def buckets_of(
    parts: Mapping[str, Part], layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int = 0
) -> Buckets:
    """The buckets of all chunks whose units are among ``parts``. ``kinds``: of the model's layers."""
    return Buckets(
        {
            chunk: members_of(parts, layout, kinds, chunk, unit_layers)
            for chunk in range(layout.chunks)
            if all(unit.name in parts for unit in chunk_units(layout, kinds, chunk, unit_layers))
        },
        layout,
    )


def norm_axes(layout: ParallelLayout) -> tuple[str, ...]:
    """Axes along which gradients differ, over which the squares of their norm are summed, one by one."""
    sharded = layout.share_ranks > 1
    experts = layout.ep > 1 and not sharded
    needed = {"tp": layout.tp > 1, "pp": layout.pp > 1, "dp": sharded, "ep": experts}
    return tuple(axis for axis, is_needed in needed.items() if is_needed)


def _cut(parts: Sequence[Part], *, shares_table: bool) -> Iterator[BucketSpec]:
    """``shares_table``: a tied head has the embedding's."""
    for place, part in enumerate(parts):
        made: list[BucketSpec] = []
        modules: tuple[str, ...] = ()
        held = Parameters()
        for name, more in part.modules.items():
            if not more.total or (shares_table and more.tied and place):
                continue
            modules, held = (*modules, name), held + more
            if held.total >= LEAST_ELEMENTS:
                made.append(BucketSpec(place, modules, held))
                modules, held = (), Parameters()
        if modules and made:  # what is left at the part's end
            last = made.pop()
            modules, held = (*last.modules, *modules), last.parameters + held
        if modules:
            made.append(BucketSpec(place, modules, held))
        yield from made


def flat_elements(layout: ParallelLayout, held: Parameters) -> dict[tuple[str, ...], int]:
    """Elements of a bucket that lie one behind the other, by the axes over which their gradients are summed.

    What ranks that differ along one of the axes do not share lies apart.
    """
    whole = held.whole if layout.tp > 1 else 0
    tied = held.tied if layout.ends_apart else 0
    found = {
        ("dp",): held.dense - whole - tied - held.summed_apart("dp"),
        ("tp", "dp"): whole,
        ("dp", "ends"): tied,
        ("edp",): held.experts - held.summed_apart("edp"),
        **dict(held.apart),
    }
    return {axes: count for axes, count in found.items() if count}


def share_ways(layout: ParallelLayout, axes: Sequence[str]) -> int:
    """Ranks over which a flat memory is cut (ZeRO)."""
    if not layout.zero:
        return 1
    return layout.share_ranks // layout.ep if "edp" in axes else layout.share_ranks


def share_elements(elements: int, ways: int) -> int:
    """Length of each of the equal shares of so many elements (ZeRO); what is not cut stays as it is."""
    return elements if ways == 1 else -(-elements // (ways * ALIGNED)) * ALIGNED
