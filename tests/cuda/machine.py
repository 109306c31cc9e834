"""A model of a machine with GPUs: streams, events, an allocator and NCCL's communicators, on a CPU.

The real classes run on it, every rank in a thread of its own. Operators compute at once, on tensors of the
CPU; what is modelled is what a GPU leaves open: the log of a rank says, in the host's order, which stream was
given what, what that reads and writes, and which waits order it. From the logs follow races, uses after free
and unequal collectives (`tests.cuda.checks`), and other orders in which the same work may run
(`tests.cuda.replay`). What is the host's own memory is told from the device's (`tests.cuda.host_memory`).

What NCCL's rules are here: kernels of a communicator run one after the other on a stream of its own, after
what the current stream was given when they were issued; they begin when all members (for messages: both ends)
have come to them; `Work.wait` lets the current stream wait, and lets go of what torch had kept for the
kernel; an abort ends kernels that wait, with garbage in their outputs.

What it cannot show: how fast anything is, how kernels share a device, what drivers and libraries do wrong.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from braid.actors.stage.rank.groups import pairs_of
from braid.kernels.collectives.communicator import Communicator
from braid.kernels.collectives.primitives import Channel, Line
from braid.kernels.operators.embedding import VocabularyShard
from braid.kernels.operators.permute import Dispatch
from tests.cuda.communicators import ModelGroup, Shared
from tests.cuda.host_memory import told_apart
from tests.cuda.log import LostError, RankLog

PATIENCE_SECONDS = 60.0
"""Between looks at whether ranks that wait can go on."""
here = threading.local()
"""``here.log``: that of the rank whose thread asks."""


class DeadlockError(RuntimeError):
    """Every rank waits for another one."""


class Machine:
    """So many ranks, and their communicators."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.ranks = [RankLog(self, rank) for rank in range(ranks)]
        self._by_key: dict[tuple[str, tuple[int, ...]], Shared] = {}
        self._given: dict[int, list[Any]] = {}
        self._alive, self._stuck, self._lost = 0, False, False
        self._blocked: list[Callable[[], bool]] = []

    def group(self, log: RankLog, name: str, ranks: Sequence[int]) -> ModelGroup:
        """A rank's end of a communicator, which members know by name and ranks."""
        with self.changed:
            key = name, tuple(ranks)
            shared = self._by_key.setdefault(key, Shared(self, f"{name} {ranks}", tuple(ranks)))
        return ModelGroup(log, shared, list(ranks).index(log.rank), log.stream())

    @property
    def communicators(self) -> list[Shared]:
        """All that were made."""
        return list(self._by_key.values())

    def run(self, rank: Callable[[RankLog], None]) -> None:
        """Run every rank to its end; raises what one raised, `DeadlockError` if none can go on."""
        errors: list[BaseException] = []

        def run(log: RankLog) -> None:
            here.log = log
            try:
                # Ranks take turns, wait by wait: threads that compete for Python's lock are slower.
                with self.changed, log:
                    rank(log)
            except LostError:
                with self.changed:
                    self._lost = True
            except BaseException as error:
                errors.append(error)
                with self.changed:
                    self._stuck = True
            finally:
                with self.changed:
                    self._alive -= 1
                    self.changed.notify_all()

        self._alive, self._stuck, self._lost = len(self.ranks), False, False
        threads = [threading.Thread(target=run, args=(log,), daemon=True) for log in self.ranks]
        # Tokens and choices are checked on a CPU alone: elsewhere the check would stall the device.
        tokens, choices = (
            patch.object(one, "_check", lambda own, x: None) for one in (VocabularyShard, Dispatch)
        )
        with tokens, choices, told_apart(lambda: getattr(here, "log", None)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, DeadlockError)), errors[0])

    def gather(self, log: RankLog, number: int, own: Any) -> list[Any]:
        """What every rank gives."""
        with self.changed:
            given = self._given.setdefault(number, [])
            given.append((log.rank, own))
            self.changed.notify_all()
        self.until(lambda: len(given) == len(self.ranks) or log.aborted, log)
        if len(given) < len(self.ranks):
            raise RuntimeError("communication was broken off")
        return [one for _, one in sorted(given, key=lambda pair: pair[0])]

    def until(self, there: Callable[[], bool], log: RankLog) -> None:
        """Block the rank's host until something is there."""
        with self.changed:
            self._blocked.append(there)
            try:
                while not there():
                    all_blocked = len(self._blocked) >= self._alive
                    if all_blocked and self._lost and not any(one() for one in self._blocked):
                        for other in self.ranks:
                            other.interrupt()
                        self.changed.notify_all()
                        continue
                    if self._stuck or (all_blocked and not any(one() for one in self._blocked)):
                        self._stuck = True
                        self.changed.notify_all()
                        raise DeadlockError(f"rank {log.rank} waits for {self._missing()}")
                    self.changed.wait(PATIENCE_SECONDS)
            finally:
                self._blocked.remove(there)

    def _missing(self) -> str:
        found = []
        for shared in self._by_key.values():
            for number, here in shared.waiting.items():
                (call, _, _), *_ = here.values()
                absent = [shared.ranks[n] for n in range(len(shared.ranks)) if n not in here]
                found.append(f"{call.kind} {number} of {shared.name}: ranks {absent} have not come")
            for kind, messages in (("receive", shared.sent), ("send", shared.received)):
                found += [f"{kind} of message {n} from {a} to {b} of {shared.name}" for a, b, n in messages]
        return "; ".join(found) or "nothing that is left"


class ModelGroups:
    """A rank's groups (`braid.actors.stage.rank.groups.Groups`)."""

    def __init__(self, machine: Machine, log: RankLog) -> None:
        self._machine, self._log = machine, log
        self._made = self._gathered = 0

    def line(self, axis: str, lines: Sequence[Sequence[int]]) -> Line | None:
        """A communicator each."""
        self._made += 1
        own = next((ranks for ranks in lines if self._log.rank in ranks), None)
        if own is None:
            return None
        return Communicator(self._machine.group(self._log, f"group {self._made}", own))

    def channel(self, lines: Sequence[Sequence[int]]) -> Channel:
        """Pairs."""
        self._made += 1
        (own,) = (ranks for ranks in lines if self._log.rank in ranks)
        name = f"channel {self._made}"
        return pairs_of(
            own, self._log.rank, lambda pair: Communicator(self._machine.group(self._log, name, pair))
        )

    def gather(self, own: Any) -> list[Any]:
        """By the machine's own memory."""
        self._gathered += 1
        return self._machine.gather(self._log, self._gathered, own)
