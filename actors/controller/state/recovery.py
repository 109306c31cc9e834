"""Where the state comes from after a failure, and what the failure was. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from braid.actors.config import Config
from braid.actors.stage.rank.messages import CopiesHeld
from braid.scheduling.mesh.mesh import MeshShape


@dataclass
class Failure:
    """A rank that died, fell silent or raised, or the controller; and what became of it."""

    rank: int | None
    """None: the controller."""
    text: str
    step: int
    """Steps that were done by then."""
    time: float
    """When it was known, seconds since 1970."""
    unwell_seconds: float
    """For how long the rank had not been known to be well."""
    gone: tuple[int, ...] = ()
    """Ranks whose processes were replaced."""
    source: str = "the beginning"
    """What the state was restored from."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the recovery's phases, in their order."""

    def facts(self, now: float, first_step: int, generation: int) -> dict[str, Any]:
        """A line of ``incidents.jsonl``, once the first step after it is done."""
        return {
            "kind": "rank failed" if self.rank is not None else "controller died",
            "rank": self.rank,
            "text": self.text,
            "time": self.time,
            "step": self.step,
            "detected_after_seconds": self.unwell_seconds,
            "recovered_after_seconds": now - self.time,
            "parts": self.parts,
            "replaced": list(self.gone),
            "restored_from": self.source,
            "steps_lost": self.step - first_step,
            "generation": generation,
        }


@dataclass
class Changed:
    """A change of the number of ranks, and what became of it."""

    reason: str
    step: int
    """Steps that were done by then."""
    time: float
    before: int
    after: int
    """Ranks."""
    parts: dict[str, float] = field(default_factory=dict)

    def then(self, next_change: "Changed") -> "Changed":
        """Both as one: the next came before a step was done with the ranks of this one."""
        return replace(
            self,
            reason=f"{self.reason}; then {next_change.reason}",
            after=next_change.after,
            parts={"given up": next_change.time - self.time},
        )

    def facts(self, now: float, first_step: int, generation: int) -> dict[str, Any]:
        """A line of ``incidents.jsonl``, once the first step after it is done."""
        return {
            "kind": "resized",
            "text": self.reason,
            "time": self.time,
            "step": self.step,
            "ranks": [self.before, self.after],
            "recovered_after_seconds": now - self.time,
            "parts": self.parts,
            "steps_lost": self.step - first_step,
            "generation": generation,
        }


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


def in_words(gone: Sequence[int]) -> str:
    """What became of lost ranks."""
    return f"{rank_names(gone)} replaced" if gone else "no rank is lost"
