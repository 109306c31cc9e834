"""Configures how a run trains: steps and optimizer, its layout over ranks, and its schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from braid.actors.config.model import Above0, AtLeast0, Count, Positive, Section, clash, one_of
from braid.scheduling.generate.named import SCHEDULES, ScheduleName
from braid.scheduling.mesh.layout import AXES
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import CONTEXT_MODES
from braid.scheduling.schedule.gone import GONE
from braid.scheduling.schedule.states import OptimizerStates
from braid.scheduling.text.pattern import counted

AUTO: Final = "auto"

MOMENTUM: Final = 0.95
"""Default of ``train.momentum``."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _by_layer(text: str, known: Callable[[str], bool], meaning: str) -> list[str]:
    """Return the word of every layer from a text such as ``2*full none``."""
    words: list[str] = []
    for part in text.split() or [""]:
        times, star, word = part.rpartition("*")
        if not known(word) or (star and not times.isdigit()):
            raise ValueError(f"{part!r} must be {meaning}")
        words += [word] * int(times or 1)
    return words


def _policies(value: Any) -> Any:
    """Parse one policy for all layers, or one per layer: ``2*full none``, or a list; or auto."""
    text = " ".join(counted([*map(str, value)])) if isinstance(value, list | tuple) else value
    if text != AUTO:
        names = f"one of {', '.join(RECOMPUTE_POLICIES)}, auto"
        known = RECOMPUTE_POLICIES.__contains__
        _by_layer(str(text), known, f"{names}, or for every layer, as in '4*full 8*none'")
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
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of initial weights, the order of samples and dropout
    # muon: orthogonal steps for matrices of hidden layers, AdamW for everything else; adamw_8bit: moments of
    # these matrices in 8 bits (the extra braid[eight-bit])
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    lr: Above0 = 1e-3  # peak learning rate; one that suits AdamW also suits Muon
    # after warm-up: a cosine or a line down to min_lr_fraction, constant, or constant until a last line down
    schedule: Literal["cosine", "linear", "constant", "stable_decay"] = "cosine"
    min_lr_fraction: Fraction = 0.1  # of lr, at the end of the schedule
    warmup_steps: Count = 10  # over which the learning rate rises
    decay_steps: Count = 0  # over which it falls at the end of stable_decay; 0: a fifth of steps
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW
    eps: Above0 = 1e-8  # of AdamW
    momentum: Beta = MOMENTUM  # of Muon
    average: Beta = 0.0  # decay of an exponential average of the weights, for exports; 0: no average is kept
    weight_decay: AtLeast0 = 0.1  # of matrices; norms and biases do not decay
    clip_norm: AtLeast0 = 1.0  # 0: no clipping
    # probability with which an element of the embedding, and of what attention and MLP add, becomes 0
    dropout: Beta = 0.0
    label_smoothing: Beta = 0.0  # share of a target's probability that is spread over the whole vocabulary
    z_loss: AtLeast0 = 0.0  # factor of the squared log-partition of the logits, which keeps them small: 1e-4
    # of a layer's values, for its backward pass: none, selective, full, or fine, which repeats no collective;
    # one for all layers, or one for each: [full, full, none], or "2*full none". auto: the fastest that fits
    recompute: Annotated[str, BeforeValidator(_policies)] = "none"
    # in which ranks sum gradients (over dp, and tp): they are rounded to it for the way, which halves bytes;
    # micro-batches are added up in fp32 all the same. null: as that; not with fp64 or deterministic_reduction
    reduce_dtype: Literal["bf16"] | None = None
    # sums of gradients in float64: the same bits for any number of data-parallel ranks, as long as the terms
    # of a sum lie within a factor of 2^25 or so, and ep stays, as an expert adds up rows of its ranks
    deterministic_reduction: bool = False
    validate_every: Count = 0  # steps; 0: only at the end
    validation_samples: Positive = 64  # of each validation, at equal distances over what is held out

    @model_validator(mode="after")
    def _optimizer_and_schedule(self) -> "TrainConfig":
        if self.momentum != MOMENTUM and self.optimizer != "muon":
            raise clash(self, "momentum", "optimizer", "set train.optimizer to muon; AdamW has train.betas")
        if self.decay_steps and self.schedule != "stable_decay":
            raise clash(self, "decay_steps", "schedule", "set train.schedule to stable_decay")
        if self.warmup_steps + self.decay_steps > self.steps and self.decay_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} and warmup_steps={self.warmup_steps} are more than "
                f"steps={self.steps}; lower train.decay_steps or train.warmup_steps, or raise train.steps"
            )
        if self.optimizer == "adamw_8bit" and self.dtype == "fp64":
            raise clash(self, "optimizer", "dtype", "set train.dtype to fp32 or bf16")
        return self

    @property
    def states(self) -> OptimizerStates:
        """What the optimizer keeps of every parameter."""
        return OptimizerStates(self.optimizer, self.average > 0)


