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


def traces_of(transfer: tuple[int, int], wait: tuple[int, int] | None = None) -> TraceFolder:
    """Compute from 0 to 100 ms and a transfer; by choice a wait for a peer."""
    operator, waiting = KINDS.index("operator"), KINDS.index("waiting")
    times = [((0, 100), 0, operator), (transfer, 1, operator), *([(wait, 1, waiting)] if wait else [])]
    records = np.zeros(len(times), RECORD)
    for record, ((begin, end), label, kind) in zip(records, times, strict=True):
        record["start_ns"], record["end_ns"] = begin * 10**6, end * 10**6
        record["label"], record["kind"], record["peer"] = label, kind, 1
    batch = Batch(rank=0, step=0, labels=LABELS, records=records)
    return TraceFolder(Path(), ranks={0: {0: batch}})


def filled(picture: str, colour: str) -> float:
    """The share of the picture's time that a colour's strip fills."""
    ((bottom, path),) = re.findall(rf'<path d="M90 ([\d.]+)([^"]*)" fill="{colour}"/>', picture)
    steps = [(float(x), float(bottom) - float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", path)]
    return sum((right - left) * high for (left, high), (right, _) in pairwise(steps)) / 10 / 1290


@pytest.mark.parametrize(("transfer", "exposed"), [((20, 60), 0), ((50, 150), 1 / 3), ((100, 200), 1 / 2)])
def test_what_is_red_is_exposed(transfer: tuple[int, int], exposed: float) -> None:
    picture = timeline_svg({"step 1": (traces_of(transfer), 0)})
    assert filled(picture, EXPOSED) == pytest.approx(exposed, abs=1e-3)
    assert filled(picture, PEERS) == 0
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_two_runs_stand_below_each_other() -> None:
    both = {"without": (traces_of((100, 200)), 0), "with": (traces_of((20, 60)), 0)}
    picture = timeline_svg(both)
    assert "without: 200 ms; 0% of communication is hidden" in picture
    assert "with: 100 ms; 100% of communication is hidden" in picture
    assert timeline_text(both, width=20).plain.splitlines() == [
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
    with pytest.raises(ValueError, match="no spans of step 8"):
        timeline_svg({"step 8": (traces_of((0, 1)), 7)})


def test_waiting_for_a_peer_is_another_row_and_colour() -> None:
    """Compute to 100 ms, a peer waited for from 80 to 140 ms, of it 20 ms beside compute."""
    steps = {"step": (traces_of((20, 60), wait=(80, 140)), 0)}
    text = timeline_text(steps, width=14).plain.splitlines()
    assert text[4] == "  peers   " + " " * 10 + "█" * 4
    assert text[2:4] == ["  hidden  " + " " * 2 + "█" * 4 + " " * 8, "  exposed " + " " * 14]
    picture = timeline_svg(steps)
    assert filled(picture, PEERS) == pytest.approx(4 / 14, abs=1e-3)
    assert filled(picture, EXPOSED) == 0
