"""What the tensor-degree planner finds, how fast, and how its schedules compare with what Oases published.

Without a profile of measured block costs only made-up problems are solved; the report says what is left out.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from braid.scheduling.planner.degree_problem import (
    DegreeCosts,
    DegreeProblem,
    PassCosts,
)
from braid.scheduling.planner.tensor_degrees import (
    describe_degrees,
    plan_degrees,
    strategy_memory_bytes,
)
from tests.papers.block_profile import BlockProfile, problem_from_profile, read_block_profile
from tests.papers.oases import DEVICES, Comparison, compare
from tests.scheduling.test_tensor_degrees import brute_force


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """The planner beside brute force on random problems."""

    costs: str
    layers: int
    degrees: int
    problems: int
    equal: int
    largest_difference: float
    """Relative."""


@dataclass(frozen=True, kw_only=True)
class SolveTime:
    """Seconds for random problems of one size, with their memory limits."""

    layers: int
    degrees: int
    problems: int
    median_s: float
    worst_s: float
    median_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class PlannerReport:
    """Everything that `run` found."""

    machine: Mapping[str, Any]
    exactness: tuple[Exactness, ...]
    solve_times: tuple[SolveTime, ...]
    published: Comparison | None
    """None without a profile."""
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def run(
    profile_path: Path | None,
    *,
    problems: int = 30,
    largest: int = 2,
    solves: int = 21,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> PlannerReport:
    """Solve and simulate.

    ``problems`` random ones of each size are compared with brute force, ``largest`` of 8 layers and 4
    degrees; ``solves`` are timed per size. ``seed`` draws them; by default it is drawn anew.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    draw = random.Random(seed)
    profile = read_block_profile(profile_path) if profile_path is not None else None
    sources: list[tuple[str, Callable[[int, int], DegreeProblem]]] = [
        ("made up", lambda layers, degrees: made_up_problem(draw, layers, degrees))
    ]
    if profile is not None:
        sources.append(("profile", lambda layers, degrees: profiled_problem(draw, profile, layers, degrees)))
    exactness = []
    for costs, make in sources:
        for layers, degrees, count in ((3, 4, problems), (5, 4, problems), (8, 2, problems), (8, 4, largest)):
            progress(f"{costs} costs, {layers} layers x {degrees} degrees: {count} times brute force")
            exactness.append(
                _exactness(costs, layers, degrees, [make(layers, degrees) for _ in range(count)])
            )
    times = []
    for layers in (24, 96):
        progress(f"{layers} layers x 6 degrees: {solves} solutions")
        times.append(_solve_time(layers, 6, [made_up_problem(draw, layers, 6) for _ in range(solves)]))
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "load": os.getloadavg(),
        "seed": seed,
    }
    return PlannerReport(
        machine=machine,
        exactness=tuple(exactness),
        solve_times=tuple(times),
        published=None if profile is None else compare(profile),
        left_out=(WITHOUT_PROFILE,) if profile is None else (),
    )


WITHOUT_PROFILE: Final = (
    "no profile of measured block costs was given: left out are brute force on measured costs, the published "
    "strategies (Oases table II) and the ablation (table V)"
)


def made_up_problem(draw: random.Random, layers: int, degrees: int) -> DegreeProblem:
    """Costs that fall and rise with the degree much as real ones do, and a memory limit."""

    def about(value: float) -> int:
        return round(value * draw.uniform(0.7, 1.4))

    def blocks(place: int, work: float) -> tuple[PassCosts, ...]:
        slower, message = 1 + 0.1 * place, (0 if place == 0 else 1.6e6 * (1 + place))
        return tuple(
            PassCosts(
                compute_ns=(about(work * slower), about(work * slower)),
                collective_ns=(about(message), about(message)),
            )
            for _ in range(2)
        )

    options = tuple(
        DegreeCosts(
            degree=2**place,
            forward=blocks(place, 5e6),
            backward=blocks(place, 15e6),
            state_bytes=about(1.6e9 / 2**place),
            saved_bytes=about(2e7 * 2**place),
            runtime_bytes=about(8e8 / 2**place),
        )
        for place in range(degrees)
    )
    gathers = {(2**i, 2**j): about(1e6 * 2 ** (j - i)) for j in range(degrees) for i in range(j)}
    problem = DegreeProblem(
        layers=layers, options=options, gather_ns=gathers, memory_limit_bytes=0, left_out={}
    )
    return _limited(draw, problem)


def profiled_problem(draw: random.Random, profile: BlockProfile, layers: int, degrees: int) -> DegreeProblem:
    """A random size of the profile, up to ``degrees`` random ones of its degrees, and a memory limit."""
    while True:
        devices, hidden = (
            draw.choice((4, 8, 16, 32)),
            draw.choice(sorted({s.hidden for s in profile.measured})),
        )
        batch = devices * draw.choice((1, 2, 4, 8)) // 2
        try:
            problem = problem_from_profile(
                profile,
                hidden=hidden,
                layers=layers,
                devices=devices,
                global_batch=batch,
                memory_limit_bytes=0,
            )
        except ValueError:  # no degree was measured at these batches
            continue
        if len(problem.options) > 1:
            chosen = draw.sample(problem.options, min(degrees, len(problem.options)))
            options = tuple(sorted(chosen, key=lambda option: option.degree))
            return _limited(draw, replace(problem, options=options))


