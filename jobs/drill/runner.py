"""Runs a drill: a run with faults, then the same run without, and compares them."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.controller import RunOptions
from braid.actors.controller.records.step_record import read_metrics
from braid.actors.controller.state.manifest import MANIFEST, CheckpointStore
from braid.actors.stage.rank.faults import FOLDER, fired_at, let_go
from braid.actors.stage.state.checkpoint import read_tensors
from braid.jobs.drill.command import BROKEN, PATIENCE_S, WHOLE, Command, census, kill
from braid.jobs.drill.hosts import Hosts, two_hosts
from braid.jobs.drill.nodes import Nodes, meet, ray_nodes, usable_nodes
from braid.jobs.drill.plan import (
    DAMAGE,
    HOSTS,
    KINDS,
    NODE_FAULTS,
    PlannedFault,
    check_faults,
    plan_drill,
    steps_of,
)
from braid.jobs.drill.report import FaultOutcome, Report

_SHORT_CUT_S = 1.5
_SLOW_S = 3.0
_MBIT, _SLOW_MBIT = 1000, 100
_DISK_MB = 256
_QUARANTINE_S = 20.0
"""Seconds of a slow node's quarantine, unless the configuration says otherwise: drills are short."""
_STEPS = 1_000_000
"""Steps of a run with faults of nodes: so many that every change of its ranks is worth its cost; it is ended
after the last fault."""


