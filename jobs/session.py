"""The Ray cluster a command works on: one that exists, or a private local one that ends with it."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError

_CONNECT_SECONDS = 20.0


@contextlib.contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Connect to ``cluster.address`` or $RAY_ADDRESS, or start a local cluster on loopback.

    Raises `ConfigError` where Ray is not installed or the address does not answer.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "cluster.launcher='ray' needs Ray, which is not installed; "
            "install it (pip install 'ray[default]') or use --launcher processes"
        ) from None
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with contextlib.ExitStack() as stack:
        if address:
            _check_reachable(address)
            try:
                with _native_messages_dropped():
                    ray.init(address=address, runtime_env={"py_modules": [_package()]}, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"cluster.address={address!r}: cannot join this Ray cluster ({_first_line(error)})"
                ) from None
        else:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster on loopback
            # Ray starts its workers at nice 15, which costs them the CPU as soon as anything else runs here.
            os.environ.setdefault("RAY_worker_niceness", "0")
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-", dir="/tmp"))
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=directory,
                **quiet,
            )
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _native_messages_dropped() -> Iterator[None]:
    """Keep Ray's C++ layer from writing its retries to standard error; the outcome is an exception."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _check_reachable(address: str) -> None:
    """Refuse an address that nobody answers at, before Ray spends a minute finding out."""
    if address in ("auto", "local"):
        return
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        raise ConfigError(f"cluster.address={address!r} must be HOST:PORT, such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address={address!r} does not answer ({error.strerror or error}); "
            f"check that 'ray start --head' runs there, or leave it out to use this machine"
        ) from None


def _package() -> str:
    """The folder of the braid package, to be shipped to the cluster's nodes."""
    return str(Path(__file__).resolve().parent.parent / "braid")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def ray_nodes() -> list[str]:
    """The nodes of the connected cluster in words: addresses and resources, for the names of profiles."""
    import ray

    names = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            names.append(f"{node['NodeManagerAddress']} {has.get('CPU', 0):g} CPU {has.get('GPU', 0):g} GPU")
    return sorted(names)
