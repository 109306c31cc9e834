"""Is the pairing search exact, how near is the list schedule to the best order, and how long do both take?

Random pairs are drawn anew in each run; layers are those of presets on a modelled cluster.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.model.shape import Workload
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.list_schedule import exact_order, list_schedule, pairing_order
from braid.scheduling.plan.orders import layer_pair
from braid.scheduling.plan.pairing import pair
from braid.scheduling.plan.strands import PairProblem
from tests.scheduling.pairing_cases import brute_force, made_up_problem, round_robin

NEAR: Final = 0.02
"""A list schedule within this share of the best order counts as near."""
ROUNDING: Final = 1e-9
"""Share by which sums of the same times in another order may differ."""
SMALL, MIDDLE = (1, 5), (2, 6)
"""Operators of a graph that brute force takes, and that branch and bound takes."""


def run(graphs: int, seed: int, repeats: int = 3) -> dict[str, Any]:
    """Compare ``graphs`` random pairs with brute force and with branch and bound; search each of `LAYERS`."""
    draw = random.Random(seed)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "seed": seed,
        "exactness": exactness([made_up_problem(draw, SMALL) for _ in range(graphs)]),
        "nearness": nearness([made_up_problem(draw, MIDDLE) for _ in range(graphs)]),
        "layers": {name: layer_times(make(), repeats) for name, make in LAYERS.items()},
    }


def exactness(problems: Sequence[PairProblem]) -> dict[str, float]:
    """Pairing by dynamic programming beside brute force over all orders and segmentations, round robin and
    one operator after the other; the share of the serial time that it saves."""
    found = [(problem, pair(problem).ns) for problem in problems]
    differences = [abs(ns / brute_force(problem) - 1) for problem, ns in found]
    savings = [1 - ns / problem.serial_ns for problem, ns in found]
    over_robin = [ns / round_robin(problem).ns - 1 for problem, ns in found]
    return {
        "graphs": len(problems),
        "equal_to_brute_force": sum(difference <= ROUNDING for difference in differences),
        "largest_relative_difference": max(differences),
        "not_worse_than_round_robin": sum(more <= ROUNDING for more in over_robin),
        "not_worse_than_serial": sum(saving >= -ROUNDING for saving in savings),
        "median_saving": statistics.median(savings),
    }


def nearness(problems: Sequence[PairProblem]) -> dict[str, float]:
    """The list schedule, and the best segments between barriers, beside the best order (branch and bound)."""
    paired = [(problem, pair(problem), exact_order(problem).ns) for problem in problems]
    barriers = [segments.ns / exact - 1 for _, segments, exact in paired]
    listed = [list_schedule(one, [pairing_order(one, segments)]).ns for one, segments, _ in paired]
    losses = [ns / exact - 1 for ns, (_, _, exact) in zip(listed, paired, strict=True)]
    return {
        "graphs": len(problems),
        "within_two_percent_of_the_best": sum(loss <= NEAR for loss in losses),
        "equal_to_the_best": sum(loss <= ROUNDING for loss in losses),
        "worst_relative_loss": max(losses),
        "median_loss_of_barriers": statistics.median(barriers),
        "worst_loss_of_barriers": max(barriers),
    }


# -- layers of presets ---------------------------------------------------------------------------------------


def _layer(model: str, cluster: str, layout: ParallelLayout, context: str = "all_gather") -> PairProblem:
    work = Workload(global_batch=64, micro_batch=1)
    setting = Setting(model=model_preset(model), layout=layout, workload=work, context=context)
    return layer_pair(modelled(cluster_preset(cluster))(setting))


_LLAMA: Final = ParallelLayout(dp=8, tp=8)
_EXPERTS: Final = ParallelLayout(dp=16, tp=2, cp=2, ep=8)

LAYERS: Final[Mapping[str, Callable[[], PairProblem]]] = {
    "llama-25b, tp 8 on A40": partial(_layer, "llama-25b", "a40", _LLAMA),
    "llama-25b, tp 8 on A800": partial(_layer, "llama-25b", "a800", _LLAMA),
    "phi-42b, tp 2, cp 2 (all-gather), ep 8 on A800": partial(_layer, "phi-42b", "a800", _EXPERTS),
    "phi-42b, tp 2, cp 2 (ring), ep 8 on A800": partial(_layer, "phi-42b", "a800", _EXPERTS, "ring"),
}
"""Layers of presets as pairs of their two passes, by a name that says how they are laid out."""


def layer_times(problem: PairProblem, repeats: int) -> dict[str, Any]:
    """Operators of both passes, median seconds of both searches, and nanoseconds of what they find."""
    pair_s, list_s = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        segments = pair(problem)
        paired = time.perf_counter()
        order = list_schedule(problem, [pairing_order(problem, segments)])
        pair_s.append(paired - start)
        list_s.append(time.perf_counter() - paired)
    return {
        "operators": (len(problem.forward), len(problem.backward)),
        "pair_s": statistics.median(pair_s),
        "list_s": statistics.median(list_s),
        "pair_ns": segments.ns,
        "list_ns": order.ns,
        "serial_ns": problem.serial_ns,
        "busiest_stream_ns": problem.lower_bound_ns,
    }


def main() -> None:
    """Compare and measure; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=500, help="random graphs to compare on")
    fresh = random.SystemRandom().randrange(2**31)
    parser.add_argument("--seed", type=int, default=fresh, help="of the random graphs (default: fresh)")
    chosen = parser.parse_args()
    print(json.dumps(run(chosen.graphs, chosen.seed), indent=1))


if __name__ == "__main__":
    main()
