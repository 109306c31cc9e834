"""Measures schedules and peers on two emulated hosts, alternating in one run: the value of overlap on a real
link.

Only the hosts are emulated: processes, sockets, gloo and TCP are real, over a veth pair whose rate ``tbf``
limits (`braid.jobs.drill.hosts`). A row is the median of the rounds; a step is a whole training step with all
micro-batches and the optimizer.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule, in_memory, model_graphs, plan_run, setting_of
from braid.actors.controller.profiling import measure
from braid.actors.controller.ranks.group import WorkerGroup, rendezvous
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan, StepResult
from braid.jobs.bench.overlap_case import LAYOUTS, OverlapCase
from braid.jobs.bench.overlap_rows import OverlapResult, row_of
from braid.jobs.bench.peers import PeerPlan, PeerRank
from braid.jobs.bench.rounds import Progress, by_turns, prepare_text
from braid.jobs.drill.hosts import Hosts, two_hosts
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.named import ScheduleKind
from braid.scheduling.generate.setting import Setting
from braid.scheduling.plan.decide import Outcome, anything, decide, measured, outcome_of_schedule
from braid.scheduling.plan.orders import BenchOf
from braid.scheduling.schedule.text import write

FIRST_GUESS_MBIT = 600.0
"""Link rate in Mbit/s at which alpha is first measured, to derive the rate for a wanted alpha."""
_SPAN_BYTES = 16 << 20
"""Size limit of a rank's span files, in the benchmark's temporary folder."""


@dataclass(frozen=True, kw_only=True)
class WithoutTier(Setting):
    """A setting whose schedule leaves out one of Centauri's tiers."""

    tier: str
    """One of partitions, reorders or early_sums (`ScheduleKind`): Centauri's operation, layer and model
    tier."""

    @property
    def kind(self) -> ScheduleKind:
        off: dict[str, Any] = {self.tier: False}
        return replace(super().kind, **off)


@dataclass(eq=False)
class Contender:
    """The ranks of a schedule or a peer."""

    name: str
    group: WorkerGroup
    predict: Callable[[Profile], float] | None
    """Simulates this side's step from a profile, in seconds; None for a peer."""

    def two_steps(self, steps: range) -> list[StepResult]:
        """Run two steps and return every rank's result of the second. A step may leave work under way for the
        next step (gathers of ZeRO 1): the second step bears the cost of the first step's, as in training."""
        return [self.group.call_all(Rank.train_step, step) for step in steps][-1]


def run(
    case: OverlapCase,
    *,
    schedules: Sequence[str] = (),
    peers: bool = True,
    rounds: int = 7,
    without: str | None = None,
    progress: Progress = lambda text: None,
) -> OverlapResult:
    """Measure a case. Raise `ConfigError` if this machine cannot emulate hosts.

    ``without``: also run braid without one of Centauri's tiers (`WithoutTier.tier`).
    """
    names = list(schedules or LAYOUTS[case.layout].schedules)
    if "megatron" not in names:
        names.insert(0, "megatron")
    load = os.getloadavg()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-bench-")))
        data = str(prepare_text(folder))
        bench = _StartedCase(case, stack.enter_context(two_hosts()), data, stack, progress)
        mbit = bench.set_rate()
        progress("measuring operators alone and beside communication")
        before = bench.profile(rounds=15)
        sides = [bench.start(name, before) for name in names]
        if without:
            sides.append(bench.start("braid", before, without))
        ours = list(sides)
        if peers and bench.serial.train.recompute == "none":  # peers keep all activations
            sides += map(bench.start_peer, LAYOUTS[case.layout].peers)
        results = by_turns({side: side.two_steps for side in sides}, rounds, progress)
        extra = 2 * rounds + 2  # the number of a step after all turns, of which the first is a warm-up
        held = {side: max(side.group.call_all(Rank.activation_bytes, extra)) for side in ours}
        for side in sides:  # while idle ranks were alive, operators were measured a fifth too slow
            side.group.shutdown()
        after = bench.profile(rounds=15)
    serial = results[next(side for side in ours if side.name == "megatron")]
    rows = []
    for side in sides:
        row = row_of(side.name, results[side], serial, case.step_tokens, mbit)
        if side.predict is not None:
            row = replace(
                row,
                activation_bytes=held[side],
                predicted_seconds=side.predict(before),
                beside_seconds=side.predict(after),
            )
        rows.append(row)
    return OverlapResult(
        model=case.name,
        link_mbit=mbit,
        rounds=rounds,
        rows=tuple(rows),
        load_before=load,
    )


