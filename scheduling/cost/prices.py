"""Looks up the prices of operations in linked code: solo times, lanes, and tasks for contention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from braid.scheduling.cost.profile import Profile
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import is_tensor
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.model.stages import Move
from braid.scheduling.schedule.buckets import summed_elements
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.memory import DTYPE_BYTES, message_bytes, sent_width, sum_width
from braid.scheduling.schedule.operations import (
    Clip,
    Compute,
    Gather,
    Node,
    Norm,
    Operation,
    Receive,
    Reduce,
    Send,
    Start,
    Step,
    Update,
    Wait,
)

LANES = ("intra", "inter", "tp sums", "data", "data inside", "send")
"""Names of a rank's queues of transfers: collectives of layers inside and between nodes; sums over tp; sums
and gathers over other axes, between nodes and inside; messages."""

NORM_BYTES = 8 << 10
"""Payload in bytes of the sum of squared norms, one number per parameter tensor; its time is mainly
latency."""


@dataclass(frozen=True)
class Price:
    """Cost of an operation in the simulation; times are in nanoseconds."""

    task: int
    """Number of the task by which slowdowns are looked up; -1: the operation runs nothing."""
    ns: float
    """Solo time of the operation."""
    stream: Stream
    lane: int = -1
    busy_ns: float = 0.0
    """Time for which issuing a transfer, or taking its result at the end of a wait, occupies the rank."""
    bytes: int = 0
    flops: int = 0


_NOTHING = Price(-1, 0.0, Stream.COMPUTE)


class Prices:
    """Computes and caches the prices of operations; raises `ValueError` if the profile lacks a cost."""

    def __init__(
        self,
        code: Code,
        profile: Profile,
        dtype: str,
        reduce_dtype: str | None = None,
    ) -> None:
        """Prepare prices for linked code. ``dtype``: of parameters and activations; ``reduce_dtype``: dtype
        to which gradients are rounded when ranks sum them."""
        self._code = code
        self._profile, self._dtype = profile, dtype
        self._summed, self._sent = sum_width(dtype), sent_width(dtype, reduce_dtype)
        self._prices: dict[int, Price] = {}
        """id of an operation of the code -> its price."""
        self._tasks: dict[tuple[str, Stream], int] = {}
        """(key, stream) of a task -> its number."""
        self.slow: list[_Slowdowns] = []
        """For every task, its slowdowns by others."""
        self.barrier_ns = float(profile.barrier_ns)

    def of(self, operation: Operation) -> Price:
        """Return the price of an operation that computes, starts a transfer or waits for one."""
        price = self._prices.get(id(operation))
        if price is None:
            price = self._prices[id(operation)] = self._find(operation)
        return price

    def _find(self, operation: Operation) -> Price:
        match operation:
            case Start(Send()):  # before all else, since every message is an operation of its own
                return self._message
            case Wait(Send() | Receive()):
                return _NOTHING
            case Compute(Node() as node):
                return self._operator(node, 0.0, 0.0)
            case Start(Node() as node, lone=lone):
                key, profile = node.operator.key, self._profile
                take = 0.0 if lone else float(profile.take_ns.get(key, 0))
                return self._operator(node, take, 0.0 if lone else float(profile.issue_ns.get(key, 0)))
            case Wait(Node() as node, lone=lone):
                take = 0.0 if lone else float(self._profile.take_ns.get(node.operator.key, 0))
                return Price(-1, 0.0, node.operator.stream, busy_ns=take)
            case Compute(Norm()):
                return self._update("norm", self._profile.norm_ns_per_parameter)
            case Compute(Step()):
                return self._update("optimizer", self._profile.optimizer_ns_per_parameter)
            case Compute(Update(chunk, bucket)):
                count = self._code.parameters(chunk, bucket).total / self._code.layout.share_ranks
                ns = self._profile.optimizer_ns_per_parameter * count
                return Price(self._task("optimizer", Stream.COMPUTE), ns, Stream.COMPUTE)
            case Compute(Clip()):
                return Price(self._task("optimizer", Stream.COMPUTE), 0.0, Stream.COMPUTE)
            case Start(Reduce(int(chunk), axis, bucket, move) as reduce):
                kind = Kind.REDUCE_SCATTER if self._code.layout.mesh.shares_along(axis) else Kind.ALL_REDUCE
                price = self._sharing(chunk, axis, kind, self._sent, bucket, move)
                copies = 0.0 if move is None else self._copies(reduce, move)
                return replace(price, busy_ns=copies + self._rounding(chunk, reduce))
            case Wait(Reduce(int(chunk)) as reduce):
                return Price(-1, 0.0, Stream.COMPUTE, busy_ns=self._rounding(chunk, reduce, back=True))
            case Start(Reduce(None, axis)):
                return self._transfer(axis, Kind.ALL_REDUCE, NORM_BYTES, NORM_BYTES)
            case Start(Gather(chunk, axis, bucket, move)):
                return self._sharing(chunk, axis, Kind.ALL_GATHER, DTYPE_BYTES[self._dtype], bucket, move)
            case Wait(Gather(move=Move() as move) as gather):
                return Price(-1, 0.0, Stream.COMPUTE, busy_ns=self._copies(gather, move))
        return _NOTHING

    @cached_property
    def _message(self) -> Price:
        payload = message_bytes(self._code.parts, DTYPE_BYTES[self._dtype])
        return self._transfer("pp", Kind.SEND_RECEIVE, payload, payload)

    def _copies(self, what: Reduce | Gather, move: Move) -> float:
        """Return the ns in which a rank reorders blocks of data for one stage of a split sum or gather
        (`kernels.collectives.stages`)."""
        if move.outer == 1 or what.chunk is None:
            return 0.0
        width = self._sent if isinstance(what, Reduce) else DTYPE_BYTES[self._dtype]
        count = self._counts(what.chunk, what.bucket, isinstance(what, Gather)).dense // move.part
        return self._profile.copy_ns_per_byte * count * width

    def _rounding(self, chunk: int, reduce: Reduce, *, back: bool = False) -> float:
        """Return the ns in which a rank rounds gradients before a sum's first stage or, with ``back``, copies
        the last stage's result back: it reads numbers of one width and writes numbers of the other."""
        move = reduce.move
        if self._sent == self._summed or (move and (not move.last if back else move.number)):
            return 0.0
        count, ranks = self._shared(chunk, reduce.axis, reduce.bucket)
        copied = count / ranks if back and self._code.layout.mesh.shares_along(reduce.axis) else count
        return self._profile.copy_ns_per_byte * copied * (self._summed + self._sent) / 2

    def _operator(self, node: Node, taken: float, busy: float) -> Price:
        op = node.operator
        ns = float(self._profile.solo(op.key))
        return Price(
            self._task(op.key, op.stream),
            max(0.0, ns - taken),
            op.stream,
            LANES.index(op.stream.value) if op.kind.communicates else -1,
            busy,
            op.bytes * DTYPE_BYTES[self._dtype] // 2,
            op.flops,
        )

    def _sharing(
        self, chunk: int, axis: str, kind: Kind, width: int, bucket: int | None, move: Move | None = None
    ) -> Price:
        """Return the price of a gradient sum or parameter gather of a chunk, or of one of its buckets.

        ``width``: bytes per element; ``move``: the only stage that runs, None for the whole transfer.
        """
        count, ranks = self._shared(chunk, axis, bucket, gathers=kind is Kind.ALL_GATHER)
        if not count:
            return _NOTHING
        if move is not None:
            axis, kind, count, ranks = str(move.factor), move.kind, count // move.part, move.factor.size
        share = (ranks - 1) / ranks * (2 if kind is Kind.ALL_REDUCE else 1)
        return self._transfer(axis, kind, count * width, round(count * width * share))

    def _counts(self, chunk: int, bucket: int | None, gathers: bool) -> Parameters:
        code = self._code
        return code.gathered(chunk, bucket) if gathers else code.parameters(chunk, bucket)

    def _shared(self, chunk: int, axis: str, bucket: int | None, *, gathers: bool = False) -> tuple[int, int]:
        """Return (number of a chunk's or bucket's parameters that are summed over an axis, or with
        ``gathers`` gathered; number of ranks along the axis)."""
        layout, parameters = self._code.layout, self._counts(chunk, bucket, gathers)
        if axis == "replica":
            return parameters.total // layout.share_ranks, layout.replicas
        count = summed_elements(layout, parameters, axis)
        if axis == "ends":
            return count // (layout.share_ranks if layout.zero > 1 else 1), 2
        return count, layout.mesh.size(layout.mesh.factors_of(axis))

    def _transfer(self, axis: str, kind: Kind, payload: int, sent_bytes: int) -> Price:
        along = "pp" if axis == "ends" else axis  # between stages
        fit, stream = self._profile.transfer(along, kind), self._profile.streams[along]
        data = "data" if stream is Stream.INTER else "data inside"
        lane = "send" if kind is Kind.SEND_RECEIVE else "tp sums" if is_tensor(axis) else data
        task = self._task(f"{along}/{kind.value}", stream)
        return Price(task, float(fit.ns(payload)), stream, LANES.index(lane), 0.0, sent_bytes)

    def _update(self, key: str, ns_each: float) -> Price:
        """Return the price of the norm or the optimizer on a rank of the stage with most parameters.

        ``ns_each``: time per parameter; with ZeRO a rank has only its shard.
        """
        ns = ns_each * self._most_parameters / self._code.layout.share_ranks
        return Price(self._task(key, Stream.COMPUTE), ns, Stream.COMPUTE)

    @cached_property
    def _most_parameters(self) -> int:
        layout = self._code.layout
        stages = map(layout.chunks_of, range(layout.pp))
        return max(sum(self._code.parameters(chunk).total for chunk in chunks) for chunks in stages)

    def _task(self, key: str, stream: Stream) -> int:
        """Return the number of the task for an operator's key; transfers outside layers are represented by
        the class of their stream."""
        if key not in self._profile.solo_ns:
            key = key if stream is Stream.COMPUTE else stream.value
        if (key, stream) not in self._tasks:
            self._tasks[key, stream] = len(self.slow)
            self.slow.append(_Slowdowns(self.slow, self._profile, key, stream))
        return self._tasks[key, stream]


class _Slowdowns(dict[int, float]):
    """Slowdowns of one task by others, looked up in the profile when both first run together."""

    def __init__(self, rows: "Sequence[_Slowdowns]", profile: Profile, key: str, stream: Stream) -> None:
        super().__init__()
        self._rows, self._profile = rows, profile
        self._key, self._stream = key, stream

    def __missing__(self, other: int) -> float:
        row = self._rows[other]
        if self._stream is row._stream and self._stream is not Stream.COMPUTE:
            value = 1.0  # two transfers share their link
        else:
            value = self._profile.slowdown(self._key, row._key)
        self[other] = value
        return value
