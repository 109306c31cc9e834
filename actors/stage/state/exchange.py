"""Weights read from and written to Hugging Face directories, tensor by tensor (`hub_files` maps the tensors),
and adapters written as `peft` reads them."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from braid.actors.stage.files.checkpoint_files import GuardedReader
from braid.actors.stage.files.hub_files import INDEX, SINGLE, HubDirectory, StoredTensor, stored_tensors
from braid.actors.stage.state.checkpoint import quietly, read_tensors
from braid.actors.stage.state.global_state import GlobalSlices, GlobalState, LoadPlanner
from braid.actors.stage.state.parameters import GlobalParameter, ParameterSlice
from braid.scheduling.model.presets.hugging_face import CONFIG, hugging_face_config
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.states import PARAMETER

EXPORT_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAPTERS: Final = "adapter_model.safetensors"
DESCRIPTION: Final = "adapter_config.json"
_IN_LAYER = re.compile(r".+\.\d+\.(.+)")
"""Pattern of a module's name: where its layer is, and its name inside the layer."""


@torch.no_grad()
def load_initial(
    directory: Path, shape: ModelShape, targets: Iterable[tuple[Tensor, Sequence[ParameterSlice]]]
) -> None:
    """Read some slices of the stored tensors, and nothing else, into local tensors that hold these slices.

    Slices of adapters, which no directory holds, are left as they are. Raise `ValueError` if the directory
    does not hold a model of this shape.
    """
    hub = HubDirectory.open(directory)
    hub.check(shape)
    homes: dict[tuple[str, int | None], tuple[StoredTensor, int]] = {}
    for tensor in stored_tensors(shape):
        row = 0
        for name, rows in tensor.sources:
            homes[name, tensor.expert] = (tensor, row)
            row += rows
    with contextlib.ExitStack() as files:
        opened = {
            path: files.enter_context(safe_open(path, framework="pt")) for path in set(hub.places.values())
        }
        for local, slices in targets:
            for piece in (piece for piece in slices if not piece.source.adapter):
                for expert, box, target in _boxes(piece, local, (piece.source.name, None) not in homes):
                    tensor, row = homes[piece.source.name, expert]
                    stored = hub.stored_name(tensor)
                    part = opened[hub.places[stored]].get_slice(stored)
                    target.copy_(_read(part, tensor, box, row))


def _boxes(
    piece: ParameterSlice, local: Tensor, by_expert: bool
) -> Iterator[tuple[int | None, list[slice], Tensor]]:
    """Yield (expert or None, box of a stored tensor, target view): of a slice, or of each expert."""
    box = [slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True)]
    target = piece.of_local(local)
    if not by_expert:
        yield None, box, target
        return
    for expert, matrix in zip(range(box[0].start, box[0].stop), target, strict=True):
        yield expert, box[1:], matrix


def _read(part: Any, tensor: StoredTensor, box: Sequence[slice], row: int) -> Tensor:
    """Read a box of a global parameter, whose rows begin at row ``row`` of the stored (stacked) tensor."""
    extents = [slice(row + box[0].start, row + box[0].stop), *box[1:]]
    values: Tensor = part[tuple(reversed(extents) if tensor.transposed else extents)]
    return values.t() if tensor.transposed else values


