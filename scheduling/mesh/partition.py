"""Partitions, which say how a schedule cuts a collective and the operators next to it (Centauri section 3.1).

A collective may run in *stages* over the dimensions of a mesh of its ranks (group partition), and in *pieces*
of its payload (workload partition): of the rows, or columns, of the adjacent operators, which then also run
piece by piece. This module describes a partition; `braid.scheduling.generate.partitions` applies it to
graphs, `braid.scheduling.plan.tiers` lists the candidates.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any, Final, NamedTuple

from braid.scheduling.text.pattern import variant_of


class DimRanks(StrEnum):
    """Subset of the ranks along a dimension of a mesh, seen from one rank: all, itself, or all others."""

    ALL = "all"
    OWN = "own"
    OTHERS = "others"

    def of(self, ranks: int) -> int:
        """Return the number of ranks in the subset for a dimension of ``ranks`` ranks."""
        return {DimRanks.ALL: ranks, DimRanks.OWN: 1, DimRanks.OTHERS: ranks - 1}[self]


Share = tuple[int, int]
"""(number, ways): the part ``number``, from 1, of something cut into ``ways`` nearly equal parts."""
WHOLE: Final[Share] = (1, 1)


def bounds(share: Share, size: int) -> tuple[int, int]:
    """Return (first row, row behind the last) of a share of ``size`` rows."""
    number, ways = share
    return (number - 1) * size // ways, number * size // ways


@dataclass(frozen=True)
class Region:
    """Rows and columns that a piece of a value holds: from which ranks, and which share of each rank's rows
    and columns.

    Ranks are numbered by a mesh over the axis, the last dimension fastest; rows are ordered by rank.
    """

    axis: str
    mesh: tuple[int, ...]
    spans: tuple[DimRanks, ...]
    rows: Share = WHOLE
    columns: Share = WHOLE

    @property
    def ranks(self) -> int:
        """Number of ranks of whose rows the piece holds some."""
        return prod(span.of(size) for span, size in zip(self.spans, self.mesh, strict=True))

    def elements(self, rows: int, columns: int) -> int:
        """Return the number of elements in the region if each rank has ``rows`` rows of ``columns``
        columns."""
        sizes = (end - begin for begin, end in (bounds(self.rows, rows), bounds(self.columns, columns)))
        return self.ranks * prod(sizes)


class Factor(str):
    """One dimension of a mesh over the ranks of an axis, used as an axis of its own.

    As a text it is the name of this axis: ``tp.2x4.1``.
    """

    axis: str
    mesh: tuple[int, ...]
    dim: int

    def __new__(cls, axis: str, mesh: tuple[int, ...], dim: int) -> "Factor":
        factor = super().__new__(cls, f"{axis}.{_by(mesh)}.{dim}")
        factor.axis, factor.mesh, factor.dim = axis, mesh, dim
        return factor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.axis, self.mesh, self.dim)

    @property
    def size(self) -> int:
        return self.mesh[self.dim]

    @property
    def inside(self) -> bool:
        """Whether ranks along this factor share a node, which those along a mesh's last dimension do."""
        return self.dim == len(self.mesh) - 1


def whole_axis(axis: str) -> str:
    """Return the axis to which a factor belongs; a whole axis is returned unchanged."""
    return axis.axis if isinstance(axis, Factor) else axis


DIMS: Final = ("tokens", "width")

MOST_PIECES: Final = 64
"""Most pieces into which a collective may be cut."""

PARTITIONED: Final = ("tp", "dp")
"""Axes whose collectives a partition may cut."""


