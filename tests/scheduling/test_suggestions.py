"""What a name that is not known stands for: slips, words of other systems, nothing where nothing is near."""

import pytest

from braid.actors.config import Config
from braid.actors.config.wording import all_keys
from braid.scheduling.generate.named import SCHEDULES
from braid.scheduling.model.presets.library import cluster_names, model_names
from braid.scheduling.text.suggestions import OTHER_WORDS, hint, must_be_one_of, nearest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("qwen-2.5-7b", "qwen2.5-7b"),
        ("mixtral", "mixtral-8x7b"),
        ("deepseek-v3", None),
    ],
)
def test_models(name: str, meant: str | None) -> None:
    assert nearest(name, model_names()) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [("h100x8", "h100"), ("H100", "h100"), ("a100", "a100x8"), ("v100", "v100x8"), ("tpu", None)],
)
def test_clusters(name: str, meant: str | None) -> None:
    assert nearest(name, cluster_names()) == meant


@pytest.mark.parametrize(("name", "meant"), [("dhelx", "dhelix"), ("1F1B", "megatron"), ("tetris", None)])
def test_schedules(name: str, meant: str | None) -> None:
    assert nearest(name, SCHEDULES) == meant


def test_what_is_a_key_here_is_told_as_one() -> None:
    assert hint("fsdp", SCHEDULES) == "here that is parallel.zero=3"


def test_choices() -> None:
    assert must_be_one_of("fp16", ["fp32", "bf16"]) == "must be one of fp32, bf16; did you mean 'bf16'?"
    assert must_be_one_of(3, [0, 1]) == "must be one of 0, 1"
    assert must_be_one_of("tetris", SCHEDULES) == f"must be one of {', '.join(SCHEDULES)}"


def test_other_words_lead_to_keys_that_there_are() -> None:
    keys = {*all_keys(Config)}
    assert {ours.partition("=")[0] for ours in OTHER_WORDS if "." in ours} <= keys
