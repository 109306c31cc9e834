"""Chooses where the state comes from after a failure, and describes the failure. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time as wall_clock
from typing import Any, Literal

from braid.actors.config import Config
from braid.actors.stage.rank.messages import CopiesHeld
from braid.scheduling.mesh.mesh import MeshShape


@dataclass(kw_only=True)
class Interruption:
    """An event that interrupts the steps of a run, and its outcome: a line of ``incidents.jsonl``."""

    kind: Literal["rank failed", "controller died", "resized"]
    text: str
    step: int
    """Number of steps that were done when it was noticed."""
    facts: dict[str, Any]
    """Facts of this kind of interruption. For a failure: ``rank`` (None: the controller), the ranks
    ``replaced``, ``restored_from``; for another number of ranks: ``ranks``, before and after."""
    time: float = field(default_factory=wall_clock)
    """Time at which it was noticed, in seconds since 1970."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the recovery's phases, in their order."""

    def line(self, now: float, first_step: int, generation: int) -> dict[str, Any]:
        """Return the line to record once the first step after the interruption is done."""
        return {
            "kind": self.kind,
            "text": self.text,
            "time": self.time,
            "step": self.step,
            **self.facts,
            "recovered_after_seconds": now - self.time,
            "parts": self.parts,
            "steps_lost": self.step - first_step,
            "generation": generation,
        }


def failure_of(rank: int | None, text: str, step: int, unwell_seconds: float) -> Interruption:
    """Describe a failure. ``unwell_seconds``: time for which the rank, or the controller (None), had not been
    known to be well."""
    facts = {"rank": rank, "detected_after_seconds": unwell_seconds, "restored_from": "the beginning"}
    kind: Literal["rank failed", "controller died"] = "controller died" if rank is None else "rank failed"
    return Interruption(kind=kind, text=text, step=step, facts={**facts, "replaced": []})


def cost_of_a_failure(config: Config) -> str:
    """Say in words how much training a run would lose with one rank, and with all of them."""
    keeping = config.checkpoint
    copies, every, seconds = keeping.copies_every, keeping.every, keeping.seconds_between
    parts = [f"{every} steps"] if every else []
    parts += [f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"] if seconds else []
    lost = " or ".join(parts)
    alone = f"at most {lost}" + (", whichever is less" if len(parts) > 1 else "") if parts else "everything"
    if not copies:
        return f"a failure costs {alone} of training (checkpoint.every, checkpoint.every_s)"
    step = "the step under way" if copies == 1 else f"at most {copies} steps"
    return f"a lost rank costs {step} (checkpoint.copies_every), all ranks {alone} of training"


def partner_shift(hosts: Sequence[str], mesh: MeshShape) -> int:
    """Return the difference between a rank and the rank that keeps its copies; 0 if other hosts hold all
    state anyway. It is the smallest shift that gives most ranks a partner on another host."""
    ranks = len(hosts)
    holders = [{hosts[other] for other in mesh.holders(rank)} for rank in range(ranks)]
    if ranks == 1 or all(len(hosts_of_rank) > 1 for hosts_of_rank in holders):
        return 0

    def elsewhere(shift: int) -> int:
        return sum(hosts[rank] != hosts[(rank + shift) % ranks] for rank in range(ranks))

    return max(range(1, ranks), key=lambda shift: (elsewhere(shift), -shift))


def newest_common(held: Sequence[CopiesHeld], mesh: MeshShape, done: int) -> tuple[int, list[int]] | None:
    """Return the newest step that every rank can return to, and for every rank a rank that holds its state;
    None if there is none.

    The step is at most ``done``, the number of recorded steps: the results of a step that failed after its
    update, in its validation or by its loss, would never be recorded.
    """
    steps = {step for copies in held for step in (*copies.own, *copies.partners) if step <= done}
    for step in sorted(steps, reverse=True):
        sources = [_source(rank, step, held, mesh) for rank in range(len(held))]
        if None not in sources:
            return step, [source for source in sources if source is not None]
    return None


def _source(rank: int, step: int, held: Sequence[CopiesHeld], mesh: MeshShape) -> int | None:
    """Find a rank that has the state: the rank itself, its partner, another holder of its slices, or the
    partner of such a holder; None if there is none."""
    if step in held[rank].own:
        return rank
    for holder in [rank, *mesh.holders(rank)]:
        for partner, copies in enumerate(held):
            if copies.partner == holder and step in copies.partners:
                return partner
        if step in held[holder].own:
            return holder
    return None


def rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
