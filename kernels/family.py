"""Which implementation of the operators layers are built from: PyTorch's, or Triton's where it pays."""

import importlib.util
from dataclasses import dataclass, fields, replace
from typing import Final

import torch

from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.attention import Attention
from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.operators.linear import Linear
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.residual import Residual


@dataclass(frozen=True, kw_only=True)
class OperatorFamily:
    """The classes of the operators that have a Triton twin."""

    rms_norm: type[RMSNorm] = RMSNorm
    layer_norm: type[LayerNorm] = LayerNorm
    residual: type[Residual] = Residual
    swiglu: type[SwiGLU] = SwiGLU
    gelu: type[GELU] = GELU
    linear: type[Linear] = Linear
    attention: type[Attention] = Attention
    cross_entropy_statistics: type[CrossEntropyStatistics] = CrossEntropyStatistics


TORCH: Final = OperatorFamily()

TRITON_WINS: Final[frozenset[str]] = frozenset()
"""Fields of `OperatorFamily` for which ``auto`` takes Triton: those that the benchmark of kernels has shown
to be no slower than the best rival. None so far: it has not been run on a GPU."""


def operator_family(kernels: str, device: torch.device, dtype: torch.dtype) -> OperatorFamily:
    """The classes for ``train.kernels``: ``torch``, ``triton``, or ``auto``.

    Raises ValueError where ``triton`` was asked for and cannot run.
    """
    if kernels == "torch":
        return TORCH
    problem = _problem(device, dtype)
    if kernels == "triton":
        if problem:
            raise ValueError(f"train.kernels='triton': {problem}; use auto or torch")
        return _triton()
    if problem or device.type != "cuda" or not TRITON_WINS:
        return TORCH
    twins = _triton()
    return replace(TORCH, **{name: getattr(twins, name) for name in TRITON_WINS})


def _problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why Triton cannot run; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (the extra braid[gpu])"
    if dtype == torch.float64:
        return "its kernels compute in fp32, bf16 and fp16, not fp64"
    if device.type == "cpu":
        from braid.kernels.fused.launch import INTERPRETING

        if not INTERPRETING:
            return "this rank has no CUDA device, and Triton's interpreter (TRITON_INTERPRET=1) is off"
    return ""


def _triton() -> OperatorFamily:
    from braid.kernels.fused import operators

    return OperatorFamily(
        **{
            field.name: getattr(operators, f"Triton{getattr(TORCH, field.name).__name__}")
            for field in fields(OperatorFamily)
        }
    )
