"""Buckets: the parameters of a chunk that are summed, gathered and let go of together.

A layer's parameters are cut at its modules, so that the gradients of a projection travel while the layer's
other half still computes, and the parameters of a layer's first half are there before those of its second
are needed. Modules with few parameters share the bucket of the next one with many.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Parameters, Part

LEAST_ELEMENTS: Final = 1 << 17
"""A bucket with fewer parameters takes the next modules of its part too: half a MiB of fp32 gradients take
longer on most links than a collective's latency."""

ALIGNED: Final = 32
"""Elements that a share's length is a multiple of: transfers from odd addresses are slower."""

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

    @property
    def keys(self) -> tuple[BucketKey, ...]:
        """All of them."""
        return tuple((chunk, number) for chunk, own in self._of.items() for number in range(len(own)))


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