class _StartedCase:
    """Starts the sides that a case compares; ``stack`` ends them."""

    def __init__(
        self, case: OverlapCase, link: Hosts, data: str, stack: contextlib.ExitStack, progress: Progress
    ) -> None:
        self._case, self._link, self._data, self._stack, self._progress = case, link, data, stack, progress
        self.serial, self.shape = case.config("megatron"), case.shape()
        self._places = link.places(self.serial.layout().ranks, filled=LAYOUTS[case.layout].filled)

    def set_rate(self) -> float:
        """Set the link's rate: the given one, or the one that gives the wanted alpha; return it in Mbit/s."""
        case = self._case
        mbit = case.mbit or FIRST_GUESS_MBIT
        for turn in range(3):
            self._link.shape(mbit, case.message_bytes, case.inside_mbit)
            if case.alpha is None:
                break
            self._progress(f"measuring alpha at {mbit:.0f} Mbit/s")
            numbers = plan_run(self.serial, self.shape, self.profile(rounds=5)).taken.numbers
            communication, step = numbers.communication_seconds, numbers.step_seconds
            if turn == 2 or abs(communication / step - case.alpha) < 0.01:
                break
            wanted = (step - communication) * case.alpha / (1 - case.alpha)
            mbit = round(mbit * communication / wanted, 1)
        return mbit

    def profile(self, rounds: int) -> Profile:
        """Measure costs at the rate that was set."""
        schedule = write(build_schedule(self.serial, self.shape))
        plan = RunPlan(config=self.serial, shape=self.shape, schedule=schedule, data=self._data)
        launcher = ProcessLauncher(self.serial, self._places)
        return measure(plan, launcher, model_graphs(self.serial, self.shape), rounds)

    def start(self, name: str, costs: Profile, without: str | None = None) -> Contender:
        """Start the ranks of a schedule, ready to train, as a training run with these costs does; perhaps
        ``without`` one of Centauri's tiers."""
        self._progress(f"starting {name}")
        config = self._case.config(name)
        decided = self._decided(config, costs, without)
        setting, schedule = decided.setting, decided.code.schedule
        self._progress(f"{name}: pipeline {', '.join([setting.pipeline, *map(str, setting.partitions)])}")
        plan = RunPlan(
            config=config,
            shape=self.shape,
            schedule=write(schedule),
            data=self._data,
            solo_ns=self._costed(config, costs)(setting).profile.solo_ns,
        )
        launcher = ProcessLauncher(config, self._places)
        if without:
            name += f", without {without}"
        files = Path(self._data).parent / "spans" / name
        collector = self._stack.enter_context(launcher.collector(files, _SPAN_BYTES))

        def predict(profile: Profile) -> float:
            costed = self._costed(config, profile)(setting)
            return outcome_of_schedule(schedule, costed, anything).numbers.step_seconds

        group = self._started(launcher, config, Rank.setup, plan)
        group.call_all(Rank.stream_spans, collector.target, 1)
        return Contender(name, group, predict)

    def start_peer(self, name: str) -> Contender:
        """Start the ranks of a peer, ready to train."""
        self._progress(f"starting {name}")
        plan = PeerPlan(kind=name, config=self.serial, shape=self.shape, data=self._data)
        launcher = ProcessLauncher(self.serial, self._places, PeerRank)
        return Contender(name, self._started(launcher, self.serial, PeerRank.setup, plan), None)

    def _started(self, launcher: ProcessLauncher, config: Config, setup: Any, plan: Any) -> WorkerGroup:
        group = launcher.start(config.layout().ranks)
        self._stack.callback(group.shutdown)
        group.call_all(setup, plan, rendezvous(group, config.cluster.group_timeout_s))
        return group

    def _decided(self, config: Config, costs: Profile, without: str | None) -> Outcome:
        if without is None:
            return plan_run(config, self.shape, costs).taken
        setting = WithoutTier(**vars(setting_of(config, self.shape)), tier=without)
        return decide([setting], self._costed(config, costs), in_memory(config))[0]

    def _costed(self, config: Config, profile: Profile) -> BenchOf:
        return measured(model_graphs(config, self.shape, profile.streams), profile)
