"""Runs a drill: a run with faults and the same run without, side by side, and what came of every fault."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.manifest import MANIFEST, CheckpointStore
from braid.actors.controller.processes import Place
from braid.actors.controller.records import StepRecord, read_lines, read_metrics
from braid.actors.stage.checkpoint import read_tensors
from braid.actors.stage.faults import FOLDER, fire
from braid.actors.stage.messages import Fault
from braid.jobs.benchmarks.hosts import Hosts, two_hosts
from braid.jobs.drill.census import Census, census
from braid.jobs.drill.child import Spec
from braid.jobs.drill.plan import (
    HARMLESS,
    KINDS,
    NEED_HOSTS,
    NEED_ROOT,
    Planned,
    plan_drill,
    steps_of,
)
from braid.jobs.drill.report import Outcome, Report, describe

_PATIENCE_S = 180.0
"""A fault that does not come, or is not over, within so long has failed the drill."""
_SHORT_CUT_S = 1.5
_SLOW_S = 3.0
_DISK_MB = 256
_LOOK_S = 0.02
RUNS = ("whole", "broken")


class DrillError(RuntimeError):
    """A fault did not fire, or the run did not go on."""


def possible_faults(config: Config) -> list[str]:
    """The faults that can be made here, for a configuration."""
    impossible = NEED_ROOT if os.geteuid() or config.cluster.launcher != "processes" else frozenset()
    return [kind for kind in KINDS if kind not in impossible]


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
        self._planned = plan_drill(kinds, count, seed)
        if set(kinds) & NEED_ROOT and os.geteuid() != 0:
            odd = ", ".join(sorted(set(kinds) & NEED_ROOT))
            raise ConfigError(f"--faults {odd}: network namespaces and mounts need root")
        if config.cluster.launcher != "processes" and set(kinds) & (NEED_HOSTS | {"disk-full"}):
            raise ConfigError("faults of emulated hosts need --launcher processes")
        self._base, self._progress = config, progress
        self._hosts: Hosts | None = None
        self._needs_hosts = bool(set(kinds) & NEED_HOSTS)
        self._faults: tuple[Fault, ...] = tuple(
            fault for one in self._planned if (fault := one.in_rank(config.layout().ranks)) is not None
        )
        self._folder = config.runs / f"{config.name}-drill-{seed}"
        self._process: subprocess.Popen[str] | None = None
        self._outcomes: list[Outcome] = []

    def run(self) -> Report:
        """Run it. Raises `DrillError`; nothing is left running, and nothing mounted."""
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self._needs_hosts:
                self._hosts = stack.enter_context(two_hosts())
                self._hosts.shape(1000)
            if self._folder.exists():
                shutil.rmtree(self._folder)
            for name in RUNS:
                self._log(name).unlink(missing_ok=True)
            self._folder.mkdir(parents=True)
            if any(one.kind == "disk-full" for one in self._planned):
                stack.enter_context(_small_disk(self._folder))
            self._progress("the undisturbed run")
            self._start("whole", (), resume=False)
            stack.callback(self._end)
            self._wait_for_end("whole")
            self._progress(
                f"the disturbed run: {len(self._planned)} faults in {steps_of(self._planned)} steps"
            )
            self._start("broken", self._faults, resume=False)
            self._wait("the first steps", lambda: self._step() >= 2)
            held = [census(self._process_id())]
            for one in self._planned:
                outcome = self._meet(one)
                self._outcomes.append(outcome)
                self._progress(describe(outcome))
            self._wait("the steps after the last fault", lambda: self._step() >= self._planned[-1].step + 3)
            held.append(census(self._process_id()))
            self._wait_for_end("broken")
            return self._compare(time.monotonic() - begin, held)

    # -- the run ---------------------------------------------------------------------------------------------

    def _config(self, name: str) -> Config:
        base = self._base
        content = base.model_dump(mode="json", exclude_unset=True)
        checkpoint = {"every": 5, "copies_every": 1, **content.get("checkpoint", {})}
        failure = {**content.get("failure", {}), "max_restarts": 10 * len(self._planned) + 10}
        train = {**content.get("train", {}), "steps": max(base.train.steps, steps_of(self._planned))}
        cluster = {"group_timeout_s": 15.0, **content.get("cluster", {})}
        if self._hosts is not None:
            cluster["launcher"] = "processes"
        changed = {"name": name, "runs": str(self._folder), "checkpoint": checkpoint, "failure": failure}
        data = {"directory": str(self._folder / "data"), **content.get("data", {})}
        telemetry = {**content.get("telemetry", {}), "page": False, "progress": False}
        return parse_config(
            {**content, **changed, "train": train, "cluster": cluster, "telemetry": telemetry, "data": data}
        )

    def _start(self, name: str, faults: Sequence[Fault], *, resume: bool) -> None:
        config = self._config(name)
        places = None
        if self._hosts is not None:
            hosts = self._hosts.places(config.layout().ranks)
            places = [Place(host.address, host.namespace) for host in hosts]
        spec = Spec(config=config.model_dump(mode="json"), faults=list(faults), places=places, resume=resume)
        path = self._folder / f"{name}.json"
        path.write_text(spec.to_json(), encoding="utf-8")
        log = self._log(name).open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "braid.jobs.drill.child", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        log.close()

    def _process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _end(self) -> None:
        """Whatever happened: nothing of the run is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _run_folder(self, name: str) -> Path:
        return self._folder / name

    def _step(self) -> int:
        lines = read_metrics(self._run_folder("broken") / "metrics.jsonl")
        return lines[-1].step if lines else 0

    def _wait(self, what: str, done: Callable[[], bool], *, ends: bool = False) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            assert self._process is not None
            if not ends and self._process.poll() not in (None, 0):
                raise DrillError(f"the run ended before {what}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise DrillError(f"waited {_PATIENCE_S:g} s in vain for {what}: {self._last_words()}")
            time.sleep(_LOOK_S)

    def _wait_for_end(self, name: str) -> None:
        assert self._process is not None
        limit = _PATIENCE_S + 10.0 * steps_of(self._planned)
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise DrillError(f"run {name} did not end within {limit:g} s: {self._last_words()}") from None
        if code:
            raise DrillError(f"run {name} ended with exit code {code}: {self._last_words()}")

    def _log(self, name: str) -> Path:
        """What a run prints; not on its disk, which may be full."""
        return self._folder.with_name(f"{self._folder.name}-{name}.log")

    def _last_words(self) -> str:
        logs = [log.read_text(encoding="utf-8")[-2000:] for log in map(self._log, RUNS) if log.exists()]
        return "\n".join(logs).strip() or "it said nothing"

    # -- faults ----------------------------------------------------------------------------------------------

    def _meet(self, one: Planned) -> Outcome:
        """Let a fault come, and wait until it is over."""
        mark = self._run_folder("broken") / FOLDER / one.name
        if one.in_rank(1) is not None:
            self._wait(f"fault {one.name} to fire", mark.exists)
        else:
            self._wait(f"step {one.step}", lambda: self._step() >= one.step)
            if not fire(mark.parent, one.name):
                raise DrillError(f"fault {one.name} had fired before")
        outcome = Outcome(one, float(mark.read_text(encoding="utf-8") or time.time()))
        after = self._step()
        self._act(one)
        if one.kind in HARMLESS or one.kind == "sigterm":
            self._wait(f"training after {one.name}", lambda: self._step() >= after + 2)
            if one.kind == "sigterm":
                outcome.recovered_after = time.time() - outcome.fired
            return outcome
        self._wait(f"recovery after {one.name}", lambda: bool(self._incidents(outcome.fired)))
        incident = self._incidents(outcome.fired)[0]
        outcome.detected_after = incident["time"] - outcome.fired
        outcome.recovered_after = incident["recovered_after_seconds"]
        outcome.steps_lost = incident["steps_lost"]
        outcome.restored_from = incident["restored_from"]
        outcome.parts = incident["parts"]
        return outcome

    def _incidents(self, since: float) -> list[dict[str, Any]]:
        """Incidents that were detected since a time."""
        lines = read_lines(self._run_folder("broken") / "incidents.jsonl")
        return [line for line in lines if line["time"] >= since]

    def _act(self, one: Planned) -> None:
        """Do what comes from outside."""
        match one.kind:
            case "kill-controller":
                self._again(signal.SIGKILL)
            case "sigterm":
                self._again(signal.SIGTERM)
            case "torn-checkpoint" | "flipped-byte":
                self._damage(one)
                self._again(signal.SIGKILL)
            case "disk-full":
                self._fill_disk()
            case "kill-host":
                self._kill_host(one)
            case "cut-short" | "cut-long":
                self._cut(one)
            case "slow-link":
                assert self._hosts is not None
                self._hosts.shape(100)
                time.sleep(_SLOW_S)
                self._hosts.shape(1000)

    def _again(self, number: signal.Signals) -> None:
        """End the command, and start it again as a user would."""
        assert self._process is not None
        self._process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._start("broken", self._faults, resume=True)

    def _damage(self, one: Planned) -> None:
        """Half a file, or one wrong byte, in the newest checkpoint."""
        store = CheckpointStore(self._run_folder("broken") / "checkpoints")
        self._wait("a second checkpoint", lambda: len(store.steps()) > 1)
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
        records = read_metrics(self._run_folder("broken") / "metrics.jsonl")
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
        cluster = json.loads((self._run_folder("broken") / "cluster.json").read_text(encoding="utf-8"))
        address = self._hosts.hosts[int(one.place * 2)].address
        for process, place in zip(cluster["processes"], cluster["addresses"], strict=True):
            if place == address:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _cut(self, one: Planned) -> None:
        """Cut the link for a moment, or until the controller has noticed."""
        assert self._hosts is not None
        events = self._run_folder("broken") / "events.jsonl"

        def restarts() -> int:
            return sum(line["kind"] == "restarted" for line in read_lines(events))

        known = restarts()
        with self._hosts.cut():
            if one.kind == "cut-short":
                time.sleep(_SHORT_CUT_S)
            else:
                self._wait("the cut link to be noticed", lambda: restarts() > known)

    # -- what came of it -------------------------------------------------------------------------------------

    def _compare(self, seconds: float, held: list[Census]) -> Report:
        whole, broken = (
            read_metrics(self._run_folder(name) / "metrics.jsonl") for name in ("whole", "broken")
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
            largest_difference=max(
                (abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(whole, broken, strict=False)), default=0.0
            ),
            seconds=seconds,
            emulated_hosts=self._hosts is not None,
            held=held,
        )

    def _tensors(self, name: str, records: Sequence[StepRecord]) -> dict[str, torch.Tensor]:
        return read_tensors(self._run_folder(name) / "checkpoints" / f"step-{records[-1].step}")


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
