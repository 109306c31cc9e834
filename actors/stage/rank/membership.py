"""A rank's membership in a generation's process groups: join, break off at any moment, leave."""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from braid.actors.config import ClusterConfig
from braid.actors.stage.rank.devices import device_of, local_rank
from braid.actors.stage.rank.groups import make_world
from braid.actors.stage.rank.messages import Rendezvous
from braid.actors.stage.rank.network import Connections, bind_gloo, store_on

if TYPE_CHECKING:
    from braid.actors.stage.run.step_graph import StepGraph


class Membership:
    """Holds the store where ranks meet, the connections between them, and the rank's device."""

    graph: "StepGraph | None" = None
    """The CUDA graph of a step. It is dropped before the groups are destroyed: NCCL destroys no communicator
    that a graph still refers to."""

    def __init__(self, address: str) -> None:
        self.device = torch.device("cpu")
        self._address = address
        self._store: dist.TCPStore | None = None
        self._connections: Connections | None = None
        self._generation, self._broken_off = 0, -1
        """The present generation, and the newest generation that was broken off."""
        self._lock = threading.Lock()

    def host_store(self, timeout_s: float) -> int:
        self._store = store_on(self._address, timedelta(seconds=timeout_s))
        return int(self._store.port)

    def begin(self, cluster: ClusterConfig, rank: int, rendezvous: Rendezvous) -> None:
        """Begin a generation: choose the device, and watch which connections are opened from now on."""
        with self._lock:  # an abort of the previous generation has ended
            if self._generation == rendezvous.generation:  # the same generation again
                self._broken_off = -1
            self._generation = rendezvous.generation
        self.intact()
        self.device = device_of(cluster.device, local_rank(rank, rendezvous.hosts))
        self.use_device()
        self._connections = Connections()

    def join(self, cluster: ClusterConfig, rendezvous: Rendezvous, rank: int, ranks: int) -> None:
        timeout = timedelta(seconds=cluster.group_timeout_s)
        bind_gloo(self._address)
        if self._store is None:
            self._store = dist.TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=timeout)
        backend: str = cluster.backend
        if backend == "auto":
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        store = dist.PrefixStore(f"generation-{rendezvous.generation}", self._store)
        make_world(backend, store, rank, ranks, timeout)

    def connected(self, mbit: float | None) -> None:
        """Record that all groups have been made; ``mbit``: limit of each connection's rate, in Mbit/s."""
        assert self._connections is not None
        self._connections.made()
        if mbit is not None:
            self._connections.pace(mbit)

    def break_off(self, generation: int | None = None) -> None:
        """Make calls that wait for other ranks raise, or return garbage; callable from any thread.

        ``generation``: the generation to break off; None for the present one. A generation that is over is
        left alone. If the generation has not begun yet, its `begin` will raise.
        """
        with self._lock:
            meant = self._generation if generation is None else generation
            if meant < self._generation:
                return
            self._broken_off = meant  # before any waiting call returns
            if meant == self._generation:
                self.use_device()
                self._drop_graph()
                if self._connections is not None:
                    self._connections.shut()
                self._abort()

    def _drop_graph(self) -> None:
        if self.graph is not None:
            self.graph.drop()

    def _abort(self) -> None:
        if dist.is_initialized() and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    @property
    def broken(self) -> bool:
        """Whether communication of the present generation was broken off."""
        return self._broken_off == self._generation

    def intact(self) -> None:
        """Raise `RuntimeError` if communication was broken off: collectives may have returned garbage."""
        if self.broken:
            raise RuntimeError("communication was broken off")

    def use_device(self) -> None:
        """Let this thread work with the rank's GPU; a new thread begins with the machine's first GPU."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def leave(self) -> None:
        self._drop_graph()
        self._destroy()
        self._store = self._connections = self.graph = None

    def _destroy(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
