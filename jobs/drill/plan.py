"""Decides which faults a drill has, and when each of them occurs: a pure function of its seed."""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from braid.actors.config import Config, ConfigError
from braid.actors.stage.rank.messages import Fault, FaultKind, FaultPhase
from braid.scheduling.text.suggestions import must_be_one_of

HOSTS, DISK, NODES = "two emulated hosts", "a small disk", "emulated Ray nodes"
"""Environments that a fault may need; the former two need root."""


@dataclass(frozen=True)
class DrillFault:
    """Definition of one kind of fault."""

    text: str
    in_rank: tuple[FaultKind, FaultPhase] | None = None
    """Action by which a rank causes the fault itself, and the phase of its step; with "hold" the rank waits
    until the link is cut."""
    needs: str = ""
    nodes: int = 0
    """Change of the number of nodes that the fault causes."""
    harmless: bool = False
    """Whether no rank fails because of it."""
    gaps: int = 1
    """Its duration in gaps (`_GAP` steps); more than one if a checkpoint must be written, or must fail,
    meanwhile."""


SLOW, JOINS = "node-slow", "node-joins"
DAMAGE = ("torn-checkpoint", "flipped-byte")
KINDS: Mapping[str, DrillFault] = {
    "kill-forward": DrillFault("a rank is killed in a forward pass", ("kill", "forward")),
    "kill-backward": DrillFault("a rank is killed in a backward pass", ("kill", "backward")),
    "kill-optimizer": DrillFault("a rank is killed before its optimizer step", ("kill", "optimizer")),
    "kill-save": DrillFault("a rank is killed while it writes a checkpoint", ("kill", "save")),
    "stop": DrillFault("a rank is stopped (SIGSTOP)", ("stop", "backward")),
    "nan": DrillFault("a gradient of a rank is no number", ("nan", "backward"), harmless=True),
    "skip": DrillFault(
        "a gradient is no number whenever its step is done, so that both runs leave the step out",
        ("skip", "backward"),
        harmless=True,
    ),
    "kill-controller": DrillFault("the controller is killed, and with it the command"),
    "sigterm": DrillFault("the command is asked to end (SIGTERM)"),
    "torn-checkpoint": DrillFault("the newest checkpoint loses half a file, and the controller is killed"),
    "flipped-byte": DrillFault("a byte of the newest checkpoint changes, and the controller is killed"),
    "disk-full": DrillFault("the run's disk is full for a while", needs=DISK, harmless=True, gaps=3),
    "kill-host": DrillFault("all ranks of a host are killed", needs=HOSTS),
    "cut-short": DrillFault(
        "the link between hosts is cut for less than the time-outs", needs=HOSTS, harmless=True
    ),
    "cut-long": DrillFault("the link between hosts is cut until that is noticed", needs=HOSTS),
    "cut-reduce": DrillFault(
        "the same while gradients are summed over replicas", ("hold", "reduce"), needs=HOSTS
    ),
    "cut-gather": DrillFault(
        "the same while updated parameters are gathered", ("hold", "gather"), needs=HOSTS
    ),
    "cut-optimizer": DrillFault(
        "the same between the two, before a rank's optimizer step", ("hold", "optimizer"), needs=HOSTS
    ),
    "cut-save": DrillFault("the same while a checkpoint is written", needs=HOSTS, gaps=2),
    "slow-link": DrillFault(
        "the link between hosts has a tenth of its rate for a while", needs=HOSTS, harmless=True
    ),
    JOINS: DrillFault("a node joins the Ray cluster", needs=NODES, nodes=1),
    "node-lost": DrillFault(
        "a node of the Ray cluster is lost: its raylet and its workers are killed", needs=NODES, nodes=-1
    ),
    "node-drained": DrillFault(
        "Ray says that a node will be taken away; when no rank is left there, it is", needs=NODES, nodes=-1
    ),
    SLOW: DrillFault("a node computes at a third of its speed for a while", needs=NODES),
}
"""Kinds of faults by name."""

