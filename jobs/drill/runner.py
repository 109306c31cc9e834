"""Runs a drill: a run with faults and the same run without, side by side, and what came of every fault."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.manifest import MANIFEST, CheckpointStore
from braid.actors.controller.step_record import StepRecord, read_metrics
from braid.actors.stage.checkpoint import read_tensors
from braid.actors.stage.faults import FOLDER, call, fire, fired_at, let_go
from braid.actors.stage.messages import Fault
from braid.jobs.drill.census import Census, census
from braid.jobs.drill.child import Spec
from braid.jobs.drill.command import PATIENCE_S, Command, DrillError
from braid.jobs.drill.hosts import Hosts, two_hosts
from braid.jobs.drill.node_faults import change_nodes, slow_node
from braid.jobs.drill.nodes import STEPS, Nodes, allowed_difference, degrees_on, node_range, ray_nodes
from braid.jobs.drill.plan import (
    AIMED,
    DAMAGE,
    HARMLESS,
    NEED_HOSTS,
    NODE_CHANGES,
    SLOW,
    Planned,
    plan_drill,
    steps_of,
)
from braid.jobs.drill.possible import check_faults
from braid.jobs.drill.report import Outcome, Report, describe

_SHORT_CUT_S = 1.5
_SLOW_S = 3.0
_DISK_MB = 256
_QUARANTINE_S = 20.0
"""Of a slow node, unless the configuration says otherwise: drills are short."""


class Drill:
    """One drill."""

    def __init__(
        self,
        config: Config,
        kinds: Sequence[str],
        *,
        count: int,
        seed: int,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`ConfigError` for faults that are not known, or cannot be made here."""
        with_nodes = not set(kinds).isdisjoint(NODE_CHANGES)
        check_faults(config, kinds)
        self._planned = plan_drill(kinds, count, seed, node_range(config) if with_nodes else None)
        self._base, self._progress = config, progress
        self._hosts: Hosts | None = None
        self._needs_hosts = bool(set(kinds) & NEED_HOSTS)
        self._nodes: Nodes | None = None
        counts = [one.nodes for one in self._planned] + [one.nodes_after for one in self._planned]
        counts += [one.nodes - 1 for one in self._planned if one.kind == SLOW and one.nodes is not None]
        self._counts = [count for count in counts if count is not None]
        """Numbers of nodes that the run has; empty without faults of nodes."""
        self._allowed = allowed_difference(config, self._counts) if self._counts else 0.0
        self._faults: tuple[Fault, ...] = tuple(
            fault
            for one in self._planned
            if (fault := one.in_rank(one.nodes or config.layout().ranks)) is not None
        )
        self._folder = config.runs / f"{config.name}-drill-{seed}"
        self._mirror = self._folder.with_name(f"{self._folder.name}-mirror").absolute()
        """A second home of checkpoints, on another disk: faults damage the first one, or fill it."""
        self._command = Command(self._folder)
        self._outcomes: list[Outcome] = []

    def run(self) -> Report:
        """Run it. Raises `DrillError`; nothing is left running, and nothing mounted."""
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self._needs_hosts:
                self._hosts = stack.enter_context(two_hosts())
                self._hosts.shape(1000)
            for folder in (self._folder, self._mirror):
                if folder.exists():
                    shutil.rmtree(folder)
            self._folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, self._mirror, ignore_errors=True)
            if any(one.kind == "disk-full" for one in self._planned):
                stack.enter_context(_small_disk(self._folder))
            stack.enter_context(contextlib.closing(self._command))
            if not self._counts:
                self._undisturbed(None)
                held = self._disturbed()
            else:
                # How many steps the changes of nodes take shows only now.
                with ray_nodes(self._counts[0]) as self._nodes, contextlib.closing(self._command):
                    held = self._disturbed()
                self._nodes = None
                self._undisturbed(self._command.step())
            return self._compare(time.monotonic() - begin, held)

    def _undisturbed(self, until: int | None) -> None:
        """The run without faults, except those that make both runs skip a step. ``until``: its last step."""
        self._progress("the undisturbed run" + ("" if until is None else f", {until} steps"))
        both = [fault for fault in self._faults if fault.kind == "skip"]
        self._start("whole", both, resume=False, until=until)
        self._wait_for_end("whole")

    def _disturbed(self) -> list[Census]:
        """The run with faults; returns what it held before and after them, if with as many ranks."""
        steps = "" if self._counts else f" in {steps_of(self._planned)} steps"
        self._progress(f"the disturbed run: {len(self._planned)} faults{steps}")
        self._start("broken", self._faults, resume=False)
        self._command.wait("the first steps", lambda: self._command.step() >= 2)
        held = [census(*self._roots())]
        for one, before in zip(self._planned, [None, *self._planned], strict=False):
            outcome = self._meet(one, before)
            self._outcomes.append(outcome)
            self._progress(describe(outcome))
        after = self._command.step() if self._counts else self._planned[-1].step
        self._command.wait("the steps after the last fault", lambda: self._command.step() >= after + 3)
        held.append(census(*self._roots()))
        if self._counts:
            self._command.signal(signal.SIGTERM)
        self._wait_for_end("broken")
        return held if not self._counts or self._counts[0] == self._planned[-1].nodes_after else []

    # -- the run ---------------------------------------------------------------------------------------------

    def _config(self, name: str) -> Config:
        base = self._base
        content = base.model_dump(mode="json", exclude_unset=True)
        checkpoint = {"every": 5, "copies_every": 1, **content.get("checkpoint", {})}
        checkpoint["mirror"] = (self._mirror / name).as_uri()
        failure = {**content.get("failure", {}), "max_restarts": -1}
        train = {**content.get("train", {}), "steps": max(base.train.steps, steps_of(self._planned))}
        cluster = {"group_timeout_s": 15.0, **content.get("cluster", {})}
        if self._hosts is not None:
            cluster["launcher"] = "processes"
        changed = {"name": name, "runs": str(self._folder), "checkpoint": checkpoint, "failure": failure}
        if self._counts:
            train["steps"] = STEPS
            cluster |= {"device": "cpu", "cpus_per_rank": 1.0}
            changed["elastic"] = {"quarantine_s": _QUARANTINE_S, **content.get("elastic", {})}
        if self._nodes is not None:
            cluster = {"placement_timeout_s": 5.0, **cluster, "address": self._nodes.address}
            degrees = degrees_on(base, len(self._nodes.names))  # also for a run that is started again
            assert degrees is not None
            changed["parallel"] = {**content.get("parallel", {}), **asdict(degrees)}
        elif self._counts:
            cluster["launcher"] = "processes"  # with fixed ranks
            changed["elastic"] = {}
        data = {"directory": str(self._folder / "data"), **content.get("data", {})}
        telemetry = {**content.get("telemetry", {}), "page": False, "progress": False}
        return parse_config(
            {**content, **changed, "train": train, "cluster": cluster, "telemetry": telemetry, "data": data}
        )

    def _start(self, name: str, faults: Sequence[Fault], *, resume: bool, until: int | None = None) -> None:
        config = self._config(name)
        places = None
        if self._hosts is not None:
            own = self._hosts.places(config.layout().ranks)
            places = [replace(place, cpus=None) for place in own]
        spec = Spec(
            config=config.model_dump(mode="json"),
            faults=list(faults),
            places=places,
            resume=resume,
            until=until,
        )
        self._command.start(name, spec)

    def _roots(self) -> list[int]:
        """What the disturbed run consists of, with all that these processes have started."""
        return [self._command.process, *(self._nodes.processes() if self._nodes is not None else ())]

    def _wait_for_end(self, name: str) -> None:
        if code := self._command.wait_for_end(PATIENCE_S + 10.0 * steps_of(self._planned)):
            raise DrillError(f"run {name} ended with exit code {code}: {self._command.last_words()}")

    # -- faults ----------------------------------------------------------------------------------------------

    def _meet(self, one: Planned, before: Planned | None) -> Outcome:
        """Let a fault come, and wait until it is over."""
        command, mark = self._command, self._command.broken / FOLDER / one.name
        due, own = one.step, one.in_rank(1)
        if self._counts and before is not None:
            due += command.step() - before.step
        if own is None or own.step is None:
            command.wait(f"step {due}", lambda: command.step() >= due)
        if one.kind == "cut-save":
            command.wait("a checkpoint to be written", self._saving)
        if one.kind in DAMAGE:
            command.wait("a second checkpoint", self._two_saved)
        if own is not None:
            if own.step is None:
                call(mark.parent, one.name)
            command.wait(f"fault {one.name} to fire", mark.exists)
        elif not fire(mark.parent, one.name):
            raise DrillError(f"fault {one.name} had fired before")
        if one.kind in NODE_CHANGES:
            assert self._nodes is not None
            if one.kind == SLOW:
                return slow_node(one, self._nodes, command, self._config("broken").elastic.quarantine_s)
            return change_nodes(one, self._nodes, command)
        outcome = Outcome(one, fired_at(mark.parent, one.name))
        after = command.step()
        self._act(one)
        if one.kind in HARMLESS or one.kind == "sigterm":
            command.wait(f"training after {one.name}", lambda: command.step() >= after + 2)
            if one.kind == "sigterm":
                outcome.recovered_after = time.time() - outcome.fired
            return outcome
        command.wait(f"recovery after {one.name}", lambda: bool(command.incidents(outcome.fired)))
        incident = command.incidents(outcome.fired)[0]
        outcome.detected_after = incident["time"] - outcome.fired
        outcome.recovered_after = incident["recovered_after_seconds"]
        outcome.steps_lost = incident["steps_lost"]
        outcome.restored_from = incident["restored_from"]
        outcome.parts, outcome.noticed = incident["parts"], incident["text"]
        return outcome

    def _act(self, one: Planned) -> None:
        """Do what comes from outside."""
        match one.kind:
            case "kill-controller":
                self._again(signal.SIGKILL)
            case "sigterm":
                self._again(signal.SIGTERM)
            case kind if kind in DAMAGE:
                self._damage(one)
                self._again(signal.SIGKILL)
            case "disk-full":
                self._fill_disk()
            case "kill-host":
                self._kill_host(one)
            case kind if kind.startswith("cut-"):
                self._cut(one)
            case "slow-link":
                assert self._hosts is not None
                self._hosts.shape(100)
                time.sleep(_SLOW_S)
                self._hosts.shape(1000)

    def _again(self, number: signal.Signals) -> None:
        """End the command, and start it again as a user would."""
        self._command.signal(number)
        self._command.wait_for_end()
        self._command.wait_for_controller()
        self._start("broken", self._faults, resume=True)

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._command.broken / "checkpoints")

    def _two_saved(self) -> bool:
        """Whether there is a checkpoint to go on from when the newest one is damaged."""
        steps = self._store.steps()
        lines = read_lines(self._command.broken / "events.jsonl")
        return len(steps) > 1 and steps[-1] in {line["step"] for line in lines if line["kind"] == "saved"}

    def _damage(self, one: Planned) -> None:
        """Half a file, or one wrong byte, in the newest checkpoint."""
        store = self._store
        newest = store.directory / f"step-{store.steps()[-1]}"
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.name != MANIFEST)
        path = files[int(one.place * len(files))]
        size = path.stat().st_size
        if one.kind == "torn-checkpoint":
            os.truncate(path, size // 2)
            return
        with path.open("r+b") as file:
            file.seek(int(one.place * 1e6) % size)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))

    def _fill_disk(self) -> None:
        """Take all the space there is until a checkpoint has failed for want of it, then give it back."""
        filler = self._folder / "filler"
        records = read_metrics(self._command.broken / "metrics.jsonl")
        step_s = median(record.seconds for record in records)
        try:
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            time.sleep(1.0 + step_s * (self._config("broken").checkpoint.every + 1))
        finally:
            filler.unlink()

    def _kill_host(self, one: Planned) -> None:
        """SIGKILL for all ranks of a host."""
        assert self._hosts is not None
        cluster = json.loads((self._command.broken / "cluster.json").read_text(encoding="utf-8"))
        address = self._hosts.hosts[int(one.place * 2)].address
        for process, place in zip(cluster["processes"], cluster["addresses"], strict=True):
            if place == address:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _cut(self, one: Planned) -> None:
        """Cut the link for a moment, or until the controller has noticed."""
        assert self._hosts is not None
        events = self._command.broken / "events.jsonl"

        def restarts() -> int:
            return sum(line["kind"] == "restarted" for line in read_lines(events))

        known = restarts()
        with self._hosts.cut():
            if one.kind in AIMED:
                let_go(self._command.broken / FOLDER, one.name)
            if one.kind == "cut-short":
                time.sleep(_SHORT_CUT_S)
            else:
                self._command.wait("the cut link to be noticed", lambda: restarts() > known)

    def _saving(self) -> bool:
        """Whether ranks write a checkpoint at present."""
        folders = (self._command.broken / "checkpoints").glob("step-*.tmp-*")
        return any(not (folder / ".metadata").exists() for folder in folders)

    # -- what came of it -------------------------------------------------------------------------------------

    def _compare(self, seconds: float, held: list[Census]) -> Report:
        whole, broken = (
            list(read_metrics(self._folder / name / "metrics.jsonl")) for name in ("whole", "broken")
        )
        tensors = [self._tensors(name, whole) for name in ("whole", "broken")]
        same = tensors[0].keys() == tensors[1].keys() and all(
            torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items()
        )
        return Report(
            outcomes=self._outcomes,
            identical_losses=[r.loss for r in whole] == [r.loss for r in broken],
            identical_parameters=same,
            identical_samples=[(r.step, r.samples) for r in whole] == [(r.step, r.samples) for r in broken],
            allowed_difference=self._allowed,
            largest_difference=max(
                (abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(whole, broken, strict=False)), default=0.0
            ),
            interval=self._config("broken").checkpoint.every,
            seconds=seconds,
            emulated_hosts=self._hosts is not None,
            emulated_nodes=bool(self._counts),
            held=held,
        )

    def _tensors(self, name: str, records: Sequence[StepRecord]) -> dict[str, torch.Tensor]:
        return read_tensors(self._folder / name / "checkpoints" / f"step-{records[-1].step}")


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own for a folder, that can be filled without harm to others."""
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)]
    made = subprocess.run(["mount", *options], capture_output=True, text=True)
    if made.returncode:
        raise ConfigError(f"--faults disk-full: a small disk cannot be mounted: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)
