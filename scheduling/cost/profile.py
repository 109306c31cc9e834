"""Defines a profile: the costs of every operator, every pair of operators and every transfer of a job.

Measured and modelled costs have one format. A missing cost is a `ValueError`, never zero.

Names: an operator is ``PART/OPERATOR`` (``layer/qkv.dgrad``); a pair is two operators, or two classes of
operators, joined by ``|`` in alphabetical order (``gemm|intra``); the slowdown of one by the other is
``SUFFERS<CAUSE`` (``intra<gemm``); a transfer is ``AXIS/KIND`` (``dp/reduce_scatter``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Final

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import WHOLE, Factor
from braid.scheduling.model.operators import Kind, Operator, OperatorKey, Part
from braid.scheduling.text.pattern import is_layer
from braid.scheduling.text.records import file_text, from_mapping, require_positive, to_mapping

VERSION: Final = 7


class UnknownCostError(ValueError):
    """Error that a profile lacks a cost that is needed."""


@dataclass(frozen=True, kw_only=True)
class TransferFit:
    """Time of a transfer as a linear function of its payload: latency + bytes / rate.

    `braid.scheduling.cost.collectives` defines payloads.
    """

    latency_ns: float
    ns_per_byte: float

    def __post_init__(self) -> None:
        require_positive(self, ("latency_ns", "ns_per_byte"), zero=True)

    def ns(self, payload_bytes: float) -> int:
        """Return the time in ns of a transfer with this payload; 0 if it is empty."""
        return round(self.latency_ns + payload_bytes * self.ns_per_byte) if payload_bytes else 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of one job on one kind of hardware; all times are in nanoseconds.

    ``solo_ns``: key of an operator (`Operator.key`) -> its time when nothing else runs.
    """

    source: str
    """Origin of the numbers: ``modelled: CLUSTER`` or ``measured: HARDWARE``."""
    solo_ns: Mapping[str, int]
    classes: Mapping[str, str] = field(default_factory=dict)
    """Operator key -> class (gemm, attention, memory, intra, inter), used for pairs that are not listed."""
    oef: Mapping[str, float] = field(default_factory=dict)
    """Pair of operators or of classes (``gemm|intra``) -> overlap effectiveness (OEF, DHelix equation 1)."""
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """``SUFFERS<CAUSE`` -> fraction by which an operator or class takes longer while another one runs. A
    measured slowdown takes precedence over the OEF, which is one number for both sides."""
    transfers: Mapping[str, TransferFit] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Axis, or factor of an axis -> stream of its transfers."""
    meshes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Axis -> (nodes, ranks per node) for axes whose collectives may be split into stages; transfers and
    streams then have the axis's factors too."""
    issue_ns: Mapping[str, int] = field(default_factory=dict)
    """Operator key -> time for which issuing an overlapped collective occupies the rank. If a collective is
    not listed it takes no time, as on modelled GPUs, whose host runs ahead."""
    take_ns: Mapping[str, int] = field(default_factory=dict)
    """Operator key -> time from the end of an overlapped collective until the rank can continue (wake-up,
    putting parts together). It is part of the solo time, during which the rank does nothing else."""
    barrier_ns: int = 0
    optimizer_ns_per_parameter: float = 0.0
    norm_ns_per_parameter: float = 0.0
    copy_ns_per_byte: float = 0.0
    """Time per byte for copies on a rank, such as pieces of values to their positions in the whole value."""
    expert_imbalance: float = 0.0
    """Rows on the expert-parallel rank with most rows, divided by the average over ranks; mean of the
    measured passes. 0: there are no experts, or all ranks have equally many rows."""
    transfers_alone: bool = False
    """Whether solo times of collectives exclude the time in which ranks wait for the last rank to start."""
    spread_ns: Mapping[str, int] = field(default_factory=dict)
    """Operator key -> interquartile range of its measured solo times."""
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version={self.version!r} of the profile is not {VERSION}; profile anew")
        require_positive(
            self,
            ("barrier_ns", "optimizer_ns_per_parameter", "norm_ns_per_parameter", "copy_ns_per_byte"),
            zero=True,
        )
        for name, value in self.solo_ns.items():
            if value < 0:
                raise ValueError(f"solo_ns.{name}={value} must be zero or more")
        for name, slowdown in self.slowdowns.items():
            if not 0 <= slowdown <= 10:
                raise ValueError(f"slowdowns.{name}={slowdown} must be between 0 and 10")
        for name, effect in self.oef.items():
            if not -10 <= effect <= 1.5:
                raise ValueError(f"oef.{name}={effect} must be between -10 and 1.5")

    @property
    def told(self) -> str:
        """Text for people: the profile's source, and how unequally it assumes experts to be loaded."""
        uneven = f", fullest rank of experts {self.expert_imbalance:.2f} x the average"
        return self.source + (uneven if self.expert_imbalance else "")

    @property
    def layer_operators(self) -> dict[str, str]:
        """Key -> name for people, for all operators of layers; the name has the kind of layer if there are
        several kinds."""
        keys = [key for key in map(OperatorKey.parse, self.solo_ns) if is_layer(key.part)]
        several = len({key.part for key in keys}) > 1
        return {str(key): str(key) if several else key.operator for key in keys}

    def solo(self, key: str) -> int:
        """Return the solo time in ns of the operator with a key (`Operator.key`); its recomputation takes as
        long.

        Raises `UnknownCostError` if there is none.
        """
        if key not in self.solo_ns:
            raise UnknownCostError(
                f"profile ({self.source}): no cost of operator {key!r}, which the plan needs; "
                f"profile this model, layout and micro-batch"
            )
        return self.solo_ns[key]

    def effect(self, first: str, second: str) -> float:
        """Return the overlap effectiveness of two operators (by key), or else that of their classes."""
        for pair in self._names(first, second):
            if (effect := self.oef.get("|".join(sorted(pair)))) is not None:
                return effect
        classes = "|".join(sorted(pair))
        raise UnknownCostError(
            f"profile ({self.source}): no time of {first!r} together with {second!r} "
            f"(neither the pair nor {classes!r})"
        )

    def slowdown(self, first: str, second: str) -> float:
        """Return the fraction by which ``first`` takes longer while ``second`` runs (operators by key).

        ``first`` advances at 1 / (1 + slowdown) of its rate. If only the OEF is known, both sides are slowed
        by 1 - OEF, which gives exactly the time together from which the OEF was computed.
        """
        for suffers, cause in self._names(first, second):
            if (slowdown := self.slowdowns.get(f"{suffers}<{cause}")) is not None:
                return slowdown
        return max(0.0, 1.0 - self.effect(first, second))

    def _names(self, first: str, second: str) -> Iterator[tuple[str, str]]:
        """Yield the pairs of names under which two operators may be listed, the most specific pair first.

        A name without a class is its own class: links and the optimizer are looked up by class name.
        """
        classes = self.classes.get(first, first), self.classes.get(second, second)
        yield first, second
        yield first, classes[1]
        yield classes[0], second
        yield classes

    def transfer(self, axis: str, kind: Kind) -> TransferFit:
        """Return the time function of a kind of transfer over an axis; raise `UnknownCostError` if there is
        none."""
        key = f"{axis}/{kind.value}"
        if key not in self.transfers:
            raise UnknownCostError(
                f"profile ({self.source}): no cost of transfer {key!r}, which the plan needs"
            )
        return self.transfers[key]

    def to_json(self) -> str:
        """Return the profile as JSON that `parse_profile` reads back to an equal object."""
        return json.dumps(to_mapping(self), indent=1)


