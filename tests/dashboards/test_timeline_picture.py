"""The picture of a step: what is red is exposed, and nothing else."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from braid.dashboards.timeline_picture import PEERS, timeline_svg, timeline_text
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.batches import RECORD, Batch, Labels
from braid.scheduling.trace.spans import KINDS, Label
from braid.scheduling.trace.svg import EXPOSED

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


def filled(picture: str, colour: str) -> float:
    """The share of the picture's time that a colour's strip fills."""
    ((bottom, path),) = re.findall(rf'<path d="M90 ([\d.]+)([^"]*)" fill="{colour}"/>', picture)
    steps = [(float(x), float(bottom) - float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", path)]
    return sum((right - left) * high for (left, high), (right, _) in pairwise(steps)) / 10 / 1290


@pytest.mark.parametrize(("transfer", "exposed"), [((20, 60), 0), ((50, 150), 1 / 3), ((100, 200), 1 / 2)])
def test_what_is_red_is_exposed(tmp_path: Path, transfer: tuple[int, int], exposed: float) -> None:
    picture = timeline_svg({"step 1": (traces_of(tmp_path / "run", transfer), 0)})
    assert filled(picture, EXPOSED) == pytest.approx(exposed, abs=1e-3)
    assert filled(picture, PEERS) == 0
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_step_without_spans_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no spans of step 8"):
        timeline_svg({"step 8": (traces_of(tmp_path / "t", (0, 1)), 7)})


def test_two_runs_stand_below_each_other(tmp_path: Path) -> None:
    hidden, exposed = traces_of(tmp_path / "hidden", (20, 60)), traces_of(tmp_path / "exposed", (100, 200))
    both = {"without": (exposed, 0), "with": (hidden, 0)}
    picture = timeline_svg(both)
    assert "without: 200 ms; 0% of communication is hidden" in picture
    assert "with: 100 ms; 100% of communication is hidden" in picture
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
    picture = timeline_svg({"step": (traces, 0)})
    assert filled(picture, PEERS) == pytest.approx(4 / 14, abs=1e-3)
    assert filled(picture, EXPOSED) == 0
