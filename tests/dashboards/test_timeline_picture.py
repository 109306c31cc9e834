"""The picture of a step: what is red is exposed, and nothing else."""

import io
from pathlib import Path

import numpy as np
import pytest

from braid.dashboards.timeline_picture import EXPOSED, comparison_png, timeline_png
from braid.dashboards.timeline_text import timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Batch
from braid.scheduling.trace import Label

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
LABELS = (
    Label(operator="qkv", stream=Stream.COMPUTE, layer=0),
    Label(operator="gather", stream=Stream.INTRA, layer=0, bytes=8),
)


def traces_of(tmp_path: Path, transfer: tuple[int, int]) -> TraceFolder:
    """Compute from 0 to 100 ms and one transfer."""
    records = np.zeros(2, RECORD)
    records["start_ns"] = [0, transfer[0] * 10**6]
    records["end_ns"] = [100 * 10**6, transfer[1] * 10**6]
    records["label"] = [0, 1]
    records["strand"], records["direction"] = 1, 1
    tmp_path.mkdir()
    batch = Batch(rank=0, generation=1, sequence=0, labels=LABELS, records=records)
    (tmp_path / "rank-00000.0000.spans").write_bytes(batch.encode())
    traces = TraceFolder(tmp_path)
    traces.refresh()
    return traces


def red_pixels(png: bytes) -> int:
    """Pixels above the legend that have the colour of exposed communication."""
    from matplotlib import image
    from matplotlib.colors import to_rgb

    pixels = image.imread(io.BytesIO(png))[:-45, :, :3]
    return int((np.abs(pixels - np.array(to_rgb(EXPOSED))).max(axis=2) < 0.02).sum())


def test_exposed_communication_is_red(tmp_path: Path) -> None:
    hidden = timeline_png(traces_of(tmp_path / "hidden", (20, 60)), 0)
    half = timeline_png(traces_of(tmp_path / "half", (50, 150)), 0)
    exposed = timeline_png(traces_of(tmp_path / "exposed", (100, 200)), 0)
    assert hidden.startswith(b"\x89PNG")
    assert red_pixels(hidden) == 0
    assert red_pixels(half) > 100
    # From 0 to 150 ms a third is exposed, from 0 to 200 ms half.
    assert red_pixels(exposed) / red_pixels(half) == pytest.approx(1.5, rel=0.05)


def test_a_step_without_spans_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no spans of step 8"):
        timeline_png(traces_of(tmp_path / "t", (0, 1)), 7)


def test_two_runs_stand_below_each_other(tmp_path: Path) -> None:
    hidden, exposed = traces_of(tmp_path / "hidden", (20, 60)), traces_of(tmp_path / "exposed", (100, 200))
    both = {"without": (exposed, 0), "with": (hidden, 0)}
    assert red_pixels(comparison_png(both)) > 100
    text = timeline_text(both, width=20).plain.splitlines()
    assert text[0] == "without: 200 ms"
    assert text[1] == "  compute " + "█" * 10 + " " * 10
    assert text[2] == "  links   " + " " * 10 + "█" * 10
    assert text[3] == "with: 100 ms"
    assert text[4] == "  compute " + "█" * 10 + " " * 10
    assert text[5] == "  links   " + " " * 2 + "█" * 4 + " " * 14


def test_exposed_transfers_have_another_colour(tmp_path: Path) -> None:
    found = timeline_text({"half": (traces_of(tmp_path / "half", (50, 150)), 0)}, width=30)
    line = found.plain.index("links")
    styles = [str(s.style) for s in found.spans if s.start >= line and found.plain[s.start : s.end] == "█"]
    assert styles == ["green"] * 10 + ["red"] * 10