def with_piece_costs(profile: Profile, parts: Iterable[Part], width: int = 2) -> Profile:
    """Return the profile plus costs of all pieces in the parts (`braid.scheduling.generate.partitions`).

    If the first of equal pieces of a GEMM was measured (``NAME.1of4``), every piece costs the same, including
    the copies that position its rows. Stages between or inside nodes cost as much as a transfer along their
    factor, with ``width`` bytes per activation. Other costs follow from the whole operator: pieces of a GEMM
    share its time, pieces of a collective share its time beyond the latency of its kind of transfer. Issuing
    a piece takes as long as for the whole, taking its result as long as its share; the rank's copies
    (`copied_bytes`) are added to both.
    """
    solo, classes = dict(profile.solo_ns), dict(profile.classes)
    issue, take = dict(profile.issue_ns), dict(profile.take_ns)
    for part, op in ((p, op) for p in parts for op in (*p.forward.operators, *p.backward.operators)):
        if op.piece is None:
            continue
        piece, key = op.piece, op.key
        name = replace(op, measured_as=piece.measured_as).key
        measured = profile.solo_ns.get(first_piece(name, piece.ways))
        equal = abs(piece.share * piece.ways - 1) < 0.01
        if isinstance(op.axis, Factor):
            payload = op.bytes * op.axis.size / (op.axis.size - 1) * width / 2
            solo[key] = profile.transfer(op.axis, op.kind).ns(payload)
            classes[key] = op.stream.value
        elif measured is not None and equal:
            solo[key] = measured
        else:
            whole = profile.solo(name)
            fit = profile.transfers.get(f"{op.axis}/{op.kind.value}")
            latency = min(float(whole), fit.latency_ns) if fit is not None else 0.0
            solo[key] = round(latency + (whole - latency) * piece.share)
        if (class_ := profile.classes.get(name)) is not None:
            classes.setdefault(key, class_)
        if op.axis is None:
            continue
        before, after = (profile.copy_ns_per_byte * count for count in copied_bytes(part, op, width))
        issue[key] = round(issue.get(name, 0) + before)
        take[key] = round(take.get(name, 0) * min(1.0, piece.share) + after)
        solo[key] += round(before + after)
    return replace(profile, solo_ns=solo, classes=classes, issue_ns=issue, take_ns=take)


