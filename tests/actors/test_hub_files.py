"""Hugging Face directories: what does not fit is refused by name.

That sizes of every kind come from `config.json` is in `tests.end_to_end.test_exchange`: a run is given its
own beside them, and what it exports has the bits and the logits of what it read.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from braid.actors.config import Config, ConfigError, load_config, parse_config
from braid.actors.stage.files.hub_files import HubDirectory, check_initial
from braid.scheduling.model.presets.hugging_face import CONFIG, hugging_face_config, initial_shape
from braid.scheduling.model.presets.library import model_preset
from braid.scheduling.model.rotary import RotaryScaling
from braid.scheduling.model.shape import ModelShape
from tests.actors.saved import Marker
from tests.foreign_models import LONG, SEQUENCE, random_model

TOKENS = 257
MIXTURES = ("mixtral", "qwen3 moe", "qwen3 moe, sparse, tied", "phi moe", "phi moe, bare")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories as `transformers` writes them, not to be changed."""
    path = tmp_path_factory.mktemp("stored")
    kinds = ("llama", "llama 3.1", "mistral", "qwen2", "qwen3", "gpt2", *MIXTURES)
    for kind in kinds:
        random_model(kind, 0).save_pretrained(path / kind)
    random_model("llama", 0).save_pretrained(path / "files", max_shard_size="200KB")
    return {kind: path / kind for kind in (*kinds, "files")}


@pytest.fixture
def copy(stored: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A directory of one's own, to damage."""

    return lambda kind: Path(shutil.copytree(stored[kind], tmp_path / kind))


def config(directory: Path, **model: Any) -> Config:
    return parse_config({"model": {"initial": str(directory), **model}})


def load(directory: Path, **model: Any) -> ModelShape:
    """What a run does before it starts."""
    shape = config(directory, **model).check(TOKENS)
    check_initial(directory, shape)
    return shape


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("kind", "key", "value", "theirs"),
    [
        ("llama", "rotary_base", 1e4, 5e4),
        ("llama", "family", "gpt", "llama"),
        ("gpt2", "tied_head", False, True),
        ("mixtral", "softmax_after", True, False),
        ("qwen3 moe, sparse, tied", "pattern", "dense layer", "dense layer 2*dense"),
    ],
)
def test_other_sizes(stored: dict[str, Path], kind: str, key: str, value: Any, theirs: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(stored[kind], **{key: value})
    message = str(refusal.value)
    for text in (f"model.{key}={value!r}", repr(theirs), "config.json", f"leave model.{key} out"):
        assert text in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match=r"^model\.initial does not go with model\.layer="):
        load(stored[kind], layer="package.module:Layer")


def test_a_resolved_configuration_reads_back(stored: dict[str, Path], tmp_path: Path) -> None:
    """Defaults are not taken for sizes that somebody asked for."""
    scaling = {"factor": 4.0, "original_sequence": 64}
    for model in (
        {"initial": str(stored["llama"])},
        {"initial": str(stored["llama 3.1"]), "rotary_scaling": scaling},
        {"preset": "qwen3-0.6b", "layers": 2},
        {"rotary_scaling": scaling, "head_norm": True},
    ):
        first = parse_config({"model": model})
        (tmp_path / "again.yaml").write_text(first.to_yaml())
        again = load_config(tmp_path / "again.yaml")
        assert again == first
        assert again.model.shape(TOKENS) == first.model.shape(TOKENS)


def test_older_files(copy: Callable[[str], Path]) -> None:
    """The rotary base at top level; GPT-2 without the first part of its names, with its causal masks."""
    llama = copy("llama")
    edit(llama / "config.json", rope_parameters=None, rope_scaling=None, rope_theta=123.0)
    assert load(llama).rotary_base == 123.0
    edit(llama / "config.json", rope_scaling={"type": "linear", "factor": 2.0})
    assert (load(llama).rotary_base, load(llama).rotary_scaling) == (123.0, RotaryScaling(factor=2.0))
    gpt = copy("gpt2")
    tensors = load_file(gpt / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, gpt / "model.safetensors")
    load(gpt)


