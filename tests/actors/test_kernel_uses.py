"""``train.kernels: auto`` in a rank: what it asks about, and what becomes of an answer."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from braid.actors.stage.measure import kernel_uses
from braid.actors.stage.measure.kernel_uses import KernelChoice, uses
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.groups import Mesh, build_mesh
from braid.actors.stage.rank.log import HEADER
from braid.actors.stage.state.parameters import Place
from braid.kernels.family import TORCH, OperatorFamily, chosen_family, names
from braid.kernels.operators.operator import ComputeOperator
from braid.kernels.trials import Laboratory, Measured, Use
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Phase
from braid.scheduling.model.sizes import PartSizes
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH

CPU = torch.device("cpu")
FIELDS = {getattr(TORCH, field.name): field.name for field in fields(OperatorFamily)}

# -- what is asked about -----------------------------------------------------------------------------------


def settings_of(operator: ComputeOperator) -> dict[str, Any]:
    """What an operator was made with."""
    module: Any = operator
    match FIELDS[type(operator)]:
        case "rms_norm" | "layer_norm":
            return {"hidden": module.hidden, "eps": module.eps}
        case "permute" | "unpermute":
            return {"experts": module.experts, "capacity": module.capacity}
        case "attention":
            return {name: getattr(module, name) for name in (*HEADS, "sequence", "rotary_base")}
        case "cross_entropy_statistics":
            terms = {"label_smoothing": module.label_smoothing, "z_loss": module.z_loss}
            return {**vars(module.shard), **{name: value for name, value in terms.items() if value}}
        case _:
            return {}


HEADS = ("heads", "kv_heads", "head_dim")


def elements_of(use: Use, hidden: int) -> int:
    """Of the value that an operator writes first, a statistic for each token aside."""
    settings = use.settings
    match use.operator:
        case "attention":
            return int(use.tokens * settings["heads"] * settings["head_dim"])
        case "cross_entropy_statistics":
            return use.tokens * 3
        case "permute" if settings["capacity"]:
            return int(settings["experts"] * settings["capacity"] * use.width)
        case "permute":
            return use.tokens * use.choices * use.width
        case _:
            return use.tokens * (use.width or hidden)


MOE = replace(LLAMA, family="moe", experts=8, top_k=2, expert_ffn=48)
SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "regularised": replace(GPT, dropout=0.1, label_smoothing=0.2, logit_z_loss=1e-4),
    "uneven": replace(LLAMA, vocabulary=97),
    "moe": MOE,
    "moe with a capacity": replace(MOE, capacity_factor=1.25),
    "moe with all that layers have": replace(MOE, shared_experts=2, pattern="2*dense 6*layer"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 4)])
def test_it_asks_about_the_operators_of_the_model(name: str, tp: int, ep: int) -> None:
    """All of them, as often as they are there, on as many tokens as their graphs say."""
    shape = SHAPES[name]
    layout = ParallelLayout(tp=tp, ep=ep, dp=ep) if shape.experts else ParallelLayout(tp=tp)
    sizes = PartSizes(shape, layout, MICRO_BATCH)
    asked: Counter[tuple[str, str, int]] = Counter()
    for use in uses(sizes):
        settings = json.dumps(dict(use.settings), sort_keys=True)
        asked[use.operator, settings, elements_of(use, shape.hidden)] += use.times
    place, kind = Place.of(layout.mesh, 0), torch.float32
    model = StageModel(shape=shape, layout=layout, place=place, sizes=sizes, device=CPU, dtype=kind)
    parts, found = built_in_parts(sizes), Counter[tuple[str, str, int]]()
    for instance in model.chunks[0]:
        part = parts[instance.name]
        for operator in part.forward.operators:
            module = instance.modules.get(operator.module)
            if operator.phase is not Phase.FORWARD or type(module) not in FIELDS:
                continue
            settings = settings_of(module)
            written = part.values[operator.writes[0]].elements
            found[FIELDS[type(module)], json.dumps(settings, sort_keys=True), written] += 1
    assert found == asked


# -- a rank ------------------------------------------------------------------------------------------------


@pytest.fixture
def groups() -> Mock:
    """Those of one rank."""
    return Mock(gather=Mock(side_effect=lambda own: [own]))


@pytest.fixture
def mesh(groups: Mock) -> Mesh:
    return build_mesh(ParallelLayout(), 0, groups=groups, timeout=None)  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are kept."""
    monkeypatch.setenv("BRAID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


SIZES = PartSizes(replace(LLAMA, layers=2), ParallelLayout(), 1)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cpu_asks_nothing_and_touches_nothing(
    kernels: str, mesh: Mesh, groups: Mock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Laboratory, "measure", None)
    choice = KernelChoice()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert choice.family(kernels, SIZES, mesh, CPU, dtype) == TORCH
    assert (choice.told, groups.gather.called, cache.parent.exists()) == ("", False, False)


class Gpu:
    """A rank on a card that is not there: its operators run on the CPU, its clock says what is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[str] = []
        monkeypatch.setattr(kernel_uses, "card", lambda device: "a card")
        candidates = {"candidates": lambda operator, *where: dict.fromkeys(names(operator))}
        clock = {"DeviceClock": lambda device: None, "Laboratory": lambda **given: self}
        for name, value in {**candidates, **clock}.items():
            monkeypatch.setattr(kernel_uses, name, value)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def measure(self, uses: Sequence[Use], kinds: dict[str, Any]) -> Measured:
        """Triton and cuDNN win, but not for norms."""
        self.measured.append(uses[0].operator)
        assert {use.operator for use in uses} == {uses[0].operator}
        loses = uses[0].operator == "rms_norm"
        return {name: 900 if name == "torch" or loses else 800 - len(name) for name in kinds}


CHOSEN = {
    "rms_norm": "torch",
    "swiglu": "triton",
    "attention": "triton+efficient",
    "cross_entropy_statistics": "triton",
}


def test_a_gpu_measures_once_and_says_what_it_took(
    mesh: Mesh,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu, device, choice = Gpu(monkeypatch), torch.device("cuda"), KernelChoice()

    def family(choice: KernelChoice) -> OperatorFamily:
        return choice.family("auto", SIZES, mesh, device, torch.bfloat16)

    first = family(choice)
    assert (first.swiglu, first.rms_norm) == (chosen_family(CHOSEN).swiglu, TORCH.rms_norm)
    assert gpu.measured == list(CHOSEN)
    told = choice.told
    assert told == "kernels: " + ", ".join(f"{operator} by {name}" for operator, name in CHOSEN.items())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{HEADER} rms_norm: torch 0.001 ms, triton 0.001 ms"
    assert lines[-1] == f"{HEADER} {told}"
    (file,) = cache.iterdir()
    entry = json.loads(file.read_text())
    assert entry["kernels"] == CHOSEN
    assert (entry["for"]["cards"], entry["for"]["dtype"]) == (["a card"], "torch.bfloat16")

    file.unlink()
    assert family(choice).swiglu == first.swiglu, "a later generation of the same process"
    assert choice.told == told
    assert family(KernelChoice()).swiglu == first.swiglu, "another process"
    assert gpu.measured == list(CHOSEN)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    family(choice)
    assert gpu.measured == 2 * list(CHOSEN), "another question"
