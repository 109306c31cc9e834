"""Which faults a drill has, and when each of them comes: a pure function of its seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from braid.actors.config import ConfigError
from braid.actors.stage.messages import Fault, FaultKind, FaultPhase
from braid.scheduling.suggestions import must_be_one_of

_IN_RANK: Mapping[str, tuple[FaultKind, FaultPhase]] = {
    "kill-forward": ("kill", "forward"),
    "kill-backward": ("kill", "backward"),
    "kill-optimizer": ("kill", "optimizer"),
    "kill-save": ("kill", "save"),
    "stop": ("stop", "backward"),
    "nan": ("nan", "backward"),
    "skip": ("skip", "backward"),
    "cut-reduce": ("hold", "reduce"),
    "cut-gather": ("hold", "gather"),
    "cut-optimizer": ("hold", "optimizer"),
}
"""What a rank does to itself: kind and phase. It waits where something comes from outside."""

KINDS = {
    "kill-forward": "a rank is killed in a forward pass",
    "kill-backward": "a rank is killed in a backward pass",
    "kill-optimizer": "a rank is killed before its optimizer step",
    "kill-save": "a rank is killed while it writes a checkpoint",
    "stop": "a rank is stopped (SIGSTOP)",
    "nan": "a gradient of a rank is no number",
    "skip": "a gradient is no number whenever its step is done, so that both runs leave the step out",
    "kill-controller": "the controller is killed, and with it the command",
    "sigterm": "the command is asked to end (SIGTERM)",
    "torn-checkpoint": "the newest checkpoint loses half a file, and the controller is killed",
    "flipped-byte": "a byte of the newest checkpoint changes, and the controller is killed",
    "disk-full": "the run's disk is full for a while",
    "kill-host": "all ranks of a host are killed",
    "cut-short": "the link between hosts is cut for less than the time-outs",
    "cut-long": "the link between hosts is cut until that is noticed",
    "cut-reduce": "the same while gradients are summed over replicas",
    "cut-gather": "the same while updated parameters are gathered",
    "cut-optimizer": "the same between the two, before a rank's optimizer step",
    "cut-save": "the same while a checkpoint is written",
    "slow-link": "the link between hosts has a tenth of its rate for a while",
    "node-joins": "a node joins the Ray cluster",
    "node-lost": "a node of the Ray cluster is lost: its raylet and its workers are killed",
    "node-drained": "Ray says that a node will be taken away; when no rank is left there, it is",
    "node-slow": "a node computes at a third of its speed for a while",
}
"""Faults by name."""

AIMED = frozenset(name for name, (kind, _) in _IN_RANK.items() if kind == "hold")
"""Cuts for which a rank waits at a place in its step, until the link is cut."""
NEED_HOSTS = frozenset({"kill-host", "cut-short", "cut-long", "cut-save", "slow-link"}) | AIMED
"""Faults of the two emulated hosts."""
NEED_ROOT = frozenset({"disk-full"}) | NEED_HOSTS
NODE_CHANGES: Mapping[str, int] = {"node-joins": 1, "node-lost": -1, "node-drained": -1, "node-slow": 0}
"""Faults of emulated Ray nodes, and what each does to their number."""
SLOW = "node-slow"
LEAST_TO_BE_SLOW = 3
"""Nodes that there must be for one to be slow: with two, nobody can say which one is."""
DAMAGE = frozenset({"torn-checkpoint", "flipped-byte"})
"""To the newest checkpoint, and the controller is killed."""
HARMLESS = frozenset({"nan", "skip", "disk-full", "cut-short", "slow-link"})
"""Faults that fail no rank."""
_GAP = 6
"""Steps between two faults, at least."""
_LAST = {"disk-full": 3, "cut-save": 2}
"""Faults that last for more than one gap: until a checkpoint has failed, until one is written."""
_FIRST = 4


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a drill begins with, and the numbers it may have, bounds included; a rank on each."""

    start: int
    least: int
    most: int


