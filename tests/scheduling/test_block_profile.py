"""The reader of measured block costs: what it takes, what it refuses and with which words."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.block_profile import (
    HEADER,
    NOT_RUN,
    AllReduceFit,
    BlockProfile,
    BlockSize,
    read_block_profile,
)

PUBLIC = Path(__file__).parents[3] / "shared/data/rtx3090_tmp_profile.csv"
"""The public profile of an RTX 3090 cluster, beside the checkout where somebody put it."""

ROWS = (
    "1024,1,1,1.5,2.5,0.75,1.25,1.125,100.5",
    "1024,2,1,1.0,1.5,0.5,1.0,2.0,50",
    "1024,2,2,2.0,3.0,1.0,2.0,4.0,60",
    "1024,2,4,-1.0,-1,-1,-1,-1,-1",
)


def written(folder: Path, *rows: str, header: str = ",".join(HEADER)) -> Path:
    """A profile file of those rows."""
    path = folder / "profile.csv"
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def test_costs_are_in_nanoseconds_and_bytes(tmp_path: Path) -> None:
    profile = read_block_profile(written(tmp_path, *ROWS))
    costs = profile.costs(1024, 2, 1)
    assert costs.forward_ns == (1_000_000, 500_000)
    assert costs.backward_ns == (1_500_000, 1_000_000)
    assert costs.collective_ns == 2_000_000
    assert costs.runtime_bytes == 50 * 2**20
    assert profile.degrees(1024) == (1, 2)
    assert profile.not_run == {BlockSize(1024, 2, 4)}


def test_a_group_of_one_reduces_with_nobody(tmp_path: Path) -> None:
    profile = read_block_profile(written(tmp_path, *ROWS))
    assert profile.costs(1024, 1, 1).collective_ns == 0
    assert profile.costs(1024, 1, 1).forward_ns == (1_500_000, 750_000)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((2048, 2, 1), ("hidden 2048", "not in the file", "measured hidden sizes: 1024")),
        ((1024, 4, 1), ("degree 4", "not in the file", "degrees of hidden 1024: 1, 2")),
        ((1024, 2, 8), ("batch 8", "not in the file", "batches of hidden 1024, degree 2: 1, 2")),
        ((1024, 2, 4), ("batch 4", "was not run", "batches of hidden 1024, degree 2: 1, 2")),
    ],
)
def test_a_missing_size_says_what_there_is(
    tmp_path: Path, size: tuple[int, int, int], words: tuple[str, ...]
) -> None:
    profile = read_block_profile(written(tmp_path, *ROWS))
    with pytest.raises(ValueError, match=r"profile\.csv") as caught:
        profile.costs(*size)
    assert all(word in str(caught.value) for word in words)


def test_sub_batches_add_up_and_an_empty_one_costs_nothing(tmp_path: Path) -> None:
    profile = read_block_profile(written(tmp_path, *ROWS))
    one, two = profile.costs(1024, 2, 1), profile.costs(1024, 2, 2)
    assert profile.split(1024, 2, 3, parts=2) == (two, one)
    assert profile.split(1024, 2, 2, parts=2) == (one, one)
    alone = profile.split(1024, 2, 1, parts=2)
    assert alone[0] == one
    assert (alone[1].forward_ns, alone[1].backward_ns, alone[1].collective_ns) == ((0, 0), (0, 0), 0)
    with pytest.raises(ValueError, match="batch 4 was not run"):
        profile.split(1024, 2, 8, parts=2)


@pytest.mark.parametrize("column", HEADER)
@pytest.mark.parametrize("wrong", ["0", "-2", "nan", "inf", "-inf", "", "x", "1_0", " 1", "-0.5", "1e999"])
def test_a_wrong_number_is_named(tmp_path: Path, column: str, wrong: str) -> None:
    cells = dict(zip(HEADER, ROWS[1].split(","), strict=True)) | {column: wrong}
    path = written(tmp_path, ROWS[0], ",".join(cells.values()))
    with pytest.raises(ValueError, match="must be") as caught:
        read_block_profile(path)
    assert f"{path}, line 3: {column}={wrong!r}" in str(caught.value)


@pytest.mark.parametrize("column", HEADER[3:])
def test_a_size_is_measured_as_a_whole_or_not_at_all(tmp_path: Path, column: str) -> None:
    cells = dict(zip(HEADER, ROWS[1].split(","), strict=True)) | {column: "-1"}
    with pytest.raises(ValueError, match=rf"line 2: {column}=-1 beside measured columns; measure it"):
        read_block_profile(written(tmp_path, ",".join(cells.values())))


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (ROWS, "hidden,tp,batch", r"line 1: header 'hidden,tp,batch' must be 'hidden_size,"),
        ((ROWS[0], ROWS[1], ROWS[0]), None, r"line 4: hidden 1024, degree 1, batch 1 stands in line 2 too"),
        ((ROWS[3], ROWS[3]), None, r"line 3: hidden 1024, degree 2, batch 4 stands in line 2 too"),
        ((ROWS[0], ROWS[1] + ",7"), None, r"line 3: 10 columns, must be 9"),
        ((ROWS[0], "1024,2"), None, r"line 3: 2 columns, must be 9"),
        ((), None, "no measured row"),
        ((ROWS[3],), None, "no measured row"),
        ((ROWS[0], '"1024'), None, "line 3: .*write plain comma-separated text"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, rows: tuple[str, ...], header: str | None, words: str
) -> None:
    path = written(tmp_path, *rows, header=header or ",".join(HEADER))
    with pytest.raises(ValueError, match=words) as caught:
        read_block_profile(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.csv: cannot be read as text"):
        read_block_profile(tmp_path / "absent.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary: cannot be read as text"):
        read_block_profile(tmp_path / "binary")


def linear_profile(folder: Path, latency_ms: float, ms_per_mib: float, noise: float = 0.0) -> BlockProfile:
    """Collectives on a straight line over their messages, every second of them ``noise`` away from it."""
    rows = []
    for n, (hidden, batch) in enumerate((h, b) for h in (1024, 2048) for b in (1, 2, 4, 8)):
        mib = batch * hidden * 1024 * 4 / 2**20
        time = (latency_ms + mib * ms_per_mib) * (1 + noise * (n % 2))
        rows.append(f"{hidden},2,{batch},1,1,1,1,{time:.9f},1")
        rows.append(f"{hidden},1,{batch},1,1,1,1,999,1")
    return read_block_profile(written(folder, *rows))


@given(latency=st.floats(0.0, 5.0), rate=st.floats(0.01, 5.0))
def test_the_fit_finds_latency_and_rate(
    tmp_path_factory: pytest.TempPathFactory, latency: float, rate: float
) -> None:
    fit = linear_profile(tmp_path_factory.mktemp("fit"), latency, rate).fit_all_reduce()
    assert fit.latency_ns == pytest.approx(latency * 1e6, rel=1e-3, abs=50)
    assert fit.ns_per_byte == pytest.approx(rate * 1e6 / 2**20, rel=1e-3)
    assert fit.worst_relative_error < 1e-3


@pytest.mark.parametrize("latency_ms", [0.0, 3.0])
def test_the_fit_is_the_best_by_relative_error_and_tells_it(tmp_path: Path, latency_ms: float) -> None:
    profile = linear_profile(tmp_path, latency_ms, 1.0, noise=0.2)
    fit = profile.fit_all_reduce()
    points = [
        (profile.activation_size_bytes(size.hidden, size.batch), costs.collective_ns)
        for size, costs in profile.measured.items()
        if size.degree > 1
    ]

    def errors(latency_ns: float, ns_per_byte: float) -> list[float]:
        return [(latency_ns + size * ns_per_byte) / ns - 1 for size, ns in points]

    found = errors(fit.latency_ns, fit.ns_per_byte)
    assert fit.worst_relative_error == pytest.approx(max(map(abs, found)))
    assert 0.05 < fit.worst_relative_error < 0.2
    assert fit.latency_ns >= 0
    for latency_step, rate_factor in ((1e4, 1.0), (-1e4, 1.0), (0.0, 1.01), (0.0, 0.99)):
        other = fit.latency_ns + latency_step
        if other >= 0:
            worse = errors(other, fit.ns_per_byte * rate_factor)
            assert sum(e * e for e in found) < sum(e * e for e in worse)


def test_a_fit_needs_two_message_sizes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two message sizes, found 1"):
        read_block_profile(written(tmp_path, ROWS[0], ROWS[1])).fit_all_reduce()


def test_an_all_gather_moves_half_of_an_all_reduce() -> None:
    fit = AllReduceFit(latency_ns=10.0, ns_per_byte=4.0, worst_relative_error=0.0)
    assert fit.all_gather_ns(100) == 210
    assert fit.all_gather_ns(0) == 0


def test_the_public_profile() -> None:
    if not PUBLIC.exists():
        pytest.skip(f"the public RTX 3090 profile is not at {PUBLIC} and not the project's to ship")
    profile = read_block_profile(PUBLIC)
    lines = PUBLIC.read_text(encoding="utf-8").splitlines()[1:]
    cells = [dict(zip(HEADER, map(float, line.split(",")), strict=True)) for line in lines]
    assert len(profile.measured) + len(profile.not_run) == len(lines)
    for row in cells:
        size = BlockSize(int(row["hidden_size"]), int(row["tp_degree"]), int(row["batch_size"]))
        if row["comm"] == NOT_RUN:
            assert size in profile.not_run
            continue
        costs = profile.costs(*size)
        times = [row[name] * 1e6 for name in ("attn_fp", "mlp_fp", "attn_bp", "mlp_bp")]
        assert [*costs.forward_ns, *costs.backward_ns] == pytest.approx(times, abs=0.5)
        expected = row["comm"] * 1e6 if size.degree > 1 else 0
        assert costs.collective_ns == pytest.approx(expected, abs=0.5)
        assert costs.runtime_bytes == pytest.approx(row["runtime_memory"] * 2**20, abs=1)
