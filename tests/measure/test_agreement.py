"""Simulator against reality: ranks within one model and link, whatever cases of another size add."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.measure.agreement import agreement


def write(path: Path, steps: Mapping[str, tuple[float, float]], **more: float) -> Path:
    """A result with a simulated and a measured step (seconds) per schedule; a peer has no simulated one."""
    rows = [
        {"schedule": name, "predicted_seconds": simulated, "seconds_per_step": measured, "alpha": 0.4, **more}
        for name, (simulated, measured) in steps.items()
    ]
    rows.append({"schedule": "torch_tp", "predicted_seconds": None, "seconds_per_step": 9.0, "alpha": None})
    path.write_text(json.dumps({"model": path.stem, "link_mbit": 500.0, "rows": rows}), encoding="utf-8")
    return path


def test_wrong_ranks_show_within_cases_though_not_over_all(tmp_path: Path) -> None:
    """Every case is ranked the wrong way round; models differ tenfold."""
    found = agreement(
        [
            write(
                tmp_path / f"{scale}.json",
                {name: (scale * (1 + 0.01 * n), scale * (1.03 - 0.01 * n)) for n, name in enumerate("abc")},
            )
            for scale in (1, 10, 100, 1000)
        ]
    )
    assert found["spearman_over_all_cases"] > 0.85
    assert found["spearman"] == {"median": pytest.approx(-1), "least": pytest.approx(-1)}
    assert (found["pairs"], found["in_order"]) == (12, 0)
    first = found["cases"][0]
    assert (first["picked"], first["fastest"], first["loss"]) == ("a", "c", pytest.approx(1.03 / 1.01 - 1))


WRONG_AT_THE_TOP = {"megatron": (2.0, 2.1), "dhelix": (1.5, 1.49), "braid": (1.45, 1.51), "ddp": (1.9, 1.8)}
ALIKE = {"megatron": (2.0, 2.0), "ddp": (2.01, 1.99), "braid": (2.0, 2.02)}


@pytest.mark.parametrize(
    ("steps", "spread", "spearman", "in_order"),
    [
        pytest.param(WRONG_AT_THE_TOP, 0.0, pytest.approx(0.8), 5, id="told apart"),
        pytest.param(WRONG_AT_THE_TOP, 0.03, pytest.approx(1), 6, id="within their spread"),
        pytest.param(ALIKE, 0.1, None, 3, id="all tie"),
        pytest.param(
            {"braid": (2.0, 1.5), "ddp": (2.0, 2.0), "megatron": (2.0, 2.5)}, 0.0, 0, 0, id="told alike"
        ),
    ],
)
def test_steps_within_their_spread_have_no_wrong_order(
    tmp_path: Path, steps: Mapping[str, tuple[float, float]], spread: float, spearman: Any, in_order: int
) -> None:
    (case,) = agreement([write(tmp_path / "one.json", steps, spread_seconds=spread)])["cases"]
    assert (case["spearman"], case["in_order"]) == (spearman, in_order)


def test_orders_count_but_are_not_picked(tmp_path: Path) -> None:
    steps = {"megatron": (2.0, 2.1), "braid": (1.5, 1.4), "braid, without reorders": (1.4, 1.3)}
    (case,) = agreement([write(tmp_path / "one.json", steps)])["cases"]
    assert (case["steps"], case["spearman"], case["in_order"]) == (3, pytest.approx(1), 3)
    assert (case["picked"], case["loss"]) == ("braid", 0)


def test_a_profile_from_between_the_rounds_tells_error_from_drift(tmp_path: Path) -> None:
    """The machine became a fifth slower after the first profile."""
    path = write(tmp_path / "one.json", {name: (n, n * 1.2) for n, name in enumerate("abc", 1)})
    content = json.loads(path.read_text(encoding="utf-8"))
    for row in content["rows"]:
        row["beside_seconds"] = row["seconds_per_step"]
    path.write_text(json.dumps(content), encoding="utf-8")
    found = agreement([path])
    assert (found["median_error"], found["error_before"]) == (0, pytest.approx(1 / 6))


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.json is no result of `braid bench overlap --json`"):
        agreement([path])
    few = write(tmp_path / "few.json", {"megatron": (1.0, 1.0)})
    with pytest.raises(ValueError, match="1 measured steps are too few"):
        agreement([few])
