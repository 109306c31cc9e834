"""Implementations of layers' operators: PyTorch's, Triton's, or chosen by measuring."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.attention import BACKENDS, Attention
from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.operator import ComputeOperator
from braid.kernels.operators.permute import Permute, Unpermute


@dataclass(frozen=True, kw_only=True)
class OperatorFamily:
    """Constructors of the operators that have several implementations."""

    rms_norm: Callable[..., RMSNorm] = RMSNorm
    layer_norm: Callable[..., LayerNorm] = LayerNorm
    swiglu: Callable[..., SwiGLU] = SwiGLU
    gelu: Callable[..., GELU] = GELU
    permute: Callable[..., Permute] = Permute
    unpermute: Callable[..., Unpermute] = Unpermute
    attention: Callable[..., Attention] = Attention
    cross_entropy_statistics: Callable[..., CrossEntropyStatistics] = CrossEntropyStatistics


TORCH: Final = OperatorFamily()

Kind = Callable[..., ComputeOperator]
Choice = Mapping[str, str]
"""Implementations by operator (field of `OperatorFamily`); others are PyTorch's."""

BY_TORCH: Final = "torch"
_BY_TRITON: Final = "triton"


def operator_family(
    kernels: str, device: torch.device, dtype: torch.dtype, choose: Callable[[], Choice] | None = None
) -> OperatorFamily:
    """Return the family of operators for ``train.kernels``: ``torch``, ``triton``, or ``auto``.

    ``auto`` calls ``choose`` on CUDA, except in fp64, which only PyTorch supports; elsewhere it uses PyTorch.

    Raise ValueError if ``triton`` is requested and cannot run.
    """
    if kernels == "torch":
        return TORCH
    if kernels == "triton":
        if problem := _problem(device, dtype):
            raise ValueError(f"train.kernels='triton': {problem}; use auto or torch")
        return _triton()
    if choose is None or device.type != "cuda" or dtype == torch.float64:
        return TORCH
    return chosen_family(choose())


def chosen_family(choice: Choice) -> OperatorFamily:
    """Return the family in which each operator of ``choice`` has the named implementation (see `names`)."""
    return replace(TORCH, **{operator: _kind(operator, name) for operator, name in choice.items()})


def names(operator: str) -> tuple[str, ...]:
    """Return the names of all implementations that an operator may have, PyTorch's first. For example
    ``triton+cudnn`` computes rotary embedding by Triton and attention by cuDNN."""
    return tuple(_implementations(operator))


def _implementations(operator: str) -> dict[str, tuple[str, str | None]]:
    """Return {name of an implementation: (``torch`` or ``triton``, backend of attention or None)}."""
    sources = (BY_TORCH, _BY_TRITON)
    made: dict[str, tuple[str, str | None]] = {source: (source, None) for source in sources}
    if operator == "attention":
        made |= {f"{source}+{backend}": (source, backend) for source in sources for backend in BACKENDS}
    return made


def candidates(operator: str, device: torch.device, dtype: torch.dtype) -> dict[str, Kind]:
    """Return an operator's implementations by name; a trial must show whether they run here."""
    triton = not _problem(device, dtype)
    return {
        name: _kind(operator, name)
        for name, (source, _) in _implementations(operator).items()
        if triton or source == BY_TORCH
    }


def _kind(operator: str, name: str) -> Any:
    source, backend = _implementations(operator)[name]
    kind = getattr(_triton() if source == _BY_TRITON else TORCH, operator)
    return partial(kind, backend=backend) if backend else kind


def _problem(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why Triton cannot run; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (the extra braid[gpu])"
    if dtype == torch.float64:
        return "its kernels compute in fp32, bf16 and fp16, not fp64"
    if device.type == "cpu":
        from braid.kernels.triton.launch import INTERPRETING

        if not INTERPRETING:
            return "this rank has no CUDA device, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    return ""


def _triton() -> OperatorFamily:
    from braid.kernels.triton import activation, cross_entropy, norm, permute, rotary

    return OperatorFamily(
        rms_norm=norm.TritonRMSNorm,
        layer_norm=norm.TritonLayerNorm,
        swiglu=activation.TritonSwiGLU,
        gelu=activation.TritonGELU,
        permute=permute.TritonPermute,
        unpermute=permute.TritonUnpermute,
        attention=rotary.TritonAttention,
        cross_entropy_statistics=cross_entropy.TritonCrossEntropyStatistics,
    )
