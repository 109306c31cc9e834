"""Buckets: parameters of a chunk that are summed, gathered and released together.

A layer's parameters are cut at its modules, so that the gradients of a projection travel while the layer's
other half still computes, and the parameters of a layer's first half arrive before its second half needs its
own. Modules with few parameters share the bucket of the next module with many.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.operators import Part
from braid.scheduling.model.parameters import HeldTensor, Parameters
from braid.scheduling.model.units import chunk_units, members_of

LEAST_ELEMENTS: Final = 1 << 17
"""Number of parameters up to which a bucket takes more modules of its part: on most links half a MiB of fp32
gradients takes longer than a collective's latency."""

ALIGNED: Final = 32
"""Number of elements to a multiple of which every shard is padded: transfers from odd addresses are
slower."""

SUMMED: Final = ("dp", "replica", "edp")
"""Axes over which replicas sum gradients: ``dp`` (including cp): ranks with the same dense parameters;
``replica``: groups that shard the same parameters (hybrid sharding); ``edp``: ranks with the same experts."""
SHARDED: Final = ("dp", "edp")
"""Axes over whose ranks ZeRO shards buckets."""

BucketKey = tuple[int, int]
"""Identifies a bucket: (chunk, number of the bucket in the chunk)."""


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: consecutive modules of one part, whose parameters are summed and gathered together."""

    part: int
    """Index of the part in the chunk, in the order of the forward pass."""
    modules: tuple[str, ...]
    parameters: Parameters
    """The modules' trained parameters on the tensor-parallel rank that holds most."""
    frozen: Parameters
    """The modules' parameters that are not trained."""

    def shared(self, layout: ParallelLayout) -> tuple[Parameters, ...]:
        """Return the parameters that ranks gather from shards: with ZeRO 1 and 2 the trained ones,
        which other ranks update; with ZeRO 3 the frozen ones too."""
        return (self.parameters, self.frozen) if layout.zero > 2 else (self.parameters,)


class Buckets:
    """The buckets of all chunks of a model, in the order of the forward pass, and the bucket of each module.

    ``members``: the parts of every chunk. A table that embedding and head of one stage share is in the bucket
    of the embedding.
    """

    def __init__(self, members: Mapping[int, Sequence[Part]], layout: ParallelLayout) -> None:
        self._layout = layout
        self._of: dict[int, tuple[BucketSpec, ...]] = {}
        self._homes: dict[tuple[int, int, str], BucketKey] = {}
        cuts: dict[tuple[object, ...], tuple[BucketSpec, ...]] = {}
        for chunk, parts in members.items():
            table = 0 if 0 in members and not layout.ends_apart else None
            key = *map(id, parts), table is None
            if key not in cuts:
                counted = layout.zero > 2
                cuts[key] = tuple(_cut(parts, shares_table=table is not None, counts_frozen=counted))
            self._of[chunk] = cuts[key]
            for number, bucket in enumerate(cuts[key]):
                for module in bucket.modules:
                    self._homes[chunk, bucket.part, module] = chunk, number
            if table is not None and layout.is_last(chunk):
                self._homes.update(
                    ((chunk, len(parts) - 1, module), (table, 0))
                    for counts in (parts[-1].modules, parts[-1].frozen)
                    for module, parameters in counts.items()
                    if parameters.tied
                )
        self.read_late = any(part.frozen for parts in members.values() for part in parts)
        """Whether weight gradients read parameters, as those of adapters do."""

    def of(self, chunk: int) -> tuple[BucketSpec, ...]:
        """Return the buckets of a chunk; empty for an unknown chunk."""
        return self._of.get(chunk, ())

    def home(self, chunk: int, part: int, module: str) -> BucketKey | None:
        """Return the bucket of a module's parameters; None for a module without parameters."""
        return self._homes.get((chunk, part, module))

    def axes(self, chunk: int) -> tuple[str, ...]:
        """Return the axes over which the gradients of a chunk are summed, in the order of the sums.

        ``tp`` sums parameters that every tensor-parallel rank holds whole; axes inside tp, layers with a
        smaller tensor-parallel degree; ``ends``, an embedding table on both the first and the last stage. The
        axes of replicas (`SUMMED`) come last. There are none if nothing in the chunk is trained.
        """
        layout = self._layout
        flat = (flat_elements(layout, bucket.parameters) for bucket in self.of(chunk))
        axes = {axis for elements in flat for together in elements for axis in together}
        ordered = ("tp", *(beyond(degree) for degree in layout.own_degrees if degree > 1), "ends", *SUMMED)
        wanted = {*axes, *(["replica"] if axes else [])} & {*layout.mesh.axes, "ends"}
        return tuple(axis for axis in ordered if axis in wanted)

    def gathered(self, chunk: int) -> tuple[str, ...]:
        """Return the axes over which ranks gather the parameters of a chunk; empty without ZeRO."""
        layout = self._layout
        counts = (each for bucket in self.of(chunk) if layout.zero for each in bucket.shared(layout))
        return tuple(shard_axes(layout, sum(counts, Parameters())))

    @property
    def keys(self) -> tuple[BucketKey, ...]:
        return tuple((chunk, number) for chunk, buckets in self._of.items() for number in range(len(buckets)))


