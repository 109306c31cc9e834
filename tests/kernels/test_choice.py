"""The choice of kernels: thresholds, what is kept and read again, and that all ranks choose alike."""

import json
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from braid.kernels.choice import FORMAT, KeptChoices, Question, choices_file, choose, quickest
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


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([{"torch": 1000, "triton": 981}], "torch"),
        ([{"torch": 1000, "triton": 980}], "triton"),
        ([{"torch": 1000, "triton": 500, "torch+flash": 400}], "torch+flash"),
        ([{"torch": 1000, "triton": 400, "torch+flash": 400}], "torch+flash"),
        ([{"torch": 1000, "triton": "is off"}], "torch"),
        ([{"torch": "does not run", "triton": 10}], "torch"),
        ([{"torch": 1000}], "torch"),
        ([None, {"torch": 1000, "triton": 500}, None], "triton"),
        ([{"torch": 1000, "triton": 500}, {"torch": 600, "triton": 990}], "torch"),
        ([{"torch": 1000, "triton": 500}, {"torch": 600, "triton": 970}], "triton"),
        ([{"torch": 1000, "triton": 500}, {"torch": 1000, "triton": "no such kernel"}], "torch"),
        ([{"torch": 1000, "triton": 500}, {"torch": 1000}], "torch"),
    ],
    ids=[
        "not by 2 %",
        "by 2 %",
        "of several",
        "of equals always the same",
        "disagrees",
        "PyTorch fails",
        "no rival",
        "one measures for others",
        "the slower card counts",
        "quicker on the slower card",
        "out on one card",
        "not there on one card",
    ],
)
def test_the_quickest(measured: Sequence[Measured | None], expected: str) -> None:
    assert quickest(measured) == expected


# -- what is kept ------------------------------------------------------------------------------------------


def test_a_choice_is_kept_for_its_question_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kernels.json"
    kept = KeptChoices(file)
    assert kept.read(question()) is None
    assert not file.parent.exists(), "reading makes nothing"
    kept.write(question(), CHOICE)
    another = KeptChoices(file)  # another process
    assert another.read(question()) == CHOICE
    larger = tuple(Use(**{**vars(use), "tokens": 16}) for use in USES)
    for other in (question("A100"), question("A100", "H100"), question(dtype="fp32"), question(uses=larger)):
        assert another.read(other) is None
        another.write(other, {"swiglu": "torch", "attention": "triton"})
    assert KeptChoices(file).read(question()) == CHOICE
    assert KeptChoices(file).read(question("A100"))["swiglu"] == "torch"
    assert len(json.loads(file.read_text())["choices"]) == 5
    assert {path.name for path in file.parent.iterdir()} == {"kernels.json", "kernels.lock"}


