"""Decides whether the ranks that a call waits for still live and make progress. Pure: the time is an
argument.

No signal is trusted alone (docs/design.md, Failure). A dead process closes its pipe or ends its actor, which
the waiting side sees. A stopped process or a node behind a cut link sends nothing, so every rank is asked for
its pulse meanwhile. Ranks that answer but wait for each other for ever make no progress.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_TOLD = 4
"""Most ranks that an error message names; there may be thousands."""


@dataclass(frozen=True)
class Trouble:
    """A rank that does not answer, or ranks without progress (then ``rank`` is furthest behind)."""

    rank: int
    text: str
    seconds: float
    """Seconds for which the rank has been silent, or the ranks without progress."""
    silent: bool


class Vigil:
    """Watches the ranks that a call waits for; times are seconds of any steady clock."""

    def __init__(
        self,
        ranks: Iterable[int],
        awake: Collection[int],
        now: float,
        silence_s: float,
        stall_s: float | None,
        limit_s: float | None = None,
    ) -> None:
        """``awake``: ranks that have answered before. ``stall_s``: seconds without progress after which the
        call has failed; None if the call reports no progress. ``limit_s``: seconds after which the call has
        failed; None: never.
        """
        self._silence_s, self._stall_s, self._limit_s = silence_s, stall_s, limit_s
        self._heard = {rank: now if rank in awake else None for rank in ranks}
        """Time of each rank's last answer; None before its first answer, which its start may delay."""
        self._progress: dict[int, int | None] = {}
        self._awaits: dict[int, str] = {}
        self._advanced = self._begun = now
        self._forgiven = 0.0

    def last_heard(self, rank: int) -> float:
        """Return when a rank last gave a sign of life; no earlier than the begin of the call."""
        return max(self._begun, self._heard.get(rank) or 0.0)

    def beat(self, rank: int, progress: int | None, now: float, awaits: str = "") -> None:
        """Record a rank's answer: how many things it has done since it began (None if it does not count), and
        which transfer it waits for.
        """
        if rank in self._heard:
            self._heard[rank] = now
            self._awaits[rank] = awaits
            if progress is None or progress != self._progress.get(rank):
                self._advanced = now
            self._progress[rank] = progress

    def forgive(self, seconds: float) -> None:
        """Do not count ``seconds`` in which the controller was too busy to listen as silence of any rank."""
        self._heard = {rank: None if at is None else at + seconds for rank, at in self._heard.items()}
        self._advanced += seconds
        self._forgiven += seconds

    def done(self, rank: int, now: float) -> None:
        del self._heard[rank]
        self._progress.pop(rank, None)
        self._advanced = now

    def verdict(self, now: float) -> Trouble | None:
        """Return what is wrong with the ranks; None if nothing is."""
        for rank, heard in self._heard.items():
            if heard is not None and now - heard > self._silence_s:
                text = f"has not answered for {now - heard:.1f} s (failure.silence_s={self._silence_s:g})"
                return Trouble(rank, text, now - heard, silent=True)
        if self._stall_s is not None and self._heard and now - self._advanced > self._stall_s:
            known = {rank: progress or 0 for rank, progress in self._progress.items()}
            behind = min(known, key=lambda rank: known[rank], default=min(self._heard))
            text = (
                f"no rank has got on for {now - self._advanced:.1f} s: a link may be cut, or a rank may hang"
            )
            return Trouble(behind, text + self._awaited(behind), now - self._advanced, silent=False)
        taken = now - self._begun - self._forgiven
        if self._limit_s is not None and self._heard and taken > self._limit_s:
            text = f"has not finished within {self._limit_s:g} s, though it answers"
            return Trouble(min(self._heard), text, taken, silent=False)
        return None

    def _awaited(self, behind: int) -> str:
        """Describe what at most `_TOLD` ranks wait for, the rank furthest behind first."""
        waiting = {rank: self._awaits[rank] for rank in (behind, *self._awaits) if self._awaits.get(rank)}
        return "".join(f"; rank {rank} waits for {what}" for rank, what in list(waiting.items())[:_TOLD])
