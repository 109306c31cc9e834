"""Operators of a layer on one GPU: alone, beside a copy over the link, beside a matrix product.

Passes run as in training, in the order of the graphs; what runs beside an operator changes from pass to
pass, so that load that comes and goes reaches all alike.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch

from braid.actors.stage.bindings import collective_of, method_of
from braid.jobs.benchmarks.gpu_rig import Rig
from braid.scheduling.analytic import operator_class
from braid.scheduling.operators import Kind, Operator, Stream
from braid.scheduling.profile import Profile

ALONE: Final = "alone"
COPY: Final = "copy"
PRODUCT: Final = "product"
SHORT: Final = 0.1
"""An operator that takes less than this share of a copy says little about the two together."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator; times in ns, medians. ``None``: not measured together."""

    operator: str
    kind: str
    """Its class: gemm, attention, memory, or intra for what crosses the link."""
    alone_ns: int
    with_copy_ns: int | None = None
    with_product_ns: int | None = None
    copy_oef: float | None = None
    """Overlap effectiveness (DHelix equation 1): 1: the shorter of the two costs nothing."""
    product_oef: float | None = None


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """All operators of a layer, and what ran beside them."""

    operators: tuple[OperatorTime, ...]
    copy_ns: int
    """The copy by itself."""
    copy_bytes: int
    """In each direction."""
    product_ns: int | None
    """The matrix product by itself; None where there is one stream only."""
    product_shape: tuple[int, int, int]
    barrier_ns: int

    @property
    def copy_bytes_per_s(self) -> float:
        """Rate of the link in each direction while both are in use."""
        return self.copy_bytes / self.copy_ns * 1e9

    def profile(self, rig: Rig) -> Profile:
        """Costs that a pairing can be searched with."""
        intra = Stream.INTRA.value
        links = [op.operator for op in self.operators if op.kind == intra]
        oef: dict[str, float] = {}
        by_class: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for op in self.operators:
            if op.copy_oef is None:
                continue
            by_class["|".join(sorted((op.kind, intra)))].append((op.copy_oef, min(op.alone_ns, self.copy_ns)))
            if op.alone_ns >= SHORT * self.copy_ns:
                oef |= {"|".join(sorted((op.operator, link))): op.copy_oef for link in links}
        for kinds, effects in by_class.items():
            oef[kinds] = sum(effect * ns for effect, ns in effects) / sum(ns for _, ns in effects)
        return Profile(
            source=f"measured: {rig.hardware}, {rig.link.name}",
            solo_ns={op.operator: op.alone_ns for op in self.operators},
            classes={op.operator: op.kind for op in self.operators},
            oef=oef,
            barrier_ns=self.barrier_ns,
        )


def measure_operators(rig: Rig, rounds: int, seed: int = 0) -> OperatorTable:
    """Time the operators of a rig that is running, ``rounds`` times in each company."""
    return _Measurement(rig, seed).run(rounds)


