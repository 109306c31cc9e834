"""Ranks without processes for the real controller: a state is a number, a checkpoint a file that holds it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.controller import Controller, Replan, RunOptions
from braid.actors.controller.ranks.group import NoRoomError, WorkerError
from braid.actors.controller.records.run_records import Event, Incident, StepDone
from braid.actors.controller.records.span_files import SpanCounts
from braid.actors.stage.rank.messages import CopiesHeld, RunPlan, StepResult, Written
from braid.scheduling.trace.spans import OverlapNumbers
from tests.actors.saved import digests
from tests.end_to_end.runs import run_plan

_NUMBERS = ("communication", "hidden", "slowdown", "launch_gap", "bubble", "compute", "links_together")
_NO_OVERLAP = OverlapNumbers(**{f"{name}_ns": 0 for name in _NUMBERS})


def states(steps: int) -> list[float]:
    """The state after each of so many steps without a failure: what the losses are."""
    found = [1.0]
    for step in range(steps):
        found.append(found[-1] * 0.75 + step)
    return found[1:]


@dataclass
class _Rank:
    """What one rank holds."""

    state: float = 1.0
    own: dict[int, float] = field(default_factory=dict)
    partner: int | None = None
    partners: dict[int, float] = field(default_factory=dict)


Hook = Callable[[str, int, tuple[Any, ...]], None]
"""Called before a rank answers: with the method's name, the rank and the arguments. What it raises, the rank
does."""


class StandIns:
    """A `WorkerGroup` whose ranks answer at once."""

    def __init__(self, ranks: int, hook: Hook, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts)
        self.addresses = ["127.0.0.1"] * ranks
        self._ranks = [_Rank() for _ in range(ranks)]
        self._hook = hook
        self.gone: set[int] = set()
        self._saved = Written()

    def call(self, rank: int, method: Any, *arguments: Any) -> Any:
        return self.call_some([rank], method, *arguments)[0]

    def call_all(self, method: Any, *arguments: Any) -> list[Any]:
        return self.call_some(range(len(self._ranks)), method, *arguments)

    def call_some(self, ranks: Sequence[int], method: Any, *arguments: Any) -> list[Any]:
        name = method.__name__
        for rank in ranks:
            if rank in self.gone:
                raise WorkerError(rank, "its process ended", died=True)
            try:
                self._hook(name, rank, arguments)
            except WorkerError as error:
                if error.died:
                    self.gone.add(rank)
                raise
        answer = getattr(self, f"_{name}", None)
        return [answer(rank, *arguments) if answer is not None else None for rank in ranks]

    def left(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if rank not in self.gone]

    def expect(self, stall_s: float) -> None:
        pass

    @contextlib.contextmanager
    def heeding(self, stopped: Callable[[], bool]) -> Iterator[None]:
        yield

    def interrupt(self, generation: int) -> list[int]:
        return sorted(self.gone)

    def replace(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._hook("replace", rank, ())
        for rank in ranks:
            self._ranks[rank] = _Rank()
        self.gone -= set(ranks)

    def describe(self) -> dict[str, Any]:
        return {"launcher": "stand-ins"}

    def shutdown(self) -> None:
        pass

    # -- what ranks do -------------------------------------------------------------------------------------

    def _open_store(self, rank: int, timeout_s: float) -> int:
        return 1

    def _setup(self, rank: int, plan: RunPlan, rendezvous: Any) -> str:
        self._ranks[rank].state = 1.0
        self._copies_every = plan.config.checkpoint.copies_every
        self._pair_copies(rank, rendezvous.copies_shift)
        return ""

    def _data_facts(self, rank: int) -> dict[str, Any]:
        return {"fingerprint": "f", "validation_tokens": 1, "validation_bytes": 1}

    def _train_step(self, rank: int, step: int) -> StepResult:
        one = self._ranks[rank]
        one.state = one.state * 0.75 + step
        if self._copies_every and (step + 1) % self._copies_every == 0:
            self._keep_copy(rank, step + 1)
        numbers = {"gradient_norm": 1.0, "lr": 0.1, "peak_bytes": 1, "lifetime_peak_bytes": 1}
        loss_sum = one.state * 8 * 32 if rank == 0 else 0.0
        return StepResult(loss_sum=loss_sum, seconds=0.001, overlap=_NO_OVERLAP, **numbers)

    def _keep_copy(self, rank: int, step: int) -> None:
        one = self._ranks[rank]
        one.own[step] = one.state
        if one.partner is not None:
            one.partners[step] = one.state  # all ranks have the same

    def _pair_copies(self, rank: int, shift: int) -> None:
        one, source = self._ranks[rank], (rank - shift) % len(self._ranks) if shift else None
        if source != one.partner:
            one.partners.clear()
        one.partner = source

    def _copies_held(self, rank: int) -> CopiesHeld:
        one = self._ranks[rank]
        return CopiesHeld(own=tuple(one.own), partner=one.partner, partners=tuple(one.partners))

    def _restore_copies(self, rank: int, step: int, sources: Sequence[int]) -> None:
        source = self._ranks[sources[rank]]
        self._ranks[rank].state = source.own[step] if sources[rank] == rank else source.partners[step]

    def _rescue(self, rank: int, directory: str, plan: Any) -> Written:
        held = self._ranks[plan.survivors[0]]
        state = held.own.get(plan.step, held.partners.get(plan.step))
        if rank == plan.survivors[0]:
            (Path(directory) / "state").write_text(repr(state))
            return Written(files=digests(Path(directory)))
        return Written()

    def _begin_save(self, rank: int, directory: str, step: int, again: bool = False) -> None:
        if rank == 0:
            (Path(directory) / "state").write_text(repr(self._ranks[0].state))
            self._saved = Written(files=digests(Path(directory)))

    def _save_finished(self, rank: int, wait: bool) -> Written:
        return self._saved if rank == 0 else Written()

    def _save(self, rank: int, directory: str, step: int) -> Written:
        self._begin_save(rank, directory, step)
        return self._save_finished(rank, True)

    def _load(self, rank: int, directory: str, step: int) -> None:
        self._ranks[rank].state = float((Path(directory) / "state").read_text())


class StandInLauncher:
    """Starts `StandIns`; ``room`` of them at most."""

    def __init__(
        self, hook: Hook = lambda *call: None, hosts: Sequence[str] = ("a", "b"), room: int = 1000
    ) -> None:
        self.hook, self.host_names, self.room = hook, hosts, room
        self.groups: list[StandIns] = []
        self.starts = 0

    def check(self, ranks: int) -> None:
        pass

    @contextlib.contextmanager
    def collector(self, files: Path, bytes_per_rank: int) -> Iterator[Any]:
        yield SimpleNamespace(target="", counts=SpanCounts)

    def machines(self) -> list[str]:
        return []

    def hosts(self, ranks: int) -> list[str]:
        return [self.host_names[rank % len(self.host_names)] for rank in range(ranks)]

    def capacity(self, group: Any, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return self.room, False

    def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> StandIns:
        self.starts += 1
        self.hook("start", ranks, ())
        if ranks > self.room:
            raise NoRoomError(f"room for {self.room} of {ranks}")
        self.groups.append(StandIns(ranks, self.hook, self.hosts(ranks)))
        return self.groups[-1]


def controller_of(
    config: Config, launcher: Any, options: RunOptions | None = None, replan: Replan | None = None
) -> Controller:
    """The real controller over stand-ins."""
    return Controller(run_plan(config), launcher, options or RunOptions(), replan)


def losses(events: Sequence[Event]) -> list[float]:
    """Of every step, as it was done last."""
    found = {event.record.step: event.record.loss for event in events if isinstance(event, StepDone)}
    return [found[step] for step in sorted(found)]


def told(events: Sequence[Event]) -> list[str]:
    """Kinds of incidents."""
    return [event.kind for event in events if isinstance(event, Incident)]