def buckets_of(
    parts: Mapping[str, Part], layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int = 0
) -> Buckets:
    """Return the buckets of all chunks whose units are in ``parts``. ``kinds``: kind of each model layer."""
    return Buckets(
        {
            chunk: members_of(parts, layout, kinds, chunk, unit_layers)
            for chunk in range(layout.chunks)
            if all(unit.name in parts for unit in chunk_units(layout, kinds, chunk, unit_layers))
        },
        layout,
    )


def norm_axes(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the axes over which ranks sum the squared norms of their gradients, in the order of the sums."""
    sharded = layout.share_ranks > 1
    experts = layout.ep > 1 and not sharded
    needed = {"tp": layout.tp > 1, "pp": layout.pp > 1, "dp": sharded, "ep": experts}
    return tuple(axis for axis, is_needed in needed.items() if is_needed)


def _cut(parts: Sequence[Part], *, shares_table: bool, counts_frozen: bool) -> Iterator[BucketSpec]:
    """Cut a chunk's parts into buckets; with ``shares_table`` a tied head's table is left out, since it is in
    the embedding's bucket. ``counts_frozen``: whether frozen parameters, which are then gathered, count for
    the size of a bucket."""
    for index, part in enumerate(parts):
        buckets: list[BucketSpec] = []
        modules: tuple[str, ...] = ()
        parameters = frozen = Parameters()
        for name in {**part.frozen, **part.modules}:
            added, fixed = part.modules.get(name, Parameters()), part.frozen.get(name, Parameters())
            if not (added.total or fixed.total) or (shares_table and (added + fixed).tied and index):
                continue
            modules, parameters, frozen = (*modules, name), parameters + added, frozen + fixed
            if parameters.total + frozen.total * counts_frozen >= LEAST_ELEMENTS:
                buckets.append(BucketSpec(index, modules, parameters, frozen))
                modules, parameters, frozen = (), Parameters(), Parameters()
        if modules and buckets:  # modules at the part's end, too few for a bucket
            last = buckets.pop()
            modules, parameters = (*last.modules, *modules), last.parameters + parameters
            frozen = last.frozen + frozen
        if modules:
            buckets.append(BucketSpec(index, modules, parameters, frozen))
        yield from buckets


def flat_elements(layout: ParallelLayout, parameters: Parameters) -> dict[tuple[str, ...], int]:
    """Return, for each combination of axes over which gradients are summed, how many of a bucket's elements
    it applies to.

    Parameters with different axes lie in separate memories.
    """
    tensors = flat_tensors(layout, parameters).items()
    return {axes: sum(tensor.elements for tensor in together) for axes, together in tensors}


def summed_elements(layout: ParallelLayout, parameters: Parameters, axis: str) -> int:
    """Return the number of a bucket's elements whose gradients are summed over an axis."""
    return sum(count for axes, count in flat_elements(layout, parameters).items() if axis in axes)


def shard_axes(layout: ParallelLayout, parameters: Parameters) -> list[str]:
    """Return the axes over which ZeRO shards a bucket's parameters."""
    axes = (axis for axis in SHARDED if axis in layout.mesh.axes)
    return [axis for axis in axes if summed_elements(layout, parameters, axis)]


def flat_tensors(
    layout: ParallelLayout, parameters: Parameters
) -> dict[tuple[str, ...], tuple[HeldTensor, ...]]:
    """Return the tensors that `flat_elements` counts, in the order in which each memory holds them."""
    axes_of = {
        "cut": ("dp",),
        "whole": ("tp", "dp") if layout.tp > 1 else ("dp",),
        "tied": ("dp", "ends") if layout.ends_apart else ("dp",),
        "experts": ("edp",),
    }
    found: dict[tuple[str, ...], tuple[HeldTensor, ...]] = {}
    for tensor in parameters.tensors:
        axes = tensor.apart or axes_of[tensor.held]
        found[axes] = (*found.get(axes, ()), tensor)
    return found


def share_ways(layout: ParallelLayout, axes: Sequence[str]) -> int:
    """Return the number of ranks over which ZeRO shards the bucket elements that are summed over ``axes``."""
    if not layout.zero:
        return 1
    return layout.share_ranks // layout.ep if "edp" in axes else layout.share_ranks


def share_elements(elements: int, ways: int) -> int:
    """Return the length of each of ``ways`` equal shards of ``elements`` elements.

    The length is padded to a multiple of `ALIGNED` unless ``ways`` is 1.
    """
    return elements if ways == 1 else -(-elements // (ways * ALIGNED)) * ALIGNED
