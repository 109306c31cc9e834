"""Every kernel as an operator of torch: what it refuses, its fake, its schema; under torch.compile."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.kernels.triton import activation, cross_entropy, norm, permute, rotary
from tests.kernels.triton.cases import DEVICE, assert_near


def f(*shape: int) -> Tensor:
    """Floats."""
    return torch.randn(shape, device=DEVICE)


def i(*values: int) -> Tensor:
    """int32 numbers."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


TARGETS = torch.tensor([0, 4, 2], device=DEVICE)
SLOTS = i(0, 1, 2, -1, 3, 4).view(3, 2)
ROTARY = (f(2, 3, 4, 6), f(2, 3, 2, 6), f(2, 3, 2, 6), f(3, 3), f(3, 3))

GOOD: dict[Any, tuple[Any, ...]] = {
    norm.norm: (f(3, 5), f(5), None, 1e-5),
    norm.norm_input_gradient: (f(3, 5), f(3, 5), f(1, 3), f(5), f(3, 5)),
    norm.norm_weight_gradient: (f(3, 5), f(3, 5), f(2, 3), f(5), f(5)),
    activation.swiglu: (f(3, 10),),
    activation.swiglu_gradient: (f(3, 5), f(3, 10)),
    activation.gelu: (f(3, 5),),
    activation.gelu_gradient: (f(3, 5), f(3, 5)),
    rotary.rotary: (*ROTARY, False),
    cross_entropy.cross_entropy_statistics: (f(3, 5), TARGETS, 0, 5),
    cross_entropy.cross_entropy_gradient: (f(3, 5), f(3), TARGETS, f(), 1.0, 0),
    permute.gather_rows: (f(3, 5), i(0, 5, -1), 2, f(3, 2)),
    permute.combine_rows: (f(5, 4), SLOTS, f(3, 2)),
    permute.combine_weight_gradient: (f(3, 4), f(5, 4), SLOTS),
}
"""Arguments that every operator accepts."""


def name_of(operator: Any) -> str:
    """Its name among torch's operators."""
    return str(operator._opoverload.name()).removeprefix("braid::")


def arguments(operator: Any) -> list[tuple[str, Any]]:
    """Names and good values of an operator's arguments; tensors that it may change are copies."""
    names = inspect.signature(operator._init_fn).parameters
    values = [value.clone() if isinstance(value, Tensor) else value for value in GOOD[operator]]
    return list(zip(names, values, strict=True))


def test_every_operator_is_here() -> None:
    modules = {sys.modules[operator._init_fn.__module__] for operator in GOOD}
    values = [value for module in modules for value in vars(module).values()]
    assert {value for value in values if hasattr(value, "_opoverload")} == set(GOOD)


@pytest.mark.parametrize("operator", GOOD, ids=name_of)
def test_schema_and_fake(operator: Any) -> None:
    """Changes what it says, aliases nothing, and its fake predicts shapes, strides and dtypes."""
    values = tuple(value for _, value in arguments(operator))
    torch.library.opcheck(operator, values, test_utils=("test_schema", "test_faketensor"))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "dims": lambda x: x.unsqueeze(0),
    "dtype": lambda x: x.bool(),
    "strides": lambda x: torch.stack([x, x], dim=-1)[..., 0] if x.dim() else x.bool(),
}


@pytest.mark.parametrize("operator", GOOD, ids=name_of)
def test_wrong_tensors_are_refused_by_name(operator: Any) -> None:
    """Every tensor argument, damaged alone; the error names the operator and an argument."""
    good = arguments(operator)
    names = [name for name, _ in good]
    for place, (name, value) in enumerate(good):
        if not isinstance(value, Tensor):
            continue
        for damage in ("dims", "dtype", "strides"):
            values = [other for _, other in arguments(operator)]
            values[place] = WRONG[damage](value)
            if damage == "strides" and value.shape[-1:] == (1,):
                continue  # one element is contiguous however far its neighbours are
            with pytest.raises(ValueError, match=f"^{name_of(operator)}: ({'|'.join(names)}) ") as refusal:
                operator(*values)
            if place or damage != "dims":
                assert f": {name} " in str(refusal.value), damage


REFUSED = [
    (norm.norm, {"weight": f(5).to("meta")}, "weight", "is on meta"),
    (norm.norm_input_gradient, {"weight": f(5).to("meta")}, "weight", "is on meta"),
    (norm.norm, {"x": f(5, 3).t()}, "x", "last dim must be contiguous"),
    (norm.norm, {"x": f(3, 40000)}, "x", "40000 columns"),
    (activation.swiglu, {"gu": f(3, 9)}, "gu", "9 columns"),
    (rotary.rotary, {"q": f(2, 3, 4, 5), "k": f(2, 3, 2, 5), "v": f(2, 3, 2, 5)}, "q", "odd"),
    (rotary.rotary, {"cos": f(4, 3)}, "cos", "3 x 3"),
    (cross_entropy.cross_entropy_statistics, {"vocabulary": 4}, "targets", r"outside \[0, 4\)"),
    (permute.gather_rows, {"sources": i(0, 6)}, "sources", r"outside \[-1, 6\)"),
    (permute.combine_rows, {"slots": SLOTS + 1}, "slots", r"outside \[-1, 5\)"),
]


@pytest.mark.parametrize(
    ("operator", "changes", "argument", "says"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_values_are_refused(operator: Any, changes: dict[str, Any], argument: str, says: str) -> None:
    if "outside" in says and DEVICE.type != "cpu":
        pytest.skip("elsewhere a check of values would stall the device")
    values = {**dict(arguments(operator)), **changes}
    with pytest.raises(ValueError, match=f"^{name_of(operator)}: {argument} .*{says}"):
        operator(*values.values())


def test_under_torch_compile() -> None:
    """One graph without a break, with the eager result."""
    x, weight = f(6, 10), f(5)

    def block(x: Tensor) -> Tensor:
        a = activation.swiglu(x)
        return norm.norm(a * 2, weight, None, 1e-5)[0] + 1

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))


def test_out_of_range_on_a_device_is_nan_not_garbage() -> None:
    """The kernels, which on a GPU are reached with wrong indices, neither crash nor make up numbers."""
    statistics = torch.empty(3, 3, device=DEVICE)
    logits, targets = f(3, 5), torch.tensor([-1, 2, 99], device=DEVICE)
    cross_entropy.statistics_kernel[(3,)](logits, targets, statistics, 5, 5, 0, 5, BLOCK=16)
    assert statistics[:, 2].isnan().tolist() == [True, False, True]
    out = torch.empty(3, 5, device=DEVICE)
    permute.gather_kernel[(3,)](logits, i(0, 6, -1), logits, out, 5, 5, 2, 6, 1, WEIGHTED=False, BLOCK=16)
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert_near(out[0], logits[0].double(), torch.float32)
    permute.combine_kernel[(3,)](
        logits, i(0, 3, -1), logits, out, 5, 5, 3, 1, CHOICES=1, WEIGHTED=False, BLOCK=16
    )
    assert out.isnan().all(1).tolist() == [False, True, False]
