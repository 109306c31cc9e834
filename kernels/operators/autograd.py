"""Operators whose gradients torch's autograd derives; the graph of each operator is recorded separately."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from braid.kernels.operators.operator import ComputeOperator, Saved


class AutogradGraph(Saved):
    """The recorded autograd graph of one call, opaque to the executor.

    It holds the inputs and the tensors that autograd saved for the gradients, but not the outputs. Gradients
    can be computed once; then the graph is freed.
    """

    def __init__(self, inputs: tuple[Tensor, ...], outputs: Iterable[Tensor]) -> None:
        self.inputs = inputs
        self._edges: list[GradientEdge | None] = [
            get_gradient_edge(output) if output.requires_grad else None for output in outputs
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the graph keeps alive; the query to autograd is slow."""
        yield from self.inputs
        for edge in self._edges:
            if edge is not None:
                saved = (getattr(edge.node, name) for name in dir(edge.node) if name.startswith("_saved_"))
                yield from (value.detach() for value in saved if isinstance(value, Tensor))

    def gradients(self, d_outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``targets``; None for a target that the outputs do not depend on."""
        assert self._edges, "the graph was freed: its gradients have been computed"
        flowing = [(edge, d) for edge, d in zip(self._edges, d_outputs, strict=True) if edge is not None]
        self.inputs, self._edges = (), []
        if not flowing or not targets:
            return (None,) * len(targets)
        edges, d_edges = zip(*flowing, strict=True)
        gradients: tuple[Tensor | None, ...]
        gradients = torch.autograd.grad(edges, targets, d_edges, allow_unused=True)
        return gradients


def record(function: Callable[..., Any], *inputs: Any) -> tuple[tuple[Tensor, ...], AutogradGraph]:
    """Call ``function`` under autograd; return its outputs (one tensor or several), detached, and the graph.

    Floating-point tensors among the inputs become leaves, whose gradients the graph can compute.
    """
    arguments = [_leaf(value) for value in inputs]
    with torch.enable_grad():
        result = function(*arguments)
    outputs: tuple[Tensor, ...] = (result,) if isinstance(result, Tensor) else tuple(result)
    leaves = tuple(value for value in arguments if isinstance(value, Tensor) and value.requires_grad)
    return tuple(output.detach() for output in outputs), AutogradGraph(leaves, outputs)


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


class AutogradOperator(ComputeOperator):
    """Makes a compute operator of any `torch.nn.Module`, which maps tensors to one or several tensors.

    Gradients of its parameters are computed in ``input_gradient``.
    """

    def __init__(self, *, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the module's outputs, and the recorded graph as the last value."""
        outputs, graph = record(self.module, *inputs)
        return (*outputs, graph)

    def input_gradient(self, *values: Any) -> tuple[Tensor, ...]:
        """Map (gradients of the outputs..., graph) to the gradients of the floating-point inputs."""
        *d_outputs, graph = values
        inputs = graph.inputs
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        gradients = graph.gradients(d_outputs, (*inputs, *parameters.values()))
        for name, gradient in zip(parameters, gradients[len(inputs) :], strict=True):
            if gradient is not None:
                self.gradients[name].add_(gradient)
        d_inputs = zip(inputs, gradients, strict=False)
        return tuple(torch.zeros_like(x) if dx is None else dx for x, dx in d_inputs)

    def weight_gradient(self, *values: Any) -> None:
        """Do nothing: ``input_gradient`` has accumulated the gradients of the parameters."""
