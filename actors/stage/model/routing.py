"""Observes routers in the training passes of a step: sums for records, and choices that profiles repeat.

Every rank routes its own tokens: a step's tokens are divided over dp, cp and tp. So sums over ranks count
each token once.

Legend: t tokens of this rank, k experts that a token visits, E experts, L layers of this rank with a router.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.model.model import PartInstance, StageModel
from braid.actors.stage.rank.messages import RoutingSums
from braid.kernels.operators.router import Router, count_visits
from braid.scheduling.model.operators import Kind, Operator, Phase

_KEPT = 64
"""Number of choices that are stored, enough for a profile of some rounds."""


class Routing:
    """Routers' statistics of one rank, added up on its device and read once at a step's end.

    `watched` is called only when training code is bound: validation and profiling are not counted, and
    recomputation has another phase than the first forward pass.
    """

    def __init__(self, model: StageModel) -> None:
        shape = model.shape
        instances = (instance for chunk in model.chunks.values() for instance in chunk)
        self._layers = tuple(sorted({one.index for one in instances if _routes(one)}))
        tokens = model.context.sizes.local_tokens
        self._capacity = shape.capacity(tokens) if shape.capacity_factor else None
        self._sums_LX = torch.zeros(
            len(self._layers), shape.experts + 3, dtype=torch.float64, device=model.context.device
        )
        """Visits of every expert, dropped visits, and the two auxiliary losses, in one tensor, so that one
        copy reads all. Float64 counts exactly up to 2^53."""

    def clear(self) -> None:
        """Set all sums to 0; called when a step begins."""
        self._sums_LX.zero_()

    def watched(self, op: Operator, instance: PartInstance, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls ``call`` and also adds to the sums, if ``op`` is a router; otherwise
        ``call`` itself.

        The forward method counts visits. The auxiliary losses are added up where their gradients are
        computed, as only there scores and the load of the whole micro-batch are available.
        """
        module = instance.modules.get(op.module)
        if op.kind is not Kind.ROUTER or not isinstance(module, Router):
            return call  # sums of gradients at a router's input have the router's name, too
        sums_X = self._sums_LX[self._layers.index(instance.index)]
        match op.phase:
            case Phase.FORWARD:
                return self._counting(call, sums_X)
            case Phase.INPUT_GRADIENT if module.balance_loss or module.z_loss:
                return _adding_losses(call, module, sums_X[-2:])
        return call

    def _counting(self, call: Callable[..., Any], sums_X: Tensor) -> Callable[..., Any]:
        visits_E, dropped, capacity = sums_X[:-3], sums_X[-3], self._capacity

        def forward(x_tD: Tensor) -> Any:
            results = call(x_tD)
            _, _, counts_E, _ = results
            visits_E.add_(counts_E)
            if capacity is not None:
                dropped.add_((counts_E - capacity).clamp_(min=0).sum())
            return results

        return forward

    def read(self) -> RoutingSums:
        """Return the sums since `clear`; the host waits for the device."""
        sums_LX = self._sums_LX.cpu().numpy()
        return RoutingSums(
            layers=self._layers,
            visits=sums_LX[:, :-3].astype("int64"),
            dropped=sums_LX[:, -3].astype("int64"),
            losses=sums_LX[:, -2:].copy(),
        )


def _routes(instance: PartInstance) -> bool:
    return any(isinstance(module, Router) for module in instance.modules.values())


def _adding_losses(call: Callable[..., Any], module: Router, losses_2: Tensor) -> Callable[..., Any]:
    def input_gradient(
        d_gates_tk: Tensor, scores_tE: Tensor, choice_tk: Tensor, load_E: Tensor, scale: float
    ) -> Any:
        losses_2.add_(module.losses(scores_tE, load_E))
        return call(d_gates_tk, scores_tE, choice_tk, load_E, scale)

    return input_gradient


class ChoicesMade(Routing):
    """Stores the routers' choices in a step's forward passes, in the order of execution."""

    def __init__(self, model: StageModel) -> None:
        super().__init__(model)
        self.choices: list[Tensor] = []
        """Choices of experts, each tensor (t, k)."""
        self.wanted = exchanges_rows(model)

    def watched(self, op: Operator, instance: PartInstance, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a router's forward method that stores the choice; for other operators ``call``."""
        if op.phase is not Phase.FORWARD or not isinstance(instance.modules.get(op.module), Router):
            return call

        def forward(x_tD: Tensor) -> Any:
            results = call(x_tD)
            if len(self.choices) < _KEPT:
                self.choices.append(results[1].clone())
            return results

        return forward


def exchanges_rows(model: StageModel) -> bool:
    """Return whether ranks exchange as many rows of tokens as their routers' choices require."""
    return model.layout.ep > 1 and not model.shape.capacity_factor


class RepeatedRouting:
    """Replaces routers' choices by recorded ``choices`` of a run, each (t, k), which are used in turn."""

    def __init__(self, model: StageModel, choices: Sequence[Tensor]) -> None:
        self._exchanges = exchanges_rows(model)
        self._choices = cycle(choices) if choices else None
        self.rows: list[int] = []
        """Number of rows that this rank's experts received, pass by pass."""

    def of(self, operator: Operator, results: Sequence[Any]) -> Sequence[Any]:
        """Return an operator's results; those of a router with the next recorded choices."""
        if not self._exchanges or operator.kind is not Kind.ROUTER or operator.phase is not Phase.FORWARD:
            return results
        match results:
            case _, _, _, _, sizes:  # from `ExpertRows`, which has all ranks' choices
                self.rows.append(sum(sizes))
            case gates_tk, _, _, scores_tE if self._choices is not None:  # from `Router`
                choice_tk = next(self._choices)
                return gates_tk, choice_tk, count_visits(choice_tk, scores_tE.shape[1]), scores_tE
        return results
