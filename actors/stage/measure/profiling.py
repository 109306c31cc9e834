"""Times operators on one rank, alone and at the same time as communication, at a run's real shapes and
groups.

The parts of the model run as in training, forward and backward, in the order of their graphs, so that caches
have the same contents as in training. At the same time as an operator runs a spare transfer, which is drawn
anew for every operator and round, so that varying load affects all of them equally; or nothing. All ranks
draw the same numbers.

Alone, operators run as in the serial schedule, without further barriers: the time of a collective then
includes waiting for other ranks. When something else runs as well, ranks begin every operator together.

On asynchronous devices the device's own time is measured: the host gets ahead of it before every mark, and
ranks begin collectives together, since in a schedule no host is delayed by reading marks.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.measure.link_times import LinkTimes
from braid.actors.stage.model.model import PartInstance, StageModel
from braid.actors.stage.model.routing import RepeatedRouting
from braid.actors.stage.rank.devices import hardware
from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.rank.messages import Samples, Together
from braid.actors.stage.run.bindings import collective_of, method_of
from braid.actors.stage.run.regions import Rows
from braid.actors.stage.run.streams import Streams, Transfer
from braid.kernels.operators.context_blocks import Documents
from braid.scheduling.cost.profile import first_piece
from braid.scheduling.generate.partitions import WAYS, cut_gemms
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import DimRanks, Region
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Precision
from braid.scheduling.text.pattern import is_layer, own_degree

Values = dict[str, Any]

_ROOM = 1.5
"""An operator begins so many of its durations before a transfer's end, at the latest, to end first."""

_WARMING = 2048
"""Rows and columns of the matrices whose products warm up a device."""
_WARM_NS = 300_000_000
"""Nanoseconds that an idle device takes to raise its clock rate."""


@dataclass(frozen=True)
class _Spare:
    """A transfer that can be started at any time: a collective of a layer with its own tensor."""

    operator: Operator
    x: Tensor
    extents: Sequence[Any]
    """Numbers of rows for each rank, if the collective takes them; otherwise empty."""
    part: str
    """Name of the part in which the collective was met first; stages that share this part know the
    collective. All stages measure layers of every kind."""