class Target(NamedTuple):
    """What a partition cuts: a collective of a part (``layer/mlp_gather``), or all collectives of a kind over
    an axis (``tp/all_gather``)."""

    where: str
    """Name of the part, or of the axis."""
    collective: str
    """Name of the collective, or kind of collective."""

    def __str__(self) -> str:
        return f"{self.where}/{self.collective}"

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse the text that ``str`` returns for a target; raise `ValueError` for any other text."""
        words = text.split("/")
        if len(words) != 2 or not all(words) or "#" in text or text.split() != [text]:
            raise ValueError(f"partition {text}: write PART/COLLECTIVE, or AXIS/KIND such as tp/all_gather")
        return cls(variant_of(words[0]), words[1])

    @classmethod
    def from_plain(cls, content: Any, where: str) -> "Target":
        if not isinstance(content, str):
            raise ValueError(f"{where}={content!r} must be text")
        return cls.parse(content)

    def to_plain(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How to cut one collective of a layer, or all collectives of a kind over an axis.

    Raises `ValueError` if the fields contradict each other.
    """

    what: Target
    mesh: tuple[int, ...] = ()
    """Sizes of a mesh of the collective's ranks, outermost first; (): the collective is not split into
    stages."""
    order: tuple[int, ...] = ()
    """Dimensions of the mesh in the order of the stages. (1, 0, 1), for a gather: a rank first receives, at
    once, from its own node and from its position in all other nodes, then the rest (Centauri figure 5e)."""
    pieces: int = 1
    dim: str = ""
    """Dimension along which adjacent operators are cut, ``tokens`` or ``width``; "": they are not cut."""
    operators: int = 0
    """Most adjacent operators, nearest first, that are cut into pieces too."""
    delivered: bool = False
    """Whether adjacent operators are cut into the rows that each stage of a gather delivers, not equally."""

    def __post_init__(self) -> None:
        where = f"partition {self.what}"
        if self.mesh and (len(self.mesh) < 2 or min(self.mesh) < 2):
            raise ValueError(f"{where}: mesh={_by(self.mesh)} needs two dims or more, of 2 ranks or more")
        dims = tuple(range(len(self.mesh)))
        if tuple(sorted(self.order)) != dims and (self.order, dims) != (ABOUT_OWN, (0, 1)):
            raise ValueError(
                f"{where}: order={_listed(self.order)} must have every dim of the mesh once"
                + (f", {_listed(dims)} in any order" if dims else "; without a mesh it is empty")
            )
        if not 1 <= self.pieces <= MOST_PIECES:
            raise ValueError(f"{where}: pieces={self.pieces} must be between 1 and {MOST_PIECES}")
        if self.dim and self.dim not in DIMS:
            raise ValueError(f"{where}: dim={self.dim!r} must be one of {', '.join(DIMS)}, or left out")
        if bool(self.dim) != bool(self.operators) or self.operators < 0:
            raise ValueError(
                f"{where}: operators={self.operators} are cut along dim={self.dim!r}; give both or none"
            )
        if self.delivered and (self.dim != "tokens" or self.pieces > 1 or not self.mesh):
            raise ValueError(f"{where}: what is cut as delivered needs a mesh, dim=tokens and pieces=1")
        if self.dim == "width" and self.operators > 1:
            raise ValueError(f"{where}: operators={self.operators}: along the width it can be 1 alone")
        if not self.mesh and self.pieces == 1:
            raise ValueError(f"{where}: it cuts nothing; give pieces or a mesh, or leave it out")

    def __str__(self) -> str:
        words = [str(self.what)]
        if self.mesh:
            words += ["mesh", _by(self.mesh), "order", _listed(self.order)]
        if self.delivered:
            words.append("delivered")
        elif self.pieces > 1:
            words += ["pieces", str(self.pieces)]
        if self.dim:
            words += ["of", self.dim, "with", str(self.operators)]
        return " ".join(words)

    @property
    def about_own(self) -> bool:
        """Whether the order is (1, 0, 1): a rank first receives from its node and from its position in
        others."""
        return self.order == ABOUT_OWN


ABOUT_OWN: Final = (1, 0, 1)
_TEXT: Final = re.compile(
    r"(?P<what>\S+)(?: mesh (?P<mesh>[0-9x]+) order (?P<order>[0-9,]+))?"
    r"(?: (?P<delivered>delivered)| pieces (?P<pieces>[0-9]+))?"
    r"(?: of (?P<dim>\w+) with (?P<operators>[0-9]+))?"
)


def _by(mesh: Iterable[int]) -> str:
    return "x".join(map(str, mesh))


def _listed(order: Iterable[int]) -> str:
    return ",".join(map(str, order))


def parse_partition(text: str) -> Partition:
    """Parse the text that ``str`` returns for a partition; raise `ValueError` for any other text."""
    match = _TEXT.fullmatch(text)
    wrong = f"partition {text!r} is not WHAT [mesh 2x4 order 0,1] [pieces 4 | delivered] [of tokens with 1]"
    if match is None:
        raise ValueError(wrong)

    def numbers(text: str | None, mark: str) -> tuple[int, ...]:
        return tuple(int(word) for word in (text or "").split(mark) if word)

    partition = Partition(
        what=Target.parse(match["what"]),
        mesh=numbers(match["mesh"], "x"),
        order=numbers(match["order"], ","),
        pieces=int(match["pieces"] or 1),
        dim=match["dim"] or "",
        operators=int(match["operators"] or 0),
        delivered=match["delivered"] is not None,
    )
    if str(partition) != text:
        raise ValueError(wrong)
    return partition


def chosen(partitions: Iterable[Partition], *names: str) -> Partition | None:
    """Return the partition that applies to a collective, or None.

    ``names``: texts by which partitions may refer to it (``what``); the first that any partition has counts.
    """
    by_what: Mapping[str, Partition] = {str(partition.what): partition for partition in partitions}
    return next((by_what[name] for name in names if name in by_what), None)
