"""Ranks that share one GPU: every rank a thread, with streams, events and memory of the real device.

It is the counterpart of `tests.cuda.machine`: what is modelled there is CUDA's own here, and what is left of
the model are the communicators, as NCCL takes one rank a card. Their rules are NCCL's: calls return at once;
kernels of a communicator run one after the other on a stream of its own, after what the current stream was
given; they begin when all members (for messages: both ends) have come to them, for which the device waits
and not the host (CUDA's stream memory operations).

Libraries, and torch's allocator, let the host wait for the whole device when something is used for the first
time, and when memory is asked of the driver; here other ranks' streams may be waiting on it for this one. So
memory is reserved, and every rank runs a step by itself before, on the same streams: what others would give
is its own, or nothing.

Random delays before every call bring ranks and streams out of step, differently each time: what no event
orders then comes in another order, on memory that torch's allocator gives away as soon as it may.
"""

import ctypes
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.run.accelerator import CudaAccelerator, DeviceStream
from tests.cuda.communicators import Collectives, Work, compute_collective

PATIENCE_SECONDS = 20.0
_SPREAD_NS = 60_000
"""A delay is as long at most: several operators of a small model."""
_MANY = 1024
"""Members of a communicator times kinds of counters."""


class Driver:
    """The two calls of CUDA's driver by which streams wait for each other without events."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """After what the stream was given: a number, and all that was written before it."""
        self._call("cuStreamWriteValue32_v2", stream, address, value)

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """What the stream is given from now on comes after the number is at least so large."""
        self._call("cuStreamWaitValue32_v2", stream, address, value)

    def _call(self, name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
        code = self._cuda[name](
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value), 0
        )
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


@dataclass(eq=False)
class Shared:
    """What the members of a communicator share: what each gave to a call, and how many calls each came to."""

    size: int
    counters: Tensor
    """int32, on the device; one for each member, then two for each pair: sent, and asked for."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    given: dict[Any, Tensor] = field(default_factory=dict)
    """Memory of the communicator's own for what a member gives; kept until the end."""

    def slot(self, key: Any, like: Tensor) -> Tensor:
        """Where a member's part of a call is: whoever comes first makes it."""
        with self.lock:
            if key not in self.given:
                self.given[key] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
            return self.given[key]

    def address(self, *index: int) -> int:
        """Of a counter: of a member, or of (source, target, 0: sent, 1: asked for)."""
        number = index[0]
        if len(index) > 1:
            source, target, kind = index
            number = self.size + 2 * (source * self.size + target) + kind
        return self.counters.data_ptr() + 4 * number


