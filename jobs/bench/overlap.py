"""Schedules and peers on two emulated hosts, alternating in one run: what overlap is worth on a real link.

Everything is real but the hosts: processes, sockets, gloo, TCP over a veth pair whose rate ``tbf`` limits
(`braid.jobs.drill.hosts`); without root, over this host's loopback with paced connections. A row is the
median of the rounds; a step is a whole training step with all micro-batches and the optimizer.
"""

import contextlib
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule, in_memory, model_graphs, plan_run, setting_of
from braid.actors.controller.profiling import measure
from braid.actors.controller.ranks.group import Launcher
from braid.actors.controller.ranks.processes import ProcessLauncher, enter_namespace
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.bench.cases import Progress, Spread, by_turns, prepare_text
from braid.jobs.bench.overlap_case import (
    EXCHANGE,
    FILLED,
    MIXED,
    PEERS,
    OverlapCase,
    WithoutTier,
    compared,
)
from braid.jobs.bench.overlap_rows import Contender, OverlapResult, Ranks, row_of
from braid.jobs.bench.peer_rank import PeerRank
from braid.jobs.bench.peers import PeerPlan
from braid.jobs.drill.hosts import PACED, Hosts, HostsError, Paced, ray_cluster, two_hosts_or_paced
from braid.jobs.training.layouts import layers_chosen
from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.lower import Choices
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
"""Link rate at which the rate for a wanted alpha is worked out."""
_SPAN_BYTES = 16 << 20
"""Of a rank's files, in the benchmark's temporary folder."""

Decide = Callable[[Config, ModelShape, Profile], Outcome]
"""What a side runs: of its configuration, its model and the measured costs."""


def planned(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
    """As a run decides it."""
    return plan_run(config, shape, profile).taken


def run(
    case: OverlapCase,
    *,
    schedules: Sequence[str] | None = None,
    peers: bool = True,
    rounds: int = 7,
    starts: int = 1,
    ray: bool = False,
    spans_cost: bool = False,
    without: str | None = None,
    others: Mapping[str, Decide] = MappingProxyType({}),
    progress: Progress = lambda text: None,
) -> OverlapResult:
    """Measure a case, on paced connections where this machine cannot make hosts.

    ``starts``: all ranks are started so often, and make their part of the rounds each time.
    ``spans_cost``: also run the last schedule without recording spans, as ``NAME, no spans``.
    ``without``: also braid without one of Centauri's tiers (`WithoutTier.tier`).
    ``others``: more sides, as ``NAME, DESCRIPTION``: those of a schedule, decided in another way.
    """
    link_made, why_paced = two_hosts_or_paced()
    if why_paced:
        progress(f"{why_paced}; {PACED}")
        if ray:
            raise HostsError(why_paced)
    names = list(schedules or compared(case))
    if "megatron" not in names:
        names.insert(0, "megatron")
    load = os.getloadavg()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-bench-")))
        data = str(prepare_text(folder))
        bench = _StartedCase(case, stack.enter_context(link_made), data, stack, progress)
        mbit = bench.set_rate()
        profile = bench.profile()
        launcher_of = stack.enter_context(bench.ray_launchers()) if ray else bench.processes
        sides = [bench.start(name, profile, launcher_of) for name in names]
        bare = None
        if spans_cost:  # the same ranks: others would differ by some percent for reasons of their own
            recorded = sides[-1]
            recorded.records = True
            bare = Contender(f"{names[-1]}, no spans", recorded.ranks, records=False)
            sides.append(bare)
        if without:
            others = {**others, f"braid, without {without}": _without(without)}
        sides += [bench.start(name, profile, launcher_of, decide) for name, decide in others.items()]
        if peers and not ray and case.recompute == "none":  # they keep all activations
            sides += [bench.start_peer(name) for name in PEERS.get(case.layout, ())]
        each = math.ceil(rounds / starts)
        draw = random.Random(case.seed)
        ranks_of_sides = list(dict.fromkeys(side.ranks for side in sides))
        for start in range(starts):
            if start:
                progress(f"starting all ranks again ({start + 1} of {starts})")
                for ranks in ranks_of_sides:
                    ranks.start()
            results = by_turns({side: side.two_steps for side in sides}, each, 2, draw, progress)
            for side in sides:
                side.results += results[side]
            if start == 0 and case.layout not in MIXED:  # with many ranks it takes minutes
                for side in sides:
                    if side.name in names:
                        held = side.ranks.group.call_all(Rank.activation_bytes, 2 * each + 2)
                        side.activation_bytes = max(held)
            for ranks in ranks_of_sides:  # beside idle ranks operators were measured a fifth too slow
                ranks.shutdown()
            again = bench.profile()
            for side in sides:
                if side.predict is not None:
                    side.beside.append(side.predict(again))
    serial = next(side for side in sides if side.name == "megatron")
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
        exact_seconds=bench.exact_seconds(profile),
        spans_price=None if bare is None else Spread.of_ratios(sides[len(names) - 1].seconds, bare.seconds),
    )


