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
from braid.actors.controller.group import Launcher, WorkerGroup
from braid.actors.controller.meeting import rendezvous
from braid.actors.controller.planning import (
    build_schedule,
    in_memory,
    model_graphs,
    plan_run,
    setting_of,
)
from braid.actors.controller.processes import ProcessLauncher, enter_namespace
from braid.actors.controller.profiling import measure
from braid.actors.stage.messages import RunPlan, StepResult
from braid.actors.stage.rank import Rank
from braid.jobs.benchmarks.cases import Spread, prepare_text
from braid.jobs.benchmarks.overlap_case import MIXED, PEERS, OverlapCase, WithoutTier, compared
from braid.jobs.benchmarks.overlap_rows import OverlapResult, Ranks, Side, row_of
from braid.jobs.benchmarks.peer_rank import PeerPlan, PeerRank, peer_rank
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.drill.hosts import PACED, Hosts, HostsError, Paced, ray_cluster, two_hosts_or_paced
from braid.jobs.layers import layers_chosen
from braid.scheduling.lowering.lower import Choices
from braid.scheduling.planner.decide import (
    Outcome,
    anything,
    decide,
    measured,
    outcome_of,
    outcome_of_schedule,
)
from braid.scheduling.planner.layer_choices import degrees_within
from braid.scheduling.planner.orders import BenchOf, decisions, exact_pairing, layer_pair
from braid.scheduling.profile import Profile
from braid.scheduling.schedule_text import write, write_sides
from braid.scheduling.spec import ModelShape

FIRST_GUESS_MBIT = 600.0
"""Link rate at which the rate for a wanted alpha is worked out."""

_SPAN_BYTES = 16 << 20
"""Of a rank's files, in the benchmark's temporary folder."""

