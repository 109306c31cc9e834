"""Profiles of runs: ranks measure (`combining` makes one of it); what was measured before is used again."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import braid
from braid.actors.config import Config, ConfigError
from braid.actors.controller.combining import combine, hardware_of
from braid.actors.controller.group import Launcher, WorkerGroup
from braid.actors.controller.manifest import write_durably
from braid.actors.controller.meeting import rendezvous
from braid.actors.controller.planning import build_schedule, model_graphs
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.scheduling.operators import Part, Stream
from braid.scheduling.pattern import measured_kind
from braid.scheduling.profile import Profile, read_profile
from braid.scheduling.schedule_text import write
from braid.scheduling.spec import AXES, ModelShape
from braid.scheduling.topology import Topology

ROUNDS = 9


def measure(plan: RunPlan, launcher: Launcher, parts: Mapping[str, Part], rounds: int = ROUNDS) -> Profile:
    """Start the ranks of a run, let them measure, end them. ``plan`` holds any schedule of the layout."""
    group = launcher.start(plan.config.layout().ranks)
    try:
        group.call_all(Rank.setup, plan, rendezvous(group, plan.config.cluster.group_timeout_s))
        return measured_profile(group, parts, rounds, plan.config.train.seed)
    finally:
        group.shutdown()


def measured_profile(
    group: WorkerGroup, parts: Mapping[str, Part], rounds: int = ROUNDS, seed: int = 0
) -> Profile:
    """What a group of ranks that are set up measure; their parameters are of no use afterwards."""
    return combine(group.call_all(Rank.profile, rounds, seed), parts)


# -- used again --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile, and where it is from."""

    profile: Profile
    path: Path
    reused: bool
    seconds: float = 0.0


def find_or_measure(config: Config, shape: ModelShape, launcher: Launcher, *, anew: bool = False) -> Profiled:
    """The profile that is known (`known_profile`), else a new one, which is kept."""
    if not anew and (found := known_profile(config, shape, launcher)) is not None:
        return found
    path = _profile_path(config, shape, launcher)
    begin = time.perf_counter()
    serial = config.with_schedule("megatron")
    schedule = build_schedule(serial, shape)
    plan = RunPlan(config=serial, shape=shape, schedule=write(schedule), data="")
    profile = measure(plan, launcher, model_graphs(serial, shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, profile.to_json())
    return Profiled(profile=profile, path=path, reused=False, seconds=time.perf_counter() - begin)


def known_profile(config: Config, shape: ModelShape, launcher: Launcher) -> Profiled | None:
    """The profile of ``overlap.profile``, or one that was measured before; None if there is none."""
    given = config.overlap.profile
    if given is not None:
        return Profiled(profile=read_profile(given), path=given, reused=True)
    path = _profile_path(config, shape, launcher)
    if path.exists():
        try:
            return Profiled(profile=read_profile(path), path=path, reused=True)
        except ValueError:
            pass  # damaged, or of another version: measured anew
    return None


def _profile_path(config: Config, shape: ModelShape, launcher: Launcher) -> Path:
    mesh = config.layout().mesh
    streams = Topology(mesh, launcher.hosts(mesh.ranks)).streams()
    hardware = (machine(), *launcher.machines())
    return config.runs / "profiles" / f"{profile_key(config, shape, hardware, streams)}.json"


def machine() -> str:
    """The processors of this machine, without asking torch for them."""
    found = set()
    for place in (Path("/proc/cpuinfo"), *Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = place.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        found |= {line.partition(":")[2].strip() for line in lines if line.lower().startswith("model")}
    return f"{platform.machine()} {os.cpu_count()} {' '.join(sorted(found))}"


def profile_key(
    config: Config, shape: ModelShape, hardware: Sequence[str], streams: Mapping[str, Stream]
) -> str:
    """What a profile is good for: hardware, streams, shapes, layout, versions; equal keys, equal costs."""
    layout = config.layout()
    content = {
        "hardware": list(hardware),
        "streams": dict(streams),
        "torch": version("torch"),
        "braid": braid.__version__,
        "shape": asdict(shape),
        "degrees": {axis: layout.degree(axis) for axis in AXES},
        "kinds": sorted({*map(measured_kind, config.sizes(shape).kinds), *layout.ends}),
        "micro_batch": config.train.micro_batch,
        "dtype": config.train.dtype,
        "kernels": config.train.kernels,
        "expert_imbalance": config.overlap.expert_imbalance,
        "layer": config.model.layer,
        "threads": config.cluster.threads_per_rank,
        "device": config.cluster.device,
        "backend": config.cluster.backend,
        "launcher": config.cluster.launcher,
        "emulated_link_mbit": config.cluster.emulated_link_mbit,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_hardware(group: WorkerGroup, source: str, where: str) -> None:
    """`ConfigError` if a measured profile is from other hardware than a group's."""
    here = f"measured: {hardware_of(group.call_all(Rank.hardware))}"
    if source.startswith("measured: ") and source != here:
        raise ConfigError(
            f"overlap.profile={where} was measured on {source.removeprefix('measured: ')!r}; these "
            f"ranks run on {here.removeprefix('measured: ')!r}: profile anew with `braid profile`"
        )
