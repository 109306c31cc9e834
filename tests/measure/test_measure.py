"""What measures Braid: arithmetic on made-up results, and small runs; times are not tested."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.command import write_config
from tests.measure import checkpoint, telemetry
from tests.measure.agreement import agreement
from tests.measure.checkpoint import ALONE, ASYNCHRONOUS, SYNCHRONOUS, Leg, summary


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
    wrong = {name: (1 + 0.01 * n, 1.03 - 0.01 * n) for n, name in enumerate("abc")}
    files = [
        write(tmp_path / f"{scale}.json", {name: (scale * a, scale * b) for name, (a, b) in wrong.items()})
        for scale in (1, 10, 100, 1000)
    ]
    told = agreement(files)
    assert told["spearman_over_all_cases"] > 0.85
    assert told["spearman"] == {"median": pytest.approx(-1), "least": pytest.approx(-1)}
    assert (told["pairs"], told["in_order"]) == (12, 0)
    first = told["cases"][0]
    assert (first["picked"], first["fastest"], first["loss"]) == ("a", "c", pytest.approx(1.03 / 1.01 - 1))


TOP = {"megatron": (2.0, 2.1), "dhelix": (1.5, 1.49), "braid": (1.45, 1.51), "ddp": (1.9, 1.8)}
ALIKE = {"megatron": (2.0, 2.0), "ddp": (2.01, 1.99), "braid": (2.0, 2.02)}
ORDERS = {"megatron": (2.0, 2.1), "braid": (1.5, 1.4), "braid, without reorders": (1.4, 1.3)}
TIES = {"braid": (2.0, 1.5), "ddp": (2.0, 2.0), "megatron": (2.0, 2.5)}


@pytest.mark.parametrize(
    ("steps", "spread", "spearman", "in_order", "loss"),
    [
        pytest.param(TOP, 0.0, pytest.approx(0.8), 5, pytest.approx(0.02 / 1.49), id="wrong at the top"),
        pytest.param(TOP, 0.03, pytest.approx(1), 6, pytest.approx(0.02 / 1.49), id="within their spread"),
        pytest.param(ALIKE, 0.1, None, 3, pytest.approx(0.01 / 1.99), id="all tie"),
        pytest.param(TIES, 0.0, 0, 0, 0, id="told alike"),
        pytest.param(ORDERS, 0.0, pytest.approx(1), 3, 0, id="orders count, but are not picked"),
    ],
)
def test_steps_within_their_spread_have_no_wrong_order(
    tmp_path: Path,
    steps: Mapping[str, tuple[float, float]],
    spread: float,
    spearman: Any,
    in_order: int,
    loss: Any,
) -> None:
    (case,) = agreement([write(tmp_path / "one.json", steps, spread_seconds=spread)])["cases"]
    assert (case["spearman"], case["in_order"], case["loss"]) == (spearman, in_order, loss)
    assert case["steps"] == len(steps)


def test_a_profile_from_between_the_rounds_tells_error_from_drift(tmp_path: Path) -> None:
    """The machine became a fifth slower after the first profile."""
    files = [write(tmp_path / f"{n}.json", {"a": (n, n * 1.2)}, beside_seconds=n * 1.2) for n in (1, 2, 3)]
    told = agreement(files)
    assert (told["median_error"], told["error_before"]) == (0, pytest.approx(1 / 6))


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.json is no result of `braid bench overlap --json`"):
        agreement([tmp_path / "other.json"])
    with pytest.raises(ValueError, match="1 measured steps are too few"):
        agreement([write(tmp_path / "few.json", {"megatron": (1.0, 1.0)})])


SECONDS = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=9))
def test_rounds_of_saves_are_compared_within_themselves(rounds: list[tuple[float, ...]]) -> None:
    told = summary(
        [
            {ALONE: Leg(a, 0.0), SYNCHRONOUS: Leg(a + more, stall), ASYNCHRONOUS: Leg(a + less, short)}
            for a, more, stall, less, short in rounds
        ]
    )
    alone, more, stall, less, short = map(median, zip(*rounds, strict=True))
    assert told["alone"]["median"] == pytest.approx(alone)
    assert told["stall_ratio"]["median"] == pytest.approx(median(times[4] / times[2] for times in rounds))
    for kind, cost, waited in ((SYNCHRONOUS, more, stall), (ASYNCHRONOUS, less, short)):
        assert told["cost"][kind]["median"] == pytest.approx(cost)
        assert told["stall"][kind]["median"] == pytest.approx(waited)


@pytest.mark.slow
def test_small_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(main: Any, *words: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["measure", *words])
        main()
        return dict(json.loads(capsys.readouterr().out))

    sizes = {"hidden": 64, "layers": 1, "rounds": 2, "steps": 1}
    saves = measured(checkpoint.main, *(f"--{name}={size}" for name, size in sizes.items()))
    assert (saves["rounds"], saves["steps"], saves["alone"]["count"]) == (2, 1, 2)
    assert saves["checkpoint_bytes"] > 3 * 4 * 257 * 64, "three numbers per parameter"
    assert all(saves["stall"][kind]["median"] > 0 for kind in (SYNCHRONOUS, ASYNCHRONOUS))
    config = write_config(tmp_path, parallel={"tp": 2}, overlap={"schedule": "wavelet"})
    price = measured(telemetry.main, str(config), "--steps", "5")
    assert price["spans_per_step"] > 100
    assert [price[name]["count"] for name in ("with", "without", "ratio")] == [5, 5, 5]
