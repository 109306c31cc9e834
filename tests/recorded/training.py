"""The bits of short trained runs: every schedule, on layouts and models on which it can run.

Whether a commit trains as another one did, on one machine (bits depend on processor and PyTorch): record each
in a checkout of its own, then compare::

    cd OLD && PYTHONPATH=$PWD python -m tests.recorded.training --out /tmp/old.json
    cd NEW && PYTHONPATH=$PWD python -m tests.recorded.training --out /tmp/new.json
    PYTHONPATH=$PWD python -m tests.recorded.training --compare /tmp/old.json /tmp/new.json

All runs take a quarter of an hour. The file is written after every one; a record that was broken off goes on
where it was, so other sources need another file. Runs measure what they decide by: decisions may differ, and
change no bits. Only what lasts is used: the command line, ``metrics.jsonl`` (its floats are exact) and
checkpoints.
"""

import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Final

import yaml

from tests.end_to_end.command import ROOT, Outcome, braid, overlap_of
from tests.recorded.files import REFUSED, SCHEDULES, Case, chosen, command, read_cases, write_cases

FAILED: Final = "failed"
"""Key of the message where a run ended otherwise than it should; it is done again when a record goes on."""
BITS: Final = ("losses", "norms", "parameters")
"""SHA-256 of what has to be equal."""
_REFUSED_EXIT: Final = 2
_PATIENCE: Final = 600.0
"""Seconds for a command."""

MICRO_BATCH, MICRO_BATCHES = 2, 12
"""Samples; micro-batches of a replica in a step: a multiple of the stages, and more than twice as many."""
BASE: Final[Mapping[str, Any]] = {
    "runs": "runs",
    "model": {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "sequence": 32},
    "data": {"files": ["corpus.txt"], "validation_fraction": 0.1, "directory": "data"},
    "train": {"steps": 3, "micro_batch": MICRO_BATCH, "warmup_steps": 2, "validation_samples": 8, "seed": 11},
    "cluster": {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.25},
    "telemetry": {"progress": False, "page": False},
}
"""The configuration of every run."""

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"family": "llama"},
    "gpt": {"family": "gpt", "kv_heads": 4},
    "tied gpt": {"family": "gpt", "kv_heads": 4, "tied_head": True},
    "llama of 8": {"family": "llama", "layers": 8},
    "own layer": {"layer": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"},
}

LAYOUTS: Final[Mapping[str, Mapping[str, int]]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
}


def _without(*names: str) -> str:
    return " ".join(name for name in SCHEDULES if name not in names)


RUNS: Final[tuple[tuple[str, str, str, Mapping[str, Any]], ...]] = (
    ("llama", "tp2", _without("megatron:eager_1f1b", "interleaved"), {}),
    ("llama", "pp2", _without("intra_batch"), {}),
    ("llama", "tp2 pp2", _without(), {}),
    ("llama", "one rank", "megatron megatron:folded wavelet braid braid:twins zbv", {}),
    ("llama", "dp2", "megatron braid braid:twins", {}),
    ("llama", "dp2 tp2", "megatron intra_batch wavelet dhelix braid braid:twins braid:v", {}),
    (
        "llama",
        "dp2 pp2",
        _without("intra_batch", "megatron:folded", "wavelet", "braid:twins", "dualpipev"),
        {},
    ),
    ("gpt", "tp2", "megatron intra_batch braid braid:twins", {}),
    ("gpt", "tp4", "intra_batch", {}),
    ("gpt", "pp2", "megatron interleaved braid:eager_w zbv", {}),
    ("gpt", "tp2 pp2", "dhelix braid braid:v dualpipev", {}),
    ("tied gpt", "pp2", "megatron megatron:folded braid braid:v zbv", {}),
    ("tied gpt", "tp2 pp2", "braid", {}),
    ("llama of 8", "tp2", "braid", {}),
    ("llama of 8", "pp2", "megatron interleaved braid:eager_w", {}),
    ("llama", "tp2", "megatron braid", {"recompute": "selective"}),
    ("llama", "tp2", "megatron dhelix", {"recompute": "fine"}),
    ("llama", "tp2", "megatron intra_batch wavelet braid:twins", {"recompute": "full"}),
    ("llama", "pp2", "megatron:folded braid braid:eager_w zbv", {"recompute": "full"}),
    ("llama", "tp2 pp2", "interleaved braid:v", {"recompute": "full"}),
    ("llama", "tp2 pp2", "braid dualpipev", {"recompute": "fine"}),
    ("llama", "pp2", "braid:v", {"recompute": "selective"}),
    ("llama", "tp2", "megatron intra_batch braid braid:twins", {"dtype": "fp32"}),
    ("llama", "pp2", "megatron:folded zbv", {"dtype": "fp32"}),
    ("llama", "tp2 pp2", "braid:v", {"dtype": "fp32"}),
    ("llama", "tp2", "auto", {}),
    ("llama", "tp2 pp2", "braid", {"overlap.memory_slack": 0.02}),
    ("llama", "dp2 tp2", "braid", {"train.deterministic_reduction": True}),
    ("own layer", "tp2", "megatron braid", {}),
    ("own layer", "tp2", "intra_batch", {"recompute": "full"}),
    ("own layer", "tp2 pp2", "braid:eager_w", {}),
    # refused
    ("llama", "pp2", "interleaved braid:v", {"train.global_batch": 3 * MICRO_BATCH}),
    ("llama", "tp2", "intra_batch", {"model.sequence": 31}),
)
"""Model, layout, schedules, and what differs: recomputation, dtype, other keys by dotted name."""


def training_cases() -> dict[str, Mapping[str, Any]]:
    """The configuration of every run by name, with the schedule at the end of the name."""
    found = {}
    for model, layout, schedules, more in RUNS:
        recompute, dtype = more.get("recompute", "none"), more.get("dtype", "fp64")
        keys = {key: value for key, value in more.items() if "." in key}
        said = [f"{key.rpartition('.')[2]} {value}" for key, value in keys.items()]
        for schedule in schedules.split():
            name = ", ".join((model, layout, dtype, f"recompute {recompute}", *said))
            sections: dict[str, Any] = json.loads(json.dumps(BASE))
            sections["model"].update(MODELS[model])
            batch = MICRO_BATCHES * MICRO_BATCH * LAYOUTS[layout].get("dp", 1)
            sections["train"].update(dtype=dtype, recompute=recompute, global_batch=batch)
            sections |= {"parallel": dict(LAYOUTS[layout]), "overlap": overlap_of(schedule)}
            for key, value in keys.items():
                section, _, last = key.partition(".")
                sections[section][last] = value
            found[f"{name}: {schedule}"] = sections
    return found


def prepare(folder: Path) -> None:
    """Write a corpus, the same every time, and tokenise it."""
    random = Random(5)
    words = ["".join(random.choices(ascii_lowercase, k=n)) for n in range(1, 9) for _ in "1234"]
    lines = (" ".join(random.choices(words, k=12)) for _ in range(4000))
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = _braid(folder, "prepare", "data", BASE)
    if done.code:
        raise RuntimeError(f"the corpus cannot be prepared: {done.errors}")


def recorded(folder: Path, name: str, content: Mapping[str, Any]) -> Case:
    """Do a run and say what came of it."""
    slug = hashlib.sha256(name.encode()).hexdigest()[:12]
    try:
        done = _braid(folder, "train", slug, {**content, "name": slug})
        if done.code:
            return {REFUSED if done.code == _REFUSED_EXIT else FAILED: _message(done)}
        return bits_of(folder / "runs" / slug)
    except (OSError, ValueError, LookupError, RuntimeError, subprocess.SubprocessError) as error:
        return {FAILED: f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder / "runs" / slug, ignore_errors=True)


def _braid(folder: Path, command: str, name: str, content: Mapping[str, Any]) -> Outcome:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    return braid(folder, command, f"{name}.yaml", timeout=_PATIENCE)


def _message(done: Outcome) -> str:
    lines = [line for line in done.errors.splitlines() if line.strip()]
    return "\n".join(lines[-3:]) or f"exit code {done.code}"


def bits_of(run: Path) -> Case:
    """Digests of a finished run's losses, gradient norms and final parameters; and the losses, to read."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = sorted(map(json.loads, lines), key=lambda line: int(line["step"]))
    found = {"losses": [step["loss"] for step in steps], "norms": [step["grad_norm"] for step in steps]}
    digests = {name: _digest(" ".join(map(float.hex, values)).encode()) for name, values in found.items()}
    return {
        **digests,
        "parameters": _digest(*parameter_bytes(run / "checkpoints" / f"step-{steps[-1]['step']}")),
        "read": found["losses"],
    }


def _digest(*parts: bytes) -> str:
    """SHA-256 of parts, each with its length before it."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(struct.pack("<Q", len(part)))
        whole.update(part)
    return whole.hexdigest()


def parameter_bytes(checkpoint: Path) -> Iterator[bytes]:
    """Name, type, shape and raw bytes of a checkpoint's parameters, by name; `LookupError` if it has none."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("parameter.") and hasattr(entry, "size")
    }
    if not state:
        raise LookupError(f"{checkpoint} holds no parameters")
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in sorted(state.items()):
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.contiguous().view(torch.uint8).numpy().tobytes()


def record(out: Path, pattern: str | None) -> int:
    """Do all runs whose names hold the pattern and that are not in the file yet; 1 if one failed."""
    cases, found = training_cases(), read_cases(out) if out.exists() else {}
    names = [name for name in chosen(cases, pattern) if FAILED in found.get(name, {FAILED: ""})]
    with tempfile.TemporaryDirectory(prefix="recorded-") as name_of_folder:
        folder = Path(name_of_folder)
        prepare(folder)
        for number, name in enumerate(names, start=1):
            begin = time.perf_counter()
            found[name] = recorded(folder, name, cases[name])
            write_cases(out, found)
            seconds = time.perf_counter() - begin
            print(f"{number}/{len(names)} {name}: {_short(found[name])} ({seconds:.0f} s)", flush=True)
    return int(any(FAILED in case for case in found.values()))


def _short(case: Case) -> str:
    for key in (REFUSED, FAILED):
        if key in case:
            return f"{key}: {case[key]}"
    return f"loss {case['read'][-1]:.6f}, parameters {case['parameters'][:12]}"


def unlike(old: Case, new: Case) -> str:
    """Which bits of a run differ, or why one failed."""
    if FAILED in old or FAILED in new:
        return f"failed: {old.get(FAILED, 'not')} / {new.get(FAILED, 'not')}"
    if not (names := [name for name in BITS if old[name] != new[name]]):
        return ""
    pairs = zip(old["read"], new["read"], strict=False)
    apart = max((abs(a / b - 1) for a, b in pairs if b), default=math.nan)
    return f"{', '.join(names)} differ; losses {apart:.1e} apart"


if __name__ == "__main__":
    sys.exit(command("trained runs", record, unlike))
