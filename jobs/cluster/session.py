"""Connects a command to its Ray cluster: an existing one, or a private one that ends with the command."""

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import braid
from braid.actors.config import Config, ConfigError
from braid.actors.controller.ranks.cpus import whole_cpus
from braid.actors.controller.ranks.group import Launcher, StoppedError
from braid.actors.controller.ranks.parent import signals_held
from braid.actors.controller.ranks.private_folders import private_folder
from braid.actors.controller.ranks.processes import LOOPBACK, ProcessPlace, check_loopback
from braid.actors.controller.ranks.rendezvous import launcher_here
from braid.jobs.cluster.doors import check_cluster, head_is_silent
from braid.jobs.cluster.guardian import MARK, guarded
from braid.jobs.data.executors import Executor, local_map, ray_map
from braid.jobs.output import first_line

_CONNECT_SECONDS = 20.0
_FOUND_BY_RAY = ("auto", "local")
"""Values of an address with which Ray finds the cluster itself."""
_SESSION_ROOM = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.10")
"""Bytes of the longest socket path below the folder of a Ray cluster."""
WORKERS = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
"""Settings with which clusters started here start workers. By default Ray starts them at nice 15, so that
they lose the CPU to all other processes, and starts some in advance, which ranks, with variables of their
own, cannot use."""


_one_session = threading.Lock()
"""Held while a run has connected this process to Ray, which knows one connection per process."""
_INSTALL_RAY = "install it (pip install 'ray[default]') or set cluster.launcher to processes"


def check_installed() -> None:
    """Raise `ConfigError` if Ray is not installed, without importing it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"cluster.launcher='ray' needs Ray, which is not installed; {_INSTALL_RAY}")


def is_joined() -> bool:
    """Return whether this process has joined a Ray cluster, as scripts, tasks and trials of Ray Tune have;
    without importing Ray."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def is_private(config: Config) -> bool:
    """Return whether a Ray cluster of this machine is started for this command alone."""
    return not (config.cluster.address or os.environ.get("RAY_ADDRESS") or is_joined())


@contextlib.contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Connect to ``cluster.address`` or $RAY_ADDRESS, or start a cluster of this machine with its own token.
    A cluster that this process has joined is used as it is, and stays joined."""
    check_installed()
    if not _one_session.acquire(blocking=False):
        raise ConfigError(
            "cluster.launcher='ray': another run of this process is connected to Ray, and ends the "
            "connection; wait for it, call ray.init() before both, or set cluster.launcher to processes"
        )
    try:
        if not is_joined():
            with _connected(config):
                yield
            return
    finally:
        _one_session.release()
    _check_joined(config)
    yield


@contextlib.contextmanager
def _connected(config: Config) -> Iterator[None]:
    """Connect this process to Ray for the length of the block."""
    try:
        import ray
    except Exception as error:  # Ray is not installed, or not completely
        raise ConfigError(
            f"cluster.launcher='ray' needs Ray, which cannot be loaded ({first_line(error)}); {_INSTALL_RAY}"
        ) from None
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with contextlib.ExitStack() as stack:
        options: dict[str, Any]
        if address:
            given = f"cluster.address={address!r}" if config.cluster.address else f"$RAY_ADDRESS ({address})"
            if address not in _FOUND_BY_RAY:
                _check_reachable(address, given)
                check_cluster(address, config.cluster.allow_unauthenticated)
            quiet: contextlib.AbstractContextManager[None] = _native_messages_dropped()
            # Ray refuses the package if a submitted job has brought it already.
            brought = "py_modules" in job_environment()
            options = {"address": address, "runtime_env": {} if brought else {"py_modules": [package()]}}
            trouble = f"{given}: cannot join this Ray cluster"
            remedy = "see `ray status` on a node of it, or leave it out to use this machine"
        else:
            check_loopback()
            stack.enter_context(environment({**WORKERS, **os.environ}))
            directory = stack.enter_context(session_folder())
            if "RAY_AUTH_MODE" not in os.environ:  # else all users of this machine could run code as this one
                stack.enter_context(own_token(directory))
            import ray._private.services

            # Ray turns 127.0.0.1 into an address that others reach, and its servers listen on all then
            services: Any = ray._private.services
            kept = services.resolve_ip_for_localhost
            stack.callback(setattr, services, "resolve_ip_for_localhost", kept)
            services.resolve_ip_for_localhost = lambda host: host
            quiet = signals_held()
            options = {
                "address": "local",
                "num_cpus": whole_cpus(),
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                "_temp_dir": f"{directory}/ray",  # readable for everybody, but its parent folder is not
            }
            trouble = "cluster.launcher='ray': Ray does not start on this machine"
            remedy = (
                "see that /dev/shm can be written and memory is free, or set cluster.launcher to processes"
            )
        try:
            with quiet, _handlers_kept():
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
        except StoppedError:
            raise
        except Exception as error:  # Ray raises bare exceptions, and others than it documents
            raise ConfigError(f"{trouble} ({first_line(error)}); {remedy}") from None
        os.environ.pop(MARK, None)  # Ray's processes keep it; trackers and the page must not have it
        stack.callback(ray.shutdown)
        if address in _FOUND_BY_RAY:
            check_cluster(ray.get_runtime_context().gcs_address, config.cluster.allow_unauthenticated)
        yield


@contextlib.contextmanager
def launcher_of(
    config: Config, places: Sequence[ProcessPlace] | None = None
) -> Iterator[tuple[Launcher, Executor]]:
    """Yield the launcher of a run's ranks and the executor that prepares its data; within the block the
    command is connected to the run's Ray cluster, if it runs on Ray. ``places``: places of plain processes,
    if they are not all on this host."""
    if config.cluster.launcher == "processes":
        launcher = launcher_here(config, places)
        with launcher.gathered():
            yield launcher, local_map
        return
    with ray_session(config):
        from braid.actors.controller.ranks.placement import RayLauncher, Reserved

        reserved = Reserved.here()
        # beside trials that have reserved all CPUs of the cluster, tasks would wait for ever
        yield RayLauncher(config, reserved=reserved), ray_map if reserved is None else local_map


@contextlib.contextmanager
def session_folder() -> Iterator[Path]:
    """Make a private folder for Ray clusters. However this process ends, the cluster processes that it starts
    within the block end with it, and the folder is removed."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_folder(_SESSION_ROOM))
        stack.enter_context(environment({MARK: str(folder)}))
        with signals_held():
            stack.enter_context(guarded(folder))
        yield folder


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep this command's handler of SIGTERM, which Ray replaces by an immediate exit, so that the run can
    end first.

    Raise `StoppedError` if the signal has arrived meanwhile.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        raise StoppedError from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the length of the block; then restore the environment."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Require a token for clusters started in the block; it is in a file that only its owner can read."""
    file = folder / "token"
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32), encoding="utf-8")
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}):
            os.environ.pop("RAY_AUTH_TOKEN", None)  # it belongs to another cluster and would take precedence
            _read_again()
            yield
    finally:
        _read_again()


