"""Simulator against reality: ranks within one model and link, whatever cases of another size add."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from tests.measure.agreement import agreement, show


def write(path: Path, model: str, steps: Mapping[str, tuple[float, float]], alpha: float = 0.4) -> Path:
    """A result with a simulated and a measured step (seconds) per schedule; a peer has no simulated one."""
    rows = [
        {"schedule": name, "predicted_seconds": simulated, "seconds_per_step": measured, "alpha": alpha}
        for name, (simulated, measured) in steps.items()
    ]
    rows.append({"schedule": "torch_tp", "predicted_seconds": None, "seconds_per_step": 9.0, "alpha": None})
    path.write_text(json.dumps({"model": model, "link_mbit": 500.0, "rows": rows}), encoding="utf-8")
    return path


def test_wrong_ranks_show_within_cases_though_not_over_all(tmp_path: Path) -> None:
    """Every case is ranked the wrong way round; models differ tenfold."""
    files = [
        write(
            tmp_path / f"{scale}.json",
            f"model {scale}",
            {name: (scale * (1 + 0.01 * n), scale * (1.03 - 0.01 * n)) for n, name in enumerate("abc")},
        )
        for scale in (1, 10, 100, 1000)
    ]
    found = agreement(files)
    assert found.pooled_spearman > 0.85
    assert [case.spearman for case in found.cases] == [pytest.approx(-1)] * 4
    assert [(case.pairs, case.in_order) for case in found.cases] == [(3, 0)] * 4
    assert found.cases[0].picked == "a"
    assert found.cases[0].fastest == "c"
    assert found.cases[0].loss == pytest.approx(1.03 / 1.01 - 1)
    console = Console(width=200, record=True)
    show(console, found)
    text = console.export_text()
    assert "within a case: Spearman -1.00 at the median, -1.00 at the least; 0 of 12 pairs" in text
    assert "over all cases at once" in text


def test_orders_count_but_are_not_picked(tmp_path: Path) -> None:
    steps = {"megatron": (2.0, 2.1), "braid": (1.5, 1.4), "braid, modelled costs": (1.4, 1.3)}
    path = write(tmp_path / "one.json", "a model", steps)
    case = agreement([path]).cases[0]
    assert (case.steps, case.spearman, case.picked, case.loss) == (3, pytest.approx(1), "braid", 0)
    assert case.in_order == 3


def test_steps_within_their_spread_have_no_wrong_order(tmp_path: Path) -> None:
    """The two fastest are simulated the wrong way round, which counts only if they can be told apart."""
    steps = {"megatron": (2.0, 2.1), "dhelix": (1.5, 1.49), "braid": (1.45, 1.51), "wavelet": (1.9, 1.8)}
    path = write(tmp_path / "one.json", "a model", steps)
    assert agreement([path]).cases[0].spearman == pytest.approx(0.8)
    content = json.loads(path.read_text(encoding="utf-8"))
    for row in content["rows"]:
        row["spread_seconds"] = 0.03
    path.write_text(json.dumps(content), encoding="utf-8")
    case = agreement([path]).cases[0]
    assert (case.spearman, case.in_order) == (pytest.approx(1), 6)


def test_steps_that_all_tie_have_no_order(tmp_path: Path) -> None:
    """Nothing was told apart, so that nothing can be in the wrong order: no correlation, and none of 1."""
    path = write(
        tmp_path / "one.json", "a model", {"megatron": (2.0, 2.0), "ddp": (2.01, 1.99), "braid": (2.0, 2.02)}
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    for row in content["rows"]:
        row["spread_seconds"] = 0.1
    path.write_text(json.dumps(content), encoding="utf-8")
    found = agreement([path])
    assert (found.cases[0].spearman, found.cases[0].in_order) == (None, 3)
    show(Console(), found)


def test_steps_told_alike_that_are_not_have_no_rank(tmp_path: Path) -> None:
    path = write(
        tmp_path / "one.json", "a model", {"megatron": (2.0, 2.5), "ddp": (2.0, 2.0), "braid": (2.0, 1.5)}
    )
    assert agreement([path]).cases[0].spearman == 0


def test_a_profile_from_between_the_rounds_tells_error_from_drift(tmp_path: Path) -> None:
    """The machine became a fifth slower after the first profile."""
    path = write(tmp_path / "one.json", "a model", {name: (n, n * 1.2) for n, name in enumerate("abc", 1)})
    content = json.loads(path.read_text(encoding="utf-8"))
    for row in content["rows"]:
        row["beside_seconds"] = row["seconds_per_step"]
    path.write_text(json.dumps(content), encoding="utf-8")
    found = agreement([path])
    assert (found.median_error, found.error_before) == (0, pytest.approx(1 / 6))


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.json is no result of `braid bench overlap --json`"):
        agreement([path])
    few = write(tmp_path / "few.json", "a model", {"megatron": (1.0, 1.0)})
    with pytest.raises(ValueError, match="1 measured steps are too few"):
        agreement([few])