NEED_ROOT = frozenset(name for name, fault in KINDS.items() if fault.needs in (HOSTS, DISK))
NODE_FAULTS = tuple(name for name, fault in KINDS.items() if fault.needs == NODES)


def changes_nodes(kinds: Iterable[str]) -> bool:
    """Return whether any of these faults concerns nodes, so that the run needs a Ray cluster."""
    return not {*kinds}.isdisjoint(NODE_FAULTS)


LEAST_TO_BE_SLOW = 3
"""Least number of nodes for one to be slow: with two, it is unknown which one is slow."""
_GAP = 6
"""Least number of steps between two faults."""
_FIRST = 4


@dataclass(frozen=True)
class NodeRange:
    """A drill's number of nodes at the start, and its least and largest allowed number; every node has a
    rank."""

    start: int
    least: int
    most: int


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a drill, and when it occurs."""

    name: str
    kind: str
    step: int
    """Number of finished steps after which it occurs. With faults of nodes, which last for a time instead of
    a number of steps, the distance to the previous fault is counted from that fault's end."""
    place: float
    """Random number in [0, 1) for all further choices, such as the rank or file."""
    nodes: int | None = None
    """Nodes of the Ray cluster when the fault occurs; None in a drill without faults of nodes."""

    @property
    def nodes_after(self) -> int | None:
        """Number of nodes after the fault; None in a drill without faults of nodes."""
        return None if self.nodes is None else self.nodes + KINDS[self.kind].nodes

    @property
    def nodes_used(self) -> list[int]:
        """Numbers of nodes that the run uses: when the fault occurs, afterwards, and without a slow node."""
        if self.nodes is None:
            return []
        return [self.nodes, self.nodes + KINDS[self.kind].nodes, self.nodes - (self.kind == SLOW)]

    def in_rank(self, ranks: int) -> Fault | None:
        """Return the fault for a rank that causes it itself; None for a fault from outside."""
        if (what := KINDS[self.kind].in_rank) is None:
            return None
        rank, place = divmod(self.place * ranks, 1.0)
        step = self.step if self.nodes is None else None
        return Fault(name=self.name, kind=what[0], rank=int(rank), step=step, phase=what[1], place=place)


def possible_faults(config: Config) -> list[str]:
    """Return all faults that can be made together on this machine for a configuration; as many nodes join as
    leave."""
    possible = [kind for kind in KINDS if not _obstacle(config, kind)]
    if os.environ.get("RAY_ADDRESS"):
        possible = [kind for kind in possible if kind not in NODE_FAULTS]
    if JOINS in possible:
        possible.remove("skip")
        if (config.elastic.max_ranks or 0) < LEAST_TO_BE_SLOW:
            possible.remove(SLOW)
    return [kind for kind in possible for _ in range(2 if kind == JOINS else 1)]


