"""Tries all implementations of an operator at the sizes of a run: are the results equal, and how long do they
take?

A trial does with an operator what a layer does: forward pass, input gradient, weight gradient, on random
operands. An implementation is rejected if it fails, or if its results differ from PyTorch's by more than
rounding in the dtype explains.

Legend: T this operator's tokens, D hidden, F feed-forward width, V local vocabulary rows, n rows of experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

import torch
from torch import Tensor

from braid.kernels.family import BY_TORCH, Kind
from braid.kernels.operators.operator import ComputeOperator, wide

TOLERANCE: Final[Mapping[torch.dtype, float]] = {
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
    torch.float32: 1e-4,
}
"""Greatest difference of results, relative to the largest value: a few roundings."""

Measured = Mapping[str, int | str]
"""Time in nanoseconds, or the reason of rejection, by implementation."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """Use of an operator, for one micro-batch, at all places in the model that have one shape."""

    operator: str
    """Name of the operator, a field of `OperatorFamily`."""
    tokens: int
    times: int
    """Number of these places."""
    settings: Mapping[str, Any]
    """Constructor arguments of the operator, except device and dtype."""
    width: int = 0
    """Columns of an activation's result, or of rows of experts; else in ``settings``."""
    choices: int = 0
    """Number of experts that every token visits, for `Permute` and `Unpermute`."""


@dataclass(frozen=True)
class Trial:
    """Operands and calls that are the same for every implementation of an operator."""

    inputs: tuple[Tensor, ...]
    reads: Callable[..., tuple[Any, ...]]
    """Function that maps forward's outputs to the arguments of both gradient methods."""
    statistics: bool = False
    """Whether the last output's columns are statistics of tokens; each column is then compared separately."""
    renew: Callable[[], object] = lambda: None
    """Function that restores operands which a run overwrites."""

    def run(self, operator: ComputeOperator) -> list[Tensor]:
        """Run all passes; return the results to compare, except gradients of parameters."""
        *outputs, last = operator(*self.inputs)
        reads = self.reads(*outputs, last)
        results = [
            *outputs,
            *(last.unbind(-1) if self.statistics else (last,)),
            *operator.input_gradient(*reads),
        ]
        if operator.gradients:
            operator.weight_gradient(*reads)
        return [x for x in results if isinstance(x, Tensor)]


_FLUSH_BYTES: Final = 1 << 28
"""Bytes that are written to flush the caches: more than any second-level cache holds."""
_LEAD_CYCLES: Final = 2_000_000
"""Cycles (about 1 ms) in which the host issues the timed work: launches are not timed."""


class DeviceClock:
    """Times calls: on a GPU by events, with cold caches and the host ahead; elsewhere by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if cuda else None

    def ns(self, call: Callable[[], object]) -> int:
        if self._flush is None:
            begin = perf_counter_ns()
            call()
            return perf_counter_ns() - begin
        self._flush.zero_()
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_LEAD_CYCLES)
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return round(begin_event.elapsed_time(end_event) * 1e6)


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """Measures implementations on one device, in one dtype, with one clock."""

    device: torch.device
    dtype: torch.dtype
    clock: DeviceClock
    rounds: int = 7
    """Number of times that each implementation is timed; the median counts."""

    def measure(self, uses: Sequence[Use], kinds: Mapping[str, Kind]) -> Measured:
        """Return by implementation the time of all uses together, or why it is rejected."""
        found: dict[str, int | str] = dict.fromkeys(kinds, 0)
        for use in uses:
            for name, one in self._measure_use(use, kinds).items():
                before = found[name]
                if isinstance(before, int):
                    found[name] = one if isinstance(one, str) else before + use.times * one
        return found

    @torch.no_grad()
    def _measure_use(self, use: Use, kinds: Mapping[str, Kind]) -> Measured:
        try:
            trial = _TRIALS[use.operator](use, _Operands(self.device, self.dtype))
            reference = self._made(use, kinds[BY_TORCH])
            expected = _results(trial, reference)
        except Exception as error:  # without PyTorch's results nothing can be compared
            return dict.fromkeys(kinds, _told(error))
        found: dict[str, int | str] = {}
        sound: dict[str, ComputeOperator] = {}
        for name, kind in kinds.items():
            try:
                operator = self._made(use, kind, reference)
                if problem := self._disagreement(_results(trial, operator), expected):
                    found[name] = problem
                else:
                    sound[name] = operator
            except Exception as error:  # from torch, Triton or CUDA: this implementation does not run here
                found[name] = _told(error)
        return {**found, **self._timed(trial, sound)}

    def _timed(self, trial: Trial, operators: Mapping[str, ComputeOperator]) -> Measured:
        """Return median times; implementations take turns: a slower device slows all equally."""
        times: dict[str, list[int]] = {name: [] for name in operators}
        failed: dict[str, str] = {}
        for _ in range(self.rounds):
            for name in [name for name in times if name not in failed]:
                try:
                    trial.renew()
                    times[name].append(self.clock.ns(partial(trial.run, operators[name])))
                except Exception as error:  # perhaps there is no memory left
                    failed[name] = _told(error)
        return {name: failed.get(name) or round(median(ns)) for name, ns in times.items()}

    def _made(self, use: Use, kind: Kind, like: ComputeOperator | None = None) -> ComputeOperator:
        """Make an operator with random parameters, or with the parameters of ``like``, and zero gradients."""
        home = {"device": self.device, "dtype": self.dtype} if _TRIALS[use.operator] is _norm else {}
        operator = kind(**use.settings, **home)
        operands = _Operands(self.device, self.dtype)
        for name, parameter in operator.named_parameters():
            values = operands.random(*parameter.shape) if like is None else like.get_parameter(name)
            parameter.copy_(values)
            operator.gradients[name] = torch.zeros_like(parameter, dtype=wide(self.dtype))
        return operator

    def _disagreement(self, results: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
        """Return how results differ from PyTorch's; empty if they agree."""
        for number, (one, other) in enumerate(zip(results, expected, strict=True), start=1):
            if one.shape != other.shape or one.dtype != other.dtype:
                return f"result {number} is {one.dtype} {tuple(one.shape)}, PyTorch's {other.dtype}"
            largest, off = (float(x.abs().max()) if x.numel() else 0.0 for x in (other, one - other))
            if not off <= TOLERANCE[self.dtype] * largest:  # NaN counts as a difference
                return f"result {number} is off by {off:.3g}, of at most {largest:.3g}"
        return ""


