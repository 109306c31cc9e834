"""The choice of kernels: thresholds, what is kept and read again, and that all ranks choose alike."""

import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from braid.kernels.choice import KeptChoices, Question, choices_folder, choose, quickest
from braid.kernels.trials import Measured, Use

USES = (
    Use(operator="swiglu", tokens=8, times=2, settings={}, width=4),
    Use(operator="attention", tokens=8, times=2, settings={"heads": 2, "rotary_base": None}),
)
TIMES: dict[str, Measured] = {
    "swiglu": {"torch": 100, "triton": 50},
    "attention": {"torch": 100, "triton": 99, "torch+cudnn": 40, "triton+cudnn": "RuntimeError: no"},
}
CHOICE = {"swiglu": "triton", "attention": "torch+cudnn"}


def question(*cards: str, dtype: str = "torch.bfloat16", uses: tuple[Use, ...] = USES) -> Question:
    return Question(cards=cards or ("H100",), dtype=dtype, deterministic=False, uses=uses)


# -- the quickest ------------------------------------------------------------------------------------------


HALF: Measured = {"torch": 1000, "triton": 500}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([{"torch": 1000, "triton": 981}], "torch"),
        ([{"torch": 1000, "triton": 980}], "triton"),
        ([{**HALF, "torch+flash": 400}], "torch+flash"),
        ([{"torch": 1000, "triton": 400, "torch+flash": 400}], "torch+flash"),
        ([{"torch": 1000, "triton": "is off"}], "torch"),
        ([{"torch": "does not run", "triton": 10}], "torch"),
        ([{"torch": 1000}], "torch"),
        ([None, HALF, None], "triton"),
        ([HALF, {"torch": 600, "triton": 990}], "torch"),
        ([HALF, {"torch": 600, "triton": 970}], "triton"),
        ([HALF, {"torch": 1000, "triton": "no such kernel"}], "torch"),
        ([HALF, {"torch": 1000}], "torch"),
    ],
)
def test_the_quickest(measured: Sequence[Measured | None], expected: str) -> None:
    assert quickest(measured) == expected


# -- what is kept ------------------------------------------------------------------------------------------


def test_a_choice_is_kept_for_its_question_alone_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    kept = KeptChoices(folder)
    assert kept.read(question()) is None
    assert not folder.exists(), "reading makes nothing"
    kept.write(question(), CHOICE)
    another = KeptChoices(folder)  # another process
    assert another.read(question()) == CHOICE
    larger = tuple(Use(**{**vars(use), "tokens": 16}) for use in USES)
    for other in (question("A100"), question("A100", "H100"), question(dtype="fp32"), question(uses=larger)):
        assert another.read(other) is None
        another.write(other, {"swiglu": "torch", "attention": "triton"})
    another.write(question(), {"swiglu": "torch", "attention": "torch"})
    assert KeptChoices(folder).read(question()) == CHOICE
    assert KeptChoices(folder).read(question("A100"))["swiglu"] == "torch"
    assert len([*folder.iterdir()]) == 5


def _content(**changes: Any) -> str:
    return json.dumps({"for": question().as_json(), "kernels": CHOICE, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "\udcff",
        _content(**{"for": {"cards": ["H100"]}}),
        _content(kernels={"swiglu": "triton"}),
        _content(kernels={**CHOICE, "gelu": "torch"}),
        _content(kernels={**CHOICE, "swiglu": "torch+cudnn"}),
    ],
)
def test_what_is_no_choice_is_ignored_with_one_warning(tmp_path: Path, text: str) -> None:
    kept = KeptChoices(tmp_path)
    kept.file(question()).write_bytes(text.encode(errors="surrogateescape"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert kept.read(question()) is None
        kept.write(question(), CHOICE)
    assert ["taken as empty" in str(one.message) for one in told] == [True]
    assert KeptChoices(tmp_path).read(question()) == CHOICE, "it was written anew"


def test_without_a_place_to_write_the_process_still_remembers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptChoices(tmp_path / "file" / "kernels")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept.write(question(), CHOICE)
        kept.write(question("A100"), CHOICE)
    assert ["cannot be" in str(one.message) for one in told] == [True]
    assert kept.used(question()) == kept.used(question("A100")) == CHOICE
    assert kept.read(question()) is kept.used(question("V100")) is None


def test_where_the_folder_is() -> None:
    assert choices_folder({"BRAID_CACHE": "/c", "HOME": "/h"}) == Path("/c/kernels")
    assert choices_folder({"HOME": "/h"}) == Path("/h/.cache/braid/kernels")


# -- ranks -------------------------------------------------------------------------------------------------


def chosen(
    cards: Sequence[str], kept: Sequence[KeptChoices | Path], times: dict[str, dict[str, Measured]]
) -> tuple[list[Any], list[tuple[int, str]]]:
    """What every rank, a thread, chooses, and what was measured by which; ``times``: by card and operator.

    ``kept``: a folder stands for a process that has just begun.
    """
    measured: list[tuple[int, str]] = []
    ranks = len(cards)
    given, barrier = [None] * ranks, threading.Barrier(ranks, timeout=20)

    def do(rank: int) -> Any:
        own = kept[rank]

        def gather(value: Any) -> list[Any]:
            given[rank] = value
            barrier.wait()
            found = list(given)
            barrier.wait()
            return found

        def measure(asked: Question) -> Iterator[Measured]:
            for operator in asked.operators:
                measured.append((rank, operator))
                yield times[cards[rank]][operator]

        return choose(
            card=cards[rank],
            question=question(),
            rank=rank,
            gather=gather,
            measure=measure,
            kept=KeptChoices(own) if isinstance(own, Path) else own,
        )

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(do, range(ranks))), sorted(measured)


def test_one_rank_measures_and_all_choose_alike(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in (0, 0, 1)]  # two hosts
    choices, measured = chosen(["H100"] * 3, folders, {"H100": TIMES})
    assert choices == [CHOICE] * 3
    assert measured == [(0, "attention"), (0, "swiglu")]
    assert KeptChoices(folders[2]).read(question()) == CHOICE, "kept on every host"
    slower = {"swiglu": {"torch": 1}, "attention": {"torch": 1}}
    assert chosen(["H100"] * 3, folders, {"H100": slower}) == ([CHOICE] * 3, []), "nothing is measured again"


def test_a_rank_that_joins_does_not_change_what_the_others_use(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(3)]
    KeptChoices(folders[0]).write(question(), {"swiglu": "torch", "attention": "torch"})
    survivors = [KeptChoices(file) for file in folders[1:]]
    for one in survivors:
        one.write(question(), CHOICE)
        one.file(question()).unlink()
    assert chosen(["H100"] * 3, [folders[0], *survivors], {}) == ([CHOICE] * 3, [])


def test_where_cards_differ_the_slowest_counts(tmp_path: Path) -> None:
    attention = {"torch": 300, "triton": 150, "torch+cudnn": "no"}
    old = {"swiglu": {"torch": 100, "triton": 120}, "attention": attention}
    cards = ["H100", "A100", "H100", "A100"]
    choices, measured = chosen(cards, [tmp_path] * 4, {"H100": TIMES, "A100": old})
    assert choices == [{"swiglu": "torch", "attention": "triton"}] * 4
    assert measured == [(0, "attention"), (0, "swiglu"), (1, "attention"), (1, "swiglu")]
    assert KeptChoices(tmp_path).read(question("A100", "H100")) == choices[0]
    assert KeptChoices(tmp_path).read(question("H100")) is None
