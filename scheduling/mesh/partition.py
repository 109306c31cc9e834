"""Partitions: how a schedule cuts a collective, and with it the operators that depend on it (Centauri
section 3.1).

A collective may run in *stages* over the dims of a mesh of its ranks (group partition), and in *pieces* of
its payload (workload partition): of the rows, or columns, of the operators beside it, which then run piece by
piece too. Here is what a schedule says of it; `braid.scheduling.generate.partitions` carries it out in
graphs, `braid.scheduling.plan.tiers` lists what there is to choose from.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Final


class DimRanks(StrEnum):
    """Which of the ranks along a dim of a mesh, seen from one of them."""

    ALL = "all"
    OWN = "own"
    OTHERS = "others"

    def of(self, ranks: int) -> int:
        """How many that is of so many."""
        return {DimRanks.ALL: ranks, DimRanks.OWN: 1, DimRanks.OTHERS: ranks - 1}[self]


Share = tuple[int, int]
"""Part number (from 1) of so many, which are as equal as they can be."""
WHOLE: Final[Share] = (1, 1)


def bounds(share: Share, size: int) -> tuple[int, int]:
    """Where a share of ``size`` rows begins and ends."""
    number, ways = share
    return (number - 1) * size // ways, number * size // ways


@dataclass(frozen=True)
class Region:
    """What of the rows of all ranks a value has: of which ranks, which of their rows, which columns.

    Ranks are numbered by a mesh over an axis, the last dim fastest; rows stand rank after rank.
    """

    axis: str
    mesh: tuple[int, ...]
    spans: tuple[DimRanks, ...]
    rows: Share = WHOLE
    columns: Share = WHOLE

    @property
    def ranks(self) -> int:
        """Of how many ranks it has rows."""
        return prod(span.of(size) for span, size in zip(self.spans, self.mesh, strict=True))

    def elements(self, rows: int, columns: int) -> int:
        """How many a value has there, where every rank has so many rows and columns."""
        sizes = (end - begin for begin, end in (bounds(self.rows, rows), bounds(self.columns, columns)))
        return self.ranks * prod(sizes)


@dataclass(frozen=True)
class Factor:
    """A dim of a mesh over the ranks of an axis, as an axis of its own: ``tp.2x4.1``."""

    axis: str
    mesh: tuple[int, ...]
    dim: int

    def __str__(self) -> str:
        return f"{self.axis}.{'x'.join(map(str, self.mesh))}.{self.dim}"

    @property
    def size(self) -> int:
        """Ranks along it."""
        return self.mesh[self.dim]

    @property
    def inside(self) -> bool:
        """Whether it lies inside nodes, which the ranks along the last dim of a mesh share."""
        return self.dim == len(self.mesh) - 1


_FACTOR: Final = re.compile(r"([a-z]+)\.([0-9]+(?:x[0-9]+)*)\.([0-9]+)")


def factor_of(axis: str) -> Factor | None:
    """The factor that an axis's name says; None for a whole axis."""
    match = _FACTOR.fullmatch(axis)
    return match and Factor(match[1], tuple(map(int, match[2].split("x"))), int(match[3]))


def whole_axis(axis: str) -> str:
    """The axis that a factor is of, or itself."""
    return axis.partition(".")[0]


DIMS: Final = ("tokens", "width")

PARTITIONED: Final = ("tp", "dp")
"""Axes whose collectives a partition may divide."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How a collective, or every one of a kind over an axis, is cut. `ValueError` where that cannot be."""

    what: str
    """A layer's collective, ``layer/mlp_gather``, or all of a kind: ``tp/all_gather``, ``dp/all_reduce``."""
    mesh: tuple[int, ...] = ()
    """Of its ranks; (): they are not divided."""
    order: tuple[int, ...] = ()
    """Dims of the mesh in the order of the stages. (1, 0, 1), of a gather: what is on the own node, and the
    own rank's of all nodes, at once, then the rest (Centauri figure 5e)."""
    pieces: int = 1
    dim: str = ""
    """What the operators beside it are cut along, ``tokens`` or ``width``; "": they are not."""
    operators: int = 0
    """How many of those at most, nearest first, run piece by piece: a GEMM, and what works row by row."""
    delivered: bool = False
    """Those are cut as the stages of a gather deliver, not in equal pieces."""

    def __post_init__(self) -> None:
        where = f"partition {self.what}"
        if not _WHAT.fullmatch(self.what):
            raise ValueError(f"{where}: write PART/COLLECTIVE, or AXIS/KIND such as tp/all_gather")
        if self.mesh and (len(self.mesh) < 2 or min(self.mesh) < 2):
            raise ValueError(f"{where}: mesh={_by(self.mesh)} needs two dims or more, of 2 ranks or more")
        dims = tuple(range(len(self.mesh)))
        if tuple(sorted(self.order)) != dims and (self.order, dims) != (ABOUT_OWN, (0, 1)):
            raise ValueError(
                f"{where}: order={_listed(self.order)} must have every dim of the mesh once"
                + (f", {_listed(dims)} in any order" if dims else "; without a mesh it is empty")
            )
        if not 1 <= self.pieces <= 64:
            raise ValueError(f"{where}: pieces={self.pieces} must be between 1 and 64")
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
        words = [self.what]
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
    def where(self) -> str:
        """The part whose collective is cut, or the axis whose collectives of a kind are."""
        return self.what.partition("/")[0]

    @property
    def collective(self) -> str:
        """Name of the collective in that part, or the kind."""
        return self.what.partition("/")[2]

    @property
    def about_own(self) -> bool:
        """Whether a gather brings the own node's, and the own rank's of all nodes, first (figure 5e)."""
        return self.order == ABOUT_OWN


ABOUT_OWN: Final = (1, 0, 1)
_WHAT: Final = re.compile(r"[^\s/#]+/[^\s/#]+")
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
    """What `str` of a partition wrote; `ValueError` for anything else."""
    match = _TEXT.fullmatch(text)
    wrong = f"partition {text!r} is not WHAT [mesh 2x4 order 0,1] [pieces 4 | delivered] [of tokens with 1]"
    if match is None:
        raise ValueError(wrong)

    def numbers(text: str | None, mark: str) -> tuple[int, ...]:
        return tuple(int(one) for one in (text or "").split(mark) if one)

    found = Partition(
        what=match["what"],
        mesh=numbers(match["mesh"], "x"),
        order=numbers(match["order"], ","),
        pieces=int(match["pieces"] or 1),
        dim=match["dim"] or "",
        operators=int(match["operators"] or 0),
        delivered=match["delivered"] is not None,
    )
    if str(found) != text:
        raise ValueError(wrong)
    return found


def chosen(partitions: Iterable[Partition], *names: str) -> Partition | None:
    """The partition of a collective by its names, of which the first that has one counts."""
    by_what: Mapping[str, Partition] = {one.what: one for one in partitions}
    return next((by_what[name] for name in names if name in by_what), None)
