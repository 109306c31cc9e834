"""Chooses a rank's kernels on a GPU by measuring them in the run's sizes (``train.kernels: auto``)."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.rank.log import HEADER
from braid.kernels.choice import Choice, KeptChoices, Question, card, choices_folder, choose
from braid.kernels.family import OperatorFamily, candidates, operator_family
from braid.kernels.trials import DeviceClock, Laboratory, Measured, Use
from braid.scheduling.model.sizes import PartSizes


class KernelChoice:
    """The kernel choices of one rank, which remain the same over all generations."""

    def __init__(self) -> None:
        self._kept = KeptChoices(choices_folder(os.environ))
        self.told = ""
        """Description of the chosen kernels for the user; empty if there was no choice."""

    def family(
        self, kernels: str, sizes: PartSizes, mesh: Mesh, device: torch.device, dtype: torch.dtype
    ) -> OperatorFamily:
        """Return the operator family for ``train.kernels``; all ranks call this together.

        Raise ValueError as `operator_family` does.
        """
        self.told = ""
        return operator_family(kernels, device, dtype, lambda: self._choose(sizes, mesh, device, dtype))

    def _choose(self, sizes: PartSizes, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Choice:
        assert mesh.groups is not None
        deterministic = torch.are_deterministic_algorithms_enabled()
        choice = choose(
            card=card(device),
            question=Question(dtype=str(dtype), deterministic=deterministic, uses=tuple(uses(sizes))),
            rank=mesh.rank,
            gather=mesh.groups.gather,
            measure=partial(_measured, device=device, dtype=dtype),
            kept=self._kept,
        )
        self.told = "kernels: " + ", ".join(f"{operator} by {name}" for operator, name in choice.items())
        if mesh.rank == 0:
            print(f"{HEADER} {self.told}")
        return choice


def _measured(question: Question, device: torch.device, dtype: torch.dtype) -> Iterator[Measured]:
    """Measure every operator in all its places, on this rank's device; print the times to the rank's log."""
    laboratory = Laboratory(device=device, dtype=dtype, clock=DeviceClock(device))
    for operator in question.operators:
        used = [use for use in question.uses if use.operator == operator]
        measured = laboratory.measure(used, candidates(operator, device, dtype))
        print(f"{HEADER} {operator}: {', '.join(f'{name} {_told(one)}' for name, one in measured.items())}")
        yield measured
    del laboratory  # its clock holds memory on the device
    torch.cuda.empty_cache()


def _told(measured: int | str) -> str:
    return f"{measured / 1e6:.3f} ms" if isinstance(measured, int) else f"is out ({measured})"


def uses(sizes: PartSizes) -> Iterator[Use]:
    """Yield the operators of a model on its fullest rank, as `braid.actors.stage.model.layers` makes them.

    Layers that a user defines are counted as if they were built-in layers.
    """
    shape = sizes.shape
    layers, local = shape.layers, sizes.local_tokens
    norm = "layer_norm" if shape.norms_center else "rms_norm"
    settings: dict[str, Any] = {"hidden": shape.hidden, "eps": shape.norm_eps}
    yield Use(operator=norm, tokens=local, times=2 * layers + 1, settings=settings)
    activation = "swiglu" if shape.gated else "gelu"
    for width, times in (
        (shape.ffn, layers - shape.expert_layers),
        (shape.shared_experts * shape.expert_width, shape.expert_layers),
    ):
        if width and times:
            local_width = width // sizes.tp
            yield Use(operator=activation, tokens=sizes.tokens, times=times, settings={}, width=local_width)
    if shape.expert_layers:
        yield from _experts(sizes)
    settings = {
        "heads": shape.heads // sizes.tp,
        "kv_heads": shape.kv_heads // sizes.tp,
        "head_dim": shape.head_dim,
        "sequence": shape.sequence,
        "rotary_base": None if shape.family == "gpt" else shape.rotary_base,
    }
    yield Use(operator="attention", tokens=sizes.tokens, times=layers, settings=settings)
    rows = {"rows": sizes.vocabulary_rows, "first_row": 0, "vocabulary": shape.vocabulary}
    settings = {**rows, **shape.loss_terms}
    yield Use(operator="cross_entropy_statistics", tokens=sizes.tokens, times=1, settings=settings)


def _experts(sizes: PartSizes) -> Iterator[Use]:
    """Yield the operators on rows of experts, if a rank gets as many rows as it sends."""
    shape, local, times = sizes.shape, sizes.local_tokens, sizes.shape.expert_layers
    capacity = shape.capacity(local) if shape.capacity_factor else None
    rows = sizes.tp * (local * shape.top_k if capacity is None else shape.experts * capacity)
    width = shape.expert_width // sizes.tp
    yield Use(operator="swiglu", tokens=rows, times=times, settings={}, width=width)
    for operator in ("permute", "unpermute"):
        yield Use(
            operator=operator,
            tokens=local,
            times=times,
            settings={"experts": shape.experts, "capacity": capacity},
            width=shape.hidden,
            choices=shape.top_k,
        )
