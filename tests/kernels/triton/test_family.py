"""``train.kernels``: which classes it gives, and that Triton's keep the contract of PyTorch's."""

import importlib.util
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.kernels.family import TORCH, OperatorFamily, candidates, names, operator_family
from braid.kernels.operators.attention import BACKENDS
from braid.kernels.operators.operator import ComputeOperator
from braid.kernels.triton import launch
from tests.kernels.cases import CASES, DEVICE, check, normal, prepare

TRITON = operator_family("triton", DEVICE, torch.float32)
COUNTERPARTS = {getattr(TORCH, field.name): getattr(TRITON, field.name) for field in fields(OperatorFamily)}
CPU = torch.device("cpu")

WITH_TWINS = [make for make in CASES if type(make(1, 1, torch.float32).operator) in COUNTERPARTS]

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the cases of PyTorch's operators are on the CPU"
)


def counterpart(operator: ComputeOperator) -> ComputeOperator:
    """The same operator with Triton's methods."""
    operator.__class__ = COUNTERPARTS[type(operator)]
    return operator


@pytest.mark.parametrize("make", WITH_TWINS, ids=lambda make: make.__name__)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from([0, 1, 9, 40, 70]),
    width=st.sampled_from([1, 5, 16, 17, 130, 1100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=6, deadline=None)  # the interpreter is slow
def test_twins_do_what_the_operators_do(make, seed, tokens, width, dtype):
    """Outputs, input gradients, and weight gradients added twice, against float64 autograd; of inputs whose
    rows lie apart, too."""
    torch.manual_seed(seed)
    case = make(tokens, width, dtype)
    gap = int(torch.randint(3, ()))
    inputs = [normal(len(x), x.shape[1] + gap, dtype=dtype)[:, : x.shape[1]] for x in case.inputs]
    counterpart(case.operator)
    check(replace(case, inputs=inputs), dtype)


@pytest.mark.parametrize("make", WITH_TWINS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_twins_save_the_same_values(make):
    """Shapes, dtypes and strides: the graphs' accounts of memory hold for both."""
    torch.manual_seed(0)
    case = make(6, 20, torch.bfloat16)
    prepare(case.operator, torch.float32)
    ours = case.operator(*case.inputs)
    theirs = counterpart(case.operator)(*case.inputs)
    assert [(x.shape, x.dtype, x.stride()) for x in ours] == [(x.shape, x.dtype, x.stride()) for x in theirs]


def test_auto_takes_what_was_chosen_and_on_cuda_alone():
    asked = []

    def choose():
        asked.append(True)
        return {"swiglu": "triton", "attention": "torch+flash", "rms_norm": "torch"}

    cuda = torch.device("cuda")
    on_cpu = [("auto", CPU, torch.float32), ("auto", CPU, torch.bfloat16)]
    for asking in (*on_cpu, ("auto", cuda, torch.float64), ("torch", cuda, torch.bfloat16)):
        assert operator_family(*asking, choose) == TORCH
    assert operator_family("auto", cuda, torch.bfloat16) == TORCH, "nobody was there to choose"
    assert not asked
    chosen = operator_family("auto", cuda, torch.bfloat16, choose)
    assert (chosen.swiglu, chosen.rms_norm, chosen.gelu) == (TRITON.swiglu, TORCH.rms_norm, TORCH.gelu)
    attention = chosen.attention(heads=2, kv_heads=1, head_dim=4, sequence=3, rotary_base=None)
    assert type(attention) is TORCH.attention
    assert attention.backend == BACKENDS["flash"]


def test_candidates(monkeypatch):
    ways = ["", "+flash", "+cudnn", "+efficient"]
    both = [f"{name}{way}" for name in ("torch", "triton") for way in ways]
    gelus = [("torch", TORCH.gelu), ("triton", TRITON.gelu)]
    assert list(candidates("gelu", CPU, torch.float32).items()) == gelus
    assert sorted(candidates("attention", CPU, torch.float32)) == sorted(both)
    for name in ("gelu", "attention"):
        assert set(candidates(name, CPU, torch.float32)) == set(names(name))
    monkeypatch.setattr(launch, "INTERPRETING", False)
    assert list(candidates("gelu", CPU, torch.float32)) == ["torch"]
    assert sorted(candidates("attention", CPU, torch.float32)) == sorted(both[:4])


@torch.no_grad()
def test_a_backend_of_attention_is_what_computes_it():
    """The CPU has one of them."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "sequence": 5, "rotary_base": 100.0}
    qkv = torch.randn(10, 64)
    (o, _), (o_, _) = (TORCH.attention(**sizes, backend=backend)(qkv) for backend in (None, "flash"))
    assert torch.equal(o, o_)
    with pytest.raises(RuntimeError, match="backend"):
        TRITON.attention(**sizes, backend="cudnn")(qkv)
    assert torch.equal(TORCH.attention(**sizes)(qkv)[0], o), "torch chooses again afterwards"


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