class _Measurement:
    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._random = random.Random(seed)
        self._spare = rig.tokens(seed=1)
        sizes, hidden = rig.model.context.sizes, rig.shape.hidden
        self._shape = sizes.tokens, hidden, hidden
        if rig.device.type == "cuda":
            self._other = torch.cuda.Stream(rig.device)
            self._x = rig.tokens(seed=2).repeat(rig.tp, 1)
            self._weight = torch.randn(hidden, hidden, device=rig.device, dtype=rig.dtype)
            self._y = torch.empty_like(self._x)
            self._companies = [ALONE, COPY, PRODUCT]
        else:
            self._companies = [ALONE, COPY]
        self._times: dict[tuple[str, str], list[int]] = defaultdict(list)

    def run(self, rounds: int) -> OperatorTable:
        for turn in range(rounds + 1):
            offset = self._random.randrange(len(self._companies))
            for beside in range(len(self._companies)):
                self._pass(offset + beside, counts=turn > 0)
            if turn > 0:
                self._alone()
        alone = {name: round(median(ns)) for (name, company), ns in self._times.items() if company == ALONE}
        copy_ns, product_ns = alone.pop(COPY), alone.pop(PRODUCT, None)
        barrier_ns = alone.pop("barrier")
        layer = self._rig.layer
        operators = [op for graph in (layer.forward, layer.backward) for op in graph.operators]
        return OperatorTable(
            operators=tuple(self._row(op, alone, copy_ns, product_ns) for op in operators),
            copy_ns=copy_ns,
            copy_bytes=self._spare.nbytes,
            product_ns=product_ns,
            product_shape=self._shape,
            barrier_ns=barrier_ns,
        )

    def _row(
        self, op: Operator, alone: Mapping[str, int], copy_ns: int, product_ns: int | None
    ) -> OperatorTime:
        key = op.key
        with_copy, with_product = (
            round(median(self._times[key, company])) if (key, company) in self._times else None
            for company in (COPY, PRODUCT)
        )
        return OperatorTime(
            operator=key,
            kind=operator_class(op),
            alone_ns=alone[key],
            with_copy_ns=with_copy,
            with_product_ns=with_product,
            copy_oef=effectiveness(alone[key], copy_ns, with_copy),
            product_oef=effectiveness(alone[key], product_ns, with_product),
        )

    def _pass(self, first: int, counts: bool) -> None:
        """One forward and backward pass, keeping all values; operators take the companies in turn."""
        rig, layer = self._rig, self._rig.layer
        values: dict[str, Any] = {"x": rig.tokens(), f"d.{layer.output}": rig.tokens(seed=3)}
        for graph in (layer.forward, layer.backward):
            for place, op in enumerate(graph.operators):
                company = self._companies[(first + place) % len(self._companies)]
                arguments = [values[name] for name in op.reads]
                if op.kind.communicates:
                    company = ALONE
                    ns, results = self._transfer(op.kind, arguments[0])
                else:
                    ns, results = self._compute(method_of(op, rig.instance), arguments, company)
                if op.writes:
                    values.update(zip(op.writes, results, strict=True))
                if counts:
                    self._times[op.key, company].append(ns)

    def _alone(self) -> None:
        """What operators are measured beside, and a barrier."""
        rig = self._rig
        self._times[COPY, ALONE].append(self._transfer(Kind.ALL_GATHER, self._spare)[0])
        if PRODUCT in self._companies:
            self._times[PRODUCT, ALONE].append(rig.timed(self._product))
        rig.synchronise()
        begin = rig.streams.mark()
        rig.streams.barrier()
        self._times["barrier", ALONE].append(rig.between(begin, rig.streams.mark()))

    def _transfer(self, kind: Kind, x: torch.Tensor) -> tuple[int, tuple[Any]]:
        rig = self._rig
        result: list[Any] = []

        def run() -> None:
            launch = collective_of(kind)(rig.line, x)
            transfer = rig.streams.start(Stream.INTRA, launch, awaited_next=True)
            rig.streams.wait(transfer)
            result.append(transfer.take())

        ns = rig.timed(run)
        return ns, (result[0],)

    def _compute(self, call: Callable[..., Any], arguments: Sequence[Any], company: str) -> tuple[int, Any]:
        rig, streams = self._rig, self._rig.streams
        results: list[Any] = []

        def run() -> None:
            if company == COPY:
                launch = rig.link.all_gather(self._spare)
                transfer = streams.start(Stream.INTRA, launch, awaited_next=False)
            if company == PRODUCT:
                self._beside()
            results.append(call(*arguments))
            if company == COPY:
                streams.wait(transfer)
                transfer.take()
            if company == PRODUCT:
                torch.cuda.current_stream(rig.device).wait_stream(self._other)

        ns = rig.timed(run)
        return ns, results[0]

    def _product(self) -> None:
        torch.mm(self._x, self._weight, out=self._y)

    def _beside(self) -> None:
        self._other.wait_stream(torch.cuda.current_stream(self._rig.device))
        with torch.cuda.stream(self._other):
            self._product()


def effectiveness(first_ns: int, second_ns: int | None, both_ns: int | None) -> float | None:
    """OEF of two operators from their times alone and together, within -1 and 1; None if one is missing."""
    if second_ns is None or both_ns is None or not min(first_ns, second_ns):
        return None
    effect = (first_ns + second_ns - both_ns) / min(first_ns, second_ns)
    return max(-1.0, min(1.0, effect))