class CardGroup(Collectives):
    """A communicator as one rank has it."""

    def __init__(self, rank: "CardRank", shared: Shared, own: int) -> None:
        self._rank, self._shared, self.own = rank, shared, own
        self.device = rank.card.device
        self._stream = rank.own_stream()
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = defaultdict(int)

    def size(self) -> int:
        return self._shared.size

    def _collective(self, kind: str, x: Tensor, y: Tensor) -> Work:
        shared, driver, size = self._shared, self._rank.card.driver, self._shared.size
        alone = self._rank.card.warming
        self._calls += 1
        with self._kernel() as stream:
            parts = [shared.slot((self._calls, n, self.own if alone else None), x) for n in range(size)]
            for part in parts if alone else [parts[self.own]]:
                part.copy_(x.reshape(-1))
            driver.write(stream, shared.address(self.own), self._calls)
            for n in range(size) if not alone else ():
                driver.wait(stream, shared.address(n), self._calls)
            outputs: list[Tensor | None] = [None] * size
            outputs[self.own] = y
            compute_collective(kind, [part.view(x.shape) for part in parts], outputs)
        return self._under_way([x, y])

    def messages(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Work:
        """As one kernel, which ends when all have passed."""
        if not sends and not receives:
            return Work(self._rank)
        shared, driver, alone = self._shared, self._rank.card.driver, self._rank.card.warming
        waits: list[tuple[int, int]] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        with self._kernel() as stream:
            for x, peer in sends:
                number = self._number(self.own, peer)
                shared.slot(self._message(self.own, peer, number), x).copy_(x.reshape(-1))
                driver.write(stream, shared.address(self.own, peer, 0), number)
                waits.append((shared.address(self.own, peer, 1), number))
            for x, peer in receives:
                number = self._number(peer, self.own)
                arriving.append((x, shared.slot(self._message(peer, self.own, number), x)))
                driver.write(stream, shared.address(peer, self.own, 1), number)
                waits.append((shared.address(peer, self.own, 0), number))
            for address, number in waits if not alone else ():
                driver.wait(stream, address, number)
            for x, part in arriving:
                x.copy_(part.zero_().view(x.shape) if alone else part.view(x.shape))
        return self._under_way([x for x, _ in (*sends, *receives)])

    def _message(self, source: int, target: int, number: int) -> object:
        """What it is known by; of a rank by itself, to this rank."""
        return source, target, number, self.own if self._rank.card.warming else None

    def _number(self, source: int, target: int) -> int:
        self._messages[source, target] += 1
        return self._messages[source, target]

    @contextmanager
    def _kernel(self) -> Iterator[torch.cuda.Stream]:
        """On the communicator's stream, after what the current one was given, late by chance."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream())
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._rank.delay()
            yield self._stream
            self._rank.delay()

    def _under_way(self, kept: Sequence[Tensor]) -> Work:
        end = torch.cuda.Event()
        end.record(self._stream)
        return Work(self._rank, end, kept)


class CardRank(CudaAccelerator):
    """One rank: its accelerator, whose streams are its own."""

    def __init__(self, card: "Card", rank: int, seed: int) -> None:
        super().__init__(card.device)
        self.card, self.rank = card, rank
        self._random = random.Random(f"{seed} {rank}")
        self._streams: list[torch.cuda.Stream] = []
        self._used = 0
        self.compute = self.own_stream(priority=0)

    def own_stream(self, priority: int = -1) -> torch.cuda.Stream:
        """The next one. Torch's own come from a pool of 32, which all ranks would share."""
        if self._used == len(self._streams):
            handle = self.card.new_stream(priority)
            made = torch.cuda.ExternalStream(handle, device=self.card.device)
            with torch.cuda.stream(made):
                _reserve(self.card.device)
            self._streams.append(made)
        self._used += 1
        return self._streams[self._used - 1]

    @property
    def streams(self) -> int:
        """How many there are."""
        return len(self._streams)

    def again(self) -> None:
        """Streams are handed out from the first on, but for that of compute."""
        self._used = 1

    def stream(self) -> DeviceStream:
        """A new one."""
        return self.own_stream()  # type: ignore[return-value]

    def synchronise(self) -> None:
        """This rank's streams alone: others may wait for it."""
        for stream in list(self._streams):
            stream.synchronize()

    def delay(self) -> None:
        """Occupy the current stream, for as long as chance wants, often not at all."""
        if self.card.delays and self._random.random() < 0.5:
            self.spin(self._random.uniform(0, _SPREAD_NS))


class Card:
    """So many ranks on one GPU (in the place of `tests.cuda.machine.Machine`)."""

    def __init__(self, ranks: int, *, seed: int = 0, delays: bool = True) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.driver, self.delays = Driver(), delays
        self.warming = False
        """Whether ranks are by themselves."""
        self._lock = threading.Lock()
        self._runtime = ctypes.CDLL(_runtime())
        self._shared: dict[tuple[str, tuple[int, ...]], Shared] = {}
        self._barrier, self._given = threading.Barrier(ranks, timeout=PATIENCE_SECONDS), dict[int, Any]()
        self.ranks = [CardRank(self, rank, seed) for rank in range(ranks)]

    @property
    def streams(self) -> int:
        """Of all ranks."""
        return sum(rank.streams for rank in self.ranks)

    def new_stream(self, priority: int) -> int:
        """A handle; the process keeps it to its end."""
        handle = ctypes.c_void_p()
        code = self._runtime.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, priority)
        if code or handle.value is None:
            raise RuntimeError(f"cudaStreamCreateWithPriority: CUDA error {code}")
        return handle.value

    def group(self, rank: CardRank, name: str, ranks: Sequence[int]) -> CardGroup:
        """A rank's end of a communicator, which members know by name and ranks."""
        with self._lock:
            key = name, tuple(ranks)
            if key not in self._shared:
                counters = torch.zeros(_MANY, dtype=torch.int32, device=self.device)
                torch.cuda.current_stream().synchronize()
                self._shared[key] = Shared(len(ranks), counters)
        return CardGroup(rank, self._shared[key], list(ranks).index(rank.rank))

    def gather(self, rank: CardRank, number: int, own: Any) -> list[Any]:
        """What every rank gives."""
        self._given[rank.rank] = own
        self._barrier.wait()
        found = [self._given[n] for n in range(len(self.ranks))]
        self._barrier.wait()
        return found

    def run(self, rank: Callable[[CardRank], None]) -> None:
        """Run every rank to its end; raises what one raised, TimeoutError where the device stands still."""
        errors: list[BaseException] = []
        ended: set[int] = set()

        def run(own: CardRank) -> None:
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(own.compute):
                    rank(own)
                    own.synchronise()
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()
            ended.add(own.rank)

        threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS if not errors else 1.0)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        if len(ended) < len(self.ranks):
            self._release()
            raise TimeoutError(f"ranks {sorted({*range(len(self.ranks))} - ended)} stand still")

    def warm(self, rank: Callable[[CardRank], None]) -> None:
        """Run every rank by itself, so that all is there when they run together."""
        self.warming = True
        self.run(rank)
        self.warming = False
        self._shared.clear()
        for one in self.ranks:
            one.again()

    def _release(self) -> None:
        """Let streams that wait for each other go on, with whatever there is: the process has other cases."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            for shared in self._shared.values():
                shared.counters.fill_(2**30)
            torch.cuda.current_stream().synchronize()

    def abreast(self) -> None:
        """Wait until all ranks have come."""
        self._barrier.wait()


def _reserve(device: torch.device) -> None:
    """Torch's allocator keeps what is given back: small pieces, and large ones, for the current stream."""
    kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1 << 20, 10 << 20) * 16]
    kept += [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in range(6, 16)]
    del kept


def _runtime() -> str:
    """The CUDA runtime that torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found = {line.split()[-1] for line in maps if "libcudart" in line}
    return min(found)
