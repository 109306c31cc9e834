"""Which implementation every operator of a run takes: the quickest of those that agree, alike on all ranks.

It is measured at first use and kept in a file, so that every later run on the same cards takes the same
kernels: another choice would change the last bits of results. The file is named by `choices_file`; its
entries say for which cards, versions, shapes and dtype they hold.

Ranks agree through one function, `Gather`, that every rank calls in the same order. One rank for each kind of
card measures; where cards differ, an implementation takes as long as on the slowest.
"""

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from braid.kernels.family import BY_TORCH, Choice, names
from braid.kernels.trials import Measured, Use

Gather = Callable[[Any], Sequence[Any]]
"""What every rank gives, in rank order; a collective call."""

FORMAT: Final = 1
"""Of the file. Another one is written anew: raise it when implementations change what they compute."""
NEEDED_GAIN: Final = 0.02
"""PyTorch stays unless a rival takes at least this share less time: clocks are not exact."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a choice is for; equal questions have equal answers."""

    cards: tuple[str, ...]
    """All kinds of cards of the run, with the versions of what computes on them (`card`)."""
    dtype: str
    deterministic: bool
    """Whether torch was told to use deterministic algorithms alone."""
    uses: tuple[Use, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """Those that are asked for, in order."""
        return tuple(dict.fromkeys(use.operator for use in self.uses))

    def as_json(self) -> dict[str, Any]:
        """As it comes back from a file."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content


def card(device: torch.device) -> str:
    """A card's name and capability, and the versions of torch, Triton and CUDA."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device)
    return f"{name}, sm_{major}{minor}, torch {torch.__version__}, triton {triton}, CUDA {torch.version.cuda}"


def choose(
    *,
    card: str,
    asked: Callable[[tuple[str, ...]], Question],
    rank: int,
    gather: Gather,
    measure: Callable[[str], Measured],
    kept: "KeptChoices",
) -> Choice:
    """The choice of all ranks, who call this together. ``asked``: the question for so many kinds of cards.

    The choice that a rank has already used is taken, so that a rank that joins changes nothing; else one that
    a rank has kept, the lowest one first; else it is measured, operator by operator, so that no rank waits
    long for another.
    """
    cards = list(gather(card))
    question = asked(tuple(sorted(set(cards))))
    answers = list(gather((kept.used(question), kept.read(question))))
    known = [used for used, _ in answers if used] + [read for _, read in answers if read]
    choice: dict[str, str] = known[0] if known else {}
    if not choice:
        measures = cards.index(card) == rank
        choice = {
            operator: quickest(gather(measure(operator) if measures else None))
            for operator in question.operators
        }
    kept.write(question, choice)
    return choice


def quickest(measured: Sequence[Measured | None]) -> str:
    """The implementation to take, from what some ranks have measured of one operator."""
    tables = [table for table in measured if table is not None]
    slowest: dict[str, int] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        times = [table.get(name, "not tried") for table in tables]
        if all(isinstance(ns, int) for ns in times):
            slowest[name] = max(ns for ns in times if isinstance(ns, int))
    if BY_TORCH not in slowest:
        return BY_TORCH
    best = min(slowest, key=lambda name: (slowest[name], name))
    wins = slowest[best] <= (1 - NEEDED_GAIN) * slowest[BY_TORCH]
    return best if wins else BY_TORCH


# -- kept on disk ------------------------------------------------------------------------------------------


def choices_file(environment: Mapping[str, str]) -> Path:
    """``kernels.json`` in the folder ``$BRAID_CACHE``, by default ``~/.cache/braid``."""
    folder = environment.get("BRAID_CACHE")
    return Path(folder or Path(environment.get("HOME", "/"), ".cache", "braid")) / "kernels.json"


class KeptChoices:
    """The choices in a file, and those that this process uses, whatever becomes of the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._used: dict[str, dict[str, str]] = {}
        self._warned = False

    def used(self, question: Question) -> dict[str, str] | None:
        """What this process was told to write for a question; None if nothing."""
        return self._used.get(_key(question))

    def read(self, question: Question) -> dict[str, str] | None:
        """The choice in the file; None if there is none. What is wrong there is as if it were not."""
        return _found(self._entries(), question)

    def write(self, question: Question, choice: Mapping[str, str]) -> None:
        """Keep a choice; one that is in the file already stays. Where nothing can be written, a warning."""
        self._used[_key(question)] = dict(choice)
        if _found(self._entries(), question) is not None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._file.with_suffix(".lock")):
                entries = self._entries()
                if _found(entries, question) is None:
                    entry = {"for": question.as_json(), "kernels": dict(choice)}
                    _replace(self._file, {"format": FORMAT, "choices": [*entries, entry]})
        except OSError as error:
            self._warn(f"cannot be written ({error}); the next run measures its kernels anew")

    def _entries(self) -> list[Any]:
        """All that the file holds; nothing, after a warning, where it is not a file of `FORMAT`."""
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if content["format"] == FORMAT and isinstance(content["choices"], list):
                return list(content["choices"])
            problem = f"is of format {content['format']!r}, not {FORMAT}"
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        self._warn(f"{problem}; it is taken as empty")
        return []

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self._file}, which keeps the choice of kernels, {problem}", stacklevel=3)


def _key(question: Question) -> str:
    return json.dumps(question.as_json(), sort_keys=True)


def _found(entries: Sequence[Any], question: Question) -> dict[str, str] | None:
    """The first entry for a question whose choice is one: a known implementation for every operator."""
    asked = question.as_json()
    for entry in entries:
        if isinstance(entry, dict) and entry.get("for") == asked:
            choice = entry.get("kernels")
            if isinstance(choice, dict) and _is_choice(choice, question.operators):
                return choice
    return None


def _is_choice(choice: Mapping[Any, Any], operators: Sequence[str]) -> bool:
    return set(choice) == set(operators) and all(choice[name] in names(name) for name in operators)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """While no other process has it: two that read, add and write would lose an entry.

    File systems without locks are gone on with; what is lost there is measured again.
    """
    with file.open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole or not at all."""
    number, written = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as target:
            json.dump(content, target, indent=1)
            target.flush()
            os.fsync(target.fileno())
        os.replace(written, file)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise
