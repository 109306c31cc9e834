"""The trace of a run's last step, made from files: of all ranks or of some, in bounded memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from braid.actors.controller.last_trace import last_trace
from braid.actors.controller.span_files import SpanFiles
from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Batch
from braid.scheduling.trace import KINDS, Label

LABELS = tuple(Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n) for n in range(40))


def write(
    files: SpanFiles, rank: int, steps: range, count: int, per_batch: int = 8192, first: int = 0
) -> None:
    """What a rank streams of some steps; ``first``: number of its next batch."""
    known = 0
    for step in steps:
        records = np.zeros(count, RECORD)
        records["step"] = step
        records["kind"] = KINDS.index("operator")
        records["kind"][-1] = KINDS.index("block")
        records["label"] = np.arange(count) % len(LABELS)
        records["start_ns"] = 10**9 * step + 100 * np.arange(count) + rank
        records["end_ns"] = records["start_ns"] + 50
        for place in range(0, count, per_batch):
            batch = Batch(
                rank=rank,
                generation=1,
                sequence=first,
                first_label=known,
                labels=LABELS[known:],
                records=records[place : place + per_batch],
                dropped=0,
                every=1,
            )
            files.take(batch.encode())
            known, first = len(LABELS), first + 1


def test_all_ranks_operators_of_the_last_step(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path / "trace", 1 << 24)
    for rank in range(3):
        write(files, rank, range(5), 100)
    files.close()
    spans = last_trace(tmp_path / "trace")
    assert {span.step for span in spans} == {4}
    assert [sum(span.rank == rank for span in spans) for rank in range(3)] == [99, 99, 99], "blocks are none"
    assert min(span.start_ns for span in spans) == 0
    assert spans[5].operator == "operator 5"
    assert spans[5].end_ns - spans[5].start_ns == 50


def test_a_step_may_begin_in_one_file_and_end_in_the_next(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path / "trace", 1 << 18)  # 64 KiB a file, some 2,000 records
    write(files, 0, range(3), 1500, per_batch=100)
    files.close()
    assert len(list((tmp_path / "trace").iterdir())) > 1
    spans = last_trace(tmp_path / "trace")
    assert [span.start_ns for span in spans] == [100 * n for n in range(1499)]
    assert [span.operator for span in spans[:50]] == [f"operator {n % 40}" for n in range(50)]


@pytest.mark.parametrize("ranks", [1, 7, 16])
def test_of_many_ranks_some_that_are_spread_over_all(tmp_path: Path, ranks: int) -> None:
    files = SpanFiles(tmp_path / "trace", 1 << 24)
    for rank in range(ranks):
        write(files, rank, range(2), 101)
    files.close()
    spans = last_trace(tmp_path / "trace", most=450)
    taken = sorted({span.rank for span in spans})
    assert len(spans) == 100 * min(4, ranks)
    if ranks == 16:
        assert taken == [0, 4, 8, 12]
    one = last_trace(tmp_path / "trace", most=30)
    assert [(span.rank, span.start_ns) for span in one] == [(0, 100 * n) for n in range(30)]


def test_nothing_was_streamed(tmp_path: Path) -> None:
    assert last_trace(tmp_path / "trace") == []
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-00000.0000.spans").write_bytes(b"damaged")
    assert last_trace(tmp_path / "trace") == []


SCRIPT = """
import resource, sys
from pathlib import Path
from braid.actors.controller.last_trace import last_trace
from braid.scheduling.chrome_trace import chrome_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
spans = last_trace(Path(sys.argv[1]))
Path(sys.argv[1]).with_name("measured.json").write_text(chrome_trace(spans))
print(len(spans), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_many_ranks_with_long_steps_take_little_memory(tmp_path: Path) -> None:
    """64 ranks of 200,000 spans each."""
    files = SpanFiles(tmp_path / "trace", 64 << 20)
    for rank in range(64):
        write(files, rank, range(7, 8), 200_000)
    files.close()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "trace")], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == 199_999, "one whole rank, without its block"
    assert grown < 500e6
