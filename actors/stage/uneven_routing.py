"""Routing as uneven as asked for, in place of what a router has chosen: profiles are measured at it.

Legend: t this rank's tokens, k experts that a token visits, E experts.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.model import StageModel
from braid.kernels.operators.router import count_visits
from braid.scheduling.operators import Kind, Operator
from braid.scheduling.operators import Pass as Phase

_HALVINGS, _DRAWN = 12, 4096


class UnevenRouting:
    """``imbalance``: rows of the rank of ep with most, the first one, over the average; the others have as
    many each, and so have the experts of a rank. None: whatever routers choose.
    """

    def __init__(self, model: StageModel, imbalance: float | None, generator: torch.Generator) -> None:
        shape, layout = model.shape, model.layout
        self._generator, self._ranks, self._met = generator, layout.ep, list[float]()
        self._exchanges = layout.ep > 1 and not shape.capacity_factor
        self._chances_E: Tensor | None = None
        if imbalance is not None and self._exchanges:
            device, held = model.context.device, shape.experts // layout.ep
            first_E = (torch.arange(shape.experts, device=device) < held).double()
            self._chances_E = _chances(first_E, imbalance / layout.ep, shape.top_k, generator)

    @property
    def met(self) -> float:
        """The mean imbalance of what this rank sent out; 0 where no rows are exchanged."""
        return round(fmean(self._met), 3) if self._met else 0.0

    def of(self, operator: Operator, results: Sequence[Any]) -> Sequence[Any]:
        """An operator's results; a router's with the choices that are asked for, of all experts once."""
        routes = operator.kind is Kind.ROUTER and operator.phase is Phase.FORWARD and len(results) == 4
        if not routes or not self._exchanges:
            return results
        gates_tk, choice_tk, counts_E, scores_tE = results
        if self._chances_E is not None:
            chances_tE = self._chances_E.expand_as(scores_tE)
            choice_tk = torch.multinomial(chances_tE, choice_tk.shape[1], generator=self._generator)
            counts_E = count_visits(choice_tk, scores_tE.shape[1])
        rows = counts_E.view(self._ranks, -1).sum(1)
        self._met.append(float(rows.max() / rows.double().mean()))
        return gates_tk, choice_tk, counts_E, scores_tE


def _chances(first_E: Tensor, share: float, choices: int, generator: torch.Generator) -> Tensor:
    """Chances of experts with which those of the first rank get a share of all visits.

    As a token visits an expert once, that takes more than that share of the chances: found by halving.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        chances_E = first_E * (middle / first_E.sum()) + (1 - first_E) * (1 - middle) / (1 - first_E).sum()
        chosen = torch.multinomial(chances_E.expand(_DRAWN, -1), choices, generator=generator)
        found = float(first_E[chosen].mean())
        low, high = (middle, high) if found < share else (low, middle)
    return chances_E
