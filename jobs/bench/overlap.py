"""Measures schedules and peers on two emulated hosts, alternating in one run: the value of overlap on a real
link.

Only the hosts are emulated: processes, sockets, gloo and TCP are real, over a veth pair whose rate ``tbf``
limits (`braid.jobs.drill.hosts`); without root, over this host's loopback with paced connections. A row is
the median of the rounds; a step is a whole training step with all micro-batches and the optimizer.
"""

import contextlib
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import braid
from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule, in_memory, model_graphs, plan_run, setting_of
from braid.actors.controller.profiling import measure
from braid.actors.controller.ranks.group import Launcher
from braid.actors.controller.ranks.parent import enter_namespace
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.bench.overlap_case import (
    EXCHANGE,
    FILLED,
    MIXED,
    PEERS,
    PLANNED,
    RECOMPUTING,
    SCHEDULES,
    OverlapCase,
)
from braid.jobs.bench.overlap_rows import Contender, OverlapResult, row_of
from braid.jobs.bench.peers import PeerPlan, PeerRank
from braid.jobs.bench.rounds import Progress, Spread, by_turns, prepare_text
from braid.jobs.cluster.session import environment, ray_session
from braid.jobs.drill.hosts import PACED, Hosts, HostsError, Paced, ray_cluster, two_hosts_or_paced
from braid.jobs.training.layouts import layers_chosen
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import ScheduleKind
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import (
    Outcome,
    anything,
    decide,
    measured,
    outcome_of,
    outcome_of_schedule,
)
from braid.scheduling.plan.layer_choices import degrees_within
from braid.scheduling.plan.orders import BenchOf, decisions, exact_pairing, layer_pair
from braid.scheduling.schedule.text import write

FIRST_GUESS_MBIT = 600.0
"""Link rate in Mbit/s at which alpha is first measured, to derive the rate for a wanted alpha."""
_SPAN_BYTES = 16 << 20
"""Size limit of a rank's span files, in the benchmark's temporary folder."""

Decide = Callable[[Config, ModelShape, Profile], Outcome]
"""Decides what a side runs, from its configuration, its model and the measured costs."""


