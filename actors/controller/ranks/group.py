"""The controller's interface to all ranks of a run, on whatever machines they run."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from braid.actors.config import ClusterConfig, ConfigError, FailureConfig
from braid.actors.controller.ranks.health import Vigil
from braid.actors.controller.records.span_files import SpanCounts
from braid.actors.stage.files.reading import UnreadableError
from braid.actors.stage.rank.interface import Pulse, Rank
from braid.actors.stage.rank.messages import Rendezvous

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method: TypeAlias = Callable[Concatenate[Any, _P], _R]


def _names(*methods: Callable[..., Any]) -> frozenset[str]:
    return frozenset(method.__name__ for method in methods)


_PULSE_SECONDS = 0.5
"""Seconds between two pulse queries of a rank that is at work."""
_CAUSE_SECONDS = 0.3
"""Seconds to wait after a rank's error for an earlier cause, such as the death of another rank."""
_INTERRUPT_SECONDS, _GPU_INTERRUPT_SECONDS = 5.0, 30.0
"""Seconds after an interrupt before a rank that still works is killed; NCCL takes seconds to abort
communicators."""
_STEADY = _names(Rank.train_step, Rank.validate, Rank.save, Rank.save_finished)
"""Methods during which ranks count their progress or report that they work without waiting for others: they
fail after too long without progress. All other methods have a limit of time."""
_LONG = _names(
    *(Rank.setup, Rank.profile, Rank.activation_bytes, Rank.damage, Rank.load, Rank.load_initial),
    *(Rank.restore_copies, Rank.rescue, Rank.begin_save),
)
"""Methods that read, write, send or measure data as large as the model."""
_CALL_SECONDS, _LONG_SECONDS = 120.0, 1200.0
"""Least limits, in seconds, of a call and of a long call; ``cluster.group_timeout_s`` beyond 120 s raises
both."""


class StoppedError(RuntimeError):
    """The run was asked to stop while it waited for ranks that were not training."""


class WorkerError(RuntimeError):
    """A rank raised an error, ``died`` or was given up; ``user_error``: the message is for the user, without
    trace."""

    def __init__(
        self, rank: int, message: str, *, user_error: bool = False, trace: str = "", died: bool = False
    ) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.user_message, self.user_error = rank, message, user_error
        self.trace, self.died = trace, died
        self.unwell_seconds = 0.0
        """Seconds before this error during which the rank was not known to be well."""

    def __reduce__(self) -> tuple[Any, ...]:
        named: dict[str, Any] = {"user_error": self.user_error, "trace": self.trace, "died": self.died}
        return partial(type(self), **named), (self.rank, self.user_message)


def raised(rank: int, error: BaseException, trace: str) -> WorkerError:
    """Convert a rank's exception to a `WorkerError`: a message for the user, or a failure with its trace."""
    if isinstance(error, ValueError | UnreadableError):
        return WorkerError(rank, str(error), user_error=True, trace=trace)
    return WorkerError(rank, f"{type(error).__name__}: {error}", trace=trace)


Outcome = tuple[Any] | WorkerError
"""Outcome of a call: its result in a tuple, or the error."""
Answer = tuple[int, str, Any]
"""A rank, the question it was asked while a call ran ("pulse" or "interrupt"), and its answer."""
Polled = tuple[list[tuple[int, Outcome]], list[Answer]]
"""Outcomes of calls by rank, and answers to questions."""


def never() -> bool:
    return False


class NoRoomError(ConfigError):
    """The nodes of lost ranks are gone, and no other nodes have room."""


