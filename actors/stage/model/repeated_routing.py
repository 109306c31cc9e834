"""Routing as in a run, in place of what routers choose on random values: profiles are measured so.

Legend: t this rank's tokens, k experts that a token visits, E experts.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from torch import Tensor

from braid.actors.stage.model.model import PartInstance, StageModel
from braid.actors.stage.model.routing import Routing
from braid.kernels.operators.router import Router, count_visits
from braid.scheduling.model.operators import Kind, Operator, Phase

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


class RepeatedRouting:
    """``choices``: of a run, each (t, k). By turns they stand in the place of what routers choose."""

    def __init__(self, model: StageModel, choices: Sequence[Tensor]) -> None:
        self._exchanges = exchanges_rows(model)
        self._choices = cycle(choices) if choices else None
        self.rows: list[int] = []
        """That came to this rank's experts, pass by pass."""

    def of(self, operator: Operator, results: Sequence[Any]) -> Sequence[Any]:
        """An operator's results; a router's with the next choices of the run."""
        if not self._exchanges or operator.kind is not Kind.ROUTER:
            return results
        if operator.phase is Phase.FORWARD and len(results) == _ROWS_TOLD:
            self.rows.append(sum(results[-1]))  # rows of every expert of this rank
        if not _is_router(operator) or len(results) != _ROUTED:
            return results
        gates_tk, _, _, scores_tE = results
        if self._choices is None:
            return results
        choice_tk = next(self._choices)
        return gates_tk, choice_tk, count_visits(choice_tk, scores_tE.shape[1]), scores_tE


_ROUTED, _ROWS_TOLD = 4, 5
"""Results of `Router`, and of `ExpertRows`, which finds the rows that follow from all ranks' choices."""


def _is_router(operator: Operator) -> bool:
    return operator.kind is Kind.ROUTER and operator.phase is Phase.FORWARD
