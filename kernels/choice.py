"""Which implementation every operator of a run takes: the quickest of those that agree, alike on all ranks.

It is measured at first use and kept in a file, so that every later run on the same cards takes the same
kernels: another choice would change the last bits of results. There is a file for each question, which names
cards, versions, shapes and dtype, in the folder `choices_folder`.

Ranks agree through one function, `Gather`, that every rank calls in the same order. One rank for each kind of
card measures; where cards differ, an implementation takes as long as on the slowest.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch

from braid.kernels.family import BY_TORCH, Choice, names
from braid.kernels.trials import Measured, Use

Gather = Callable[[Any], Sequence[Any]]
"""What every rank gives, in rank order; a collective call."""

FORMAT: Final = 2
"""Part of every question: raise it when implementations change what they compute."""
NEEDED_GAIN: Final = 0.02
"""PyTorch stays unless a rival takes at least this share less time: clocks are not exact."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a choice is for; equal questions have equal answers."""

    cards: tuple[str, ...] = ()
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
        content: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return content

    @property
    def digest(self) -> str:
        """Names the question."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


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
    question: Question,
    rank: int,
    gather: Gather,
    measure: Callable[[Question], Iterable[Measured]],
    kept: "KeptChoices",
) -> Choice:
    """The choice of all ranks, who call this together; the question is asked of all their cards.

    ``measure``: the question's operators, one after the other.

    The choice that a rank has already used is taken, so that a rank that joins changes nothing; else one that
    a rank has kept, the lowest one first; else it is measured, operator by operator, so that no rank waits
    long for another.
    """
    cards = list(gather(card))
    question = replace(question, cards=tuple(sorted(set(cards))))
    answers = list(gather((kept.used(question), kept.read(question))))
    known = [used for used, _ in answers if used] + [read for _, read in answers if read]
    choice: dict[str, str] = known[0] if known else {}
    if not choice:
        trials = measure(question) if cards.index(card) == rank else repeat(None)
        pairs = zip(trials, question.operators, strict=False)  # trials first, so that they come to their end
        choice = {operator: quickest(gather(measured)) for measured, operator in pairs}
    kept.write(question, choice)
    return choice


def quickest(measured: Sequence[Measured | None]) -> str:
    """The implementation to take, from what some ranks have measured of one operator."""
    tables = [table for table in measured if table is not None]
    slowest: dict[str, int] = {}
    for name in tables[0]:
        times = [ns for table in tables if isinstance(ns := table.get(name), int)]
        if len(times) == len(tables):
            slowest[name] = max(times)
    if BY_TORCH not in slowest:
        return BY_TORCH
    best = min(slowest, key=lambda name: (slowest[name], name))
    wins = slowest[best] <= (1 - NEEDED_GAIN) * slowest[BY_TORCH]
    return best if wins else BY_TORCH


# -- kept on disk ------------------------------------------------------------------------------------------


def choices_folder(environment: Mapping[str, str]) -> Path:
    """``kernels`` in the folder ``$BRAID_CACHE``, by default ``~/.cache/braid``."""
    folder = environment.get("BRAID_CACHE")
    return Path(folder or Path(environment.get("HOME", "/"), ".cache", "braid")) / "kernels"


class KeptChoices:
    """The choices in a folder, a file for each question, and those that this process uses, whatever becomes
    of the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, dict[str, str]] = {}
        self._warned = False

    def used(self, question: Question) -> dict[str, str] | None:
        """What this process was told to write for a question; None if nothing."""
        return self._used.get(question.digest)

    def read(self, question: Question) -> dict[str, str] | None:
        """The choice in the folder; None if there is none. What is wrong there is as if it were not."""
        try:
            content = json.loads(self.file(question).read_text(encoding="utf-8"))
            choice = content["kernels"]
            if content["for"] == question.as_json() and _is_choice(choice, question.operators):
                return dict(choice)
            problem = "holds no choice"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        self._warn(question, f"{problem}; it is taken as empty")
        return None

    def write(self, question: Question, choice: Mapping[str, str]) -> None:
        """Keep a choice; one that is there already stays. Where nothing can be written, a warning."""
        self._used[question.digest] = dict(choice)
        if self.read(question) is not None:
            return
        written = self.file(question).with_suffix(f".{uuid4().hex}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written.open("x", encoding="utf-8") as target:
                json.dump({"for": question.as_json(), "kernels": dict(choice)}, target, indent=1)
                target.flush()
                os.fsync(target.fileno())
            written.replace(self.file(question))  # as a whole or not at all
        except OSError as error:
            self._warn(question, f"cannot be written ({error}); the next run measures its kernels anew")
            with contextlib.suppress(OSError):
                written.unlink()

    def file(self, question: Question) -> Path:
        """Where a question's choice is kept."""
        return self._folder / f"{question.digest}.json"

    def _warn(self, question: Question, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.file(question)}, which keeps the choice of kernels, {problem}", stacklevel=3
            )


def _is_choice(choice: Any, operators: Sequence[str]) -> bool:
    """Whether it names a known implementation for every operator."""
    return set(choice) == set(operators) and all(choice[name] in names(name) for name in operators)