class WorkerGroup(ABC):
    """All ranks of a run; notices ranks that die, fall silent or make no progress.

    Its calls run methods of `Rank`, with positional arguments. Subclasses say how to reach a rank.
    """

    hosts: Sequence[str]
    """Host of every rank, by rank; equal for ranks that share memory and links, and fail together."""
    addresses: Sequence[str]
    """Address of every rank's node, by rank."""

    def __init__(self, ranks: int, failure: FailureConfig, cluster: ClusterConfig, *, on_gpus: bool) -> None:
        self._ranks = ranks
        self._interrupt_s = _GPU_INTERRUPT_SECONDS if on_gpus else _INTERRUPT_SECONDS
        self._silence_s, self._stall_s = failure.silence_s, cluster.group_timeout_s
        self._limit_s = max(_CALL_SECONDS, cluster.group_timeout_s)
        self._long_limit_s = max(_LONG_SECONDS, cluster.group_timeout_s * (_LONG_SECONDS / _CALL_SECONDS))
        self._stopped: Callable[[], bool] = never
        self._calls: dict[int, Future[Any]] = {}
        """The last call of every rank that has not answered it yet."""
        self._questions: dict[tuple[int, str], Future[Any]] = {}
        """Unanswered questions, by rank and name."""
        self._gone: set[int] = set()
        self._awake: set[int] = set()
        """Ranks that have answered a question since they started; a rank's first answer may take long."""

    def call(self, rank: int, method: _Method[_P, _R], *arguments: _P.args, **named: _P.kwargs) -> _R:
        return self.call_some([rank], method, *arguments, **named)[0]

    def call_all(self, method: _Method[_P, _R], *arguments: _P.args, **named: _P.kwargs) -> list[_R]:
        return self.call_some(range(self._ranks), method, *arguments, **named)

    def call_some(
        self, ranks: Sequence[int], method: _Method[_P, _R], *arguments: _P.args, **named: _P.kwargs
    ) -> list[_R]:
        """Call a method on several ranks at once and return all results, in the order of ``ranks``.

        Raise `WorkerError` as soon as a rank fails, `StoppedError` if the test of `heeding` says so.
        """
        assert not named, "a rank is told its arguments by their places"
        results = self._outcomes(ranks, method.__name__, arguments)
        return [results[rank] for rank in ranks]

    def left(self) -> list[int]:
        """Return the ranks that are not gone."""
        return [rank for rank in range(self._ranks) if rank not in self._gone]

    def expect(self, stall_s: float) -> None:
        """Treat ranks that make no progress in a step for ``stall_s`` seconds as failed from now on."""
        self._stall_s = stall_s

    @contextlib.contextmanager
    def heeding(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Within the block, calls that wait for ranks raise `StoppedError` once ``stopped()`` is true."""
        before, self._stopped = self._stopped, stopped
        try:
            yield
        finally:
            self._stopped = before

    def interrupt(self, generation: int) -> list[int]:
        """Break off the calls of all ranks in a generation; return the ranks that are gone: dead, or killed
        because they did not break off. All other ranks have acknowledged the interrupt.

        A rank's own `interrupt` may end later than the call that it breaks off, and the next generation
        begins after both.
        """
        told = self._calls.keys() - self._gone
        for rank in told:
            self._ask(rank, "interrupt", generation)
        deadline = time.monotonic() + self._interrupt_s
        while (left := (self._calls.keys() | told) - self._gone) and time.monotonic() < deadline:
            outcomes, answers = self._poll(left & self._calls.keys(), _PULSE_SECONDS)
            for rank, outcome in outcomes:
                self._answered(rank, outcome)
            told -= {rank for rank, question, _ in answers if question == "interrupt"}
        self._gone |= self._calls.keys() | told
        for rank in self._gone:
            self._kill(rank)
        self._calls.clear()
        return sorted(self._gone)

    def replace(self, ranks: Sequence[int]) -> None:
        """Start new processes for ranks that are gone; raise `NoRoomError` if there is no room for them."""
        self._awake -= set(ranks)
        self._questions = {
            asked: answer for asked, answer in self._questions.items() if asked[0] not in ranks
        }
        self._restart(ranks)
        self._gone -= set(ranks)

    def _outcomes(self, ranks: Iterable[int], method: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        waiting = set(ranks)
        for rank in sorted(waiting):
            self._calls[rank] = self._send(rank, method, arguments)
        stall_s = self._stall_s if method in _STEADY else None
        limit_s = None if stall_s else self._long_limit_s if method in _LONG else self._limit_s
        vigil = Vigil(waiting, self._awake, time.monotonic(), self._silence_s, stall_s, limit_s)
        results: dict[int, Any] = {}
        asked = 0.0
        while waiting:
            if self._stopped():
                raise StoppedError
            if (now := time.monotonic()) > asked + _PULSE_SECONDS:
                asked = now
                for rank in waiting:
                    self._ask(rank, "pulse")
            polled = time.monotonic()
            outcomes, answers = self._poll(waiting, _PULSE_SECONDS)
            now = time.monotonic()
            vigil.forgive(max(0.0, now - polled - _PULSE_SECONDS))  # reading large answers takes long
            for rank, question, answer in answers:
                progress, awaits = answer if question == "pulse" and answer else Pulse(None)
                vigil.beat(rank, progress, now, awaits)
                self._awake.add(rank)
            errors = []
            for rank, outcome in outcomes:  # all of them: an answer comes once
                waiting.discard(rank)
                self._answered(rank, outcome)
                if isinstance(outcome, WorkerError):
                    errors.append(outcome)
                else:
                    vigil.done(rank, now)
                    results[rank] = outcome[0]
            if errors:
                error = self._cause(errors, waiting)
                error.unwell_seconds = now - vigil.last_heard(error.rank)
                raise error
            if (trouble := vigil.verdict(time.monotonic())) is not None:
                if trouble.silent:
                    self._gone.add(trouble.rank)
                doing = "" if trouble.silent or method in _STEADY else f" ({method})"
                error = WorkerError(trouble.rank, trouble.text + doing, died=trouble.silent)
                error.unwell_seconds = trouble.seconds
                raise error
        return results

    def _answered(self, rank: int, outcome: Outcome) -> None:
        self._calls.pop(rank, None)
        if isinstance(outcome, WorkerError) and outcome.died:
            self._gone.add(rank)

    def _ask(self, rank: int, question: str, *arguments: Any) -> None:
        """Call ``pulse`` or ``interrupt`` of a rank at work; skip a pulse while an earlier one is
        unanswered."""
        if question != "pulse" or (rank, question) not in self._questions:
            self._questions[rank, question] = self._send(rank, question, arguments, beside=True)

    def _poll(self, waiting: Collection[int], timeout_s: float) -> Polled:
        """Wait for an event; return outcomes of calls to the ``waiting`` ranks, and answers to questions."""
        calls = {self._calls[rank]: rank for rank in waiting}
        questions = {answer: asked for asked, answer in self._questions.items()}
        if not (calls or questions):  # the rank that an answer is due from cannot be reached
            time.sleep(timeout_s)
        done, _ = wait([*calls, *questions], timeout_s, return_when=FIRST_COMPLETED)
        outcomes: list[tuple[int, Outcome]] = []
        for call, rank in calls.items():
            if call in done:
                error = call.exception()
                outcomes.append((rank, (call.result(),) if error is None else self._failure(rank, error)))
        answers: list[Answer] = []
        for answer, asked in questions.items():
            if answer in done:
                del self._questions[asked]
                if answer.exception() is None:
                    answers.append((*asked, answer.result()))
        return outcomes, answers

    def _cause(self, errors: list[WorkerError], waiting: Collection[int]) -> WorkerError:
        """Return the error to report: a rank's death or a user's error if one is found, else the first error.
        Errors of other ranks, which may be mere consequences, are awaited for a moment."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        left = set(waiting)
        while True:
            for error in errors:
                if error.died or error.user_error:
                    return error
            if not left or (rest := deadline - time.monotonic()) <= 0:
                return errors[0]
            outcomes, _ = self._poll(left, rest)
            for rank, outcome in outcomes:
                left.discard(rank)
                self._answered(rank, outcome)
                if isinstance(outcome, WorkerError):
                    errors.append(outcome)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe what the ranks run on, for ``cluster.json``."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all ranks and leave no process running."""

    @abstractmethod
    def _send(
        self, rank: int, method: str, arguments: tuple[Any, ...], *, beside: bool = False
    ) -> "Future[Any]":
        """Start a call on a rank, without waiting until the rank accepts it. ``beside``: whether the rank
        answers it while another call runs."""

    @abstractmethod
    def _failure(self, rank: int, error: BaseException) -> WorkerError:
        """Describe the exception with which a call has ended."""

    @abstractmethod
    def _kill(self, rank: int) -> None:
        """End a rank's process at once, if it lives."""

    @abstractmethod
    def _restart(self, ranks: Sequence[int]) -> None:
        """Start new processes in the places of these ranks."""


def rendezvous(
    group: WorkerGroup, timeout_s: float, generation: int = 1, copies_shift: int = 0
) -> Rendezvous:
    """Open a store on the first rank, where all of a group's ranks meet."""
    return Rendezvous(
        address=group.addresses[0],
        port=group.call(0, Rank.open_store, timeout_s),
        generation=generation,
        hosts=tuple(group.hosts),
        copies_shift=copies_shift,
    )


class Collector(Protocol):
    @property
    def target(self) -> Any:
        """The destination of spans that ranks are given (`Worker.stream_spans`)."""

    def counts(self) -> SpanCounts:
        """Return how many spans were received or lost so far, as far as known without waiting."""


class Launcher(Protocol):
    """Starts worker groups; picklable, so that it can be handed to a controller elsewhere."""

    def check(self, ranks: int) -> None:
        """Raise `ConfigError` if the cluster is already known to have no room for that many ranks."""

    def collector(self, files: Path, bytes_per_rank: int) -> AbstractContextManager[Collector]:
        """Start a collector to which ranks stream their spans, and which writes them into the folder
        ``files``."""

    def machines(self) -> list[str]:
        """Name the kinds of machines that ranks may run on, beside this one: part of a profile's identity."""

    def hosts(self, ranks: int) -> Sequence[str]:
        """Predict each rank's host as things stand; the actual hosts are known once ranks have started."""

    def start(
        self, ranks: int, avoid: Sequence[str] = (), stopped: Callable[[], bool] = never
    ) -> WorkerGroup:
        """Start that many ranks, none of them on nodes whose addresses are in ``avoid``.

        Raise `NoRoomError` if there is no room, `WorkerError` if a rank does not start, `StoppedError` once
        ``stopped`` says so.
        """

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        """Return how many ranks there is room for, the group's own included, outside the nodes whose
        addresses are in ``avoid``; and whether one of the group's nodes is leaving."""