class Drill:
    """Trains with and without faults, and compares the two runs."""

    _hosts: Hosts | None = None
    _nodes: Nodes | None = None

    def __init__(
        self,
        config: Config,
        kinds: list[str],
        *,
        count: int,
        seed: int,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raise `ConfigError` for faults that are unknown, or cannot be made here."""
        check_faults(config, kinds)
        self._base, self._progress = config, progress
        self._ranks = config.layout().ranks
        self._of_nodes = kinds[0] in NODE_FAULTS
        nodes = (self._ranks, usable_nodes(config)) if self._of_nodes else ()
        self._planned = plan_drill(kinds, count, seed, *nodes)
        in_ranks = (fault.in_rank(self._ranks) for fault in self._planned)
        self._faults = [fault for fault in in_ranks if fault is not None]
        self._folder = config.runs / f"{config.name}-drill-{seed}"
        self._mirror = self._folder.with_name(f"{self._folder.name}-mirror").absolute()
        """Second folder for checkpoints, on another disk: faults damage the first one, or fill its disk."""
        self._command = Command(self._folder)
        self._broken = self._command.broken
        self._store = CheckpointStore(self._broken / "checkpoints")
        self._outcomes: list[FaultOutcome] = []

    def run(self) -> Report:
        """Run the drill and return its report. Raise `DrillError` if it fails; leave no process and no mount
        behind."""
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if any(KINDS[fault.kind].needs == HOSTS for fault in self._planned):
                self._hosts = stack.enter_context(two_hosts())
                self._hosts.shape(_MBIT)
            for folder in (self._folder, self._mirror):
                if folder.exists():
                    shutil.rmtree(folder)
            self._folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, self._mirror, ignore_errors=True)
            if any(fault.kind == "disk-full" for fault in self._planned):
                stack.enter_context(_small_disk(self._folder))
            stack.enter_context(contextlib.closing(self._command))
            with contextlib.ExitStack() as cluster:
                if self._of_nodes:
                    self._nodes = cluster.enter_context(ray_nodes(self._ranks))
                cluster.enter_context(contextlib.closing(self._command))
                held = self._disturbed()
            self._nodes = None
            steps = self._command.step()  # with faults of nodes, the number of steps is known only now
            self._progress(f"the undisturbed run, {steps} steps")
            self._start(WHOLE, resume=False, until=steps)  # faults that skip a step occur in both runs
            self._wait_for_end(WHOLE)
            return self._compare(time.monotonic() - begin, held)

    def _disturbed(self) -> list[dict[str, int]]:
        """Run with faults; return a census before and after them, or nothing if the numbers of ranks
        differ."""
        self._progress(f"the disturbed run: {len(self._planned)} faults")
        command = self._command
        self._start(BROKEN, resume=False)
        command.wait("the first steps", lambda: command.step() >= 2)
        held = [self._held()]
        for fault in self._planned:
            self._outcomes.append(self._meet(fault))
            self._progress(str(self._outcomes[-1]))
        after = command.step() if self._of_nodes else self._planned[-1].step
        command.wait("the steps after the last fault", lambda: command.step() >= after + 3)
        held.append(self._held())
        if self._of_nodes:
            command.process.send_signal(signal.SIGTERM)
        self._wait_for_end(BROKEN)
        return held if self._planned[-1].nodes_after in (None, self._ranks) else []

    # -- the run ---------------------------------------------------------------------------------------------

    def _config(self, name: str) -> Config:
        """Build the configuration of a run: the drill's defaults, then the user's values, then what a drill
        requires."""
        defaults: dict[str, Any] = {
            "checkpoint": {"every": 5, "copies_every": 1},
            "cluster": {"group_timeout_s": 15.0},
            "data": {"directory": str(self._folder / "data")},
        }
        cluster, elastic = dict[str, Any](), dict[str, Any]()
        if self._of_nodes:
            cluster |= {"device": "cpu", "cpus_per_rank": 1.0}
            defaults["cluster"]["placement_timeout_s"] = 5.0
            defaults["elastic"] = {"quarantine_s": _QUARANTINE_S}
        if self._nodes is not None:
            cluster["address"] = self._nodes.address
        elif self._of_nodes:  # the undisturbed run
            cluster["launcher"], elastic["max_ranks"] = "processes", None
        elif self._hosts is not None:
            cluster["launcher"] = "processes"
        steps = _STEPS if self._of_nodes else max(self._base.train.steps, steps_of(self._planned))
        needed = {
            "name": name,
            "runs": str(self._folder),
            "checkpoint": {"mirror": (self._mirror / name).as_uri()},
            "failure": {"max_restarts": -1},
            "train": {"steps": steps},
            "telemetry": {"page": False, "progress": False},
            "cluster": cluster,
            "elastic": elastic,
        }
        content: dict[str, Any] = {}
        for layer in (defaults, self._base.model_dump(mode="json", exclude_unset=True), needed):
            for key, value in layer.items():
                content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
        return parse_config(content)

    def _start(self, name: str, *, resume: bool, until: int | None = None) -> None:
        config, places = self._config(name), None
        if self._hosts is not None:
            places = [replace(host, cpus=None) for host in self._hosts.places(config.layout().ranks)]
        self._command.start(
            name,
            config=config,
            options=RunOptions(resume=resume, overwrite=not resume, again=resume, until=until),
            faults=tuple(fault for fault in self._faults if name == BROKEN or fault.kind == "skip"),
            places=places,
        )

    def _held(self) -> dict[str, int]:
        """Count what the disturbed run and all processes that it started hold."""
        return census(self._command.process.pid, *(self._nodes.processes() if self._nodes else []))

    def _wait_for_end(self, name: str) -> None:
        if code := self._command.wait_for_end(name, PATIENCE_S + 10.0 * steps_of(self._planned)):
            raise self._command.failed(f"run {name} ended with exit code {code}")

    # -- faults ----------------------------------------------------------------------------------------------

    def _meet(self, fault: PlannedFault) -> FaultOutcome:
        """Cause a fault, and wait until it is over."""
        command, marks, fired = self._command, self._broken / FOLDER, 0.0
        before = command.step()
        if self._nodes is not None:
            command.wait("further steps", lambda: command.step() >= before + 4)
            return meet(fault, self._nodes, command, self._config(BROKEN).elastic.quarantine_s)
        if KINDS[fault.kind].in_rank is not None:
            command.wait(f"fault {fault.name} to fire", (marks / fault.name).exists)
            fired = fired_at(marks, fault.name)
        else:
            command.wait(f"step {fault.step}", lambda: command.step() >= fault.step)
            if fault.kind == "cut-save":
                command.wait("a checkpoint to be written", self._saving)
            if fault.kind in DAMAGE:
                command.wait("a second checkpoint", self._two_saved)
        outcome = FaultOutcome(fault, fired or time.time())
        after = command.step()
        self._act(fault)
        if KINDS[fault.kind].harmless or fault.kind == "sigterm":
            command.wait(f"training after {fault.name}", lambda: command.step() >= after + 2)
            if fault.kind == "sigterm":
                outcome.recovered_after = time.time() - outcome.fired
        else:
            command.wait(f"recovery after {fault.name}", lambda: bool(command.incidents(outcome.fired)))
            outcome.note(command.incidents(outcome.fired)[0])
        return outcome

    def _act(self, fault: PlannedFault) -> None:
        """Cause a fault from outside the ranks."""
        if fault.kind in DAMAGE:
            self._damage(fault)
        if fault.kind in (*DAMAGE, "kill-controller", "sigterm"):
            # End the command, and start it again as a user would.
            self._command.process.send_signal(signal.SIGTERM if fault.kind == "sigterm" else signal.SIGKILL)
            self._command.wait_for_end(BROKEN)
            self._start(BROKEN, resume=True)
        if fault.kind == "disk-full":
            self._fill_disk()
        if self._hosts is None:
            return
        if fault.kind == "kill-host":
            kill(*self._command.ranks_at(self._hosts.hosts[int(fault.place * 2)].address))
        if fault.kind.startswith("cut-"):
            self._cut(fault, self._hosts)
        if fault.kind == "slow-link":
            self._hosts.shape(_SLOW_MBIT)
            time.sleep(_SLOW_S)
            self._hosts.shape(_MBIT)

    def _two_saved(self) -> bool:
        """Return whether an older checkpoint remains if the newest is damaged."""
        steps = self._store.steps()
        return len(steps) > 1 and steps[-1] in {line["step"] for line in self._command.events("saved")}

    def _damage(self, fault: PlannedFault) -> None:
        """Cut a file of the newest checkpoint in half, or change one of its bytes."""
        newest = self._store.directory / f"step-{self._store.steps()[-1]}"
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.name != MANIFEST)
        path = files[int(fault.place * len(files))]
        content = bytearray(path.read_bytes())
        if fault.kind == "torn-checkpoint":
            del content[len(content) // 2 :]
        else:
            content[int(fault.place * 1e6) % len(content)] ^= 0x10
        path.write_bytes(content)

    def _fill_disk(self) -> None:
        """Fill the disk until a checkpoint has failed for lack of space, then free it."""
        filler = self._folder / "filler"
        step_s = median(record.seconds for record in read_metrics(self._broken / "metrics.jsonl"))
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            time.sleep(1.0 + step_s * (self._config(BROKEN).checkpoint.every + 1))
        finally:
            filler.unlink()

    def _cut(self, fault: PlannedFault, hosts: Hosts) -> None:
        """Cut the link for a moment, or until the controller has noticed."""
        command = self._command
        known = len(command.events("restarted"))
        with hosts.cut():
            if KINDS[fault.kind].in_rank is not None:
                let_go(self._broken / FOLDER, fault.name)
            if fault.kind == "cut-short":
                time.sleep(_SHORT_CUT_S)
            else:
                command.wait("the cut link to be noticed", lambda: len(command.events("restarted")) > known)

    def _saving(self) -> bool:
        """Return whether ranks are writing a checkpoint."""
        folders = self._store.directory.glob("step-*.tmp-*")
        return any(not (folder / ".metadata").exists() for folder in folders)

    # -- what came of it -------------------------------------------------------------------------------------

    def _compare(self, seconds: float, held: list[dict[str, int]]) -> Report:
        folders = [self._folder / name for name in (WHOLE, BROKEN)]
        whole, broken = (list(read_metrics(folder / "metrics.jsonl")) for folder in folders)
        ends = zip(folders, (whole, broken), strict=True)
        ours, theirs = (read_tensors(run / "checkpoints" / f"step-{steps[-1].step}") for run, steps in ends)
        same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        pairs = zip(whole, broken, strict=False)
        return Report(
            outcomes=self._outcomes,
            identical_losses=[r.loss for r in whole] == [r.loss for r in broken],
            identical_parameters=same,
            identical_samples=[(r.step, r.samples) for r in whole] == [(r.step, r.samples) for r in broken],
            largest_difference=max((abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs), default=0.0),
            seconds=seconds,
            emulated_hosts=self._hosts is not None,
            emulated_nodes=self._of_nodes,
            held=held,
        )


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system on a folder, which can be filled without harm to others."""
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)]
    made = subprocess.run(["mount", *options], capture_output=True, text=True)
    if made.returncode:
        raise ConfigError(f"--faults disk-full: a small disk cannot be mounted: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)