Progress = Callable[[str], None]

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
    memory: bool = True,
    spans_cost: bool = False,
    without: str | None = None,
    others: Mapping[str, Decide] = MappingProxyType({}),
    progress: Progress = lambda text: None,
) -> OverlapResult:
    """Measure a case, on paced connections where this machine cannot make hosts.

    ``starts``: all ranks are started so often, and make their part of the rounds each time.
    ``spans_cost``: also run the last schedule without recording spans, as ``NAME, no spans``.
    ``without``: also braid without one of Centauri's tiers (`overlap_case.TIERS`).
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
        link = stack.enter_context(link_made)
        bench = _Bench(case, link, data, progress)
        mbit = bench.set_rate()
        profile = bench.profile()
        launchers = stack.enter_context(bench.launchers(ray))
        sides = [bench.start(name, profile, launchers, stack) for name in names]
        bare = None
        if spans_cost:  # the same ranks: others would differ by some percent for reasons of their own
            recorded = sides[-1]
            recorded.records = True
            bare = Side(f"{names[-1]}, no spans", recorded.ranks, records=False)
            sides.append(bare)
        if without:
            others = {**others, f"braid, without {without}": _without(without)}
        sides += [bench.start(name, profile, launchers, stack, decide) for name, decide in others.items()]
        if peers and not ray and case.recompute == "none":  # they keep all activations
            sides += [bench.start_peer(kind, messages, stack) for kind, messages in PEERS[case.layout]]
        each = math.ceil(rounds / starts)
        draw = random.Random(case.seed)
        started = list(dict.fromkeys(side.ranks for side in sides))
        for start in range(starts):
            if start:
                progress(f"starting all ranks again ({start + 1} of {starts})")
                for ranks in started:
                    ranks.start()
            _alternate(sides, each, case, draw, progress)
            if memory and start == 0:
                for side in sides:
                    if side.name in names:
                        held = side.ranks.group.call_all(Rank.activation_bytes, 2 * each + 2)
                        side.activation_bytes = max(held)
            for ranks in started:  # beside them, idle as they are, operators were measured a fifth too slow
                ranks.shutdown()
            _predict_again(sides, bench.profile())
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


class _Bench:
    """Starts what a case compares."""

    def __init__(self, case: OverlapCase, link: Hosts | Paced, data: str, progress: Progress) -> None:
        self._case, self._link, self._data, self._progress = case, link, data, progress
        config = self._config("megatron")
        self.shape: ModelShape = config.check(tokenizer_of(config).vocabulary)
        self._places = link.places(config.layout().ranks, filled=case.filled)
        self._known: Profile | None = None

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
            self._known = self._measure()
            numbers = plan_run(self._config("megatron"), self.shape, self._known).taken.numbers
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
        config = self._every_degree()
        schedule = write(build_schedule(config, self.shape))
        plan = RunPlan(config=config, shape=self.shape, schedule=schedule, data=self._data)
        return measure(plan, self._processes(config), model_graphs(config, self.shape), rounds)

    def _every_degree(self) -> Config:
        """Serial, with layers of every degree that schedules have."""
        case = self._case
        if case.layout not in MIXED:
            return self._config("megatron")
        degrees = degrees_within(self._config("megatron").parallel.tp)
        every = islice(cycle(reversed(degrees)), case.layers)
        return self._config(f"megatron {' '.join(map(str, every))}")

    def _processes(self, config: Config) -> ProcessLauncher:
        return ProcessLauncher(config, self._places)

    def exact_seconds(self, profile: Profile) -> float | None:
        """The simulated step of ``braid:w`` with the best order of a layer's two passes that exists."""
        config = self._config("braid:w")
        bench = self._costed(config, profile)(setting_of(config, self.shape))
        ((choices, _),) = decisions(bench)
        try:
            sides, order, _ = exact_pairing(layer_pair(bench))
        except ValueError:
            return None
        alone = {text: own for text, own in choices.orders.items() if "|" not in text}
        exact = Choices(orders={**alone, write_sides(sides): order})
        return outcome_of(bench, exact, None, anything).numbers.step_seconds

    def _costed(self, config: Config, profile: Profile) -> BenchOf:
        return measured(model_graphs(config, self.shape, profile.streams), profile)

    @contextlib.contextmanager
    def launchers(self, ray: bool) -> Iterator[Callable[[Config], Launcher]]:
        """How ranks are started: as processes, or as actors of a Ray cluster over the two hosts."""
        if not ray:
            yield self._processes
            return
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(_import_paths())}
        os.environ["RAY_AUTH_MODE"] = "disabled"
        ranks = len(self._places)
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        with ray_cluster(self._link.hosts, env, cpus=ranks) as address:
            enter_namespace(self._link.hosts[0].namespace)
            try:
                from braid.jobs.session import ray_session

                config = self._config("megatron", address=address, allow_unauthenticated=True)
                with ray_session(config):
                    from braid.actors.controller.placement import RayLauncher

                    yield lambda config: RayLauncher(
                        config.model_copy(
                            update={"cluster": config.cluster.model_copy(update={"spread": True})}
                        )
                    )
            finally:
                enter_namespace(home)

    def start(
        self,
        name: str,
        profile: Profile,
        launchers: Callable[[Config], Launcher],
        stack: contextlib.ExitStack,
        decided_by: Decide = planned,
    ) -> Side:
        """The ranks of a schedule, ready to train; what follows a comma in its name only describes it."""
        self._progress(f"starting {name}")
        config, shown = self._config(name.partition(",")[0]), name
        if config.chooses_layers:
            config, found = layers_chosen(config, self.shape, profile)
            shown += f": {found[0].layout}"
            self._progress("\n".join(f"{one.layout}: {one.seconds:.3f} s {one.trouble}" for one in found))
        decided = decided_by(config, self.shape, profile)
        schedule, bench = decided.code.schedule, self._costed(config, profile)(decided.setting)
        own = decided.setting
        self._progress(f"{shown}: pipeline {', '.join([own.pipeline, *map(str, own.partitions)])}")
        plan = RunPlan(
            config=config,
            shape=self.shape,
            schedule=write(schedule),
            data=self._data,
            solo_ns=bench.profile.solo_ns,
        )
        launcher = launchers(config)
        files = Path(self._data).parent / "spans" / shown
        collector = stack.enter_context(launcher.collector(files, _SPAN_BYTES))

        def begin() -> WorkerGroup:
            group = launcher.start(config.layout().ranks)
            _meet(group, plan)
            group.call_all(Rank.stream_spans, collector.target, 1)  # as in a run
            return group

        def predict(profile: Profile) -> float:
            bench = self._costed(config, profile)(decided.setting)
            return outcome_of_schedule(schedule, bench, anything).numbers.step_seconds

        return Side(shown, _started(begin, stack), predict=predict, predicted=predict(profile))

    def start_peer(self, kind: str, messages: bool, stack: contextlib.ExitStack) -> Side:
        """The ranks of a peer, ready to train."""
        name = f"{kind}, Braid's exchange" if messages else kind
        self._progress(f"starting {name}")
        config = self._config("megatron")
        plan = PeerPlan(kind=kind, messages=messages, config=config, shape=self.shape, data=self._data)

        def begin() -> WorkerGroup:
            group = ProcessLauncher(config, self._places, peer_rank).start(config.layout().ranks)
            _meet(group, plan)
            return group

        return Side(name, _started(begin, stack))


