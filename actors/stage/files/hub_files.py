"""Names, shapes and files of weights in Hugging Face directories. Importable without torch.

A stored tensor is one global parameter of Braid, or several stacked along their rows (GPT-2's fused q, k, v),
and may be transposed (GPT-2 stores matrices as inputs x outputs). If a global parameter holds the matrices of
all experts (E x rows x columns), a stored tensor holds one expert's matrix, as in published files.

Only safetensors files are opened: they are numbers behind a JSON header, while pickles can run code when they
are read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from braid.scheduling.model.presets.architectures import GPT2, MIXTRAL, PHI_MOE
from braid.scheduling.model.presets.hugging_face import CONFIG, architecture_of
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.pattern import DENSE

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
READABLE: Final = ("F64", "F32", "F16", "BF16")
"""Names of supported element types in safetensors."""

_MIXTRAL: Final = {"gate": "w1", "up": "w3", "down": "w2"}
"""Names of an expert's matrices in files of Mixtral and Phi-3.5-MoE."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_BUFFERS = re.compile(r".*\.(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")
"""Pattern of names of constants that old files contain as well: causal masks, rotary frequencies."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: global parameters (name, rows), stacked; ``columns`` is None for vectors."""

    name: str
    sources: tuple[tuple[str, int], ...]
    columns: int | None = None
    transposed: bool = False
    experts: int = 0
    """Experts whose matrices each of the global parameters holds; 0 if these belong to no experts."""
    expert: int | None = None
    """Number of the expert whose matrix is stored; None if the tensor belongs to no experts."""

    def source_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the global parameter that has ``rows`` rows in this tensor."""
        experts = (self.experts,) if self.experts else ()
        return (*experts, rows) if self.columns is None else (*experts, rows, self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file; in Braid's orientation, rows are outputs."""
        rows = sum(count for _, count in self.sources)
        shape = (rows,) if self.columns is None else (rows, self.columns)
        return shape[::-1] if self.transposed else shape


def stored_tensors(shape: ModelShape) -> tuple[StoredTensor, ...]:
    """Return all tensors that a model of this shape is stored as; raise `ValueError` if it has no stored
    form."""
    return tuple(_gpt2(shape) if architecture_of(shape) is GPT2 else _llama(shape))


def _tensor(name: str, source: str, rows: int, columns: int | None = None) -> StoredTensor:
    return StoredTensor(name=name, sources=((source, rows),), columns=columns)


def _linear(stored: str, ours: str, rows: int, columns: int, bias: bool = False) -> Iterator[StoredTensor]:
    yield _tensor(f"{stored}.weight", f"{ours}.weight", rows, columns)
    if bias:
        yield _tensor(f"{stored}.bias", f"{ours}.bias", rows)


def _llama(shape: ModelShape) -> Iterator[StoredTensor]:
    hidden, ffn = shape.hidden, shape.ffn
    yield _tensor("model.embed_tokens.weight", "embedding.weight", shape.vocabulary, hidden)
    for index in range(shape.layers):
        stored, ours = f"model.layers.{index}", f"layers.{index}"
        yield from _norm(shape, f"{stored}.input_layernorm", f"{ours}.attention_norm")
        attention, mlp = f"{stored}.self_attn", f"{stored}.mlp"
        for part, rows in (("q", shape.query_width), ("k", shape.kv_width), ("v", shape.kv_width)):
            names = f"{attention}.{part}_proj", f"{ours}.qkv.{part}"
            yield from _linear(*names, rows, hidden, shape.qkv_bias)
        for part in "qk" if shape.head_norm else "":
            yield _tensor(f"{attention}.{part}_norm.weight", f"{ours}.{part}_norm.weight", shape.head_dim)
        names = f"{attention}.o_proj", f"{ours}.projection"
        yield from _linear(*names, hidden, shape.query_width, shape.projection_bias)
        yield from _norm(shape, f"{stored}.post_attention_layernorm", f"{ours}.mlp_norm")
        if shape.experts and shape.kinds[index] != DENSE:
            yield from _experts(shape, stored, ours)
            continue
        for part in ("gate", "up") if shape.gated else ("up",):
            yield from _linear(f"{mlp}.{part}_proj", f"{ours}.mlp_in.{part}", ffn, hidden)
        yield from _linear(f"{mlp}.down_proj", f"{ours}.mlp_out", hidden, ffn)
    yield from _norm(shape, "model.norm", "final_norm")
    yield from _head(shape)


