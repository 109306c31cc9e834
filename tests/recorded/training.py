"""The bits of short trained runs: every schedule, on layouts and models on which it can run.

Whether a commit trains as another one did, on one machine (bits depend on processor and PyTorch): record each
in a checkout of its own, then compare::

    cd OLD && PYTHONPATH=$PWD python -m tests.recorded.training --out /tmp/old.json
    cd NEW && PYTHONPATH=$PWD python -m tests.recorded.training --out /tmp/new.json
    PYTHONPATH=$PWD python -m tests.recorded.training --compare /tmp/old.json /tmp/new.json

All runs take a quarter of an hour. The file is written after every one; a record that was broken off goes on
where it was, unless the sources have changed since. Runs measure what they decide by: decisions may differ,
and change no bits. Only what lasts is used: the command line, ``metrics.jsonl`` (its floats are exact) and
checkpoints.
"""

import hashlib
import json
import math
import platform
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

from tests.end_to_end.command import ROOT, Outcome, braid
from tests.recorded.files import REFUSED, Case, chosen, command, read_cases, write_cases
from tests.recorded.training_cases import BASE, Training, training_cases

ORIGIN: Final = "origin"
"""Name of the entry that says what was recorded, and where."""
FAILED: Final = "failed"
"""Key of the message where a run ended otherwise than it should; it is done again when a record goes on."""
BITS: Final = ("losses", "norms", "parameters")
"""SHA-256 of what has to be equal."""
MACHINE: Final = ("torch", "processor")
"""What bits depend on beside the sources."""
_REFUSED_EXIT: Final = 2
_PATIENCE: Final = 600.0
"""Seconds for a command."""


def prepare(folder: Path) -> None:
    """Write a corpus, the same every time, and tokenise it."""
    random = Random(5)
    words = ["".join(random.choices(ascii_lowercase, k=n)) for n in range(1, 9) for _ in "1234"]
    lines = (" ".join(random.choices(words, k=12)) for _ in range(4000))
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = _braid(folder, "prepare", "data", BASE)
    if done.code:
        raise RuntimeError(f"the corpus cannot be prepared: {done.errors}")


def recorded(folder: Path, training: Training) -> Case:
    """Do a run and say what came of it."""
    slug = hashlib.sha256(training.name.encode()).hexdigest()[:12]
    try:
        done = _braid(folder, "train", slug, {**training.content(), "name": slug})
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


def origin() -> Case:
    """The commit, a digest of its sources, PyTorch and the processor."""
    from importlib.metadata import version

    sources = hashlib.sha256()
    for folder in ("scheduling", "kernels", "actors", "jobs"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            sources.update(f"{file.relative_to(ROOT)} {_digest(file.read_bytes())}\n".encode())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": head.stdout.strip() or "unknown",
        "sources": sources.hexdigest()[:16],
        "torch": version("torch"),
        "processor": f"{platform.machine()} {_processor()}",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def record(out: Path, pattern: str | None) -> int:
    """Do all runs whose names hold the pattern and that are not in the file yet.

    1 if one failed; `ValueError` if the file is a record of other sources.
    """
    here = origin()
    found = read_cases(out) if out.exists() else {ORIGIN: here}
    if found.get(ORIGIN, {}).get("sources") != here["sources"]:
        raise ValueError(f"{out} is a record of other sources; give another file or remove it")
    cases = training_cases()
    names = [name for name in chosen(cases, pattern) if FAILED in found.get(name, {FAILED: ""})]
    with tempfile.TemporaryDirectory(prefix="recorded-") as name_of_folder:
        folder = Path(name_of_folder)
        prepare(folder)
        for number, name in enumerate(names, start=1):
            begin = time.perf_counter()
            found[name] = recorded(folder, cases[name])
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
    """Which bits of a run differ, or why one failed; where the records are from, if they are not from one."""
    if FAILED in old or FAILED in new:
        return f"failed: {old.get(FAILED, 'not')} / {new.get(FAILED, 'not')}"
    if "commit" in old:
        return ", ".join(f"{key}: {old[key]} / {new[key]}" for key in MACHINE if old[key] != new[key])
    if not (names := [name for name in BITS if old[name] != new[name]]):
        return ""
    pairs = zip(old["read"], new["read"], strict=False)
    apart = max((abs(a / b - 1) for a, b in pairs if b), default=math.nan)
    return f"{', '.join(names)} differ; losses {apart:.1e} apart"


if __name__ == "__main__":
    sys.exit(command("trained runs", record, unlike))