def _without(tier: str) -> Decide:
    """Without one of Centauri's tiers; ``overlap.memory_slack`` does not count."""

    def found(config: Config, shape: ModelShape, profile: Profile) -> Outcome:
        setting = WithoutTier(**vars(setting_of(config, shape)), tier=tier)
        bench_of = measured(model_graphs(config, shape, profile.streams), profile)
        return decide([setting], bench_of, in_memory(config))[0]

    return found


def _import_paths() -> list[str]:
    import braid

    root = str(Path(next(iter(braid.__path__))).resolve().parent)
    return [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _started(begin: Callable[[], WorkerGroup], stack: contextlib.ExitStack) -> Ranks:
    ranks = Ranks(begin)
    stack.callback(ranks.shutdown)
    return ranks


def _meet(group: WorkerGroup, plan: RunPlan | PeerPlan) -> None:
    meeting = rendezvous(group, plan.config.cluster.group_timeout_s)
    if isinstance(plan, PeerPlan):
        group.call_all(PeerRank.setup, plan, meeting)
    else:
        group.call_all(Rank.setup, plan, meeting)


def _predict_again(sides: Sequence[Side], profile: Profile) -> None:
    for side in sides:
        if side.predict is not None:
            side.beside.append(side.predict(profile))


def _alternate(
    sides: Sequence[Side], rounds: int, case: OverlapCase, draw: random.Random, progress: Progress
) -> None:
    """A step of every side in each round, in an order that is drawn anew; the first round is not counted.

    Right before it each side runs another one, which is not counted either: a step may leave work under way
    for the next one (gathers, ZeRO 1), which must not end while other sides run.
    """
    for turn in range(rounds + 1):
        progress(f"round {turn} of {rounds}" + (" (not counted)" if turn == 0 else ""))
        for side in draw.sample(list(sides), len(sides)):
            if side.records is not None:
                side.ranks.group.call_all(Rank.record_spans, side.records)
            side.ranks.group.call_all(Rank.train_step, 2 * turn)
            results: list[Any] = side.ranks.group.call_all(Rank.train_step, 2 * turn + 1)  # of peers: tuples
            if isinstance(results[0], StepResult):
                seconds = max(result.seconds for result in results)
                side.loss = sum(result.loss_sum for result in results) / case.step_tokens
                side.peak_bytes = max(result.peak_bytes for result in results)
                if turn:
                    side.results.append(results)
            else:
                seconds = max(result[0] for result in results)
                side.loss = results[0][1]
                side.peak_bytes = max(result[2] for result in results)
            if turn:
                side.seconds.append(seconds)
