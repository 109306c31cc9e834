"""The ranks of one generation as the controller sees them, wherever they run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from braid.actors.controller.span_files import SpanCounts


class WorkerError(RuntimeError):
    """A rank raised, or ``died``. ``user_error``: its message is for the user and needs no trace."""

    def __init__(
        self, rank: int, message: str, *, user_error: bool = False, trace: str = "", died: bool = False
    ) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.user_error = user_error
        self.user_message = message
        self.trace = trace
        self.died = died

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive pickling with all fields."""
        return _worker_error, (self.rank, self.user_message, self.user_error, self.trace, self.died)


def _worker_error(rank: int, message: str, user_error: bool, trace: str, died: bool) -> WorkerError:
    return WorkerError(rank, message, user_error=user_error, trace=trace, died=died)


class WorkerGroup(Protocol):
    """All ranks of a run. Methods are those of `braid.actors.stage.worker.Worker`, by name."""

    @property
    def addresses(self) -> Sequence[str]:
        """Address of every rank's node, by rank."""

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call one rank and wait; raises `WorkerError`."""

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks at once and wait for all results, in rank order; raises `WorkerError`."""

    def describe(self) -> dict[str, Any]:
        """What the ranks run on, for ``cluster.json``."""

    def shutdown(self) -> None:
        """End all ranks; nothing is left running."""

    def abort(self) -> None:
        """End all ranks at once, whatever they are at: one of them has failed."""


class Collector(Protocol):
    """Takes the spans that ranks stream."""

    @property
    def target(self) -> Any:
        """What ranks are told (`Worker.stream_spans`)."""

    def counts(self) -> SpanCounts:
        """What became of the spans so far."""


class Launcher(Protocol):
    """Starts worker groups; picklable, so that it can be handed to a controller elsewhere."""

    def check(self, ranks: int) -> None:
        """Raise `ConfigError` if it is plain already that there is no room for that many ranks."""

    def collector(self, files: Path, bytes_per_rank: int) -> AbstractContextManager[Collector]:
        """Where ranks stream their spans to; it writes them into a folder."""

    def start(self, ranks: int) -> WorkerGroup:
        """Start that many ranks; `ConfigError` if there is no room for them."""