def export_model(
    checkpoint: Path,
    directory: Path,
    shape: ModelShape,
    dtype: str,
    max_file_bytes: int,
    tokens: Mapping[str, Any] = MappingProxyType({}),
    base: Path | None = None,
    state: str = PARAMETER,
) -> list[Path]:
    """Write a verified checkpoint's parameters into an empty directory; return the files that hold them.

    ``dtype``: a key of `EXPORT_DTYPES`; ``tokens``: ids of special tokens, for ``config.json``; ``base``:
    directory of the model whose adapters the checkpoint holds, which are merged into it; ``state``: kind of
    state that is written, the weights or their average. One file's tensors are in memory at a time; a tensor
    larger than ``max_file_bytes`` gets a file of its own. Raise `ValueError` if the checkpoint belongs to
    another model, `OSError` if a file cannot be written.
    """
    tensors = stored_tensors(shape)
    load: Callable[[Sequence[StoredTensor]], _Parts]
    if base is None:
        reader = GuardedReader(checkpoint)
        _check_contents(checkpoint, reader, tensors, state)
        load = partial(_load, reader, kind=state)
    else:
        load = partial(_load_merged, base, shape, adapters_in(checkpoint, state))
    kind = EXPORT_DTYPES[dtype]
    groups = _groups(tensors, kind.itemsize, max_file_bytes)
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [SINGLE]
    for name, group in zip(names, groups, strict=True):
        parts = load(group)
        write_tensors(directory / name, {tensor.name: _stored(tensor, parts, kind) for tensor in group})
    if len(groups) > 1:
        total = sum(kind.itemsize * math.prod(tensor.shape) for tensor in tensors)
        files_of = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": files_of}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = hugging_face_config(shape, str(kind).removeprefix("torch."), tokens)
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    files = [directory / name for name in names]
    for file in files:  # safetensors creates files that only the owner may read
        shutil.copymode(directory / CONFIG, file)
    return files


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name as safetensors; raise `OSError` if that fails."""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from None


def _check_contents(
    checkpoint: Path, reader: GuardedReader, tensors: Sequence[StoredTensor], state: str
) -> None:
    """Raise `ValueError` unless a checkpoint's parameters have the names and shapes of ``tensors``."""
    stored = {
        name.removeprefix(f"{state}."): tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(f"{state}.") and isinstance(entry, TensorStorageMetadata)
    }
    if not stored and state != PARAMETER:
        raise ValueError(
            f"checkpoint {checkpoint} has no {state} of the weights; train with train.average, or export "
            f"without `--average`"
        )
    wanted = {name: tensor.source_shape(rows) for tensor in tensors for name, rows in tensor.sources}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {checkpoint} cannot be exported: parameter {name} has shape {stored.get(name)} "
                f"there and {wanted.get(name)} in the model that `transformers` knows"
            )


def _groups(tensors: Sequence[StoredTensor], itemsize: int, max_file_bytes: int) -> list[list[StoredTensor]]:
    """Divide tensors, in order, into files of at most ``max_file_bytes`` bytes."""
    groups: list[list[StoredTensor]] = [[]]
    used = 0
    for tensor in tensors:
        size = itemsize * math.prod(tensor.shape)
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += size
    return groups


_Parts = Mapping[str, tuple[int, Tensor]]
"""Name of a global parameter -> (first expert, box) of experts' parameters, (0, whole tensor) of others."""


def _boxes_of(group: Sequence[StoredTensor]) -> dict[str, tuple[tuple[int, ...], range]]:
    """Return {global parameter: (its shape, its rows in a file)}; rows are experts if it holds experts.

    Rows reach from the file's first expert to its last, so that no other experts are read. There is one box
    per parameter, as a stored slice of many experts is read anew for each box that overlaps it.
    """
    boxes: dict[str, tuple[tuple[int, ...], range]] = {}
    for tensor in group:
        for name, rows in tensor.sources:
            shape = tensor.source_shape(rows)
            wanted = range(shape[0]) if tensor.expert is None else range(tensor.expert, tensor.expert + 1)
            _, experts = boxes.get(name, (shape, wanted))
            boxes[name] = shape, range(min(experts.start, wanted.start), max(experts.stop, wanted.stop))
    return boxes


Adapters = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a matrix -> the factors of its adapter: rank x inputs, outputs x rank."""


def adapters_in(checkpoint: Path, state: str = PARAMETER) -> Adapters:
    """Return all adapters of a verified checkpoint, in its dtype: the weights, or another kind of state."""
    found = read_tensors(checkpoint)
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        kind, _, parameter = name.partition(".")
        matrix, _, factor = parameter.rpartition(".lora_")
        if kind == state and matrix:
            factors.setdefault(f"{matrix}.weight", {})[factor] = tensor
    return {matrix: (both["a"], both["b"]) for matrix, both in factors.items()}


def _load_merged(base: Path, shape: ModelShape, adapters: Adapters, group: Sequence[StoredTensor]) -> _Parts:
    """Read the parameters that a file's tensors consist of from another directory, and add adapters."""
    assert shape.lora is not None
    wide = next(iter(adapters.values()))[0].dtype
    parts, pieces = {}, []
    for name, (extents, experts) in _boxes_of(group).items():
        sizes = (len(experts), *extents[1:])
        parts[name] = experts.start, torch.empty(sizes, dtype=wide)
        offsets = (experts.start, *[0] * (len(extents) - 1))
        source = GlobalParameter(name=name, shape=extents)
        pieces.append((ParameterSlice(source=source, offsets=offsets, sizes=sizes),))
    load_initial(base, shape, zip((local for _, local in parts.values()), pieces, strict=True))
    for name, (_, local) in parts.items():
        if (factors := adapters.get(name)) is not None:
            a, b = factors
            local.addmm_(b, a, alpha=shape.lora.scale)
    return parts