@dataclass(frozen=True)
class Planned:
    """One fault of a drill."""

    name: str
    kind: str
    step: int
    """It comes when so many steps are done. With nodes, whose changes take a time and not steps, what lies
    between it and the fault before is counted from that one's end."""
    place: float
    """In [0, 1): what else is to be drawn."""
    nodes: int | None = None
    """Of the Ray cluster when it comes; None in a drill without faults of nodes."""

    @property
    def nodes_after(self) -> int | None:
        """Nodes once it is over."""
        return None if self.nodes is None else self.nodes + NODE_CHANGES.get(self.kind, 0)

    def in_rank(self, ranks: int) -> Fault | None:
        """The fault as a rank does it to itself; None for one that comes from outside."""
        if self.kind not in _IN_RANK:
            return None
        kind, phase = _IN_RANK[self.kind]
        rank = int(self.place * ranks)
        place = (self.place * ranks) % 1.0
        step = self.step if self.nodes is None else None
        return Fault(name=self.name, kind=kind, rank=rank, step=step, phase=phase, place=place)


def check_names(kinds: Sequence[str]) -> None:
    """`ConfigError` for a fault that there is not."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults: {unknown[0]!r} {must_be_one_of(unknown[0], KINDS)}")


def plan_drill(kinds: Sequence[str], count: int, seed: int, nodes: NodeRange | None = None) -> list[Planned]:
    """Every kind ``count`` times, in an order drawn by the seed, at steps some way apart.

    ``nodes``: for faults of nodes, whose number stays in the range; `ConfigError` where no order does that.
    """
    check_names(kinds)
    draw = random.Random(seed)
    every = [kind for kind in kinds for _ in range(count)]
    draw.shuffle(every)
    if nodes is not None:
        every = _in_range(every, nodes)
    planned, step = [], _FIRST
    there = None if nodes is None else nodes.start
    for number, kind in enumerate(every):
        one = Planned(f"{number:03}-{kind}", kind, step + draw.randrange(3), draw.random(), there)
        planned.append(one)
        there = one.nodes_after
        step += _GAP * _LAST.get(kind, 1)
    return planned


def _in_range(kinds: Sequence[str], nodes: NodeRange) -> list[str]:
    """The same faults, each drawn forward past those that are not possible yet.

    If the number of nodes at the end lies in the range, and the range holds more than one number, there is
    always a fault left that is possible: at the most of nodes, one that takes a node, and so on.
    """
    changes = [NODE_CHANGES[kind] for kind in kinds if kind in NODE_CHANGES]
    end = nodes.start + sum(changes)
    if changes and (nodes.least == nodes.most or not nodes.least <= end <= nodes.most):
        raise ConfigError(
            f"{changes.count(1)} nodes that join and {changes.count(-1)} that leave lead from {nodes.start} "
            f"to {end} nodes, and elastic and the model's layouts allow {nodes.least} to {nodes.most}: name "
            f"other --faults (one that is named twice comes twice), lower --count, or widen "
            f"elastic.min_ranks and elastic.max_ranks"
        )
    left, ordered, there = list(kinds), [], nodes.start

    def possible(kind: str) -> bool:
        enough = there >= LEAST_TO_BE_SLOW and there > nodes.least if kind == SLOW else True
        return enough and nodes.least <= there + NODE_CHANGES.get(kind, 0) <= nodes.most

    while left:
        # While a node is still to be slow, nodes rather join than leave: there may not be as many again.
        can = sorted(filter(possible, left), key=lambda one: SLOW in left and NODE_CHANGES.get(one, 0) < 0)
        kind = SLOW if SLOW in can else next(iter(can), "")
        if not kind:
            raise ConfigError(
                f"--faults {', '.join(left)}: with {there} nodes none of these can come; {SLOW} needs "
                f"{LEAST_TO_BE_SLOW} nodes, and one more than elastic.min_ranks"
            )
        left.remove(kind)
        ordered.append(kind)
        there += NODE_CHANGES.get(kind, 0)
    return ordered


def steps_of(planned: Sequence[Planned]) -> int:
    """Steps that a run needs so that all its faults come, and are over before it ends."""
    return max((fault.step for fault in planned), default=0) + 3 * _GAP