def test_what_is_kept_stays(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    KeptChoices(file).write(question(), CHOICE)
    before = file.stat()
    KeptChoices(file).write(question(), {"swiglu": "torch", "attention": "torch"})
    assert KeptChoices(file).read(question()) == CHOICE
    assert file.stat().st_ino == before.st_ino, "nothing was written"


def _content(**changes: Any) -> str:
    entry = {"for": question().as_json(), "kernels": CHOICE, **changes.pop("entry", {})}
    return json.dumps({"format": FORMAT, "choices": [entry], **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "[" * 100_000,
        "\udcff",
        _content(format=FORMAT - 1),
        _content(choices={}),
        "{}",
    ],
    ids=["empty", "cut", "list", "null", "number", "deep", "bytes", "old", "no list", "no format"],
)
def test_what_cannot_be_read_is_ignored_with_one_warning(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kernels.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    kept = KeptChoices(file)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert kept.read(question()) is None
        kept.write(question(), CHOICE)
    assert ["taken as empty" in str(one.message) for one in told] == [True]
    assert KeptChoices(file).read(question()) == CHOICE, "it was written anew"


@pytest.mark.parametrize(
    "entry",
    [
        {"kernels": None},
        {"kernels": {"swiglu": "triton"}},
        {"kernels": {**CHOICE, "gelu": "torch"}},
        {"kernels": {**CHOICE, "swiglu": "cuda"}},
        {"kernels": {**CHOICE, "swiglu": "torch+cudnn"}},
        {"kernels": {**CHOICE, "swiglu": ["torch"]}},
        {"for": {"cards": ["H100"]}},
    ],
)
@pytest.mark.filterwarnings("error")
def test_an_entry_that_is_no_choice_is_not_taken(tmp_path: Path, entry: dict[str, Any]) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(_content(entry=entry))
    assert KeptChoices(file).read(question()) is None
    file.write_text(json.dumps({"format": FORMAT, "choices": [1, None, [], {}]}))
    assert KeptChoices(file).read(question()) is None


def test_without_a_place_to_write_the_process_still_remembers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptChoices(tmp_path / "file" / "kernels.json")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept.write(question(), CHOICE)
        kept.write(question("A100"), CHOICE)
    assert ["cannot be" in str(one.message) for one in told] == [True]
    assert kept.used(question()) == kept.used(question("A100")) == CHOICE
    assert kept.read(question()) is kept.used(question("V100")) is None


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    questions = [question(f"card {number}") for number in range(12)]
    threads = [threading.Thread(target=KeptChoices(file).write, args=(one, CHOICE)) for one in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(KeptChoices(file).read(one) == CHOICE for one in questions)


def test_where_the_file_is() -> None:
    assert choices_file({"BRAID_CACHE": "/c", "HOME": "/h"}) == Path("/c/kernels.json")
    assert choices_file({"HOME": "/h"}) == Path("/h/.cache/braid/kernels.json")
    assert choices_file({}) == Path("/.cache/braid/kernels.json")


# -- ranks -------------------------------------------------------------------------------------------------


class Meeting:
    """Ranks as threads; `gather` is collective, as between processes."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._given = ranks, [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def gather(self, rank: int, own: Any) -> list[Any]:
        """What every rank gives."""
        self._given[rank] = own
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, do: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        """What every rank returns."""
        results: list[Any] = [None] * self._ranks

        def of(rank: int) -> None:
            results[rank] = do(rank, lambda own: self.gather(rank, own))

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(self._ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def chosen(
    cards: Sequence[str], kept: Sequence[KeptChoices | Path], times: dict[str, dict[str, Measured]]
) -> tuple[list[Any], list[tuple[int, str]]]:
    """What every rank chooses, and what was measured by which rank; ``times``: by card and operator.

    ``kept``: a file's name stands for a process that has just begun.
    """
    measured: list[tuple[int, str]] = []

    def do(rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        own = kept[rank]

        def measure(operator: str) -> Measured:
            measured.append((rank, operator))
            return times[cards[rank]][operator]

        return choose(
            card=cards[rank],
            asked=lambda kinds: question(*kinds),
            rank=rank,
            gather=gather,
            measure=measure,
            kept=KeptChoices(own) if isinstance(own, Path) else own,
        )

    return Meeting(len(cards)).run(do), sorted(measured)


def test_one_rank_measures_and_all_choose_alike(tmp_path: Path) -> None:
    files = [tmp_path / str(number) / "kernels.json" for number in (0, 0, 1)]  # two hosts
    choices, measured = chosen(["H100"] * 3, files, {"H100": TIMES})
    assert choices == [CHOICE] * 3
    assert measured == [(0, "attention"), (0, "swiglu")]
    assert KeptChoices(files[2]).read(question()) == CHOICE, "kept on every host"
    slower = {"swiglu": {"torch": 1}, "attention": {"torch": 1}}
    assert chosen(["H100"] * 3, files, {"H100": slower}) == ([CHOICE] * 3, []), "nothing is measured again"


def test_a_choice_that_any_rank_has_kept_is_that_of_all(tmp_path: Path) -> None:
    files = [tmp_path / str(rank) / "kernels.json" for rank in range(3)]
    KeptChoices(files[1]).write(question(), CHOICE)
    KeptChoices(files[2]).write(question(), {"swiglu": "torch", "attention": "torch"})
    assert chosen(["H100"] * 3, files, {}) == ([CHOICE] * 3, [])
    assert KeptChoices(files[0]).read(question()) == CHOICE


def test_a_rank_that_joins_does_not_change_what_the_others_use(tmp_path: Path) -> None:
    files = [tmp_path / str(rank) / "kernels.json" for rank in range(3)]
    KeptChoices(files[0]).write(question(), {"swiglu": "torch", "attention": "torch"})
    survivors = [KeptChoices(file) for file in files[1:]]
    for one in survivors:
        one.write(question(), CHOICE)
        one._file.unlink()
    assert chosen(["H100"] * 3, [files[0], *survivors], {}) == ([CHOICE] * 3, [])


def test_where_cards_differ_the_slowest_counts(tmp_path: Path) -> None:
    files = [tmp_path / "kernels.json"] * 4
    old = {
        "swiglu": {"torch": 100, "triton": 120},
        "attention": {"torch": 300, "triton": 150, "torch+cudnn": "no"},
    }
    cards = ["H100", "A100", "H100", "A100"]
    choices, measured = chosen(cards, files, {"H100": TIMES, "A100": old})
    assert choices == [{"swiglu": "torch", "attention": "triton"}] * 4
    assert measured == [(0, "attention"), (0, "swiglu"), (1, "attention"), (1, "swiglu")]
    assert KeptChoices(files[0]).read(question("A100", "H100")) == choices[0]
    assert KeptChoices(files[0]).read(question("H100")) is None


def test_a_damaged_file_of_one_rank_is_replaced(tmp_path: Path) -> None:
    files = [tmp_path / str(rank) / "kernels.json" for rank in range(2)]
    files[1].parent.mkdir()
    files[1].write_text("{")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert chosen(["H100"] * 2, files, {"H100": TIMES})[0] == [CHOICE] * 2
    assert len(told) == 1
    assert KeptChoices(files[1]).read(question()) == CHOICE