def _head(shape: ModelShape) -> Iterator[StoredTensor]:
    if not shape.tied_head:
        yield from _linear("lm_head", "head", shape.vocabulary, shape.hidden, shape.head_bias)


def _norm(shape: ModelShape, stored: str, ours: str) -> Iterator[StoredTensor]:
    for kind in ("weight", "bias") if shape.norms_center else ("weight",):
        yield _tensor(f"{stored}.{kind}", f"{ours}.{kind}", shape.hidden)


def _experts(shape: ModelShape, stored: str, ours: str) -> Iterator[StoredTensor]:
    """Yield the tensors of a layer's router and experts; ``stored``, ``ours``: the layer's prefixes."""
    hidden, width, experts = shape.hidden, shape.expert_width, shape.experts
    matrices = {part: (f"{ours}.experts.{part}.weight", width, hidden) for part in ("gate", "up")}
    matrices["down"] = (f"{ours}.experts.down.weight", hidden, width)
    original = architecture_of(shape) in (MIXTRAL, PHI_MOE)
    block = f"{stored}.block_sparse_moe" if original else f"{stored}.mlp"
    yield _tensor(f"{block}.gate.weight", f"{ours}.router.weight", experts, hidden)
    for expert in range(experts):
        for part, (name, rows, columns) in matrices.items():
            called = _MIXTRAL[part] if original else f"{part}_proj"
            yield StoredTensor(
                name=f"{block}.experts.{expert}.{called}.weight",
                sources=((name, rows),),
                columns=columns,
                experts=experts,
                expert=expert,
            )


def _gpt2(shape: ModelShape) -> Iterator[StoredTensor]:
    hidden, ffn = shape.hidden, shape.ffn
    yield _tensor("transformer.wte.weight", "embedding.weight", shape.vocabulary, hidden)
    yield _tensor("transformer.wpe.weight", "positions.weight", shape.sequence, hidden)
    for index in range(shape.layers):
        stored, ours = f"transformer.h.{index}", f"layers.{index}"
        yield from _norm(shape, f"{stored}.ln_1", f"{ours}.attention_norm")
        qkv = {f"{ours}.qkv.{part}": hidden for part in "qkv"}
        yield from _gpt2_linear(f"{stored}.attn.c_attn", qkv, hidden)
        yield from _gpt2_linear(f"{stored}.attn.c_proj", {f"{ours}.projection": hidden}, hidden)
        yield from _norm(shape, f"{stored}.ln_2", f"{ours}.mlp_norm")
        yield from _gpt2_linear(f"{stored}.mlp.c_fc", {f"{ours}.mlp_in.up": ffn}, hidden)
        yield from _gpt2_linear(f"{stored}.mlp.c_proj", {f"{ours}.mlp_out": hidden}, ffn)
    yield from _norm(shape, "transformer.ln_f", "final_norm")
    yield from _head(shape)


def _gpt2_linear(stored: str, outputs: dict[str, int], inputs: int) -> Iterator[StoredTensor]:
    weights = tuple((f"{name}.weight", rows) for name, rows in outputs.items())
    biases = tuple((f"{name}.bias", rows) for name, rows in outputs.items())
    yield StoredTensor(name=f"{stored}.weight", sources=weights, columns=inputs, transposed=True)
    yield StoredTensor(name=f"{stored}.bias", sources=biases)