def planned(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
    """Decide as a training run does."""
    return plan_run(config, shape, profile).taken


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


def without_tier(tier: str) -> Decide:
    """Return a decision like a run's, without one of Centauri's tiers; it ignores
    ``overlap.memory_slack``."""

    def decided(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
        setting = WithoutTier(**vars(setting_of(config, shape)), tier=tier)
        return decide([setting], _costed(config, shape, profile), in_memory(config))[0]

    return decided


def compared(case: OverlapCase) -> tuple[str, ...]:
    """Return the schedules that a case compares by default."""
    if case.layout in MIXED:
        ours = "oases" if case.recompute == "full" else "braid:sub_batches"
        alike = [f"{ours} {case.layers}*{degree}" for degree in degrees_within(case.axes["tp"])]
        return ("megatron", *alike, f"{ours} {PLANNED}")
    return SCHEDULES[case.layout] if case.recompute == "none" else RECOMPUTING


def drawn(schedule: str, case: OverlapCase, count: int) -> tuple[str, ...]:
    """Draw ``count`` different schedules with a random tensor-parallel degree for every layer.

    The number of layers of each degree is drawn first, so that unequal numbers are as likely as equal ones.
    """
    assignments, draw = set[str](), random.Random(case.seed)
    degrees = degrees_within(case.axes["tp"])
    while len(assignments) < min(count, len(degrees) ** case.layers):
        weights = [draw.expovariate(1) for _ in degrees]
        assignments.add(" ".join(map(str, draw.choices(degrees, weights, k=case.layers))))
    return tuple(f"{schedule} {degrees}" for degrees in sorted(assignments))


def run(
    case: OverlapCase,
    *,
    schedules: Sequence[str] = (),
    peers: bool = True,
    rounds: int = 7,
    starts: int = 1,
    ray: bool = False,
    spans_cost: bool = False,
    without: str | None = None,
    others: Mapping[str, Decide] = MappingProxyType({}),
    progress: Progress = lambda text: None,
) -> OverlapResult:
    """Measure a case; use paced connections if this machine cannot emulate hosts.

    ``starts``: how often all ranks are started; each start measures its part of the rounds. ``spans_cost``:
    also run the last schedule without recording spans, as ``NAME, no spans``. ``without``: also run braid
    without one of Centauri's tiers (`WithoutTier.tier`). ``others``: more sides, ``SCHEDULE, DESCRIPTION``,
    each with its own way to decide what it runs.
    """
    link_made, why_paced = two_hosts_or_paced()
    if why_paced:
        progress(f"{why_paced}; {PACED}")
        if ray:
            raise HostsError(why_paced)
    names = list(schedules or compared(case))
    if "megatron" not in names:
        names.insert(0, "megatron")
    if without:
        others = {**others, f"braid, without {without}": without_tier(without)}
    load = os.getloadavg()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-bench-")))
        data = str(prepare_text(folder))
        bench = _StartedCase(case, stack.enter_context(link_made), data, stack, progress)
        mbit = bench.set_rate()
        bench.costs = bench.profile()
        if ray:
            bench.launcher_of = stack.enter_context(bench.ray_launchers())
        named = [bench.start(name) for name in names]
        sides = list(named)
        if spans_cost:  # the same ranks: other ranks would differ by some percent for other reasons
            last, name = named[-1], f"{names[-1]}, no spans"
            last.records = True
            sides.append(Contender(name, last.launcher, last.plan, shares=last, records=False))
            sides[-1].start()
        sides += [bench.start(name, way) for name, way in others.items()]
        if peers and not ray and case.recompute == "none":  # peers keep all activations
            sides += [bench.start_peer(name) for name in PEERS.get(case.layout, ())]
        each = math.ceil(rounds / starts)
        draw = random.Random(case.seed)
        for start in range(starts):
            if start:
                progress(f"starting all ranks again ({start + 1} of {starts})")
                for side in sides:
                    side.start()
            results = by_turns({side: side.two_steps for side in sides}, each, 2, draw, progress)
            for side in sides:
                side.results += results[side]
            if start == 0 and case.layout not in MIXED:  # with many ranks it takes minutes
                for side in named:
                    held = side.group.call_all(Rank.activation_bytes, 2 * each + 2)
                    side.activation_bytes = max(held)
            for side in sides:  # while idle ranks were alive, operators were measured a fifth too slow
                side.group.shutdown()
            again = bench.profile()
            for side in sides:
                if side.predict is not None:
                    side.beside.append(side.predict(again))
    serial = next(side for side in named if side.name == "megatron")
    return OverlapResult(
        model=case.name,
        link_mbit=mbit,
        rounds=each * starts,
        starts=starts,
        ray=ray,
        paced=bool(why_paced),
        rows=tuple(row_of(side, serial, case.step_tokens, mbit) for side in sides),
        seed=case.seed,
        load_before=load,
        exact_seconds=bench.exact_seconds(),
        spans_price=Spread.of_ratios(named[-1].seconds, sides[len(named)].seconds) if spans_cost else None,
    )


class _StartedCase:
    """Starts the sides that a case compares; ``stack`` ends them."""

    costs: Profile
    """Costs that were measured before any side ran."""

    def __init__(
        self,
        case: OverlapCase,
        link: Hosts | Paced,
        data: str,
        stack: contextlib.ExitStack,
        progress: Progress,
    ) -> None:
        self._case, self._link, self._data, self._stack, self._progress = case, link, data, stack, progress
        self.shape = case.shape()
        ranks = self._config("megatron").layout().ranks
        self._places = link.places(ranks, filled=case.layout in FILLED)
        self.launcher_of: Callable[[Config], Launcher] = self._processes

    def _config(self, schedule: str, **cluster: Any) -> Config:
        return self._case.config(schedule, **self._link.cluster, **cluster)

    def set_rate(self) -> float:
        """Set the link's rate: the given one, or the one that gives the wanted alpha; return it in Mbit/s."""
        case = self._case
        mbit = case.mbit or FIRST_GUESS_MBIT
        for turn in range(3):
            self._link.shape(mbit, case.message_bytes, case.inside_mbit)
            if case.alpha is None:
                break
            self._progress(f"measuring alpha at {mbit:.0f} Mbit/s")
            numbers = planned(self._config("megatron"), self.shape, self._measure()).numbers
            communication, step = numbers.communication_seconds, numbers.step_seconds
            if turn == 2 or abs(communication / step - case.alpha) < 0.01:
                break
            wanted = (step - communication) * case.alpha / (1 - case.alpha)
            mbit = round(mbit * communication / wanted, 1)
        return mbit

    def profile(self) -> Profile:
        """Measure costs at the rate that was set."""
        self._progress("measuring operators alone and beside communication")
        return self._measure(rounds=15)

    def _measure(self, rounds: int = 5) -> Profile:
        config = self._config("megatron")
        if self._case.layout in MIXED:  # one profile has layers of every degree that schedules have
            every = islice(cycle(reversed(degrees_within(config.parallel.tp))), self._case.layers)
            config = self._config(f"megatron {' '.join(map(str, every))}")
        schedule = write(build_schedule(config, self.shape))
        plan = RunPlan(config=config, shape=self.shape, schedule=schedule, data=self._data)
        return measure(plan, self._processes(config), model_graphs(config, self.shape), rounds)

    def exact_seconds(self) -> float | None:
        """Simulate a step of ``braid:w`` with the optimal order of a layer's forward and backward pass;
        return seconds, or None if the search takes too long."""
        config = self._config("braid:w")
        bench = _costed(config, self.shape, self.costs)(setting_of(config, self.shape))
        ((choices, _),) = decisions(bench)
        try:
            sides, order, _ = exact_pairing(layer_pair(bench))
        except ValueError:
            return None
        alone = {passes: own for passes, own in choices.orders.items() if not passes[1:]}
        exact = Choices(orders={**alone, sides: order})
        return outcome_of(bench, exact, None, anything).numbers.step_seconds

    def _processes(self, config: Config) -> Launcher:
        return ProcessLauncher(config, self._places)

    @contextlib.contextmanager
    def ray_launchers(self) -> Iterator[Callable[[Config], Launcher]]:
        """Yield a function that makes launchers of Ray actors on a Ray cluster over the two hosts."""
        root = str(Path(next(iter(braid.__path__))).resolve().parent)
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths}
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        with (
            environment({"RAY_AUTH_MODE": "disabled"}),
            ray_cluster(self._link.hosts, env, cpus=len(self._places)) as address,
        ):
            enter_namespace(self._link.hosts[0].namespace)
            try:
                with ray_session(self._config("megatron", address=address, allow_unauthenticated=True)):
                    from braid.actors.controller.ranks.placement import RayLauncher

                    def spread(config: Config) -> Launcher:
                        cluster = config.cluster.model_copy(update={"spread": True})
                        return RayLauncher(config.model_copy(update={"cluster": cluster}))

                    yield spread
            finally:
                enter_namespace(home)

    def start(self, name: str, decided_by: Decide = planned) -> Contender:
        """Start the ranks of a schedule, ready to train; text after a comma in its name is only a
        description."""
        self._progress(f"starting {name}")
        config = self._config(name.partition(",")[0])
        if config.chooses_layers:
            config, choices = layers_chosen(config, self.shape, self.costs)
            name += f": {choices[0].layout}"
            for choice in choices:
                self._progress(f"{choice.layout}: {choice.seconds:.3f} s {choice.trouble}")
        decided = decided_by(config, self.shape, self.costs)
        setting, schedule = decided.setting, decided.code.schedule
        self._progress(f"{name}: pipeline {', '.join([setting.pipeline, *map(str, setting.partitions)])}")
        plan = RunPlan(
            config=config,
            shape=self.shape,
            schedule=write(schedule),
            data=self._data,
            solo_ns=_costed(config, self.shape, self.costs)(setting).profile.solo_ns,
        )
        launcher = self.launcher_of(config)
        files = Path(self._data).parent / "spans" / name
        collector = self._stack.enter_context(launcher.collector(files, _SPAN_BYTES))

        def predict(profile: Profile) -> float:
            bench = _costed(config, self.shape, profile)(setting)
            return outcome_of_schedule(schedule, bench, anything).numbers.step_seconds

        return self._started(
            Contender(name, launcher, plan, collector.target, predict=predict, predicted=predict(self.costs))
        )

    def start_peer(self, name: str) -> Contender:
        """Start the ranks of a peer, ready to train."""
        self._progress(f"starting {name}")
        config = self._config("megatron")
        kind, _, exchange = name.partition(", ")
        messages = exchange == EXCHANGE
        plan = PeerPlan(kind=kind, messages=messages, config=config, shape=self.shape, data=self._data)
        return self._started(Contender(name, ProcessLauncher(config, self._places, PeerRank), plan))

    def _started(self, side: Contender) -> Contender:
        side.start()
        self._stack.callback(lambda: side.group.shutdown())
        return side


def _costed(config: Config, shape: ModelShape, profile: Profile) -> BenchOf:
    return measured(model_graphs(config, shape, profile.streams), profile)
