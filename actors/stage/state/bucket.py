"""A bucket: parameters that are summed, updated, gathered and released together.

It is a run of a chunk's parameters with one placement: their gradients are summed over the same axes of the
mesh, and with ZeRO the ranks along those axes cut them into equal shards, wherever tensors begin and end. A
rank updates its shard: sums of gradients leave it there and gathers start from it, without a copy. Parameters
and gradients are two flat memories of the bucket's layout:

    ZeRO    parameters                              gradients
    0       separate tensors                        whole, always
    1       whole, always                           whole, always
    2       whole, always                           the shard of the sums; whole while passes add
    3       the shard; whole while in use           as with ZeRO 2
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import torch
from torch import Tensor

from braid.actors.stage.state.parameters import Place, StageParameter, main_gradient_dtype
from braid.actors.stage.state.shards import Shard, shard_of
from braid.kernels.collectives.primitives import Launch, Line, gather_stage, scatter_stage, whole_shares
from braid.scheduling.mesh.mesh import MeshShape
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.stages import Move
from braid.scheduling.schedule.buckets import BucketKey, share_elements


class Bucket:
    """One bucket on one rank: its layout is known from construction on, its memory exists after `hold`."""

    def __init__(
        self,
        key: BucketKey,
        axes: tuple[str, ...],
        members: Sequence[StageParameter],
        ways: int = 1,
        index: int = 0,
    ) -> None:
        """``key``: chunk, and the bucket's number in the chunk. ``axes``: axes over which gradients are
        summed. ``ways``: number of shards; ``index``: number of this rank's shard."""
        self.key, self.axes, self.members = key, axes, tuple(members)
        self.trained = members[0].trained
        self.ways, self.index = ways, index
        self.offsets = [0]
        """Offset of each member in the flat memory, then the end of the last member."""
        for member in self.members:
            self.offsets.append(self.offsets[-1] + member.shape.numel())
        self.shard_elements = share_elements(self.offsets[-1], ways)
        self.parameters: FlatMemory | None = None
        """Memory of the parameters; None if the bucket is not cut into shards."""
        self._between: dict[str, Tensor] = {}
        """Results that one stage of a sum or gather leaves for the next stage."""
        self.rounded: dict[str, Tensor] = {}
        """Rounded copies of gradients, by axis, while they are being sent."""

    @property
    def elements(self) -> int:
        """Length of the flat memory: all members, and the padding that makes shards equal."""
        return self.ways * self.shard_elements

    def part_of_rank(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a flat memory, a view."""
        return flat[self.index * self.shard_elements :][: self.shard_elements]

    def views(self, flat: Tensor) -> Iterator[tuple[StageParameter, Tensor]]:
        """Yield every member with a view of its elements in a flat memory, of the member's shape."""
        for member, (begin, end) in zip(self.members, pairwise(self.offsets), strict=True):
            yield member, flat[begin:end].view(member.shape)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that this rank updates, one per member that it shares, in the order of the members."""
        low = self.index * self.shard_elements
        shards = []
        for member, (begin, end) in zip(self.members, pairwise(self.offsets), strict=True):
            first, last = max(begin, low), min(end, low + self.shard_elements)
            if first < last:
                shards.append(shard_of(member, first - begin, last - begin))
        return tuple(shards)

    def _shard_views(self, flat_shard: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Yield every shard with a view of its elements in the rank's flat shard, where all lie in order."""
        begin = 0
        for shard in self.shards:
            end = begin + shard.shape.numel()
            yield shard, flat_shard[begin:end].view(shard.shape)
            begin = end

    # -- memory --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hold(self, zero: int, *, exact: bool, within: Tensor | None = None) -> None:
        """Allocate the bucket's memory for a ZeRO stage; parameters keep their values, gradients are 0.

        ``exact``: gradients are added up in float64. ``within``: memory for the gradients, part of a larger
        bucket's memory; None: allocate new memory. A bucket that is not trained has no gradients.
        """
        first = self.members[0].tensor
        nothing = torch.empty(0, dtype=first.dtype, device=first.device)

        def lay_parameter(member: StageParameter, view: Tensor | None) -> None:
            member.tensor.data = nothing if view is None else view

        def lay_gradient(member: StageParameter, view: Tensor | None) -> None:
            member.gradient = view

        if self.ways > 1:
            whole = nothing.new_zeros(self.elements)
            for member, view in self.views(whole):
                view.copy_(member.tensor)
            self.parameters = FlatMemory(self, lay_parameter, whole, lasting=zero < 3)
            for shard, view in self._shard_views(self.parameters.shard):
                shard.tensor = view
        if not self.trained:
            return
        gradients = within
        if gradients is None:
            dtype = torch.float64 if exact else main_gradient_dtype(first.dtype)
            gradients = torch.zeros(self.elements, dtype=dtype, device=first.device)
        lasting = self.ways == 1 or zero < 2
        self.gradients = FlatMemory(self, lay_gradient, gradients, lasting=lasting)
        for shard, view in self._shard_views(self.gradients.shard):
            shard.gradient = view

    @property
    def passing(self) -> list[Tensor]:
        """Tensors that exist during a part of a step only."""
        held = (self.parameters, self.gradients if self.trained else None)
        flats = [flat for flat in held if flat is not None and not flat.lasting]
        return [*(flat.whole for flat in flats if flat.whole is not None), *self.rounded.values()]

    # -- moves ---------------------------------------------------------------------------------------------

    def gather(self, line: Line, move: Move | None) -> Launch:
        """Gather the parameters from the shards; ``move``: one stage of that, None: all at once."""
        assert self.parameters is not None
        whole = self.parameters.make()
        if move is None:
            return line.all_gather(self.parameters.shard, into=whole)
        x = self._between.pop("gather", self.parameters.shard)
        launch = gather_stage(line, x, move.outer, into=whole if move.last else None)
        if not move.last:
            self._between["gather"] = launch.result
        return launch

    def sum(
        self, axis: str, line: Line, move: Move | None, *, scatters: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Launch]:
        """Start to sum the gradients over a line's ranks; return (sent tensor, launch). ``move``: as for
        `gather`.

        ``scatters``: every rank gets the sums of its own shard; otherwise all ranks get all sums. ``dtype``:
        gradients are rounded to this dtype before they are sent; None: they are sent unchanged.
        """
        if self.gradients.whole is None or axis == "replica":  # what earlier sums left in the shard
            whole = shard = self.gradients.shard
        else:
            whole = self.gradients.whole
            shard = self.part_of_rank(whole)
        if dtype is None or dtype == whole.dtype:
            return whole, self._summing(line, move, whole, shard, scatters=scatters)
        if move is None or move.number == 0:
            self.rounded[axis] = whole.to(dtype)
        sent, target = self.rounded[axis], whole
        result = sent
        if scatters:
            target, result = shard, self.part_of_rank(sent)
        launch = self._summing(line, move, sent, result, scatters=scatters)
        if move is not None and not move.last:
            return sent, launch

        def widen() -> None:
            target.copy_(result)
            del self.rounded[axis]

        return sent, launch.then(widen)

    def _summing(
        self, line: Line, move: Move | None, whole: Tensor, shard: Tensor, *, scatters: bool
    ) -> Launch:
        if move is None:
            return line.reduce_scatter(whole, into=shard) if scatters else line.all_reduce(whole)
        x = self._between.pop("sum", None)
        if x is None:
            x = whole if self.ways > 1 else whole_shares(whole, prod(move.factor.mesh))
        if move.kind is Kind.ALL_REDUCE:
            launch = line.all_reduce(x)
        elif move.kind is Kind.REDUCE_SCATTER:
            launch = scatter_stage(line, x, move.outer, into=shard if move.last else None)
        else:
            fits = move.last and x.numel() * line.size == whole.numel()
            launch = gather_stage(line, x, move.outer, into=whole if fits else None)
            if move.last and not fits:
                arrived = launch.result
                return launch.then(lambda: whole.copy_(arrived[: whole.numel()]))
        if not move.last:
            self._between["sum"] = launch.result
        return launch

    def keep_sums(self) -> None:
        """Add the sums that have arrived to the shard, and free the whole gradients (ZeRO 2 and 3)."""
        if self.gradients.whole is not None and not self.gradients.lasting:
            self.gradients.shard.add_(self.part_of_rank(self.gradients.whole))
            self.gradients.release()

    def clear(self) -> None:
        if self.gradients.lasting:
            self.gradients.make().zero_()
        else:
            self.gradients.shard.zero_()
            self.gradients.release()


class FlatMemory:
    """Contiguous parameters or gradients of a bucket: always this rank's shard, at times the whole."""

    def __init__(
        self,
        bucket: Bucket,
        lay: Callable[[StageParameter, Tensor | None], None],
        whole: Tensor,
        *,
        lasting: bool,
    ) -> None:
        """``lay`` gives a member its view of the whole, or None. ``lasting``: the whole always exists."""
        self._bucket, self._lay, self.lasting = bucket, lay, lasting
        shard = bucket.part_of_rank(whole)
        self.shard = shard if lasting else shard.clone()
        self.whole: Tensor | None = whole
        for member, view in bucket.views(whole):
            lay(member, view)
        if not lasting:
            self.release()

    def make(self, *, zeros: bool = False) -> Tensor:
        """Return the whole memory; allocate it if it does not exist, uninitialised unless ``zeros``."""
        if self.whole is None:
            count = self._bucket.elements
            self.whole = self.shard.new_zeros(count) if zeros else self.shard.new_empty(count)
            for member, view in self._bucket.views(self.whole):
                self._lay(member, view)
        return self.whole

    def release(self) -> None:
        """Free the whole memory; only the shard stays."""
        self.whole = None
        for member in self._bucket.members:
            self._lay(member, None)


def buckets_of(
    parameters: Iterable[StageParameter], place: Place, *, trained: bool = True, cut: bool = True
) -> list[Bucket]:
    """Group a rank's parameters, ``trained`` ones or others, into buckets, which have no memory yet.

    ``cut``: whether ranks that hold the same parameters cut them into shards.
    """
    mesh = place.mesh

    def placement(p: StageParameter) -> tuple[int, int, tuple[str, ...], int]:
        axes = _axes(p, mesh)
        return p.chunk, len(axes), axes, p.bucket

    buckets = []
    ordered = sorted((p for p in parameters if p.trained is trained), key=placement)
    for (chunk, _, axes, number), group in groupby(ordered, key=placement):
        members = tuple(group)
        factors = [name for name in mesh.sharded if cut and name in members[0].summed_over(mesh)]
        ways, index = mesh.size(factors), place.index(factors)
        buckets.append(Bucket((chunk, number), axes, members, ways, index))
    return buckets


def joined(buckets: Sequence[Bucket], *, exact: bool) -> list[Bucket]:
    """Join uncut buckets into one bucket per chunk and axes, so that one transfer sums all their gradients.

    The memory of the given and of the joined buckets is allocated; gradients of a joined bucket are
    contiguous.
    """
    larger = []
    for (chunk, axes), group in groupby(buckets, key=lambda bucket: (bucket.key[0], bucket.axes)):
        members = tuple(group)
        whole = Bucket((chunk, -1), axes, [member for bucket in members for member in bucket.members])
        whole.hold(0, exact=exact)
        begin = 0
        for bucket in members:
            bucket.hold(0, exact=exact, within=whole.gradients.make()[begin : begin + bucket.elements])
            begin += bucket.elements
        larger.append(whole)
    return larger


def shards_in_order(buckets: Sequence[Bucket], parameters: Sequence[StageParameter]) -> list[Shard]:
    """Return the shards of buckets, in the order of the rank's parameters."""
    ranks_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    shards = [shard for bucket in buckets for shard in bucket.shards]
    return sorted(shards, key=lambda shard: ranks_of[id(shard.parameter)])


def _axes(parameter: StageParameter, mesh: MeshShape) -> tuple[str, ...]:
    """Return the axes over which a gradient is summed, and "ends" if two stages hold it."""
    return (*mesh.axes_over(parameter.summed_over(mesh)), *("ends",) * parameter.shared)
