"""Streams on a CPU: gloo, which works in its own threads and does not report when a transfer is done."""

import os
import queue
import threading
import time
from functools import cache

from braid.actors.stage.run.streams import Mark, Streams, Transfer
from braid.kernels.collectives.primitives import Launch, Work
from braid.scheduling.mesh.cluster import Stream

_Waiting = queue.SimpleQueue[Transfer | None]
"""Transfers that a thread waits for, in order; None ends the thread."""
_Order = tuple[Transfer, _Waiting]
"""A transfer to be issued, and the queue of the thread that waits for it afterwards."""


class HostStreams(Streams):
    """gloo transfers, with helper threads for transfers that are not awaited at once.

    One thread, the issuer, issues these in order: gloo's sending thread itself writes as much of a message as
    the socket takes, 1.6 ms for 1 MB (docs/log.md), while the caller could compute. The caller issues small
    messages itself, since the issuer takes longer to wake up than the message takes to write. Since gloo does
    not report when a transfer is done, one waiter thread per stream and lane waits for transfers and records
    when they end.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[Stream, str], _Waiting] = {}
        self._orders: queue.SimpleQueue[_Order | None] | None = None
        self._last: Transfer | None = None
        """The transfer that was given to the issuer last."""
        self._threads: list[threading.Thread] = []
        self._marks = 0

    def mark(self) -> int:
        self._marks += 1
        return time.perf_counter_ns()

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer, or, unless the caller waits next, pass it to the issuer and a waiter."""
        self._marks += 1
        if awaited_next:
            self._all_issued()
            begin = time.perf_counter_ns()
            return Transfer(launch=launch, work=_issued(launch), begin=begin, sent=launch.sends)
        transfer = Transfer(launch=launch, work=None, begin=None, sent=launch.sends)
        transfer.issued, transfer.done = threading.Event(), threading.Event()
        order = transfer, self._waiter(stream, lane)
        if 0 < launch.sends <= _SMALL_BYTES:
            self._all_issued()
            _issue(order)
        else:
            self._issuer().put(order)
            self._last = transfer
        return transfer

    def _all_issued(self) -> None:
        """Wait until the issuer has issued all transfers: the order of issue is the same on all ranks."""
        last, self._last = self._last, None
        if last is not None and last.issued is not None:
            last.issued.wait()

    def wait(self, transfer: Transfer) -> None:
        """Block until the transfer is complete; raise the transfer's error."""
        if transfer.done is None:
            assert transfer.work is not None
            transfer.work.wait()
            transfer.end = time.perf_counter_ns()
            return
        transfer.done.wait()
        if transfer.error is not None:
            raise transfer.error

    def progress(self) -> int:
        return self._marks

    def complete(self, transfer: Transfer) -> bool:
        return transfer.end is not None

    def delay(self, ns: float) -> None:
        time.sleep(ns / 1e9)

    def nanoseconds(self, mark: Mark) -> int:
        return int(mark)

    def epoch_ns(self) -> int:
        """Return the wall-clock time at the monotonic clock's zero, by the quickest of several readings."""
        readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(3)]
        before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
        return now - (before + after) // 2

    def close(self) -> None:
        """Ask the threads to end; they are daemons, so a thread that waits for a dead peer may be left."""
        if self._orders is not None:
            self._orders.put(None)
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _issuer(self) -> "queue.SimpleQueue[_Order | None]":
        if self._orders is None:
            self._orders = queue.SimpleQueue()
            self._begin(threading.Thread(target=_issue_all, args=(self._orders,), name="issuer", daemon=True))
        return self._orders

    def _begin(self, thread: threading.Thread) -> None:
        thread.start()
        self._threads.append(thread)

    def _waiter(self, stream: Stream, lane: str) -> _Waiting:
        if (stream, lane) not in self._queues:
            waiting: _Waiting = queue.SimpleQueue()
            self._queues[stream, lane] = waiting
            name = f"waiter {stream.value} {lane}"
            self._begin(threading.Thread(target=_await_all, args=(waiting,), name=name, daemon=True))
        return self._queues[stream, lane]


_SMALL_BYTES = 128 << 10
"""Messages up to this size are issued by the caller: to hand a message to a thread on the same CPU takes
about as long as the operator that hides the message (docs/log.md)."""


def _issue_all(orders: "queue.SimpleQueue[_Order | None]") -> None:
    while (order := orders.get()) is not None:
        _issue(order)
        del order  # otherwise its tensors would stay alive until the next order


def _issue(order: _Order) -> None:
    """Begin a transfer; on failure store the error, which `HostStreams.wait` raises."""
    transfer, waiting = order
    issued, done = transfer.issued, transfer.done  # `take` may drop these attributes before the end
    assert issued is not None
    assert done is not None
    assert transfer.launch is not None
    transfer.begin = time.perf_counter_ns()
    try:
        transfer.work = _issued(transfer.launch)
        waiting.put(transfer)
    except (RuntimeError, OSError) as error:  # OSError if a priority may no longer be changed
        transfer.error, transfer.end = error, time.perf_counter_ns()
        done.set()
    issued.set()


def _issued(launch: Launch) -> Work:
    """Issue a transfer; a sending thread has real-time priority meanwhile, if the kernel allows this.

    Otherwise gloo's thread, woken by the peer's data, may preempt this thread while it holds a connection's
    lock, and then spins on that lock until its time slice ends: 3 ms for one in four exchanges of 64 KB
    (docs/log.md). Real-time priorities need root or CAP_SYS_NICE.
    """
    if not (launch.sends and _may_go_first()):
        return launch.issue()
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        return launch.issue()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@cache
def _may_go_first() -> bool:
    """Tell whether this process may use real-time priority, and has its usual policy."""
    if not hasattr(os, "sched_setscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False  # not on Linux
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return True


def _await_all(transfers: _Waiting) -> None:
    while (transfer := transfers.get()) is not None:
        assert transfer.work is not None
        try:
            transfer.work.wait()
        except RuntimeError as error:
            transfer.error = error
        transfer.end = time.perf_counter_ns()
        assert transfer.done is not None
        transfer.done.set()
        del transfer  # otherwise its tensors would stay alive until the next transfer