class _Operands:
    """Generates random operands, equal in every trial; torch's global generator is not used."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (count,), generator=self._generator, device=self._device)

    def routing(self, count: int, experts: int, choices: int) -> tuple[Tensor, Tensor]:
        """Return the different experts that every token chooses, and their gates (wide)."""
        best = self.random(count, experts).to(wide(self._dtype)).topk(choices)
        return best.indices, best.values.softmax(-1)


def _results(trial: Trial, operator: ComputeOperator) -> list[Tensor]:
    """Return copies of all results of a run, including gradients of parameters."""
    trial.renew()
    return [x.clone() for x in (*trial.run(operator), *operator.gradients.values())]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]


# -- what a layer does with every operator -----------------------------------------------------------------


def _norm(use: Use, operands: _Operands) -> Trial:
    x_TD, dy_TD, d_skip_TD = (operands.random(use.tokens, use.settings["hidden"]) for _ in range(3))
    return Trial((x_TD,), lambda _, statistics: (dy_TD, x_TD, statistics, d_skip_TD), statistics=True)


def _activation(inputs: int, use: Use, operands: _Operands) -> Trial:
    h, da_TF = operands.random(use.tokens, inputs * use.width), operands.random(use.tokens, use.width)
    return Trial((h,), lambda _: (da_TF, h))


def _permute(use: Use, operands: _Operands) -> Trial:
    x_TD, d_rows_nD = operands.random(use.tokens, use.width), operands.random(_visited(use), use.width)
    choice_Tk, _ = operands.routing(use.tokens, use.settings["experts"], use.choices)
    return Trial((x_TD, choice_Tk), lambda _: (d_rows_nD, choice_Tk))


def _unpermute(use: Use, operands: _Operands) -> Trial:
    dy_TD, rows_nD = operands.random(use.tokens, use.width), operands.random(_visited(use), use.width)
    choice_Tk, gates_Tk = operands.routing(use.tokens, use.settings["experts"], use.choices)
    return Trial((rows_nD, gates_Tk, choice_Tk), lambda _: (dy_TD, rows_nD, gates_Tk, choice_Tk))


def _visited(use: Use) -> int:
    """Return the number of rows that a permutation makes."""
    experts, capacity = use.settings["experts"], use.settings["capacity"]
    return use.tokens * use.choices if capacity is None else experts * capacity


def _attention(use: Use, operands: _Operands) -> Trial:
    heads, kv_heads, width = (use.settings[name] for name in ("heads", "kv_heads", "head_dim"))
    qkv = operands.random(use.tokens, (heads + 2 * kv_heads) * width)
    d_o = operands.random(use.tokens, heads * width)
    return Trial((qkv,), lambda _, graph: (d_o, graph))


def _cross_entropy(use: Use, operands: _Operands) -> Trial:
    logits_TV = operands.random(use.tokens, use.settings["rows"])
    kept_TV, targets_T = logits_TV.clone(), operands.tokens(use.tokens, use.settings["vocabulary"])

    def reads(statistics_T3: Tensor) -> tuple[Any, ...]:
        maximum_T, sum_T, _ = statistics_T3.unbind(-1)
        return logits_TV, maximum_T + sum_T.log(), targets_T, 1.0

    return Trial((logits_TV, targets_T), reads, statistics=True, renew=partial(logits_TV.copy_, kept_TV))


_TRIALS: Final[Mapping[str, Callable[[Use, _Operands], Trial]]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "swiglu": partial(_activation, 2),
    "gelu": partial(_activation, 1),
    "permute": _permute,
    "unpermute": _unpermute,
    "attention": _attention,
    "cross_entropy_statistics": _cross_entropy,
}