PRESETS = ("llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b", "mixtral-8x7b")
PRESETS += ("mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "phi-3.5-moe")


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    shape = model_preset(name)
    (tmp_path / CONFIG).write_text(json.dumps(hugging_face_config(shape, "float32")))
    assert initial_shape(tmp_path, {}) == shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters()


def refused(directory: Path, *says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        load(directory)
    for text in says:
        assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


def no(kind: str, says: str, **changes: Any) -> Any:
    """A directory of a kind whose ``config.json`` has other entries; texts of its refusal between bars."""
    return pytest.param(kind, changes, says.split("|"), id=f"{kind}, {changes}")


def scaling(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**LONG, **changes}}


REFUSALS = [
    no("llama", "gemma3|'llama'|'qwen3'|'gpt2'", model_type="gemma3", architectures=["Gemma3ForCausalLM"]),
    no("llama", "LlamaForSequenceClassification", architectures=["LlamaForSequenceClassification"]),
    no("llama", "hidden_act='gelu'|'silu'", hidden_act="gelu"),
    no("llama", "low_freq_factor is missing", rope_parameters={"rope_type": "llama3", "factor": 8.0}),
    no("llama", "rope_scaling|yarn|'llama3'", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    no("llama", "factor='x'|a number", rope_scaling={"type": "linear", "factor": "x"}),
    no("llama", "partial_rotary_factor=0.5|all dimensions", partial_rotary_factor=0.5),
    no("llama", "rope_parameters=[1]", rope_parameters=[1]),
    no("llama", "quantization_config", quantization_config={"bits": 4}),
    no("llama", "hidden_size is missing", hidden_size=None),
    no("llama", "hidden='many'|whole number", hidden_size="many"),
    no("llama", "vocabulary of 100|257 tokens", vocab_size=100),
    no("llama", "lacks tensor model.layers.4.|8 more", num_hidden_layers=5),
    no("llama", "holds tensor model.layers.3.|another architecture", num_hidden_layers=3),
    no("llama", "[261, 64] instead of [300, 64]", tie_word_embeddings=False, vocab_size=300),
    no("mistral", "sliding_window=31|sequence of 32|model.sequence", sliding_window=SEQUENCE - 1),
    no("qwen2", "use_sliding_window=True|False", use_sliding_window=True),
    no("qwen2", "layer_types=['sliding_attention'", layer_types=["sliding_attention"] * 4),
    no("qwen3", "shape [96, 64] instead of [512, 64]", head_dim=None),
    no("mixtral", "model_type='deepseek_v3'|compressed keys", model_type="deepseek_v3"),
    no("qwen3 moe", "normalised=1|true or false", norm_topk_prob=1),
    no("qwen3 moe", "mlp_only_layers=['0']|numbers of layers", mlp_only_layers=["0"]),
    no("qwen3 moe", "lacks tensor model.layers.2.mlp.gate_proj.weight", mlp_only_layers=[2]),
    no("qwen3 moe", "model_type='qwen2_moe'|shared expert", model_type="qwen2_moe"),
    no("phi moe", "mixer_jitter=0.0|SparseMixer", router_jitter_noise=0.0),
    no("phi moe", "top_k=1|two", num_experts_per_tok=1),
    no("phi moe", "head_bias=true|tied_head", tie_word_embeddings=True),
    no("phi moe", "1 entries|8 frequencies", **scaling(short_factor=[1.0])),
    no("phi moe", "magnitude=0.0", **scaling(short_mscale=0.0)),
    no("gpt2", "activation_function='relu'", activation_function="relu"),
    no("gpt2", "model.head_dim=12", n_head=5),
]


@pytest.mark.parametrize(("kind", "changes", "says"), REFUSALS)
def test_other_models(
    copy: Callable[[str], Path], kind: str, changes: dict[str, Any], says: list[str]
) -> None:
    directory = copy(kind)
    edit(directory / "config.json", **changes)
    refused(directory, str(directory), *says)


def test_published_phi_is_read_up_to_the_length_that_its_short_factors_are_for(
    copy: Callable[[str], Path], stored: dict[str, Path]
) -> None:
    """Its ``config.json`` names the class of the code that came with it."""
    directory = copy("phi moe")
    content = json.loads((directory / "config.json").read_text())
    content |= {"architectures": ["PhiMoEForCausalLM"], "max_position_embeddings": 16 * SEQUENCE}
    content |= {"rope_scaling": {"type": "longrope", **{k: v for k, v in LONG.items() if k != "rope_type"}}}
    content |= {"sliding_window": 16 * SEQUENCE, "rope_theta": content.pop("rope_parameters")["rope_theta"]}
    (directory / "config.json").write_text(json.dumps(content))
    assert load(directory) == load(stored["phi moe"])
    with pytest.raises(ConfigError, match=r"model\.sequence=64, but .* says 32"):
        load(directory, sequence=64)


def test_a_window_as_long_as_the_samples_hides_nothing(copy: Callable[[str], Path]) -> None:
    directory = copy("mistral")
    for window, length in ((16, 16), (None, SEQUENCE)):
        edit(directory / "config.json", sliding_window=window)
        assert load(directory, sequence=length).sequence == length


def test_tensors_of_integers_or_of_other_sizes_and_files_that_are_torn(copy: Callable[[str], Path]) -> None:
    file = copy("llama") / "model.safetensors"
    whole = load_file(file)
    norm = "model.layers.2.input_layernorm.weight"
    for tensors, says in (
        ({**whole, norm: torch.ones(64, dtype=torch.int8)}, f"{norm} is I8"),
        ({**whole, norm: torch.ones(63)}, f"{norm} has shape [63] instead of [64]"),
    ):
        save_file(tensors, file)
        refused(file.parent, says)
    file.write_bytes(file.read_bytes()[:-100])
    refused(file.parent, str(file), "cannot be read as safetensors")


def test_pickles_are_refused_unread(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside safetensors they are left alone."""
    directory, marker = copy("llama"), tmp_path / "ran"
    whole = (directory / "model.safetensors").read_bytes()
    for name in ("pytorch_model.bin", "model.pt", "weights.pth"):
        (directory / name).write_bytes(pickle.dumps(Marker(marker)))
        load(directory)
        (directory / "model.safetensors").unlink()
        refused(directory, name, "pickle", "safetensors")
        assert not marker.exists()
        (directory / name).unlink()
        (directory / "model.safetensors").write_bytes(whole)
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists(), "the file is harmless: too easy a test"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../llama/model.safetensors", "is refused"),
        ("..", "is refused"),
        ("pytorch_model.bin", "is a pickle"),
        (7, "is refused"),
        ("model-00009-of-00009.safetensors", "cannot be read"),
    ],
)
def test_names_in_an_index(copy: Callable[[str], Path], name: Any, says: str) -> None:
    copy("llama")  # what the first name leads to is there
    directory = copy("files")
    load(directory)
    assert len(set(HubDirectory.open(directory).places.values())) > 2
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**places, "model.norm.weight": name})
    refused(directory, str(name), says)


def test_an_index_that_is_wrong(copy: Callable[[str], Path]) -> None:
    directory = copy("files")
    index = directory / "model.safetensors.index.json"
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    other = next(file for file in places.values() if file != places["model.norm.weight"])
    edit(index, weight_map={**places, "model.norm.weight": other})
    refused(directory, other, "has no tensor model.norm.weight")
    for content in ("{", "[]", '{"weight_map": []}'):
        index.write_text(content)
        refused(directory, str(index), "weight_map")


def test_directories_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "model.initial", "nowhere", "does not exist")
    (tmp_path / "model.pt").write_bytes(b"")
    refused(tmp_path / "model.pt", "model.pt", "is not a directory")
    refused(tmp_path, "config.json", "cannot be read")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "no keys")


SIZES: dict[str, Any] = {"hidden": 64, "ffn": 256, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16}
SIZES |= {"vocabulary": 64, "sequence": 8}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt", {"kv_heads": 2}, r"no equal in `transformers`"),
        ("llama", {"qkv_bias": True, "head_norm": True}, r"head_norm=true, model\.qkv_bias=true has no"),
        ("moe", {"qkv_bias": True}, r"'moe', model\.qkv_bias=true has no"),
        ("moe", {"shared_experts": 1}, r"model\.shared_experts=1 has no"),
        ("moe", {"normalised": False}, r"model\.normalised=false has no equal"),
        ("moe", {"pattern": "dense layer"}, r"='dense layer' has no equal .* without model\.head_norm"),
    ],
)
def test_what_has_no_equal_is_not_written(family: str, changes: dict[str, Any], says: str) -> None:
    sizes = SIZES | ({"experts": 4, "top_k": 2} if family == "moe" else {})
    with pytest.raises(ValueError, match=says):
        hugging_face_config(ModelShape(family=family, **{**sizes, **changes}), "float32")


@pytest.mark.parametrize("head_norm", [False, True])
def test_equal_mixtures_are_written_alike(head_norm: bool) -> None:
    """A softmax over the chosen, a width of experts that is no layer's: `transformers` has other words."""
    shape = ModelShape(family="moe", **{**SIZES, "ffn": 96}, experts=4, top_k=2, head_norm=head_norm)
    other = replace(shape, expert_ffn=96, softmax_after=True, normalised=False, z_loss=0.1)
    other = other if head_norm else replace(other, ffn=128)
    assert hugging_face_config(other, "float32") == hugging_face_config(shape, "float32")


def test_settings_of_training_are_the_runs_own(copy: Callable[[str], Path]) -> None:
    """Noise and the loss of routers are not read; ours may be asked for."""
    directory = copy("mixtral")
    free = load(directory)
    theirs = {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    edit(directory / "config.json", **theirs)
    assert load(directory) == free
    assert (free.balance_loss, free.z_loss, free.capacity_factor) == (0.0, 0.0, 0.0)
    own = {"balance_loss": 0.01, "z_loss": 0.001, "capacity_factor": 1.5}
    assert load(directory, **own) == replace(free, **own)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 moe"])
def test_either_name_of_the_number_of_experts(copy: Callable[[str], Path], kind: str) -> None:
    """Published files of Qwen3-MoE have another one than those of `transformers` 5."""
    config = copy(kind) / "config.json"
    for there, gone in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        edit(config, **{there: 4, gone: None})
        assert load(config.parent).experts == 4
