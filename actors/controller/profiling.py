"""Profiles runs: ranks measure (`combining` merges the results); earlier measurements are used again."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import braid
from braid.actors.config import Config, ConfigError
from braid.actors.controller.combining import combine, hardware_of
from braid.actors.controller.decisions import key_of, remove_oldest, sources_digest
from braid.actors.controller.planning import build_schedule, model_graphs
from braid.actors.controller.ranks.cpus import throttled, usable_cpus
from braid.actors.controller.ranks.group import Launcher, WorkerGroup, rendezvous
from braid.actors.controller.state.locks import FileHold
from braid.actors.controller.state.manifest import write_durably
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.scheduling.cost.profile import Profile, read_profile
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import AXES
from braid.scheduling.mesh.topology import Topology
from braid.scheduling.model.operators import Part
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.text import write
from braid.scheduling.text.pattern import ENDS, measured_kind
from braid.scheduling.text.records import to_mapping

ROUNDS = 9
_MEASURED_SECONDS = 600.0
"""Seconds to wait for another run that measures the same; then this run measures, too."""
KEPT = 64
"""Number of profiles that are kept in a folder, of all runs."""
_SOURCES = tuple(Path(braid.__file__).parent / folder for folder in ("actors", "kernels"))


def measure(plan: RunPlan, launcher: Launcher, parts: Mapping[str, Part], rounds: int = ROUNDS) -> Profile:
    """Start the ranks of a run, let them measure, end them. ``plan`` may hold any schedule of the layout."""
    group = launcher.start(plan.config.layout().ranks)
    try:
        group.call_all(Rank.setup, plan, rendezvous(group, plan.config.cluster.group_timeout_s))
        return combine(group.call_all(Rank.profile, rounds, plan.config.train.seed), parts)
    finally:
        group.shutdown()


# -- used again --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile, and where it comes from."""

    profile: Profile
    path: Path
    reused: bool
    seconds: float = 0.0
    trouble: str = ""
    """Why it was not kept for other runs; empty if it was kept."""


