"""Chooses the implementation of every operator of a run: the quickest that is correct, the same on all ranks.

Implementations are measured at first use. The choice is stored in a file, so that later runs on the same
cards use the same kernels: another choice would change the last bits of results. There is one file for each
question, which names cards, versions, shapes and dtype, in the folder `choices_folder`.

Ranks agree through one function, `Gather`, that every rank calls in the same order. One rank for each kind of
card measures; where cards differ, an implementation's time is that on the slowest card.
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
"""Collective function that returns the values of all ranks, in rank order."""

FORMAT: Final = 2
"""Version of files and questions: raise it when implementations compute something else."""
NEEDED_GAIN: Final = 0.02
"""Share of PyTorch's time that another implementation must save to replace it: clocks are not exact."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The conditions of a choice of implementations; equal questions have equal answers."""

    cards: tuple[str, ...] = ()
    """All kinds of cards of the run, with the versions of the software that computes on them (see `card`)."""
    dtype: str
    deterministic: bool
    """Whether torch was told to use deterministic algorithms only."""
    uses: tuple[Use, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators to choose implementations for, in order."""
        return tuple(dict.fromkeys(use.operator for use in self.uses))

    def as_json(self) -> dict[str, Any]:
        """Return the question as JSON values, as they are read back from a file."""
        content: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return content

    @property
    def digest(self) -> str:
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def card(device: torch.device) -> str:
    """Return a text with a card's name and capability, and the versions of torch, Triton and CUDA."""
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
    """Return the choice of all ranks, which call this together; ``question`` is extended by all ranks' cards.

    ``measure`` yields the measurements of the question's operators, one operator after the other.

    A choice that a rank has already used is preferred, so that a rank that joins changes nothing; otherwise
    the choice that the lowest rank has stored; otherwise operators are measured one by one, and ranks
    exchange results after each operator, so that no rank waits long for another.
    """
    cards = list(gather(card))
    question = replace(question, cards=tuple(sorted(set(cards))))
    answers = list(gather((kept.used(question), kept.read(question))))
    known = [used for used, _ in answers if used] + [read for _, read in answers if read]
    choice: dict[str, str] = known[0] if known else {}
    if not choice:
        trials = measure(question) if cards.index(card) == rank else repeat(None)
        pairs = zip(trials, question.operators, strict=False)  # trials first, so that the generator ends
        choice = {operator: quickest(gather(measured)) for measured, operator in pairs}
    kept.write(question, choice)
    return choice


def quickest(measured: Sequence[Measured | None]) -> str:
    """Return the implementation to use, given the measurements of some ranks (else None)."""
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
    """Return ``kernels`` in ``$BRAID_CACHE``, by default in ``~/.cache/braid``."""
    folder = environment.get("BRAID_CACHE")
    return Path(folder or Path(environment.get("HOME", "/"), ".cache", "braid")) / "kernels"


class KeptChoices:
    """Stored choices: one file per question in a folder, and in memory the choices that this process uses,
    which do not depend on the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, dict[str, str]] = {}
        self._warned = False

    def used(self, question: Question) -> dict[str, str] | None:
        """Return the choice that was passed to `write` in this process; None if none was."""
        return self._used.get(question.digest)

    def read(self, question: Question) -> dict[str, str] | None:
        """Return the folder's choice; None if there is none. A damaged file is ignored, with a warning."""
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
        """Store a choice unless the folder has one; if that fails, give a warning."""
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
            written.replace(self.file(question))  # atomic
        except OSError as error:
            self._warn(question, f"cannot be written ({error}); the next run measures its kernels anew")
            with contextlib.suppress(OSError):
                written.unlink()

    def file(self, question: Question) -> Path:
        return self._folder / f"{question.digest}.json"

    def _warn(self, question: Question, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.file(question)}, which keeps the choice of kernels, {problem}", stacklevel=3
            )


def _is_choice(choice: Any, operators: Sequence[str]) -> bool:
    """Return whether a choice names a known implementation for every operator."""
    return set(choice) == set(operators) and all(choice[name] in names(name) for name in operators)