class _StartedCase:
    """Starts what a case compares; ``stack`` ends it."""

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

    def _config(self, schedule: str, **cluster: Any) -> Config:
        return self._case.config(schedule, **self._link.cluster, **cluster)

    def set_rate(self) -> float:
        """Shape the link: at the given rate, or at the one that gives the wanted alpha."""
        case = self._case
        mbit = case.mbit or FIRST_GUESS_MBIT
        self._link.shape(mbit, case.message_bytes, case.inside_mbit)
        if case.alpha is None:
            return mbit
        for turn in range(3):
            self._progress(f"measuring alpha at {mbit:.0f} Mbit/s")
            numbers = planned(self._config("megatron"), self.shape, self._measure()).numbers
            communication = numbers.communication_seconds
            alpha = communication / numbers.step_seconds
            if abs(alpha - case.alpha) < 0.01 or turn == 2:
                break
            compute = numbers.step_seconds - communication
            wanted = compute * case.alpha / (1 - case.alpha)
            mbit = round(mbit * communication / wanted, 1)
            self._link.shape(mbit, case.message_bytes, case.inside_mbit)
        return mbit

    def profile(self) -> Profile:
        """Measured costs at the rate that was set."""
        self._progress("measuring operators alone and beside communication")
        return self._measure(rounds=15)

    def _measure(self, rounds: int = 5) -> Profile:
        config = self._config("megatron")
        if self._case.layout in MIXED:  # one profile has layers of every degree that schedules have
            every = islice(cycle(reversed(degrees_within(config.parallel.tp))), self._case.layers)
            config = self._config(f"megatron {' '.join(map(str, every))}")
        schedule = write(build_schedule(config, self.shape))
        plan = RunPlan(config=config, shape=self.shape, schedule=schedule, data=self._data)
        return measure(plan, self.processes(config), model_graphs(config, self.shape), rounds)

    def exact_seconds(self, profile: Profile) -> float | None:
        """The simulated step of ``braid:w`` with the best order of a layer's two passes that exists."""
        config = self._config("braid:w")
        bench = _costed(config, self.shape, profile)(setting_of(config, self.shape))
        ((choices, _),) = decisions(bench)
        try:
            sides, order, _ = exact_pairing(layer_pair(bench))
        except ValueError:
            return None
        alone = {passes: own for passes, own in choices.orders.items() if not passes[1:]}
        exact = Choices(orders={**alone, sides: order})
        return outcome_of(bench, exact, None, anything).numbers.step_seconds

    def processes(self, config: Config) -> Launcher:
        """Starts ranks as processes."""
        return ProcessLauncher(config, self._places)

    @contextlib.contextmanager
    def ray_launchers(self) -> Iterator[Callable[[Config], Launcher]]:
        """What starts ranks as actors of a Ray cluster over the two hosts."""
        import braid

        root = str(Path(next(iter(braid.__path__))).resolve().parent)
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(paths)}
        os.environ["RAY_AUTH_MODE"] = "disabled"
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        with ray_cluster(self._link.hosts, env, cpus=len(self._places)) as address:
            enter_namespace(self._link.hosts[0].namespace)
            try:
                from braid.jobs.cluster.session import ray_session

                with ray_session(self._config("megatron", address=address, allow_unauthenticated=True)):
                    from braid.actors.controller.ranks.placement import RayLauncher

                    def spread(config: Config) -> Launcher:
                        cluster = config.cluster.model_copy(update={"spread": True})
                        return RayLauncher(config.model_copy(update={"cluster": cluster}))

                    yield spread
            finally:
                enter_namespace(home)

    def start(
        self,
        name: str,
        profile: Profile,
        launcher_of: Callable[[Config], Launcher],
        decided_by: Decide = planned,
    ) -> Contender:
        """The ranks of a schedule, ready to train; what follows a comma in its name only describes it."""
        self._progress(f"starting {name}")
        config, shown = self._config(name.partition(",")[0]), name
        if config.chooses_layers:
            config, found = layers_chosen(config, self.shape, profile)
            shown += f": {found[0].layout}"
            self._progress("\n".join(f"{one.layout}: {one.seconds:.3f} s {one.trouble}" for one in found))
        decided = decided_by(config, self.shape, profile)
        setting, schedule = decided.setting, decided.code.schedule
        self._progress(f"{shown}: pipeline {', '.join([setting.pipeline, *map(str, setting.partitions)])}")
        solo_ns = _costed(config, self.shape, profile)(setting).profile.solo_ns
        text = write(schedule)
        plan = RunPlan(config=config, shape=self.shape, schedule=text, data=self._data, solo_ns=solo_ns)
        launcher = launcher_of(config)
        files = Path(self._data).parent / "spans" / shown
        collector = self._stack.enter_context(launcher.collector(files, _SPAN_BYTES))

        def predict(profile: Profile) -> float:
            bench = _costed(config, self.shape, profile)(setting)
            return outcome_of_schedule(schedule, bench, anything).numbers.step_seconds

        ranks = self._started(Ranks(launcher, plan, collector.target))
        return Contender(shown, ranks, predict=predict, predicted=predict(profile))

    def start_peer(self, name: str) -> Contender:
        """The ranks of a peer, ready to train."""
        self._progress(f"starting {name}")
        config = self._config("megatron")
        kind, _, exchange = name.partition(", ")
        messages = exchange == EXCHANGE
        plan = PeerPlan(kind=kind, messages=messages, config=config, shape=self.shape, data=self._data)
        return Contender(name, self._started(Ranks(ProcessLauncher(config, self._places, PeerRank), plan)))

    def _started(self, ranks: Ranks) -> Ranks:
        ranks.start()
        self._stack.callback(ranks.shutdown)
        return ranks


def _costed(config: Config, shape: ModelShape, profile: Profile) -> BenchOf:
    return measured(model_graphs(config, shape, profile.streams), profile)


def _without(tier: str) -> Decide:
    """Without one of Centauri's tiers; ``overlap.memory_slack`` does not count."""

    def found(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
        setting = WithoutTier(**vars(setting_of(config, shape)), tier=tier)
        return decide([setting], _costed(config, shape, profile), in_memory(config))[0]

    return found
