"""Computes how a step spread tokens over experts, for its record, from the sums of all ranks.

Legend: L layers with experts, E experts of each, G groups of ranks that exchange tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.actors.stage.rank.messages import RoutingSums
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape

_COUNTS_A_RECORD: Final = 256
"""Average number of visit counts per record, some 2 KB: up to 32 layers of 8 experts, every record has all
counts."""
_PLACES: Final = 5
"""Decimal places to which ratios and shares are rounded."""


@dataclass(frozen=True, kw_only=True)
class ExpertNumbers:
    """Expert load in one step: means over layers unless stated otherwise; ``worst_`` fields are the worst
    layer's."""

    imbalance: float
    """Visits of the fullest expert over the average: 1 if all have equally many, at most E. It equals 1 +
    MaxVio of Wang et al. 2024 (arXiv 2408.15664)."""
    worst_imbalance: float
    entropy: float
    """Entropy of the load, relative to log E, that of a balanced load, so that models of any E can be
    compared. E to its power is the number of equally loaded experts with the same entropy."""
    worst_entropy: float
    unvisited: int
    """Number of experts that no token visited, summed over layers."""
    worst_unvisited: int
    """Largest number of unvisited experts in one layer."""
    dropped: float | None = None
    """Share of visits that were dropped for lack of capacity; None if experts have no capacity limit."""
    worst_dropped: float | None = None
    rank_imbalance: float | None = None
    """Rows of the fullest rank over the average rank of its stage. None if experts are not distributed (ep
    1), or have a capacity: then all ranks compute equally many rows. Rows are counted over the step: single
    micro-batches, after each of which ranks wait for each other, differ more."""
    worst_rank_imbalance: float | None = None
    balance_loss: float | None = None
    """Balancing loss per token, summed over layers, which is trained in addition to ``loss``. None if there
    is none."""
    z_loss: float | None = None
    layers: tuple[int, ...] = ()
    """Numbers of the layers in ``visits``."""
    visits: tuple[tuple[int, ...], ...] = ()
    """Visits of every expert, layer by layer (L x E); empty in records that omit them (`tells_visits`)."""


def tells_visits(shape: ModelShape, step: int, last: int) -> bool:
    """Return whether the record of a step (from 1) contains all counts; large models record them only every
    so many steps."""
    every = ceil(shape.expert_layers * shape.experts / _COUNTS_A_RECORD)
    return step == last or (step - 1) % max(1, every) == 0


def expert_numbers(
    ranks: Sequence[RoutingSums | None],
    shape: ModelShape,
    layout: ParallelLayout,
    tokens: int,
    *,
    visits: bool,
) -> ExpertNumbers | None:
    """Compute a step's numbers from the sums of all ranks; None without experts. ``tokens``: number of tokens
    in the step. ``visits``: whether to include all counts.
    """
    layers = tuple(sorted({layer for sums in ranks if sums is not None for layer in sums.layers}))
    if not layers:
        return None
    visits_LE = _added(layers, shape.experts, ranks)
    dropped_L = np.zeros(len(layers), np.int64)
    losses_2 = np.zeros(2)
    for sums in (sums for sums in ranks if sums is not None):
        dropped_L[[layers.index(layer) for layer in sums.layers]] += sums.dropped
        losses_2 += sums.losses.sum(0)
    shares_LE = visits_LE / visits_LE.sum(1, keepdims=True)
    logs_LE = np.log(np.where(shares_LE > 0, shares_LE, 1.0))
    entropy_L = (
        -(shares_LE * logs_LE).sum(1) / log(shape.experts) if shape.experts > 1 else np.ones(len(layers))
    )
    numbers: dict[str, Any] = {
        **_mean_and_worst("imbalance", shares_LE.max(1) * shape.experts, max),
        **_mean_and_worst("entropy", entropy_L, min),
    }
    if shape.capacity_factor:
        numbers |= _mean_and_worst("dropped", dropped_L / visits_LE.sum(1), max)
    elif layout.ep > 1:
        numbers |= _mean_and_worst("rank_imbalance", _rank_imbalance(layers, ranks, shape, layout), max)
    unvisited_L = (visits_LE == 0).sum(1)
    return ExpertNumbers(
        **numbers,
        unvisited=int(unvisited_L.sum()),
        worst_unvisited=int(unvisited_L.max()),
        balance_loss=float(losses_2[0] / tokens) if shape.balance_loss else None,
        z_loss=float(losses_2[1] / tokens) if shape.z_loss else None,
        layers=layers if visits else (),
        visits=tuple(map(tuple, visits_LE.tolist())) if visits else (),
    )


def _added(layers: Sequence[int], experts: int, ranks: Iterable[RoutingSums | None]) -> NDArray[np.int64]:
    """Add up the visits of all ranks (L x E)."""
    visits_LE = np.zeros((len(layers), experts), np.int64)
    for sums in (sums for sums in ranks if sums is not None):
        visits_LE[[layers.index(layer) for layer in sums.layers]] += sums.visits
    return visits_LE


def _mean_and_worst(name: str, values_L: NDArray[np.float64], worst: Any) -> dict[str, float]:
    values = values_L.tolist()
    mean = sum(values) / len(values)
    return {name: round(mean, _PLACES), f"worst_{name}": round(worst(values), _PLACES)}


def _rank_imbalance(
    layers: Sequence[int], ranks: Sequence[RoutingSums | None], shape: ModelShape, layout: ParallelLayout
) -> NDArray[np.float64]:
    """Return the rows of the fullest rank over the average, by layer.

    Tensor-parallel ranks each have a part of the width of the same experts, so they compute the same rows.
    """
    mesh = layout.mesh
    groups = mesh.groups((*mesh.factors_of("ep"), *mesh.factors_of("tp")))  # ranks that exchange tokens
    visits_LGE = np.stack([_added(layers, shape.experts, (ranks[r] for r in group)) for group in groups], 1)
    rows_LG_ranks = visits_LGE.reshape(*visits_LGE.shape[:2], layout.ep, -1).sum(3)
    # A group of another stage has no rows of a layer; all groups with rows of a layer have equally many.
    groups_L = (rows_LG_ranks.sum(2) > 0).sum(1)
    average_L = rows_LG_ranks.sum((1, 2)) / (groups_L * layout.ep)
    imbalance_L: NDArray[np.float64] = rows_LG_ranks.max((1, 2)) / average_L
    return imbalance_L
