"""The picture of a step: what is red is exposed, and nothing else."""

import io
from pathlib import Path

import numpy as np
import pytest

from braid.dashboards.timeline_picture import EXPOSED, PEERS, comparison_png, timeline_png
from braid.dashboards.timeline_text import timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Batch, Labels
from braid.scheduling.trace import KINDS, Label

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
LABELS = Labels(
    [
        Label(operator="qkv", stream=Stream.COMPUTE, layer=0),
        Label(operator="gather", stream=Stream.INTRA, layer=0, bytes=8),
    ]
)


def traces_of(tmp_path: Path, transfer: tuple[int, int], wait: tuple[int, int] | None = None) -> TraceFolder:
    """Compute from 0 to 100 ms and one transfer; by choice a wait for a peer."""
    records = np.zeros(2 if wait is None else 3, RECORD)
    records["start_ns"][:2] = [0, transfer[0] * 10**6]
    records["end_ns"][:2] = [100 * 10**6, transfer[1] * 10**6]
    records["label"][:2] = [0, 1]
    records["strand"], records["direction"] = 1, 1
    if wait is not None:
        records["start_ns"][2], records["end_ns"][2] = wait[0] * 10**6, wait[1] * 10**6
        records["label"][2], records["kind"][2], records["peer"][2] = 1, KINDS.index("waiting"), 1
    tmp_path.mkdir()
    batch = Batch(rank=0, step=0, labels=LABELS, records=records)
    (tmp_path / "rank-00000.0000.arrows").write_bytes(batch.encode())
    traces = TraceFolder(tmp_path)
    traces.refresh()
    return traces


def red_pixels(png: bytes) -> int:
    """Pixels that have the colour of exposed communication."""
    return pixels_of(png, EXPOSED)


def pixels_of(png: bytes, colour: str) -> int:
    """Pixels above the legend that have a colour."""
    from matplotlib import image
    from matplotlib.colors import to_rgb

    pixels = image.imread(io.BytesIO(png))[:-45, :, :3]
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=2) < 0.02).sum())


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
    assert text == [
        "without: 200 ms",
        "  compute " + "█" * 10 + " " * 10,
        "  hidden  " + " " * 20,
        "  exposed " + " " * 10 + "█" * 10,
        "with: 100 ms",
        "  compute " + "█" * 10 + " " * 10,
        "  hidden  " + " " * 2 + "█" * 4 + " " * 14,
        "  exposed " + " " * 20,
        "  transfers are hidden behind compute or exposed: compute waits for them",
    ]


def test_waiting_for_a_peer_is_another_row_and_colour(tmp_path: Path) -> None:
    """Compute to 100 ms, a peer waited for from 80 to 140 ms, of it 20 ms beside compute."""
    traces = traces_of(tmp_path / "waits", (20, 60), wait=(80, 140))
    text = timeline_text({"step": (traces, 0)}, width=14).plain.splitlines()
    assert text[4] == "  peers   " + " " * 10 + "█" * 4
    assert text[2:4] == ["  hidden  " + " " * 2 + "█" * 4 + " " * 8, "  exposed " + " " * 14]
    assert pixels_of(timeline_png(traces, 0), PEERS) > 100
    assert pixels_of(timeline_png(traces, 0), EXPOSED) == 0
