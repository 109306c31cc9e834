"""Graphs, buckets and schedules of models with adapters: what is trained, gathered, summed and counted."""

from dataclasses import replace

import pytest
import torch

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.state.parameters import Place
from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.flops import model_flops
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.lora import Lora
from braid.scheduling.model.operators import Phase
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import members_of
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.operations import Allocate, Gather, Reduce, Start
from tests.scheduling.cases import GPT, LLAMA, choices_for, layout_for, parts_for, setting_for

MIXTURE = replace(LLAMA, family="moe", experts=4, top_k=2, pattern="dense layer")
MODELS = {"llama": LLAMA, "gpt": GPT, "moe": MIXTURE}
LORA = Lora(rank=2, alpha=3)


def adapted(model: ModelShape, lora: Lora = LORA) -> ModelShape:
    return replace(model, lora=lora)


@pytest.mark.parametrize("targets", [None, ("q",), ("o", "v")])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_modules(name: str, tp: int, targets: tuple[str, ...] | None) -> None:
    """On every rank, and in all; also with the base."""
    shape, layout = adapted(MODELS[name], Lora(rank=2, targets=targets)), ParallelLayout(tp=tp)
    sizes = PartSizes(shape, layout, 2)
    place, meta = Place.of(layout.mesh, 0), torch.device("meta")
    model = StageModel(shape=shape, layout=layout, place=place, sizes=sizes, device=meta, dtype=torch.float32)
    parts = members_of(built_in_parts(sizes), layout, sizes.kinds, 0)
    held = {trained: [p for p in model.parameters if p.trained is trained] for trained in (True, False)}
    counts = {trained: sum(p.shape.numel() for p in held[trained]) for trained in held}
    tied = sum(part.frozen_parameters.tied for part in parts[-1:])
    assert sum(part.parameters.total for part in parts) == counts[True]
    assert sum(part.frozen_parameters.total for part in parts) - tied == counts[False]
    whole = sum(p.shape.numel() for p in held[True] if not p.factors) if tp > 1 else 0
    assert tp == 1 or sum(part.parameters.whole for part in parts) == whole
    assert shape.adapter_parameters() == whole + (counts[True] - whole) * tp


def test_a_frozen_matrix_has_no_weight_gradient() -> None:
    """And adapters cost little beside it; embedding and head compute no gradients for others than layers."""
    plain, few = (
        built_in_parts(PartSizes(shape, ParallelLayout(tp=2), 2))
        for shape in (LLAMA, adapted(LLAMA, Lora(rank=2, targets=("q", "v"))))
    )
    late = [op.name for op in few["layer"].backward.operators if op.phase is Phase.WEIGHT_GRADIENT]
    assert late == ["qkv.wgrad"]
    assert not any(op.phase is Phase.GRADIENT for part in few.values() for op in part.backward.operators)
    assert [op.name for op in few["embedding"].backward.operators] == ["embedding.drop"]
    forward = plain["layer"].forward
    assert forward.flops < few["layer"].forward.flops < 1.1 * forward.flops
    added = few["layer"].forward.named("qkv").flops - forward.named("qkv").flops
    assert few["layer"].backward.named("qkv.wgrad").flops == 2 * added
    assert {op.name for op in few["head"].forward.operators} == {
        op.name for op in plain["head"].forward.operators if op.phase is not Phase.WEIGHT_GRADIENT
    }


def test_a_step_needs_two_thirds_of_the_flops() -> None:
    tokens = 1024
    share = model_flops(adapted(LLAMA), tokens) / model_flops(LLAMA, tokens)
    assert 2 / 3 < share < 0.8


def linked(name: str, **layout: int) -> list[object]:
    """All sums, gathers and allocations of a schedule's code."""
    found = layout_for(name, layout.pop("pp", 1), **layout)
    setting: Setting = replace(setting_for(name, found, 6), model=adapted(LLAMA))
    parts = parts_for(setting)
    code = link(training_schedule(setting, parts, choices_for(setting)), found, setting.kinds, parts)
    operations = [op for stage in code.stages for stretch in stage for op in stretch.operations]
    starts = [op for op in operations if isinstance(op, Start | Allocate)]
    for op in starts:
        if isinstance(op.what, Reduce) and op.what.chunk is not None and op.what.bucket is not None:
            assert code.parameters(op.what.chunk, op.what.bucket).total, f"{op.what} moves nothing"
        if isinstance(op.what, Gather):
            assert code.gathered(op.what.chunk, op.what.bucket).total, f"{op.what} moves nothing"
    return [op.what for op in starts]


@pytest.mark.parametrize("name", ["megatron", "ddp", "zbv", "dualpipev"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_frozen_is_gathered_and_never_summed(name: str, zero: int) -> None:
    pp = 2 if name in ("zbv", "dualpipev") else 1
    moved = linked(name, pp=pp, dp=2, zero=zero)
    sums = [what for what in moved if isinstance(what, Reduce) and what.axis == "dp"]
    gathers = [what for what in moved if isinstance(what, Gather)]
    assert sums
    assert bool(gathers) == bool(zero)