def first_piece(key: str, ways: int) -> str:
    """Return the key of the first of ``ways`` equal pieces of the operator with ``key``."""
    return f"{key}.1of{ways}"


def copied_bytes(part: Part, op: Operator, width: int) -> tuple[int, int]:
    """Return the bytes that a rank copies (before the transfer of a collective's piece, after it).

    Before it, rows or columns that are not contiguous are copied, and blocks that a scatter's stage needs in
    another order. After it, blocks of a gather's stage are, and the piece to its position in the whole value.
    """
    read, written = part.values[op.reads[0]], part.values[op.writes[0]]
    region = written.region
    gathers = op.kind is Kind.ALL_GATHER
    before = after = 0
    whole = read.region is None and region is not None
    if whole and region is not None and (region.columns != WHOLE or (not gathers and region.rows != WHOLE)):
        share = region.columns if region.columns != WHOLE else region.rows
        before += read.bytes(width) // share[1]
    if isinstance(factor := op.axis, Factor):
        mesh, spans = factor.mesh, region.spans if region is not None else None
        outer = prod(
            (spans[dim].of(mesh[dim]) if spans else mesh[dim] if gathers else 1) for dim in range(factor.dim)
        )
        if outer > 1 and gathers:
            after += written.bytes(width)
        elif outer > 1:
            before += written.bytes(width) * factor.size
    if written.piece_of is not None:
        after += written.bytes(width)
    return before, after


def parse_profile(text: str, where: str) -> Profile:
    """Parse a profile from JSON text that comes from ``where``.

    Raises `ValueError` that names the source, the wrong key, its value and the remedy.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no profile, which `braid profile` writes: {error}") from None
    return from_mapping(Profile, content, where)


def read_profile(path: Path) -> Profile:
    """Read a profile from a JSON file; raise `ValueError` that names the file and a remedy if it is
    unusable."""
    return parse_profile(file_text(path, "profile", "make one with `braid profile --output`"), str(path))
