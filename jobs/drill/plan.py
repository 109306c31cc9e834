"""Decides which faults a drill has, and when each of them occurs: a pure function of its seed."""

import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from braid.actors.config import Config, ConfigError
from braid.actors.stage.rank.messages import Fault, FaultKind, FaultPhase
from braid.scheduling.text.suggestions import must_be_one_of

HOSTS, DISK, NODES = "root, for two emulated hosts", "root, for a small disk", "Ray, elastic"
"""What a fault may need."""


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

NODE_FAULTS = tuple(name for name, fault in KINDS.items() if fault.needs == NODES)

LEAST_TO_BE_SLOW = 3
"""Least number of nodes for one to be slow: with two, it is unknown which one is slow."""
_GAP = 6
"""Least number of steps between two faults."""
_FIRST = 4
_ORDERS = 10_000
"""Number of random orders that are tried to keep the number of nodes in its range."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a drill, and when it occurs."""

    name: str
    kind: str
    step: int
    """Number of finished steps after which it occurs. Faults of nodes last for a time instead of a number of
    steps, and occur some steps after the previous one."""
    place: float
    """Random number in [0, 1) for all further choices, such as the rank or file."""
    nodes: int | None = None
    """Nodes of the Ray cluster when the fault occurs; None in a drill without faults of nodes."""

    @property
    def nodes_after(self) -> int | None:
        """Number of nodes after the fault; None in a drill without faults of nodes."""
        return None if self.nodes is None else self.nodes + KINDS[self.kind].nodes

    def in_rank(self, ranks: int) -> Fault | None:
        """Return the fault for a rank that causes it itself; None for a fault from outside."""
        if (what := KINDS[self.kind].in_rank) is None:
            return None
        rank, place = divmod(self.place * ranks, 1.0)
        return Fault(name=self.name, kind=what[0], rank=int(rank), step=self.step, phase=what[1], place=place)


def possible_faults(config: Config) -> list[str]:
    """Return the faults that are made on this machine if none are named: all faults of nodes for a run that
    follows its nodes, in which as many nodes join as leave, else all others that can be made."""
    possible = [kind for kind in KINDS if not _obstacle(config, kind)]
    if JOINS not in possible or os.environ.get("RAY_ADDRESS"):
        return [kind for kind in possible if kind not in NODE_FAULTS]
    enough = (config.elastic.max_ranks or 0) >= LEAST_TO_BE_SLOW
    return [JOINS, *(kind for kind in NODE_FAULTS if enough or kind != SLOW)]


def check_faults(config: Config, kinds: Sequence[str]) -> None:
    """Raise `ConfigError` for faults that are unknown, cannot be made here, or cannot be combined."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults: {unknown[0]!r} {must_be_one_of(unknown[0], KINDS)}")
    others = [kind for kind in kinds if kind not in NODE_FAULTS]
    if others and len(others) < len(kinds):
        raise ConfigError(
            f"--faults: {', '.join(NODE_FAULTS)} change the ranks of a run, and {others[0]} does not: drill "
            f"them one after the other"
        )
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
            return f"the drill starts a Ray cluster itself: leave out cluster.address={cluster.address!r}"
        if config.elastic.max_ranks is None:
            return (
                f"faults of nodes need a run that follows its nodes: add a section elastic with max_ranks, "
                f"such as --set elastic.max_ranks={layout.ranks + 2}"
            )
        if not config.train.deterministic_reduction:
            return "losses are compared bit for bit: --set train.deterministic_reduction=true"
    if kind == "cut-gather" and not layout.zero:
        return "no parameters are gathered without sharding: --set parallel.zero=1"
    if kind == "cut-reduce" and layout.dp * layout.cp == 1:
        return "no gradients are summed over replicas: --set parallel.dp=2"
    return ""


def plan_drill(
    kinds: Sequence[str], count: int, seed: int, start: int | None = None, usable: Collection[int] = ()
) -> list[PlannedFault]:
    """Plan every kind of fault ``count`` times, in an order drawn by the seed, some steps apart.

    ``start``: number of nodes at first, in a drill with faults of nodes, and ``usable``: the numbers that
    there may be. Raise `ConfigError` if no order keeps to these.
    """
    draw = random.Random(seed)
    order = [kind for kind in kinds for _ in range(count)]
    for _ in range(_ORDERS):
        draw.shuffle(order)
        if start is None or _keeps(order, start, usable):
            break
    else:
        numbers = ", ".join(map(str, sorted(usable)))
        changes = [KINDS[kind].nodes for kind in order]
        raise ConfigError(
            f"{changes.count(1)} nodes that join and {changes.count(-1)} that leave, beginning with {start}: "
            f"no order was found in which every number is one of {numbers} (there each node has a rank, and "
            f"only the data-parallel degree changes); {SLOW} needs {LEAST_TO_BE_SLOW} nodes and allows one "
            f"less: name other --faults (one that is named twice comes twice), lower --count, or widen "
            f"elastic.min_ranks and elastic.max_ranks"
        )
    planned, step, nodes = list[PlannedFault](), _FIRST, start
    for kind in order:
        name = f"{len(planned):03}-{kind}"
        planned.append(PlannedFault(name, kind, step + draw.randrange(3), draw.random(), nodes))
        nodes = planned[-1].nodes_after
        step += _GAP * KINDS[kind].gaps
    return planned


def _keeps(order: Iterable[str], nodes: int, usable: Collection[int]) -> bool:
    """Return whether faults in this order leave usable numbers of nodes, and a node is slow only among
    enough others."""
    for kind in order:
        if kind == SLOW and (nodes < LEAST_TO_BE_SLOW or nodes - 1 not in usable):
            return False
        nodes += KINDS[kind].nodes
        if nodes not in usable:
            return False
    return True


def steps_of(planned: Sequence[PlannedFault]) -> int:
    """Return the number of steps that a run needs so that all its faults occur, and are over before it
    ends."""
    return max((fault.step for fault in planned), default=0) + 3 * _GAP