def _degrees(value: Any) -> Any:
    """Parse ``2*4 2`` to ``(4, 4, 2)``; leave auto and other types unchanged."""
    if not isinstance(value, str) or value == AUTO:
        return value
    return tuple(map(int, _by_layer(value, str.isdigit, "a degree, or NUMBER*DEGREE, as in '12*4 12*2'")))


class ParallelConfig(Section):
    """Degrees of the mesh axes; ``pp`` x ``dp`` x ``cp`` x ``tp`` is the number of ranks.

    ``parallel: auto``: `braid plan` searches them, and a run measures what the machine makes of each;
    ``{auto: true, tp: 8}`` fixes those that are given.
    ``zero`` that is not given is searched by `braid plan`: each layout has the first from 1 on that fits.
    ``ep`` borrows ranks of dp x cp: the innermost ones, as many experts on each.
    """

    dp: Positive = 1  # data: replicas, each with its share of the batch
    tp: Positive = 1  # tensor: matrices are cut, and tokens between them
    pp: Positive = 1  # pipeline: stages of consecutive layers
    cp: Positive = 1  # context: the sequence is cut
    ep: Positive = 1  # expert: experts are cut over ranks of dp and cp
    # tensor-parallel degree of every layer: [4, 4, 2], or "2*4 2"; each divides tp. null: tp. auto: the
    # fastest that fits
    tensor_degrees: Annotated[tuple[Positive, ...] | Literal["auto"], BeforeValidator(_degrees)] | None = None
    auto: bool = False  # search the degrees that are not given
    zero: Annotated[int, Field(ge=0, le=3)] = 0  # cut over dp: 1 optimizer states, 2 gradients, 3 parameters
    shards: Count = 0  # ranks of dp that zero cuts over, others hold the same; 0: all
    context: Annotated[str, one_of(CONTEXT_MODES)] = "all_gather"  # how cp exchanges keys and values

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, content: Any) -> Any:
        if not isinstance(content, str):
            return content
        if content != AUTO:
            raise ValueError("must hold degrees, such as {tp: 2}, or be the word auto")
        return {"auto": True}

    @model_validator(mode="after")
    def _degrees_of_one_layout(self) -> "ParallelConfig":
        if self.auto and isinstance(self.tensor_degrees, tuple):
            raise clash(self, "tensor_degrees", "auto", "set parallel.auto to false")
        return self

    @property
    def replicas(self) -> int:
        """Number of ranks that share parameters, each with its share of the tokens."""
        return self.dp * self.cp

    @property
    def fixed(self) -> dict[str, int]:
        """The degrees that the configuration gives."""
        return {axis: getattr(self, axis) for axis in (*AXES, "ep") if axis in self.model_fields_set}


class OverlapConfig(Section):
    """Which schedule runs: one of the built-in ones, or a file made with ``braid schedule --output``.

    Schedules with searched pairings (dhelix, braid) take them from a plan (``braid plan --output``) or from a
    profile, which is measured on first use. ``auto``: the one that is simulated to be fastest, or needs less
    memory and is within 2 % of it.
    """

    # what runs beside what; auto: the fastest
    schedule: Annotated[str, one_of((*SCHEDULES, AUTO), GONE)] = "megatron"
    # of the schedule, perhaps with slots of a message between stages (eager_w/3); null: braid searches the
    # best, all others take their first
    pipeline: str | None = None
    schedule_file: Path | None = None  # a schedule's text, from `braid schedule --output`
    plan: Path | None = None  # decisions to repeat, from `braid plan --output` or a run's plan.yaml
    profile: Path | None = None  # measured costs to use instead of the run's own profile
    # Share by which a schedule that is found here may need more for activations than megatron's: 0.03 is 3 %.
    memory_slack: AtLeast0 | None = None
    # issue the passes of a step as one CUDA graph; auto: with a single rank, if the host takes about as long
    # to issue the passes as the GPU to run them; with several ranks false, as that is untested on two GPUs
    cuda_graphs: bool | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _pipeline_of_the_schedule(self) -> "OverlapConfig":
        if self.pipeline is not None and self.schedule == AUTO:
            raise clash(self, "pipeline", "schedule", "name the schedule, or leave the pipeline out")
        _ = self.name  # `ValueError` where the schedule has no such pipeline
        return self

    @property
    def name(self) -> ScheduleName:
        """Schedule and pipeline; for ``auto``, the serial schedule."""
        if self.schedule == AUTO:
            return ScheduleName("megatron")
        return ScheduleName.parse(f"{self.schedule}:{self.pipeline or ''}")

    @property
    def needs_profile(self) -> bool:
        """Whether decisions remain that need measured costs."""
        if self.plan is not None or self.schedule_file is not None:
            return False
        return self.schedule == AUTO or SCHEDULES[self.schedule].decided
