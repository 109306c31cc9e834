"""Attention against explicit softmax and rotation; and what it keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from braid.kernels.operators import attention
from braid.kernels.operators.attention import Attention
from tests.kernels.cases import TOLERANCE, assert_close, attention_by_scores, normal, turned, wide_leaf


def check(operator: Attention, batch: int, dtype: torch.dtype) -> None:
    """Compare output and input gradient with the explicit softmax in float64."""
    qkv = normal(batch * operator.sequence, operator.width, dtype=dtype)
    leaf, kept = wide_leaf(qkv), qkv.clone()
    sizes, place = (operator.heads, operator.kv_heads, operator.rotary_base), torch.arange(operator.sequence)
    samples = leaf.view(batch, operator.sequence, -1)
    mask_bss = (place[:, None] >= place).expand(batch, -1, -1)
    expected = attention_by_scores(samples, *sizes, mask_bss, place.expand(batch, -1)).flatten(0, 1)
    d_o = normal(*expected.shape, dtype=dtype)
    (d_expected,) = torch.autograd.grad(expected, leaf, d_o.double())
    with torch.no_grad():
        o, saved = operator(qkv)
        assert torch.equal(qkv, kept)
        qkv.zero_()  # the executor may reuse the buffer
        (d_qkv,) = operator.input_gradient(d_o, saved)
    assert o.dtype == d_qkv.dtype == dtype
    assert d_qkv.is_contiguous()
    assert not o.requires_grad
    assert_close(o, expected, TOLERANCE[dtype])
    assert_close(d_qkv, d_expected, TOLERANCE[dtype])


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    sequence=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 5),
    base=st.sampled_from([None, 100.0, 10_000.0]),
)
@settings(max_examples=60, deadline=None)
def test_equals_explicit_softmax(seed, batch, sequence, kv_heads, group, half, base):
    torch.manual_seed(seed)
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 2 * half}
    check(Attention(**heads, sequence=sequence, rotary_base=base), batch, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(dtype):
    torch.manual_seed(0)
    check(Attention(heads=4, kv_heads=2, head_dim=16, sequence=33, rotary_base=500_000.0), 2, dtype)


def test_heads_are_repeated_where_no_kernel_takes_groups(monkeypatch):
    monkeypatch.setattr(attention, "_grouped_kernel_exists", lambda q: False)
    torch.manual_seed(0)
    check(Attention(heads=6, kv_heads=2, head_dim=4, sequence=5, rotary_base=100.0), 2, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotation_in_16_bits_is_rounded_once(dtype):
    torch.manual_seed(0)
    sequence, d, base = 300, 32, 10_000.0
    x = torch.randn(2, sequence, 3, d).to(dtype)
    exact = turned(x.double(), torch.arange(sequence), base)
    tables = attention.rotary_tables(sequence, d, base, x.device, dtype)
    assert {table.dtype for table in tables} == {torch.float32}
    found = torch.empty_like(x)
    attention.turn(x, tables, found)
    half_a_step = torch.finfo(dtype).eps / 2
    assert bool(((found.double() - exact).abs() <= 1.001 * half_a_step * exact.abs() + 1e-6).all())
    back = torch.empty_like(x)
    attention.turn(found, tables, back, back=True)
    assert_close(back, x, 4 * half_a_step)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_keeps_and_allocates_nothing_of_the_size_of_the_scores(kv_heads, dtype):
    sequence, heads, d = 1024, 4, 4
    operator = Attention(heads=heads, kv_heads=kv_heads, head_dim=d, sequence=sequence, rotary_base=100.0)
    qkv = torch.randn(sequence, (heads + 2 * kv_heads) * d, dtype=dtype)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        with hooks:
            o, saved = operator(qkv)
        operator.input_gradient(torch.ones_like(o), saved)
    one_head_bytes = sequence * sequence * dtype.itemsize
    allocations = [event.cpu_memory_usage for event in trace.events() if event.name == "[memory]"]
    assert allocations
    assert max(allocations) < one_head_bytes
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert qkv.untyped_storage().data_ptr() not in storages
    assert o.untyped_storage().data_ptr() in storages
    log_sum_exp_bytes = sequence * heads * max(dtype.itemsize, 4)
    assert sum(storages.values()) <= qkv.nbytes + o.nbytes + log_sum_exp_bytes


def test_wrong_widths_are_refused():
    operator = Attention(heads=4, kv_heads=2, head_dim=2, sequence=4, rotary_base=None)
    with pytest.raises(ValueError, match="15 columns"):
        operator(torch.zeros(8, 15))
