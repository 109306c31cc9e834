"""Routing as uneven as asked for, or as in a run, in place of what routers choose: profiles are measured so.

Legend: t this rank's tokens, k experts that a token visits, E experts.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.routing import Routing
from braid.kernels.operators.router import Router, count_visits
from braid.scheduling.operators import Kind, Operator
from braid.scheduling.operators import Pass as Phase

_HALVINGS, _DRAWN = 12, 4096
_KEPT = 64
"""Choices, as many as a profile of some rounds asks for."""


class ChoicesMade(Routing):
    """Keeps which experts routers chose in the forward passes of a step, layer by layer as they ran."""

    def __init__(self, model: StageModel) -> None:
        super().__init__(model)
        self.choices: list[Tensor] = []
        """Each (t, k)."""
        self.wanted = exchanges_rows(model)

    def watched(self, op: Operator, instance: PartInstance, call: Callable[..., Any]) -> Callable[..., Any]:
        """A router's forward method that also keeps its choice; else itself."""
        if not _is_router(op) or not isinstance(instance.modules.get(op.module), Router):
            return call

        def forward(x_tD: Tensor) -> Any:
            results = call(x_tD)
            if len(self.choices) < _KEPT:
                self.choices.append(results[1].clone())
            return results

        return forward


def exchanges_rows(model: StageModel) -> bool:
    """Whether ranks send each other as many rows of tokens as their routers choose."""
    return model.layout.ep > 1 and not model.shape.capacity_factor


class UnevenRouting:
    """``imbalance``: rows of the rank of ep with most, the first one, over the average; the others have as
    many each, and so have the experts of a rank. None: as in ``choices``, each (t, k), by turns; where there
    are none of these either, whatever routers choose.
    """

    def __init__(
        self,
        model: StageModel,
        imbalance: float | None,
        choices: Sequence[Tensor],
        generator: torch.Generator,
    ) -> None:
        shape, layout = model.shape, model.layout
        self._generator = generator
        self._exchanges = exchanges_rows(model)
        self._choices = cycle(choices) if choices else None
        self._chances_E: Tensor | None = None
        self.rows: list[int] = []
        """That came to this rank's experts, pass by pass."""
        if imbalance is not None and self._exchanges:
            device, held = model.context.device, shape.experts // layout.ep
            first_E = (torch.arange(shape.experts, device=device) < held).double()
            self._chances_E = _chances(first_E, imbalance / layout.ep, shape.top_k, generator)

    def of(self, operator: Operator, results: Sequence[Any]) -> Sequence[Any]:
        """An operator's results; a router's with the choices that are asked for, of all experts once."""
        if not self._exchanges or operator.kind is not Kind.ROUTER:
            return results
        if operator.phase is Phase.FORWARD and len(results) == _ROWS_TOLD:
            self.rows.append(sum(results[-1]))  # rows of every expert of this rank
        if not _is_router(operator) or len(results) != _ROUTED:
            return results
        gates_tk, choice_tk, _, scores_tE = results
        if self._chances_E is not None:
            chances_tE = self._chances_E.expand_as(scores_tE)
            choice_tk = torch.multinomial(chances_tE, choice_tk.shape[1], generator=self._generator)
        elif self._choices is not None:
            choice_tk = next(self._choices)
        else:
            return results
        return gates_tk, choice_tk, count_visits(choice_tk, scores_tE.shape[1]), scores_tE


_ROUTED, _ROWS_TOLD = 4, 5
"""Results of `Router`, and of `ExpertRows`, which finds the rows that follow from all ranks' choices."""


def _is_router(operator: Operator) -> bool:
    return operator.kind is Kind.ROUTER and operator.phase is Phase.FORWARD


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
