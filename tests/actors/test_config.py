"""The configuration as a user writes it: what YAML makes of it, and where its paths begin."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, ConfigError, load_config, parse_config
from braid.actors.config.paths import anchored
from braid.scheduling.text.yaml_text import parse_yaml


def written(folder: Path, text: str, *overrides: str) -> Config:
    """A configuration file with this text."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(parse: Callable[..., Config], *arguments: Any) -> str:
    """The one line that says what is wrong."""
    with pytest.raises(ConfigError) as refused:
        parse(*arguments).check(257)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_words_and_dates_are_text(tmp_path: Path) -> None:
    text = "name: 2026-11-23\ntelemetry: {wandb: off, progress: no}\ntrain: {lr: 1e-3}"
    config = written(tmp_path, text)
    assert (config.name, config.telemetry.wandb.mode, config.train.lr) == ("2026-11-23", "off", 1e-3)
    assert config.telemetry.progress is False
    config = written(tmp_path, "", "telemetry.wandb=off", "name=2026-11-24", "train.steps=1e3")
    assert (config.name, config.telemetry.wandb.mode, config.train.steps) == ("2026-11-24", "off", 1000)
    (tmp_path / "again.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml").to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: 123", 'name=123: must be text; write it in quotes: "123", or override \'name="123"\''),
        ("name: 1.5", '"1.5"'),
        ("name: true", '"true"'),
        ("runs: 2026", '"2026"'),
    ],
)
def test_numbers_that_should_be_text(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(written, tmp_path, text)
    key, _, value = text.partition(": ")
    assert str(getattr(written(tmp_path, f'{key}: "{value}"'), key)) == value
    assert str(getattr(written(tmp_path, "", f'{key}="{value}"'), key)) == value


MIRRORS = {
    "/m": "/m",
    "file:m": "file:/base/m",
    "file://m": "file:///base/m",
    "file:///m": "file:///m",
    "local://m": "local:///base/m",
    "s3://bucket/m": "s3://bucket/m",
    "simplecache::s3://bucket/m": "simplecache::s3://bucket/m",
    "~/m": "~/m",
}


def test_mirrors() -> None:
    for mirror, at_base in MIRRORS.items():
        config = anchored(parse_config({"checkpoint": {"mirror": mirror}}), Path("/base"))
        assert config.checkpoint.mirror == at_base


PLACES = ("a", "/a", "~/a", "$CORPORA/a", "$PWD/a", "${CORPORA}/a/../b", "b/$CORPORA")
TEXTS = ("runs", "model.initial", "data.tokenizer", "data.directory", "checkpoint.mirror")
TEXTS += ("overlap.schedule_file", "overlap.plan", "overlap.profile")


@pytest.mark.parametrize("key", [*TEXTS, "data.files", "data.exclude", "model.layer"])
@pytest.mark.parametrize("place", PLACES)
def test_homes_and_variables(key: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CORPORA", "/corpora")
    monkeypatch.setenv("PWD", "/here")
    (tmp_path / "b" / "corpora").mkdir(parents=True)  # else it may be the name of a repository
    found = {
        "a": f"{tmp_path}/a" if key != "data.exclude" else "a",
        "/a": "/a",
        "~/a": "/home/me/a",
        "$PWD/a": "/here/a",
        "$CORPORA/a": "/corpora/a",
        "${CORPORA}/a/../b": "/corpora/b",
    }
    value = {"data.files": f"['{place}']", "data.exclude": f"['{place}']", "model.layer": f"{place}.py:L"}
    config = anchored(written(tmp_path, "", f"{key}={value.get(key, place)}"), tmp_path)
    section, _, name = key.rpartition(".")
    got = getattr(getattr(config, section) if section else config, name)
    text = str(got[0] if isinstance(got, tuple) else got)
    text = os.path.normpath(text.removesuffix(".py:L")) if key in ("data.exclude", "model.layer") else text
    where = "" if key == "data.exclude" else f"{tmp_path}/"
    assert text == found.get(place, f"{where}b/corpora")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("$NONE/a", "runs='$NONE/a': the variable NONE is not set here, or empty; set it"),
        ("a/${EMPTY}", "the variable EMPTY is not set here, or empty"),
        ("~nobody-of-this/a", "runs='~nobody-of-this/a': ~nobody-of-this is nobody's home here"),
        ("$MY_TOKEN/a", "MY_TOKEN looks like a secret"),
    ],
)
def test_homes_and_variables_that_are_not_known(
    place: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("MY_TOKEN", "t")
    monkeypatch.delenv("NONE", raising=False)
    assert says in refusal(written, tmp_path, "", f"runs={place}")


def test_homes_are_left_to_whoever_reads_them() -> None:
    """A manifest for other machines has neither homes nor variables of this one; modules are no files."""
    content = {"runs": "~/r", "data": {"directory": "$D/d"}, "model": {"layer": "package.module:Layer"}}
    config = anchored(parse_config(content), Path("/base"))
    assert (str(config.runs), str(config.data.directory)) == ("~/r", "$D/d")
    assert config.model.layer == "package.module:Layer"
    assert not anchored(parse_config({}), Path("/base")).model.model_fields_set, "nothing that was not given"


def test_layers_by_name(tmp_path: Path) -> None:
    """In a file, in overrides, beside the configuration, and written down again."""
    model: dict[str, Any] = {
        "layer": {"own": "mine.py:Layer", "other": "package.module:Layer"},
        "pattern": "2*own other layer",
    }
    config = anchored(parse_config({"model": model}, ["model.layer.own=other.py:Wide"]), Path("/base"))
    assert config.model.own_layers == {"own": "/base/other.py:Wide", "other": "package.module:Layer"}
    assert config.check(257).kinds == ("own", "own", "other", "layer")
    assert model["layer"]["own"] == "mine.py:Layer", "what is given stays as it is"
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "run.yaml") == config
    assert parse_config({"model": {"layer": "a.b:C"}}).model.own_layers == {"layer": "a.b:C"}
    assert parse_config({}).model.own_layers == {}
    model = {"preset": "llama-3.1-8b", "pattern": "31*layer own", "layer": {"own": "a:B"}}
    preset = parse_config({"model": model})
    assert preset.model.shape(1).kinds.count("layer") == 31


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"rotary_scaling": {"facto": 2}}, "scaling: unknown key 'facto'; did you mean 'factor'?"),
        ({"rotary_scaling": 8}, "model.rotary_scaling=8: must hold keys and values, found 8"),
        ({"rotary_scaling": {}}, "model.rotary_scaling: factor is missing; give it a number"),
        ({"family": "gpt", "rotary_scaling": {"factor": 2}}, "does not go with model.family gpt"),
        ({"rotary_scaling": {"factor": 1, "factors": [1, 2], "original_sequence": 256}}, "has 2 entries"),
        (
            {"rotary_scaling": {"factor": 1, "factors": [1.5] * 16, "original_sequence": 64}},
            "model.sequence=256 is longer than model.rotary_scaling.original_sequence=64",
        ),
        ({"head_bias": True, "tied_head": True}, "model.head_bias=true needs an output matrix of its own"),
        ({"mixer_jitter": 0.01}, "model.mixer_jitter=0.01 needs experts, and with them model.family moe"),
        (
            {"family": "moe", "experts": 4, "top_k": 2, "mixer_jitter": 0.01, "softmax_after": True},
            "do not go with model.softmax_after=true; leave one out",
        ),
        ({"family": "gpt", "head_norm": True}, "model.head_norm=True does not go with model.family gpt"),
    ],
)
def test_parts_of_attention_that_cannot_be(model: dict[str, object], says: str) -> None:
    assert says in refusal(parse_config, {"model": model})


