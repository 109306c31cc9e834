"""``train.kernels``: which classes it gives, and that Triton's keep the contract of PyTorch's."""

import importlib.util
from dataclasses import fields

import pytest
import torch

from braid.kernels import family
from braid.kernels.family import TORCH, OperatorFamily, operator_family
from braid.kernels.fused import launch
from braid.kernels.operators.operator import ComputeOperator
from tests.kernels.cases import CASES, assert_close, check, prepare
from tests.kernels.fused.cases import DEVICE

TRITON = operator_family("triton", DEVICE, torch.float32)
TWINS = {getattr(TORCH, field.name): getattr(TRITON, field.name) for field in fields(OperatorFamily)}
CPU = torch.device("cpu")

WITH_TWINS = [make for make in CASES if type(make(1, 1, torch.float32).operator) in TWINS]

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the cases of PyTorch's operators are on the CPU"
)


def twin(operator: ComputeOperator) -> ComputeOperator:
    """The same operator with Triton's methods."""
    operator.__class__ = TWINS[type(operator)]
    return operator


@pytest.mark.parametrize("make", WITH_TWINS, ids=lambda make: make.__name__)
def test_twins_do_what_the_operators_do(make):
    """Outputs, input gradients, and weight gradients added twice, against float64 autograd."""
    torch.manual_seed(0)
    case = make(7, 21, torch.float32)
    twin(case.operator)
    check(case, torch.float32)


@pytest.mark.parametrize("make", WITH_TWINS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_twins_save_the_same_values(make):
    """Shapes, dtypes and strides: the graphs' accounts of memory hold for both."""
    torch.manual_seed(0)
    case = make(6, 20, torch.bfloat16)
    prepare(case.operator, torch.float32)
    ours = case.operator(*case.inputs)
    theirs = twin(case.operator)(*case.inputs)
    assert [(x.shape, x.dtype, x.stride()) for x in ours] == [(x.shape, x.dtype, x.stride()) for x in theirs]


@pytest.mark.parametrize("rotary_base", [None, 10000.0])
@torch.no_grad()
def test_attention(rotary_base):
    torch.manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 6, "sequence": 5, "rotary_base": rotary_base}
    qkv, d_o = torch.randn(10, 48), torch.randn(10, 24)
    (o, saved), (o_, saved_) = TORCH.attention(**sizes)(qkv), TRITON.attention(**sizes)(qkv)
    assert_close(o_, o, 1e-6)
    (d_qkv,) = TORCH.attention(**sizes).input_gradient(d_o, saved)
    (d_qkv_,) = TRITON.attention(**sizes).input_gradient(d_o, saved_)
    assert_close(d_qkv_, d_qkv, 1e-5)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@torch.no_grad()
def test_cross_entropy(scale):
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 30), torch.randint(50, (9,))
    log_partition = logits.logsumexp(-1) + 1
    results = []
    for kind in (TORCH.cross_entropy_statistics, TRITON.cross_entropy_statistics):
        operator, own = kind(rows=30, first_row=10, vocabulary=50), logits.clone()
        (statistics,) = operator(own, targets)
        (d_logits,) = operator.input_gradient(own, log_partition, targets, scale)
        assert d_logits is own
        results.append((statistics, d_logits))
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-6)


def test_auto_takes_what_has_won(monkeypatch):
    assert operator_family("auto", CPU, torch.float32) == TORCH
    assert operator_family("torch", CPU, torch.float32) == TORCH
    cuda = torch.device("cuda")
    assert operator_family("auto", cuda, torch.bfloat16) == TORCH, "nothing was measured yet"
    monkeypatch.setattr(family, "TRITON_WINS", frozenset({"swiglu"}))
    chosen = operator_family("auto", cuda, torch.bfloat16)
    assert (chosen.swiglu, chosen.linear) == (TRITON.swiglu, TORCH.linear)
    assert operator_family("auto", CPU, torch.bfloat16) == TORCH
    assert operator_family("auto", cuda, torch.float64) == TORCH


def test_triton_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match=r"train\.kernels='triton'.*fp64"):
        operator_family("triton", CPU, torch.float64)
    monkeypatch.setattr(launch, "INTERPRETING", False)
    with pytest.raises(ValueError, match=r"train\.kernels='triton': this rank has no CUDA device"):
        operator_family("triton", CPU, torch.float32)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else find_spec(name, *more)
    )
    assert operator_family("auto", torch.device("cuda"), torch.float32) == TORCH
    with pytest.raises(ValueError, match=r"Triton is not installed"):
        operator_family("triton", torch.device("cuda"), torch.float32)
