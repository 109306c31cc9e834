"""A rank in a process that torchrun has started: its spans travel over a connection to the controller."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from braid.actors.stage.measure.span_stream import Sink
from braid.actors.stage.rank.worker import Worker


class JoinedWorker(Worker):
    """A rank with the methods of `Worker`."""

    def __init__(self, rank: int, address: str, connect: Callable[[], Connection]) -> None:
        """``connect``: opens a connection for this rank's spans."""
        super().__init__(rank, address)
        self._connect = connect

    def _span_sink(self, target: Any) -> Sink:
        return ConnectionSink(self._connect())


class ConnectionSink:
    """Sends batches over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, batch: bytes) -> bool:
        self._connection.send_bytes(batch)
        return True

    def close(self, timeout_s: float) -> None:
        self._connection.close()
