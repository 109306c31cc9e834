"""A rank among all ranks: it joins them for a generation, may be broken off at any moment, and leaves."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from braid.actors.config import ClusterConfig
from braid.actors.stage.devices import device_of, local_rank
from braid.actors.stage.mesh import make_world
from braid.actors.stage.messages import Rendezvous
from braid.actors.stage.network import Connections, bind_gloo, store_on


class Membership:
    """The store where ranks meet, the connections between them, the device that they compute on."""

    def __init__(self, address: str) -> None:
        self.device = torch.device("cpu")
        self._address = address
        self._store: dist.TCPStore | None = None
        self._connections: Connections | None = None
        self._broken_off = threading.Event()

    def host_store(self, timeout_s: float) -> int:
        """Host the rendezvous on a free port of this node and return the port."""
        self._store = store_on(self._address, timedelta(seconds=timeout_s))
        return int(self._store.port)

    def begin(self, cluster: ClusterConfig, rank: int, rendezvous: Rendezvous) -> None:
        """A generation begins: take the rank's device, and note which connections are made from now on."""
        self._broken_off.clear()
        self.device = device_of(cluster.device, local_rank(rank, rendezvous.hosts))
        self.use_device()
        self._connections = Connections()

    def join(self, cluster: ClusterConfig, rendezvous: Rendezvous, rank: int, ranks: int) -> None:
        """Meet all ranks."""
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
        """All groups have been made; ``mbit``: what their connections are to send at most."""
        assert self._connections is not None
        self._connections.made()
        if mbit is not None:
            self._connections.pace(mbit)

    def break_off(self) -> None:
        """Make what waits for other ranks raise, or come back with garbage; from any thread."""
        self._broken_off.set()  # before anything comes back
        self.use_device()
        if self._connections is not None:
            self._connections.shut()
        if dist.is_initialized() and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    @property
    def broken(self) -> bool:
        """Whether communication was broken off."""
        return self._broken_off.is_set()

    def intact(self) -> None:
        """`RuntimeError` once it was broken off: results of collectives may be garbage."""
        if self.broken:
            raise RuntimeError("communication was broken off")

    def use_device(self) -> None:
        """Let this thread work with the rank's GPU; a new one begins with the first of the machine."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def leave(self) -> None:
        """Give up all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = self._connections = None