@pytest.mark.parametrize("layer", [3, {}, {"own": 3}, {1: "a:B"}, ["a:B"], True])
def test_layers_that_are_no_names(layer: object) -> None:
    assert re.search(
        r"model\.layer.*'package\.module:Class'", refusal(parse_config, {"model": {"layer": layer}})
    )


def test_what_belongs_to_a_file_begins_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current directory is, and in overrides too; what a run reads and writes is left."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "run.yaml").write_text("model: {layer: mine.py:Layer}", encoding="utf-8")
    config = load_config("folder/run.yaml", ["model.initial=weights", "checkpoint.mirror=file:mirror"])
    assert config.model.layer == f"{tmp_path}/folder/mine.py:Layer"
    assert config.model.initial == tmp_path / "folder" / "weights"
    assert config.checkpoint.mirror == f"file:{tmp_path}/folder/mirror"
    assert (config.runs, config.data.files) == (Path("runs"), ("python-stdlib",))
    model = parse_config({"model": {"layer": "mine.py:Layer", "initial": "weights"}}).model
    assert (model.layer, model.initial) == ("mine.py:Layer", Path("weights")), "no file, no folder"


SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_CREDENTIALS")
ODD = [("API_KEY", 1234567), ("HTTPS_PROXY", "http://user:canary@proxy:3128")]