@dataclass
class Profiler:
    """Measures operators and transfers on one rank; all ranks of a run call `run` at the same time."""

    parts: Mapping[str, Part]
    model: StageModel
    mesh: Mesh
    streams: Streams
    seed: int = 0
    documents: Sequence[Mapping[str, Documents]] = ()
    """`MicroBatch.documents` of some micro-batches, used in turn."""
    choices: Sequence[Tensor] = ()
    """Routers' choices, used in turn (`RepeatedRouting`)."""
    _solo: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _together: dict[tuple[str, str], list[Together]] = field(default_factory=lambda: defaultdict(list))
    _spare_times: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _handling: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _lasted: dict[str, int] = field(default_factory=dict)
    """Duration of each spare transfer when it ran last, in nanoseconds."""
    _spares: dict[str, _Spare] = field(default_factory=dict)
    _spare_of: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        context = self.model.context
        self._generator = torch.Generator(context.device).manual_seed(self.seed)
        # Instances take turns: parameters of an instance that ran just before would still be in the caches.
        held = self.model.of_every_kind(self.seed)
        self._instances = {name: cycle(instances) for name, instances in held.items()}
        tp = self.mesh.layout.tp > 1
        layers = [part for name, part in self.parts.items() if is_layer(name) and not own_degree(name)]
        self._in_pieces = {key for part in layers if tp for key in cut_gemms(part)}
        self._ways = WAYS[0]
        self._documents = cycle(self.documents)
        self._links = LinkTimes(self.mesh, self.streams, self.model)
        self._routing = RepeatedRouting(self.model, self.choices)

    @torch.no_grad()
    def run(self, rounds: int, square: Callable[[], object], update: Callable[[], object]) -> Samples:
        """Measure ``rounds`` times: each operator alone, and each together with other work."""
        self._warm_clock()
        for turn in range(-1, rounds):
            self._ways = WAYS[turn % len(WAYS)]
            for name, instances in self._instances.items():
                for beside in (False, True):
                    # Stages hold different parts; for shared parts they must draw the same numbers.
                    self._random.seed(f"{self.seed} {turn} {name} {beside}")
                    self._pass(self.parts[name], next(instances), beside, counts=turn >= 0)
        self._spares_alone(rounds)
        place, rows = self.mesh.place, self._routing.rows
        with_experts = place.mesh.members(place.position, place.mesh.factors_of("ep")) if rows else ()
        trained = (parameter for parameter in self.model.parameters if parameter.trained)
        parameters = sum(parameter.shape.numel() for parameter in trained)
        norms, updates = (
            [self._time(what) / max(1, parameters) for _ in range(3)] for what in (square, update)
        )
        return Samples(
            solo_ns=dict(self._solo),
            together=dict(self._together),
            spares=dict(self._spare_times),
            handling=dict(self._handling),
            spare_of=dict(self._spare_of),
            transfers=self._links.alone(rounds),
            streams={axis: self.mesh.stream(axis) for axis in self._links.axes},
            norm_ns_per_parameter=norms,
            optimizer_ns_per_parameter=updates,
            copy_ns_per_byte=self._copies(rounds),
            expert_rows=rows,
            experts_with=tuple(with_experts),
            transfers_alone=self.streams.asynchronous,
            hardware=hardware(self.model.context.device),
        )

    # -- passes --------------------------------------------------------------------------------------------

    def _pass(self, part: Part, instance: PartInstance, beside: bool, counts: bool) -> None:
        """Run one forward and backward pass through a part; values are freed only at its end."""
        values = self._inputs(part)
        self._run(part, part.forward, instance, values, beside, counts)
        output = part.values[part.output]
        if output.precision is Precision.ACTIVATION:
            values[f"d.{part.output}"] = torch.randn_like(values[part.output])
        self._run(part, part.backward, instance, values, beside, counts)

    def _inputs(self, part: Part) -> Values:
        """Return random inputs of a part, by name."""
        context = self.model.context
        values: Values = {}
        documents = next(self._documents, {})
        for name in part.inputs:
            value = part.values[name]
            if name in documents:
                values[name] = documents[name]
            elif value.precision is Precision.INDEX:
                high = self.model.shape.vocabulary
                values[name] = torch.randint(
                    high, (value.elements,), generator=self._generator, device=context.device
                )
            elif name in part.constants:
                values[name] = 1e-6
            else:
                shape = (context.sizes.local_tokens, self.model.shape.hidden)
                values[name] = torch.randn(
                    shape, generator=self._generator, device=context.device, dtype=context.dtype
                )
        return values

    def _run(
        self, part: Part, graph: Graph, instance: PartInstance, values: Values, beside: bool, counts: bool
    ) -> None:
        for operator in graph.operators:
            key = operator.key
            if operator.kind.communicates:
                ns = self._communicate(part, operator, values, meets=beside)
                if counts and not beside:
                    self._solo[key].append(ns)
                continue
            call, arguments = method_of(operator, instance), [values[name] for name in operator.reads]
            transfers = self._transfers_for(part) if beside else []
            if transfers:
                self._links.meet()
                results = self._beside_transfer(call, arguments, key, self._random.choice(transfers), counts)
            else:
                self.streams.lead()
                begin = self.streams.mark()
                results = call(*arguments)
                if counts and not beside:
                    self._solo[key].append(self.streams.between(begin, self.streams.mark()))
                    if key in self._in_pieces:
                        self._one_piece(call, *arguments, *results, key=key)
            if operator.writes:
                values.update(zip(operator.writes, self._routing.of(operator, results), strict=True))

    def _transfers_for(self, part: Part) -> list[str]:
        """Return the names of the transfers that all stages which measure a part can start beside it."""
        known = self._spares.items()
        own = (name for name, spare in known if is_layer(spare.part) or spare.part == part.name)
        return [*sorted(own), *(self._links.names if is_layer(part.name) else [])]

    def _one_piece(self, call: Callable[..., Any], x: Tensor, whole: Tensor, *, key: str) -> None:
        """Time a matrix product on one of `_ways` pieces of its rows, as `intra_batch` cuts them."""
        ways, ranks = self._ways, (self.mesh.layout.tp,)
        held = Region("tp", ranks, (DimRanks.ALL,))
        piece = replace(held, rows=(1, ways))
        rows, into = piece.elements(x.shape[0] // ranks[0], 1), torch.empty_like(whole)
        if not rows:
            return
        self.streams.lead()
        begin = self.streams.mark()
        (part,) = call(x[:rows])
        Rows(held, piece, (self.mesh.place.on("tp"),)).place(into, part)
        self._solo[first_piece(key, ways)].append(self.streams.between(begin, self.streams.mark()))

    def _communicate(self, part: Part, operator: Operator, values: Values, *, meets: bool) -> int:
        (source, *more), (target,) = operator.reads, operator.writes
        x: Tensor = values[source]
        extents = [values[name] for name in more]
        size = part.values[source].bytes(self.model.context.dtype.itemsize)
        # Collectives of one class take the same time; for rows of experts only the average size is equal.
        self._spare_of[operator.key] = name = f"{operator.axis}/{operator.kind.value} {size}"
        if name not in self._spares:
            spare = torch.zeros_like(x) if operator.kind is Kind.ALL_REDUCE else x.clone()
            self._spares[name] = _Spare(operator, spare, extents, operator.part)
        if meets or self.streams.asynchronous:
            self._links.meet()
        begin = self.streams.mark()
        transfer = self._start(operator, x, extents, awaited_next=True)
        values[target] = self.streams.result_of(transfer)
        return self.streams.between(begin, self.streams.mark())

    def _start(
        self, operator: Operator, x: Tensor, extents: Sequence[Any], *, awaited_next: bool
    ) -> Transfer:
        assert operator.axis is not None
        launch = collective_of(operator.kind, operator.phase)(self.mesh.lines[operator.axis], x, *extents)
        return self.streams.start(self.mesh.stream(operator.axis), launch, awaited_next=awaited_next)

    def _beside_transfer(
        self, call: Callable[..., Any], arguments: list[Any], key: str, name: str, counts: bool
    ) -> Any:
        begin = self.streams.mark()
        transfer = self._start_spare(name)
        issued = started = self.streams.mark()
        if (delay := self._delay_ns(key, name)) > 0:
            self.streams.delay(delay)
            started = self.streams.mark()
        results = call(*arguments)
        ended = self.streams.mark()
        self.streams.wait(transfer)
        transfer_end = transfer.end
        transfer.take()
        taken = self.streams.mark()
        if counts:
            after = min(self.streams.between(ended, taken), self.streams.between(transfer_end, taken))
            self._handling[name].append((self.streams.between(begin, issued), after))
            both = max(self.streams.between(begin, ended), self.streams.between(begin, transfer_end))
            self._together[key, name].append(
                Together(
                    operator_ns=self.streams.between(started, ended),
                    other_ns=self.streams.between(begin, transfer_end),
                    both_ns=both,
                    delay_ns=self.streams.between(begin, started),
                )
            )
        self._lasted[name] = self.streams.between(begin, transfer_end)
        return results

    def _delay_ns(self, key: str, name: str) -> float:
        """Return a random delay after which to begin an operator that is shorter than the transfer beside it.

        On a CPU most of a transfer's cost to the rank occurs at its begin and its end. If operators always
        ran at its begin, they would measure only this cost, as if the whole transfer were like its begin.
        """
        share = self._random.random()
        alone = median(self._solo.get(key, [0]))
        return share * max(0.0, self._lasted.get(name, 0) - _ROOM * alone)

    def _start_spare(self, name: str) -> Transfer:
        if name in self._links.names:
            return self._links.start(name)
        spare = self._spares[name]
        return self._start(spare.operator, spare.x, spare.extents, awaited_next=False)

    def _spares_alone(self, rounds: int) -> None:
        """Time spare transfers alone, and pairs of transfers inside and between nodes together."""
        self._random.seed(f"{self.seed} transfers")
        names = sorted(self._spares) + self._links.names
        for _ in range(rounds):
            for name in self._random.sample(names, len(names)):
                self._links.meet()
                transfer = self._start_spare(name)
                self.streams.wait(transfer)
                self._spare_times[name].append(self.streams.between(transfer.begin, transfer.end))
                transfer.take()
        for pair in (*self._links.pairs, *self._of_two_links()):
            for _ in range(rounds):
                self._together[pair].append(self._links.both(self._start_spare, pair))

    def _of_two_links(self) -> list[tuple[str, str]]:
        """Return pairs of layers' spare transfers: one inside nodes, one between nodes."""
        streams = self.mesh.topology.streams()
        links: dict[Stream, list[str]] = {Stream.INTRA: [], Stream.INTER: []}
        for name, spare in sorted(self._spares.items()):
            if is_layer(spare.part):
                assert spare.operator.axis is not None
                links[streams[spare.operator.axis]].append(name)
        return list(product(links[Stream.INTRA], links[Stream.INTER]))

    # -- helpers -------------------------------------------------------------------------------------------

    def _copies(self, rounds: int) -> list[float]:
        """Return nanoseconds per byte to copy every other row of one tensor to another tensor."""
        context = self.model.context
        shape = (context.sizes.local_tokens, 2, self.model.shape.hidden)
        x = torch.zeros(shape, device=context.device, dtype=context.dtype)
        y = torch.empty_like(x)
        return [self._time(lambda: y[:, 0].copy_(x[:, 1])) / (x.nbytes / 2) for _ in range(rounds)]

    def _warm_clock(self) -> None:
        """Raise the clock rate of a device that was idle; at a low rate compute would seem to take longer."""
        if not self.streams.asynchronous:
            return
        factor = torch.randn(_WARMING, _WARMING, device=self.model.context.device)
        product, begin = torch.empty_like(factor), self.streams.mark()
        while self.streams.between(begin, self.streams.mark()) < _WARM_NS:
            for _ in range(100):
                torch.mm(factor, factor, out=product)

    def _time(self, what: Callable[[], object]) -> int:
        self.streams.lead()
        begin = self.streams.mark()
        what()
        return self.streams.between(begin, self.streams.mark())