def _read_again() -> None:
    """Let Ray read mode and token again, which it does only once per process; first the mode, else Ray looks
    for a token that is gone."""
    import ray._raylet

    raylet: Any = ray._raylet  # compiled, without types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _native_messages_dropped() -> Iterator[None]:
    """Keep Ray's C++ layer from writing its retries to standard error; failures raise exceptions anyway."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _check_joined(config: Config) -> None:
    """Refuse an address of another cluster than the one that this process has joined."""
    import ray

    wanted, here = config.cluster.address, ray.get_runtime_context().gcs_address
    if wanted not in (None, here, *_FOUND_BY_RAY):
        raise ConfigError(
            f"cluster.address={wanted!r}: this process has joined the Ray cluster {here}; leave "
            f"cluster.address out to use that one, or call ray.shutdown() first"
        )


def _check_reachable(address: str, given: str) -> None:
    """Refuse an address that does not answer, before Ray spends a minute on it; ``given``: the setting in
    words."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        raise ConfigError(f"{given} must be HOST:PORT, such as 10.0.0.1:6379 or [fd00::1]:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        if head_is_silent(address):
            raise TimeoutError("it takes connections and says nothing")
    except OSError as error:
        raise ConfigError(
            f"{given} does not answer ({error.strerror or error}); "
            f"check that 'ray start --head' runs there, or leave it out to use this machine"
        ) from None


def package() -> str:
    """Return the folder of the braid package, which is shipped to the cluster's nodes."""
    return str(Path(braid.__file__).resolve().parent)


def job_environment() -> dict[str, Any]:
    """Return the runtime environment of the Ray job whose driver is this process; empty outside of jobs."""
    return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}


def check_lasting(config: Config) -> None:
    """Refuse checkpoint folders in a job's working directory, a copy that Ray removes with the job."""
    if "working_dir" not in job_environment():
        return
    for key, path in (("runs", str(config.runs)), ("checkpoint.mirror", config.checkpoint.mirror or "")):
        if "working_dir_files" in path.split("/"):
            raise ConfigError(
                f"{key}={path!r} lies in this job's working directory, which Ray removes with the job; "
                f"give an absolute path that means the same on all nodes, such as {key}=/shared/runs"
            )
