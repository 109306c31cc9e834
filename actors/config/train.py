"""How a run trains: steps, batch, precision and optimizer; a section of the configuration."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from braid.actors.config.model import Positive, Section
from braid.actors.config.overlap import AUTO
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.pattern import counted

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _policies(value: Any) -> Any:
    """One policy, or those of all layers: ``2*full none``, or as a list; or auto."""
    text = " ".join(counted([*map(str, value)])) if isinstance(value, list | tuple) else value
    for word in () if text == AUTO else str(text).split() or [""]:
        times, star, policy = word.rpartition("*")
        if policy not in RECOMPUTE_POLICIES or (star and not times.isdigit()):
            known = ", ".join(RECOMPUTE_POLICIES)
            raise ValueError(
                f"{word!r} must be one of {known}, auto, or for every layer, as in '4*full 8*none'"
            )
    return text


class TrainConfig(Section):
    """Steps, batch and optimizer."""

    steps: Positive = 100  # optimizer steps of the whole run
    global_batch: Positive = 16  # samples per step
    micro_batch: Positive = 4  # samples per micro-batch
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"  # of weights and activations; bf16 keeps fp32 masters
    # triton: its kernels; auto: on CUDA the quickest ones, measured once and kept, elsewhere PyTorch's
    kernels: Literal["auto", "torch", "triton"] = "auto"
    tf32: bool = False  # fp32 products on GPUs may round their operands to 10 bits, as tensor cores do
    # the same bits in every run on the same GPUs: kernels without atomics, one algorithm for all sums; slower
    deterministic: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of initial weights and the order of samples
    lr: Annotated[float, Field(gt=0)] = 1e-3  # peak learning rate of AdamW
    min_lr_fraction: Fraction = 0.1  # of lr, at the end of the cosine
    warmup_steps: Annotated[int, Field(ge=0)] = 10  # over which the learning rate rises
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW
    eps: Annotated[float, Field(gt=0)] = 1e-8  # of AdamW
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of matrices; norms and biases do not decay
    clip_norm: Annotated[float, Field(ge=0)] = 1.0  # 0: no clipping
    # of a layer's values, for its backward pass: none, selective, full, or fine, which repeats no collective;
    # one for all layers, or one for each: [full, full, none], or "2*full none". auto: the fastest that fits
    recompute: Annotated[str, BeforeValidator(_policies)] = "none"
    # in which ranks sum gradients (over dp, and tp): they are rounded to it for the way, which halves bytes;
    # micro-batches are added up in fp32 all the same. null: as that; not with fp64 or deterministic_reduction
    reduce_dtype: Literal["bf16"] | None = None
    # sums of gradients in float64: the same bits for any number of data-parallel ranks, as long as the terms
    # of a sum lie within a factor of 2^25 or so, and ep stays, as an expert adds up rows of its ranks
    deterministic_reduction: bool = False
    validate_every: Annotated[int, Field(ge=0)] = 0  # steps; 0: only at the end
    validation_samples: Positive = 64  # of each validation, at equal distances over what is held out