def _limited(draw: random.Random, problem: DegreeProblem) -> DegreeProblem:
    """With a memory limit between what the leanest and the largest uniform strategy take."""
    sizes = [strategy_memory_bytes(problem, (choice,) * problem.layers) for choice in problem.choices]
    return replace(problem, memory_limit_bytes=draw.randint(min(sizes), max(sizes)))


def _exactness(costs: str, layers: int, degrees: int, problems: Sequence[DegreeProblem]) -> Exactness:
    differences = [plan_degrees(problem).cost_ns / brute_force(problem)[0] - 1 for problem in problems]
    return Exactness(
        costs=costs,
        layers=layers,
        degrees=degrees,
        problems=len(problems),
        equal=differences.count(0.0),
        largest_difference=max(map(abs, differences), default=0.0),
    )


def _solve_time(layers: int, degrees: int, problems: Sequence[DegreeProblem]) -> SolveTime:
    wall, cpu = [], []
    for problem in problems:
        start = time.process_time()
        wall.append(plan_degrees(problem).solver_seconds)
        cpu.append(time.process_time() - start)
    return SolveTime(
        layers=layers,
        degrees=degrees,
        problems=len(problems),
        median_s=statistics.median(wall),
        worst_s=max(wall),
        median_cpu_s=statistics.median(cpu),
    )


def show(console: Console, report: PlannerReport) -> None:
    """Print everything as tables."""
    machine = report.machine
    console.print(f"{machine['cpus']} CPUs, load {machine['load'][0]:.1f}, seed {machine['seed']}")
    table = _table(
        "planner and brute force",
        ["costs", "layers x degrees, at most"],
        ["problems", "equal", "largest difference"],
    )
    for e in report.exactness:
        difference = f"{e.largest_difference:.1e}"
        table.add_row(e.costs, f"{e.layers} x {e.degrees}", str(e.problems), str(e.equal), difference)
    console.print(table)
    table = _table("seconds to solve", ["layers x degrees"], ["problems", "median", "worst", "median CPU"])
    for t in report.solve_times:
        seconds = [f"{value:.3f}" for value in (t.median_s, t.worst_s, t.median_cpu_s)]
        table.add_row(f"{t.layers} x {t.degrees}", str(t.problems), *seconds)
    console.print(table)
    if report.published is not None:
        _show_published(console, report.published)
    for text in report.left_out:
        console.print(text)


def _show_published(console: Console, published: Comparison) -> None:
    table = _table(
        f"strategies under equation 5, {DEVICES} GPUs",
        ["model", "origin", "degrees x layers"],
        ["ms", "ktokens/s", "GiB"],
    )
    for s in published.strategies:
        numbers = f"{s.cost_ns / 1e6:.1f}", f"{s.ktokens_per_s:.1f}", f"{s.memory_bytes / 2**30:.1f}"
        table.add_row(s.model, s.origin, describe_degrees(s.degrees).replace("[", r"\["), *numbers)
    console.print(table)
    table = _table(
        "ablation (table V), ktokens/s", ["model", "schedule"], ["published", "simulated", "error"]
    )
    for a in published.ablation:
        numbers = f"{a.published:.1f}", f"{a.simulated:.1f}", f"{a.relative_error:+.0%}"
        table.add_row(a.model, a.method, *numbers)
    console.print(table)
    table = _table(
        "could fewer GPUs reach it? ktokens/s if they only computed",
        ["model"],
        ["GPUs", "at most", "published"],
    )
    for c in published.device_counts:
        table.add_row(c.model, str(c.devices), f"{c.ceiling:.1f}", f"{c.published:.1f}")
    console.print(table)
    table = _table(
        "milliseconds of one collective, by Megatron's published step and by the profile",
        ["model"],
        ["degree", "published", "profile"],
    )
    for i in published.implied:
        times = f"{i.implied_ns / 1e6:.1f}", f"{i.profiled_ns / 1e6:.1f}"
        table.add_row(i.model, str(i.degree), *times)
    console.print(table)
    for note in published.notes:
        console.print(f"- {note}")


def _table(title: str, labels: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for label in labels:
        table.add_column(label)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="the public RTX 3090 profile (CSV)")
    parser.add_argument("--seed", type=int, help="of the random problems (default: fresh)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    says = Console(stderr=True)
    result = run(chosen.profile, seed=chosen.seed, progress=says.print)
    if chosen.json:
        print(json.dumps(result.as_json()))
    else:
        show(Console(), result)


if __name__ == "__main__":
    main()