@dataclass(frozen=True, kw_only=True)
class HubDirectory:
    """A directory of safetensors files; ``places`` maps a tensor's name to its file."""

    path: Path
    places: dict[str, Path]

    @classmethod
    def open(cls, path: Path) -> "HubDirectory":
        """Find the tensors; raise `ValueError` for pickles, and for files or tensors that are missing."""
        if (path / SINGLE).is_file():
            return cls(path=path, places=dict.fromkeys(_header(path / SINGLE), path / SINGLE))
        if not (path / INDEX).is_file():
            raise ValueError(_nothing_to_read(path))
        places = {}
        for name, file in _index(path / INDEX).items():
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                pickled = isinstance(file, str) and file.endswith(PICKLES)
                refused = "is a pickle, which can run code when it is read" if pickled else "is refused"
                raise ValueError(
                    f"{path / INDEX}: {name} is said to be in {file!r}, which {refused}; "
                    f"only names such as model-00001-of-00002.safetensors are read"
                )
            places[name] = path / file
        for file in sorted(set(places.values())):
            held = _header(file)
            if lost := [name for name, place in places.items() if place == file and name not in held]:
                raise ValueError(f"{file} has no tensor {lost[0]}, which {INDEX} says is there")
        return cls(path=path, places=places)

    def stored_name(self, tensor: StoredTensor) -> str:
        """Return a tensor's name in this directory: GPT-2 is also published without a prefix of names."""
        bare = tensor.name.removeprefix("transformer.")
        return bare if tensor.name not in self.places and bare in self.places else tensor.name

    def check(self, shape: ModelShape) -> None:
        """Raise `ValueError` unless the directory holds exactly the tensors of a model of this shape."""
        tensors = {self.stored_name(tensor): tensor for tensor in stored_tensors(shape)}
        if missing := [name for name in tensors if name not in self.places]:
            raise ValueError(
                f"{self.path} lacks tensor {missing[0]}{_and_more(missing)}, which {CONFIG} says is there"
            )
        known = {*tensors, *(("lm_head.weight",) if shape.tied_head else ())}
        spare = [name for name in self.places if name not in known and not _BUFFERS.fullmatch(name)]
        if spare:
            experts = f", model.experts={shape.experts}" if shape.experts else ""
            sizes = f"model.layers={shape.layers}{experts}"
            raise ValueError(
                f"{self.path} holds tensor {min(spare)}{_and_more(spare)}, which a {shape.family} model of "
                f"{sizes} does not have; it is of another architecture"
            )
        headers = {file: _header(file) for file in set(self.places.values())}
        for name, tensor in tensors.items():
            found, kind = headers[self.places[name]][name]
            if found != tensor.shape:
                raise ValueError(
                    f"{self.places[name]}: tensor {name} has shape {list(found)} instead of "
                    f"{list(tensor.shape)}, which follows from {CONFIG}"
                )
            if kind not in READABLE:
                raise ValueError(f"{self.places[name]}: tensor {name} is {kind}, not {', '.join(READABLE)}")


def check_initial(path: Path | None, shape: ModelShape) -> None:
    """Raise `ValueError` if ``model.initial`` is given and does not hold a model of this shape."""
    if path is not None:
        HubDirectory.open(path).check(shape)


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _nothing_to_read(path: Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.name.endswith(PICKLES))
    if not pickles:
        return f"model.initial={str(path)!r} holds neither {SINGLE} nor {INDEX}"
    return (
        f"model.initial={str(path)!r} holds {pickles[0]} but no {SINGLE}: a pickle can run code when it is "
        f"read, so it is refused; save the model as safetensors where you trust the file"
    )


def _index(path: Path) -> dict[str, Any]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); it must hold a weight_map") from None
    if not isinstance(places, dict):
        raise ValueError(f"{path}: weight_map must map names of tensors to names of files")
    return places


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of every tensor in a file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
