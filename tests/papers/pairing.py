"""Is the pairing search exact, how near is the list schedule to the best order, and how long do both take?

Random pairs are drawn anew in each run; layers are those of presets on a modelled cluster.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from braid.scheduling.planner.decide import modelled
from braid.scheduling.planner.list_schedule import exact_order, list_schedule, pairing_order
from braid.scheduling.planner.orders import layer_pair
from braid.scheduling.planner.pairing import pair
from braid.scheduling.planner.strands import PairProblem
from braid.scheduling.presets.library import cluster_preset, model_preset
from braid.scheduling.setting import Setting
from braid.scheduling.spec import ParallelLayout, Workload
from tests.scheduling.pairing_cases import brute_force, made_up_problem, round_robin

NEAR: Final = 0.02
"""A list schedule within this share of the best order counts as near."""

ROUNDING: Final = 1e-9
"""Share by which sums of the same times in another order may differ."""

SMALL: Final = (1, 5)
"""Operators of a graph that brute force takes."""

MIDDLE: Final = (2, 6)
"""Operators of a graph that branch and bound takes."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Pairing by dynamic programming beside brute force over all orders and segmentations."""

    graphs: int
    equal: int
    largest_difference: float
    """Relative."""
    not_worse_than_round_robin: int
    not_worse_than_serial: int
    median_saving: float
    """Share of the serial time that the best pairing saves."""


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """The list schedule beside the best order (branch and bound), both without barriers."""

    graphs: int
    near: int
    """Within `NEAR`."""
    best: int
    """Equal."""
    worst_loss: float
    """Relative, of the list schedule."""
    median_barrier_loss: float
    """Relative, of the best segments between barriers."""
    worst_barrier_loss: float


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Searches on one layer of a preset."""

    layer: str
    forward_operators: int
    backward_operators: int
    pair_s: float
    """Median seconds of pairing by dynamic programming."""
    list_s: float
    """Median seconds of the list schedule that begins with the pairing, among others."""
    pair_ns: float
    list_ns: float
    serial_ns: float
    lower_bound_ns: float
    """Work of the busiest stream."""


@dataclass(frozen=True, kw_only=True)
class PairingReport:
    """Everything that `run` found."""

    machine: Mapping[str, Any]
    exactness: Exactness
    nearness: Nearness
    layers: tuple[LayerTime, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def run(
    graphs: int = 500,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    repeats: int = 3,
    layers: Sequence[str] | None = None,
) -> PairingReport:
    """Compare and measure.

    ``graphs`` random pairs each are solved by brute force and by branch and bound; ``seed`` draws them, by
    default anew. Every layer is searched ``repeats`` times; ``layers``: names of `LAYERS`, by default all.
    `ValueError` for less than one graph or repeat, or an unknown layer.
    """
    for key, value in (("graphs", graphs), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    for name in layers or ():
        if name not in LAYERS:
            raise ValueError(f"layers={name!r} must be of {', '.join(LAYERS)}")
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    draw = random.Random(seed)
    progress(f"{graphs} pairs of small graphs, by brute force")
    exactness = _exactness([made_up_problem(draw, SMALL) for _ in range(graphs)])
    progress(f"{graphs} pairs of small graphs, by branch and bound")
    nearness = _nearness([made_up_problem(draw, MIDDLE) for _ in range(graphs)])
    times = []
    for name in LAYERS if layers is None else layers:
        progress(f"{name}: {repeats} searches")
        times.append(_layer_time(name, LAYERS[name](), repeats))
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "load": os.getloadavg(),
        "seed": seed,
    }
    return PairingReport(machine=machine, exactness=exactness, nearness=nearness, layers=tuple(times))


def _exactness(problems: Sequence[PairProblem]) -> Exactness:
    differences, savings = [], []
    robin = serial = 0
    for problem in problems:
        found = pair(problem).ns
        differences.append(abs(found / brute_force(problem) - 1))
        savings.append(1 - found / problem.serial_ns)
        robin += found <= round_robin(problem).ns * (1 + ROUNDING)
        serial += found <= problem.serial_ns * (1 + ROUNDING)
    return Exactness(
        graphs=len(problems),
        equal=sum(difference <= ROUNDING for difference in differences),
        largest_difference=max(differences),
        not_worse_than_round_robin=robin,
        not_worse_than_serial=serial,
        median_saving=statistics.median(savings),
    )


def _nearness(problems: Sequence[PairProblem]) -> Nearness:
    losses, barriers = [], []
    for problem in problems:
        exact = exact_order(problem).ns
        segments = pair(problem)
        losses.append(list_schedule(problem, [pairing_order(problem, segments)]).ns / exact - 1)
        barriers.append(segments.ns / exact - 1)
    return Nearness(
        graphs=len(problems),
        near=sum(loss <= NEAR for loss in losses),
        best=sum(loss <= ROUNDING for loss in losses),
        worst_loss=max(losses),
        median_barrier_loss=statistics.median(barriers),
        worst_barrier_loss=max(barriers),
    )


# -- layers of presets ---------------------------------------------------------------------------------------


def _layer(model: str, cluster: str, layout: ParallelLayout, context: str = "all_gather") -> PairProblem:
    setting = Setting(
        model=model_preset(model),
        layout=layout,
        workload=Workload(global_batch=64, micro_batch=1),
        context=context,
    )
    return layer_pair(modelled(cluster_preset(cluster))(setting))


_LLAMA: Final = ParallelLayout(dp=8, tp=8)
_EXPERTS: Final = ParallelLayout(dp=16, tp=2, cp=2, ep=8)

LAYERS: Final[Mapping[str, Callable[[], PairProblem]]] = {
    "llama-25b, tp 8 on A40": lambda: _layer("llama-25b", "a40", _LLAMA),
    "llama-25b, tp 8 on A800": lambda: _layer("llama-25b", "a800", _LLAMA),
    "phi-42b, tp 2, cp 2 (all-gather), ep 8 on A800": lambda: _layer("phi-42b", "a800", _EXPERTS),
    "phi-42b, tp 2, cp 2 (ring), ep 8 on A800": lambda: _layer("phi-42b", "a800", _EXPERTS, "ring"),
}
"""Layers of presets as pairs of their two passes, by a name that says how they are laid out."""


def _layer_time(name: str, problem: PairProblem, repeats: int) -> LayerTime:
    pair_s, list_s = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        segments = pair(problem)
        paired = time.perf_counter()
        order = list_schedule(problem, [pairing_order(problem, segments)])
        pair_s.append(paired - start)
        list_s.append(time.perf_counter() - paired)
    return LayerTime(
        layer=name,
        forward_operators=len(problem.forward),
        backward_operators=len(problem.backward),
        pair_s=statistics.median(pair_s),
        list_s=statistics.median(list_s),
        pair_ns=segments.ns,
        list_ns=order.ns,
        serial_ns=problem.serial_ns,
        lower_bound_ns=problem.lower_bound_ns,
    )


# -- printing ------------------------------------------------------------------------------------------------


def show(console: Console, report: PairingReport) -> None:
    """Print everything as tables."""
    machine, e, n = report.machine, report.exactness, report.nearness
    console.print(f"{machine['cpus']} CPUs, load {machine['load'][0]:.1f}, seed {machine['seed']}")
    table = _table("random pairs of graphs", ["what"], ["of", "count", "note"])
    difference = f"largest difference {e.largest_difference:.1e}"
    for what, total, count, note in (
        ("pairing equal to brute force", e.graphs, e.equal, difference),
        ("not worse than round robin", e.graphs, e.not_worse_than_round_robin, ""),
        ("not worse than serial", e.graphs, e.not_worse_than_serial, f"saves {e.median_saving:.0%} (median)"),
        (f"list schedule within {NEAR:.0%} of the best order", n.graphs, n.near, f"worst {n.worst_loss:.1%}"),
        ("list schedule equal to the best order", n.graphs, n.best, ""),
    ):
        table.add_row(what, str(total), str(count), note)
    console.print(table)
    console.print(
        f"barriers lose {n.median_barrier_loss:.1%} to the best order (median), {n.worst_barrier_loss:.0%} "
        f"at the worst"
    )
    table = _table(
        "layers of presets",
        ["layer", "operators"],
        ["pairing s", "list s", "pairing ms", "list ms", "serial ms", "busiest stream ms"],
    )
    for t in report.layers:
        times = (t.pair_ns, t.list_ns, t.serial_ns, t.lower_bound_ns)
        table.add_row(
            t.layer,
            f"{t.forward_operators} x {t.backward_operators}",
            f"{t.pair_s:.3f}",
            f"{t.list_s:.3f}",
            *(f"{ns / 1e6:.2f}" for ns in times),
        )
    console.print(table)


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
    parser.add_argument("--graphs", type=int, default=500, help="random graphs to compare on")
    parser.add_argument("--seed", type=int, help="of the random graphs (default: fresh)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    says = Console(stderr=True)
    result = run(graphs=chosen.graphs, seed=chosen.seed, progress=says.print)
    if chosen.json:
        print(json.dumps(result.as_json()))
    else:
        show(Console(), result)


if __name__ == "__main__":
    main()