def check_faults(config: Config, kinds: Sequence[str]) -> None:
    """Raise `ConfigError` for faults that are unknown, cannot be made here, or cannot be combined."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults: {unknown[0]!r} {must_be_one_of(unknown[0], KINDS)}")
    if changes_nodes(kinds):
        if not NEED_ROOT.isdisjoint(kinds):
            raise ConfigError(
                f"--faults: {', '.join(NODE_FAULTS)} need cluster.launcher=ray, and "
                f"{', '.join(sorted(NEED_ROOT))} need --launcher processes: drill them one after the other"
            )
        if "skip" in kinds:
            raise ConfigError("--faults skip: the step that is left out is another one where nodes change")
    for kind in kinds:
        if why := _obstacle(config, kind):
            raise ConfigError(f"--faults {kind}: {why}")


def _obstacle(config: Config, kind: str) -> str:
    """Return why a fault cannot be made here for a configuration; empty if it can."""
    layout, cluster, needs = config.layout(), config.cluster, KINDS[kind].needs
    if needs in (HOSTS, DISK):
        if os.geteuid() != 0:
            return "network namespaces and mounts need root"
        if cluster.launcher != "processes":
            return "faults of emulated hosts need --launcher processes"
    if needs == NODES:
        if cluster.launcher != "ray":
            return "faults of nodes need cluster.launcher=ray: leave out --launcher processes"
        if cluster.address is not None:
            return (
                f"faults of nodes come to a Ray cluster that the drill starts itself: leave out "
                f"cluster.address={cluster.address!r}"
            )
        if config.elastic.max_ranks is None:
            return (
                f"faults of nodes need a run that follows its nodes: add a section elastic with max_ranks, "
                f"such as --set elastic.max_ranks={layout.ranks + 2}"
            )
    if kind == "cut-gather" and not layout.zero:
        return "no parameters are gathered without sharding: --set parallel.zero=1"
    if kind == "cut-reduce" and layout.dp * layout.cp == 1:
        return "no gradients are summed over replicas: --set parallel.dp=2"
    return ""


def plan_drill(
    kinds: Sequence[str], count: int, seed: int, nodes: NodeRange | None = None
) -> list[PlannedFault]:
    """Plan every kind of fault ``count`` times, in an order drawn by the seed, some steps apart.

    ``nodes``: range in which faults keep the number of nodes; raise `ConfigError` if no order does that.
    """
    draw = random.Random(seed)
    left = [kind for kind in kinds for _ in range(count)]
    draw.shuffle(left)
    if nodes is not None:
        _check_range(left, nodes)
    planned, step, there = list[PlannedFault](), _FIRST, None if nodes is None else nodes.start
    while left:
        kind = left[0] if nodes is None or there is None else _next(left, nodes, there)
        left.remove(kind)
        name = f"{len(planned):03}-{kind}"
        planned.append(PlannedFault(name, kind, step + draw.randrange(3), draw.random(), there))
        there = planned[-1].nodes_after
        step += _GAP * KINDS[kind].gaps
    return planned


def _check_range(kinds: Sequence[str], nodes: NodeRange) -> None:
    """Raise `ConfigError` unless the final number of nodes lies in the range, and the range has several
    numbers. Otherwise some remaining fault is always possible: at the largest number, one that removes a
    node, and so on."""
    changes = [KINDS[kind].nodes for kind in kinds]
    end = nodes.start + sum(changes)
    if changes_nodes(kinds) and (nodes.least == nodes.most or not nodes.least <= end <= nodes.most):
        raise ConfigError(
            f"{changes.count(1)} nodes that join and {changes.count(-1)} that leave lead from {nodes.start} "
            f"to {end} nodes, and elastic and the model's layouts allow {nodes.least} to {nodes.most}: name "
            f"other --faults (one that is named twice comes twice), lower --count, or widen "
            f"elastic.min_ranks and elastic.max_ranks"
        )


def _next(left: Sequence[str], nodes: NodeRange, there: int) -> str:
    """Return the first fault that is possible with ``there`` nodes; a slow node comes as early as
    possible."""
    can = [kind for kind in left if nodes.least <= there + KINDS[kind].nodes <= nodes.most]
    if SLOW in left:
        if there >= LEAST_TO_BE_SLOW and there > nodes.least:
            return SLOW
        # Prefer joining to leaving, as the number of nodes may not rise again.
        can = sorted((kind for kind in can if kind != SLOW), key=lambda kind: KINDS[kind].nodes < 0)
    if not can:
        raise ConfigError(
            f"--faults {', '.join(left)}: with {there} nodes none of these can come; {SLOW} needs "
            f"{LEAST_TO_BE_SLOW} nodes, and one more than elastic.min_ranks"
        )
    return can[0]


def steps_of(planned: Sequence[PlannedFault]) -> int:
    """Return the number of steps that a run needs so that all its faults occur, and are over before it
    ends."""
    return max((fault.step for fault in planned), default=0) + 3 * _GAP
