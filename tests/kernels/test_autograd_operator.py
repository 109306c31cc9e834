"""User modules through autograd."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from braid.kernels.operators.autograd import AutogradOperator
from tests.kernels.cases import assert_close, prepare

pytestmark = pytest.mark.slow


class Mixed(nn.Module):
    """Two floating-point inputs and an index; two outputs; a parameter that is frozen and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, index: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.inner(x + self.table(index)))
        return hidden * self.frozen, skip * hidden.sum(-1, keepdim=True)


def run(operator, module):
    """Compare with plain autograd; return the graph and the gradients of the outputs."""
    torch.manual_seed(1)
    before = prepare(operator, torch.float64)
    x, skip = torch.randn(6, 3).requires_grad_(), torch.randn(6, 1).requires_grad_()
    index = torch.randint(5, (6,))
    outputs = module(x, index, skip)
    d_outputs = [torch.randn_like(output) for output in outputs]
    names = [name for name, p in module.named_parameters() if p.requires_grad and name != "unused"]
    parameters = [module.get_parameter(name) for name in names]
    expected = torch.autograd.grad(outputs, [x, skip, *parameters], d_outputs)
    with torch.no_grad():
        *actual, graph = operator(x.detach(), index, skip.detach())
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(actual, outputs, strict=True))
        d_inputs = operator.input_gradient(*d_outputs, graph)
    for gradient, reference in zip(d_inputs, expected[:2], strict=True):
        assert_close(gradient, reference)
    changed = dict(zip(names, expected[2:], strict=True))
    for name, _ in module.named_parameters():
        assert_close(operator.gradients[f"module.{name}"], before[f"module.{name}"] + changed.get(name, 0))
    return graph, d_outputs


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_any_module_equals_autograd():
    module = Mixed()
    operator = AutogradOperator(module=module)
    graph, d_outputs = run(operator, module)
    assert graph.inputs == ()
    with pytest.raises(AssertionError, match="freed"):
        operator.input_gradient(*d_outputs, graph)


def test_input_that_the_output_ignores_gets_zeros():
    class First(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2

    operator = AutogradOperator(module=First())
    with torch.no_grad():
        output, graph = operator(torch.ones(3), torch.ones(2))
        dx, dy = operator.input_gradient(torch.ones(3), graph)
    assert torch.equal(output, torch.full((3,), 2.0))
    assert torch.equal(dx, torch.full((3,), 2.0))
    assert torch.equal(dy, torch.zeros(2))


def test_graph_frees_what_it_saved():
    saved = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            inner = (x * self.weight).exp()
            saved.append(weakref.ref(inner.untyped_storage()))
            return inner.sin()

    operator = AutogradOperator(module=Watched())
    prepare(operator, torch.float64)
    with torch.no_grad():
        x = torch.ones(3)
        saved.append(weakref.ref(x.untyped_storage()))
        _, graph = operator(x)
        del x
        gc.collect()
        assert all(reference() is not None for reference in saved)
        operator.input_gradient(torch.ones(3), graph)
    gc.collect()
    assert graph.inputs == ()
    assert all(reference() is None for reference in saved)
