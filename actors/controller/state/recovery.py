"""Where the state comes from after a failure, and what the failure was. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time as wall_clock
from typing import Any, Literal

from braid.actors.config import Config
from braid.actors.stage.rank.messages import CopiesHeld
from braid.scheduling.mesh.mesh import MeshShape


@dataclass(kw_only=True)
class Interruption:
    """What breaks off the steps of a run, and what became of it: a line of ``incidents.jsonl``."""

    kind: Literal["rank failed", "controller died", "resized"]
    text: str
    step: int
    """Steps that were done by then."""
    facts: dict[str, Any]
    """What is told of this kind alone. Of a failure ``rank`` (None: the controller), the ranks ``replaced``,
    ``restored_from``; of another number of ranks ``ranks``, before and after."""
    time: float = field(default_factory=wall_clock)
    """When it was known, seconds since 1970."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the recovery's phases, in their order."""

    def line(self, now: float, first_step: int, generation: int) -> dict[str, Any]:
        """What is written down once the first step after it is done."""
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
    """``unwell_seconds``: for how long the rank, or the controller (None), had not been known to be well."""
    facts = {"rank": rank, "detected_after_seconds": unwell_seconds, "restored_from": "the beginning"}
    kind: Literal["rank failed", "controller died"] = "controller died" if rank is None else "rank failed"
    return Interruption(kind=kind, text=text, step=step, facts={**facts, "replaced": []})


def cost_of_a_failure(config: Config) -> str:
    """What a run would lose with a rank, and with all of them, in words."""
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
    """The difference between a rank and the rank that keeps its copies; 0 if other hosts hold everything
    anyway. Of the shifts with which most ranks have their partner on another host, it is the smallest."""
    ranks = len(hosts)
    holders = [{hosts[other] for other in mesh.holders(rank)} for rank in range(ranks)]
    if ranks == 1 or all(len(hosts_of_rank) > 1 for hosts_of_rank in holders):
        return 0

    def elsewhere(shift: int) -> int:
        return sum(hosts[rank] != hosts[(rank + shift) % ranks] for rank in range(ranks))

    return max(range(1, ranks), key=lambda shift: (elsewhere(shift), -shift))


def newest_common(held: Sequence[CopiesHeld], mesh: MeshShape, done: int) -> tuple[int, list[int]] | None:
    """The newest step that every rank can go back to, and for every rank a rank that holds its state.

    It is at most ``done``, the number of recorded steps: of a step that failed after its update, in its
    validation or by its loss, nobody would ever know the numbers.
    """
    steps = {step for copies in held for step in (*copies.own, *copies.partners) if step <= done}
    for step in sorted(steps, reverse=True):
        sources = [_source(rank, step, held, mesh) for rank in range(len(held))]
        if None not in sources:
            return step, [source for source in sources if source is not None]
    return None


def _source(rank: int, step: int, held: Sequence[CopiesHeld], mesh: MeshShape) -> int | None:
    """A rank that has the state: the rank itself, its partner, another holder of its slices, or the partner
    of such a holder."""
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