@pytest.mark.parametrize(("name", "value"), [*((name, "canary") for name in SECRETS), *ODD])
def test_secrets_have_no_value_in_a_configuration(tmp_path: Path, name: str, value: object) -> None:
    says = refusal(parse_config, {"cluster": {"env": {name: value}}})
    assert f"{name} looks like a secret" in says
    assert f"write {name}: null" in says
    assert str(value) not in says
    assert "canary" not in says
    config = written(tmp_path, f"cluster: {{env: {{{name}: null}}}}")
    assert config.cluster.env == {name: None}
    assert parse_config(parse_yaml(config.to_yaml(), "it")) == config


def test_other_variables_have() -> None:
    names = ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "MONKEY", "KEYBOARD", "HTTPS_PROXY")
    variables = dict.fromkeys(names, "http://proxy:3128")
    assert parse_config({"cluster": {"env": variables}}).cluster.env == variables


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'train.lr'?"),
        ("train.batch_size=4", "unknown key 'train.batch_size'; did you mean 'train.global_batch'?"),
        ("parallel.fsdp=true", "unknown key 'parallel.fsdp'; did you mean 'parallel.zero=3'?"),
        ("model.lr=1", "unknown key 'model.lr'; did you mean 'train.lr'?"),
        ("training.lr=1", "unknown key 'training'; did you mean 'train'?"),
        ("overlap.schedule=fsdp", "overlap.schedule='fsdp': is not known; here that is parallel.zero=3"),
        ("overlap.schedule=dhelx", "overlap.schedule='dhelx': is not known; did you mean 'dhelix'?"),
        ("train.steps=true", "train.steps=true: must be a whole number at least 1"),
        ("train.betas=[true, 0.9]", "train.betas=[true, 0.9]: must be a list of 2 numbers at least 0, < 1"),
        ("train.seed=-1", "train.seed=-1: must be a whole number at least 0, < 4294967296"),
        ("train.dropout=1", "train.dropout=1: must be a number at least 0, < 1"),
        ("overlap.memory_slack=-0.1", "overlap.memory_slack=-0.1: must be a number at least 0"),
        ("train.z_loss=-1e-4", "train.z_loss=-0.0001: must be a number at least 0"),
        ("model.dropout=0.1", "unknown key 'model.dropout'; did you mean 'train.dropout'?"),
        ("telemetry.page=1", "telemetry.page=1: must be true or false"),
        ("overlap.cuda_graphs=maybe", "overlap.cuda_graphs='maybe': must be true or false, or auto"),
        ("cluster.env={A: 1}", 'cluster.env.A=1: must be text; write it in quotes: "1"'),
        (
            "failure.spike=0.5",
            "failure: spike=0.5 would repeat every other step; set it above 1, as to 3, or",
        ),
        ("elastic={min_ranks: 3, max_ranks: 2}", "elastic: min_ranks=3 does not go with max_ranks=2; set"),
        ("train=5", "train=5: is a section of keys; write them as train: {steps: ...}"),
    ],
)
def test_wrong_keys_and_values_are_one_line_with_the_remedy(override: str, says: str) -> None:
    assert refusal(parse_config, {}, [override]).startswith(f"override {override!r}: {says}")


def test_keys_that_are_numbers() -> None:
    for content, key in (({1: 2}, "1"), ({"train": {1: 2}}, "train.1")):
        assert f"configuration: unknown key '{key}'; known here: " in refusal(parse_config, content)