def _load(reader: GuardedReader, group: Sequence[StoredTensor], kind: str) -> _Parts:
    """Read the parameters that a file's tensors consist of, in the checkpoint's dtype."""
    entries = reader.read_metadata().state_dict_metadata
    state: GlobalState = {}
    parts: dict[str, tuple[int, Tensor]] = {}
    for name, (shape, experts) in _boxes_of(group).items():
        entry = entries[f"{kind}.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        local = torch.empty((len(experts), *shape[1:]), dtype=entry.properties.dtype)
        offsets = torch.Size((experts.start, *[0] * (len(shape) - 1)))
        state[f"{kind}.{name}"] = GlobalSlices(shape, {offsets: local})
        parts[name] = experts.start, local
    with quietly():
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    return parts


def _stored(tensor: StoredTensor, parts: _Parts, dtype: torch.dtype) -> Tensor:
    sources = [parts[name] for name, _ in tensor.sources]
    rows = [whole if tensor.expert is None else whole[tensor.expert - first] for first, whole in sources]
    stacked = torch.cat(rows).to(dtype)
    return stacked.t().contiguous() if tensor.transposed else stacked


def export_adapters(
    checkpoint: Path, directory: Path, shape: ModelShape, dtype: str, base: Path | None, state: str
) -> Path:
    """Write the adapters of a verified checkpoint into an empty directory; return the file that holds them.

    ``dtype``: a key of `EXPORT_DTYPES`; ``base``: directory of the model that the adapters belong to;
    ``state``: kind of state that is written, the weights or their average. A
    matrix that `transformers` has in one with others (GPT-2's queries, keys and values) makes one adapter of
    as many times the rank: the first factors one below the other, the second ones along the diagonal. Raise
    `ValueError` if `transformers` has no such model or `peft` no such adapters, `OSError` if a file cannot be
    written.
    """
    lora, adapters, kind = shape.lora, adapters_in(checkpoint, state), EXPORT_DTYPES[dtype]
    assert lora is not None
    content, ranks, transposed = {}, {}, False
    for tensor in stored_tensors(shape):
        pairs = [(rows, adapters.get(name)) for name, rows in tensor.sources]
        first = [factors[0] for _, factors in pairs if factors is not None]
        if not first:
            continue
        second = [torch.empty(rows, 0) if factors is None else factors[1] for rows, factors in pairs]
        module = tensor.name.removesuffix(".weight")
        for factor, value in (("A", torch.cat(first)), ("B", torch.block_diag(*second))):
            content[f"base_model.model.{module}.lora_{factor}.weight"] = value.to(kind).contiguous()
        inside = _IN_LAYER.fullmatch(module)
        assert inside is not None, f"{module} is in no layer"
        ranks[inside[1]] = lora.rank * len(first)
        transposed |= tensor.transposed
    if shape.experts and (mlp := [name for name in ranks if name.startswith("mlp.")]):
        raise ValueError(
            f"adapters of {mlp[0]} in layers without experts cannot be exported: `peft` takes the name for "
            f"that of experts' matrices; export the whole model with `--merge`, or train with "
            f"model.lora.targets=[q, k, v, o]"
        )
    file = directory / ADAPTERS
    write_tensors(file, content)
    larger = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*ranks],
        "rank_pattern": larger,
        "alpha_pattern": {name: lora.scale * rank for name, rank in larger.items()},
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    shutil.copymode(directory / DESCRIPTION, file)  # safetensors creates files that only the owner may read
    return file
