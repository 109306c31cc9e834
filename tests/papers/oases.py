"""Plans of Oases beside what its paper published, on a profile of measured block costs.

Published numbers are facts of Oases (Li et al.), tables II and III, for the cluster without NVLink; no
constant here is fitted to them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final

from braid.scheduling.plan.tensor_degrees import DegreeProblem, plan_degrees, strategy_cost
from tests.papers.block_profile import BlockProfile, problem_from_profile
from tests.papers.rows import Row, claim
from tests.scheduling.test_tensor_degrees import fully_recomputed

DEVICES: Final = 32
"""8 nodes of 4 GPUs (section VI-A), whose tokens are counted together: fewer could not reach the published
throughput if they only computed."""

USABLE_BYTES: Final = 24 * 2**30 * 95 // 100
"""What the paper's planner leaves to the model on a 24 GiB GPU, by the authors' public source."""


@dataclass(frozen=True)
class PublishedModel:
    """A row of table III, with the strategy of table II."""

    name: str
    hidden: int
    layers: int
    degree: int
    global_batch: int
    strategy: tuple[int, ...]
    """Degrees of the layers."""


PUBLISHED: Final = (
    PublishedModel("BERT-1.3B", 2048, 24, 4, 128, (2,) * 8 + (4,) * 16),
    PublishedModel("LLaMA-7B", 4096, 16, 4, 32, (2,) * 10 + (4,) * 6),
)

row: Final = partial(claim, "Oases")


def oases_rows(profile: BlockProfile) -> Iterator[Row]:
    for model in PUBLISHED:
        free = _problem(model, profile)
        planned = plan_degrees(_problem(model, profile, sorted(set(model.strategy))))
        degrees = tuple(choice.degree for choice in planned)
        yield strategy_row(model, degrees, lambda chosen, free=free: _cost_ns(free, chosen))


def strategy_row(
    model: PublishedModel, ours: tuple[int, ...], cost_ns: Callable[[tuple[int, ...]], int]
) -> Row:
    """Table II: the plan, of the same degrees, is not slower than the published strategy, by equation 5."""
    degrees = (ours, model.strategy, (model.degree,) * model.layers)
    shown, (own_ns, published_ns, single_ns) = [*map(described, degrees)], map(cost_ns, degrees)
    what = f"{model.name}: our plan over the published one, same degrees (not slower)"
    over = f"over {shown[2]}: {single_ns / own_ns - 1:+.0%} and {single_ns / published_ns - 1:+.0%}"
    note = f"ours {shown[0]}, published {shown[1]}; {over}"
    return row("table II", what, "%", 100 * (published_ns / own_ns - 1), own_ns <= published_ns, note)


def _problem(
    model: PublishedModel, profile: BlockProfile, degrees: Sequence[int] | None = None
) -> DegreeProblem:
    return problem_from_profile(
        profile,
        hidden=model.hidden,
        layers=model.layers,
        devices=DEVICES,
        global_batch=model.global_batch,
        memory_limit_bytes=USABLE_BYTES,
        degrees=degrees,
    )


def described(degrees: Sequence[int]) -> str:
    """Equal degrees in a row, in the order of the layers, as in table II: ``[2]x8+[4]x16``."""
    return "+".join(f"[{degree}]x{len([*run])}" for degree, run in groupby(degrees))


def _cost_ns(problem: DegreeProblem, degrees: tuple[int, ...]) -> int:
    return strategy_cost(problem, fully_recomputed(degrees))