def find_or_measure(
    config: Config, shape: ModelShape, launcher: Launcher, *, data: str = "", anew: bool = False
) -> Profiled:
    """Return the known profile (`known_profile`), else measure one and keep it; other runs wait for it.

    ``data``: folder of the run's tokens. Experts are measured with the numbers of rows that the first step
    gives them; without data, with what routers choose for random tokens.
    """
    if not anew and (found := known_profile(config, shape, launcher)) is not None:
        return found
    path = _profile_path(config, shape, launcher)
    with _held(path):
        if not anew and (found := known_profile(config, shape, launcher)) is not None:
            return found  # a run that measured meanwhile has kept it
        begin, stops = time.perf_counter(), throttled()
        serial = config.with_schedule("megatron")
        schedule = build_schedule(serial, shape)
        plan = RunPlan(config=serial, shape=shape, schedule=write(schedule), data=data)
        profile = measure(plan, launcher, model_graphs(serial, shape))
        seconds = time.perf_counter() - begin
        if stops := throttled() - stops:
            trouble = (
                f"the CPU quota of this machine stopped ranks {stops} times while they were profiled: the "
                f"profile says little and is not kept; give them more CPUs, or lower cluster.cpus_per_rank"
            )
        else:
            trouble = _keep(path, profile)
    return Profiled(profile=profile, path=path, reused=False, seconds=seconds, trouble=trouble)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the lock of a profile, if its folder supports locks; other runs wait until it is measured."""
    lock = FileHold(path.with_name(f".{path.stem}.lock"))
    with contextlib.suppress(OSError, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.take(_MEASURED_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _keep(path: Path, profile: Profile) -> str:
    """Write a profile and remove those unused for longest; return why that failed, or an empty string."""
    try:
        write_durably(path, profile.to_json())
        kept = [file for file in path.parent.glob("*.json") if re.fullmatch("[0-9a-f]{16}", file.stem)]
        for old in remove_oldest(kept, KEPT):
            old.with_name(f".{old.stem}.lock").unlink(missing_ok=True)
    except OSError as error:
        return f"the profile is used, and not kept: {path} cannot be written ({error.strerror})"
    return ""


def known_profile(config: Config, shape: ModelShape, launcher: Launcher) -> Profiled | None:
    """Return the profile of ``overlap.profile``, or one that was measured before; None if there is none."""
    given = config.overlap.profile
    if given is not None:
        return Profiled(profile=read_profile(given), path=given, reused=True)
    path = _profile_path(config, shape, launcher)
    try:
        profile = read_profile(path)
    except ValueError:  # missing, damaged, or of another version: it is measured again
        return None
    graphs = (graph for part in _graphs(config, shape).values() for graph in (part.forward, part.backward))
    if any(op.key not in profile.solo_ns for graph in graphs for op in graph.operators):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # mark as used, so that it is removed last
    return Profiled(profile=profile, path=path, reused=True)


def _graphs(config: Config, shape: ModelShape) -> dict[str, Part]:
    """Return the graphs to measure; operators take equally long in recomputation, so that it is left out."""
    return model_graphs(config.changed(train={"recompute": "none"}), shape)


def _profile_path(config: Config, shape: ModelShape, launcher: Launcher) -> Path:
    mesh = config.layout().mesh
    streams = Topology(mesh, launcher.hosts(mesh.ranks)).streams()
    hardware = (machine(), *launcher.machines())
    return config.runs / "profiles" / f"{profile_key(config, shape, hardware, streams)}.json"


def machine() -> str:
    """Describe the processors of this machine, without asking torch."""
    models = set()
    for file in (Path("/proc/cpuinfo"), *Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models |= {line.partition(":")[2].strip() for line in lines if line.lower().startswith("model")}
    return f"{platform.machine()} {usable_cpus():g} {' '.join(sorted(models))}"


_TRAIN_KEYS = {
    *("micro_batch", "dtype", "reduce_dtype", "tf32", "deterministic", "deterministic_reduction", "kernels"),
    "optimizer",
}
_CLUSTER_KEYS = {
    *("threads_per_rank", "cpus_per_rank", "nccl", "env", "device", "backend", "launcher"),
    "emulated_link_mbit",
}
"""Configuration keys that influence costs."""


def profile_key(
    config: Config, shape: ModelShape, hardware: Sequence[str], streams: Mapping[str, Stream]
) -> str:
    """Return the key of a profile: runs with equal keys have equal costs.

    It covers hardware and links, the operators' graphs, the sources that run and measure operators (including
    the user's layers), numerics, and the limits of ranks. Of ``cluster.env`` it covers only values that the
    configuration gives.
    """
    layout = config.layout()
    content = {
        "hardware": list(hardware),
        "streams": dict(streams),
        "torch": version("torch"),
        "sources": [_own_sources(), *map(_layer_digest, sorted(config.model.own_layers.values()))],
        "graphs": to_mapping(_graphs(config, shape)),
        "shape": asdict(shape),
        "degrees": {axis: layout.degree(axis) for axis in AXES},
        "kinds": sorted({*map(measured_kind, config.sizes(shape).kinds), *ENDS}),
        "layer": config.model.layer,
        "train": config.train.model_dump(include=_TRAIN_KEYS),
        "cluster": config.cluster.model_dump(include=_CLUSTER_KEYS),
    }
    return key_of(content)


@functools.cache
def _own_sources() -> str:
    return sources_digest(_SOURCES)


def _layer_digest(reference: str) -> str:
    """Return a digest of a layer's name and the file of its class; only the name if its module is not found,
    which is reported elsewhere."""
    module, _, _ = reference.rpartition(":")
    file: str | None = module if module.endswith(".py") else None
    if file is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            file = spec.origin if spec is not None else None
    return f"{reference} {sources_digest([Path(file)]) if file else ''}"


def check_hardware(group: WorkerGroup, source: str, where: str) -> None:
    """Raise `ConfigError` if a measured profile is from other hardware than a group's."""
    here = f"measured: {hardware_of(group.call_all(Rank.hardware))}"
    if source.startswith("measured: ") and source != here:
        raise ConfigError(
            f"overlap.profile={where} was measured on {source.removeprefix('measured: ')!r}; these "
            f"ranks run on {here.removeprefix('measured: ')!r}: profile anew with `braid profile`"
        )
