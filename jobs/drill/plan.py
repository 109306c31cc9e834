"""Which faults a drill has, and when each of them comes: a pure function of its seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from braid.actors.config import ConfigError
from braid.actors.stage.messages import Fault, FaultKind, FaultPhase

_IN_RANK: Mapping[str, tuple[FaultKind, FaultPhase]] = {
    "kill-forward": ("kill", "forward"),
    "kill-backward": ("kill", "backward"),
    "kill-optimizer": ("kill", "optimizer"),
    "kill-save": ("kill", "save"),
    "stop": ("stop", "backward"),
    "nan": ("nan", "backward"),
}
"""What a rank does to itself: kind and phase."""

KINDS = {
    "kill-forward": "a rank is killed in a forward pass",
    "kill-backward": "a rank is killed in a backward pass",
    "kill-optimizer": "a rank is killed before its optimizer step",
    "kill-save": "a rank is killed while it writes a checkpoint",
    "stop": "a rank is stopped (SIGSTOP)",
    "nan": "a gradient of a rank is no number",
    "kill-controller": "the controller is killed, and with it the command",
    "sigterm": "the command is asked to end (SIGTERM)",
    "torn-checkpoint": "the newest checkpoint loses half a file, and the controller is killed",
    "flipped-byte": "a byte of the newest checkpoint changes, and the controller is killed",
    "disk-full": "the run's disk is full for a while",
    "kill-host": "all ranks of a host are killed",
    "cut-short": "the link between hosts is cut for less than the time-outs",
    "cut-long": "the link between hosts is cut until that is noticed",
    "slow-link": "the link between hosts has a tenth of its rate for a while",
}
"""Faults by name."""

NEED_HOSTS = frozenset({"kill-host", "cut-short", "cut-long", "slow-link"})
"""Faults of the two emulated hosts."""
NEED_ROOT = frozenset({"disk-full"}) | NEED_HOSTS
HARMLESS = frozenset({"nan", "disk-full", "cut-short", "slow-link"})
"""Faults that fail no rank."""
_GAP = 6
"""Steps between two faults, at least."""
_FIRST = 4


@dataclass(frozen=True)
class Planned:
    """One fault of a drill."""

    name: str
    kind: str
    step: int
    """It comes when so many steps are done."""
    place: float
    """In [0, 1): what else is to be drawn."""

    def in_rank(self, ranks: int) -> Fault | None:
        """The fault as a rank does it to itself; None for one that comes from outside."""
        if self.kind not in _IN_RANK:
            return None
        kind, phase = _IN_RANK[self.kind]
        rank = int(self.place * ranks)
        place = (self.place * ranks) % 1.0
        return Fault(name=self.name, kind=kind, rank=rank, step=self.step, phase=phase, place=place)


def plan_drill(kinds: Sequence[str], count: int, seed: int) -> list[Planned]:
    """Every kind ``count`` times, in an order drawn by the seed, at steps some way apart."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults: {unknown[0]!r} is not known; there are {', '.join(KINDS)}")
    draw = random.Random(seed)
    every = [kind for kind in kinds for _ in range(count)]
    draw.shuffle(every)
    planned, step = [], _FIRST
    for number, kind in enumerate(every):
        planned.append(Planned(f"{number:03}-{kind}", kind, step + draw.randrange(3), draw.random()))
        step += _GAP * (3 if kind == "disk-full" else 1)  # which lasts for a while
    return planned


def steps_of(planned: Sequence[Planned]) -> int:
    """Steps that a run needs so that all its faults come, and are over before it ends."""
    return max((fault.step for fault in planned), default=0) + 3 * _GAP
