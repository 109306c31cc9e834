"""Degrees and policies of layers: what the program is told, what it proposes, what the simulator takes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import load_cluster
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES, policies_of, with_policies
from braid.scheduling.model.shape import Workload
from braid.scheduling.plan.decide import Outcome, decide, modelled, within
from braid.scheduling.plan.layer_choices import (
    LayerSearch,
    choose_layers,
    degrees_within,
    with_choices,
)
from braid.scheduling.plan.space import COARSE
from braid.scheduling.plan.tensor_degrees import LayerChoice
from braid.scheduling.text.pattern import base_kind, measured_kind, own_degree, own_recompute
from tests.scheduling.cases import LLAMA

TP, LAYERS = 4, 6
CLUSTER = replace(load_cluster("h100", 1), gpus_per_node=TP)
SETTING = Setting(
    model=replace(LLAMA, hidden=1024, ffn=4096, sequence=2048, layers=LAYERS),
    layout=ParallelLayout(tp=TP),
    workload=Workload(global_batch=16, micro_batch=4),
    schedule="braid",
    pipeline="w",
)
CHOICES = st.builds(LayerChoice, st.sampled_from((1, 2, 4)), st.sampled_from(RECOMPUTE_POLICIES))


def choices_of(setting: Setting) -> tuple[LayerChoice, ...]:
    """What a setting has for every layer."""
    layers = setting.model.layers
    degrees = setting.layout.tensor_degrees or (setting.layout.tp,) * layers
    return tuple(map(LayerChoice, degrees, policies_of(setting.recompute, layers)))


@given(st.lists(CHOICES, min_size=LAYERS, max_size=LAYERS))
@settings(max_examples=50)
def test_choices_are_those_of_the_setting(choices: list[LayerChoice]) -> None:
    setting = with_choices(SETTING, choices)
    assert choices_of(setting) == tuple(choices)
    alike = len({one.recompute for one in choices}) == 1
    for kind, choice in zip(setting.kinds, choices, strict=True):
        assert base_kind(kind) == "layer"
        assert (own_degree(kind) or TP) == choice.degree
        assert own_recompute(kind) == ("" if alike or choice.recompute == "none" else choice.recompute)
        assert measured_kind(kind) == ("layer" if choice.degree == TP else f"layer.{choice.degree}")


def test_policies_are_one_word_or_one_for_every_layer() -> None:
    assert policies_of("fine", 3) == ("fine",) * 3
    assert policies_of("2*full none", 3) == ("full", "full", "none")
    assert with_policies(("layer", "dense", "layer.2"), "full none fine") == (
        "layer.full",
        "dense",
        "layer.2.fine",
    )
    assert with_policies(("layer", "dense"), "2*full") == ("layer", "dense")
    with pytest.raises(ValueError, match=r"'2\*full none' has 3 policies, and model.layers=4"):
        policies_of("2*full none", 4)
    with pytest.raises(ValueError, match="'some' is not a recompute policy"):
        policies_of("2*some none", 3)


def test_degrees_side_by_side_divide_each_other() -> None:
    assert [degrees_within(tp) for tp in (1, 2, 8, 6)] == [(1,), (1, 2), (1, 2, 4, 8), (1, 3, 6)]


@cache
def alike(degree: int, recompute: str) -> Outcome:
    setting = with_choices(SETTING, (LayerChoice(degree, recompute),) * LAYERS)
    return decide([setting], modelled(CLUSTER), within(float("inf")), COARSE)[0]


def held(outcome: Outcome) -> int:
    return max(one.total_bytes for one in outcome.simulation.memory)


def chosen(limit: float) -> list[Outcome]:
    search = LayerSearch(degrees=(1, 4), policies=("none", "full"), limit_bytes=limit)
    return choose_layers(SETTING, search, modelled(CLUSTER), within(limit), lambda setting: [setting])


def test_what_is_taken_fits_and_is_the_fastest_of_what_does() -> None:
    """With room for everything, for nothing, and for some of the layers to hold more."""
    mixed = False
    some = [alike(degree, policy) for degree in (1, 4) for policy in ("none", "full")]
    bounds = sorted({held(one) for one in some})
    for limit in (bounds[-1], *((low + high) / 2 for low, high in pairwise(bounds))):
        found = chosen(limit)
        fitting = [one for one in found if held(one) <= limit]
        assert found[0] in fitting
        assert found[0].step_ns == min(one.step_ns for one in fitting)
        assert found[0].step_ns <= min(one.step_ns for one in some if held(one) <= limit)
        mixed |= len({*choices_of(found[0].setting)}) > 1
    assert mixed, "some of the layers hold more"
    least = chosen(bounds[0] / 2)[0]
    assert least.missing_bytes == held(least) - bounds[0] / 2 > 0


def test_nothing_that_can_be_run() -> None:
    odd = replace(SETTING, workload=Workload(global_batch=16, micro_batch=1))
    search = LayerSearch(degrees=(1,), policies=("none",))
    with pytest.raises(ValueError, match=r"train\.micro_batch=1 is not divisible by the 4 groups"):
        choose_layers(odd, search, modelled(CLUSTER), within(1e12), lambda setting: [setting])
