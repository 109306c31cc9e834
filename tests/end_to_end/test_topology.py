"""Where ranks are decides what goes inside a node and what between nodes. On nodes of Ray: `test_nodes`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.planning import model_graphs
from braid.actors.controller.profiling import find_or_measure
from braid.actors.controller.ranks.processes import ProcessLauncher, ProcessPlace
from braid.actors.controller.records.run_records import Event, Started
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import MeshShape
from tests.end_to_end.runs import BYTES_VOCABULARY, run_plan, small_config, trained
from tests.spans import read_folder, spans_of

pytestmark = pytest.mark.slow


def run(config: Any, data: Path, launcher: Any) -> tuple[list[Event], TraceFolder]:
    events = trained(run_plan(config, data), launcher=launcher).events
    return list(events), read_folder(config.run_directory)


def check_spans(traces: TraceFolder, mesh: MeshShape, hosts: Sequence[str]) -> None:
    """Every span of a transfer is labelled by the hosts of the ranks that it joins."""
    seen = 0
    for step in traces.steps:
        for span in spans_of(traces.step(step)):
            if span.stream is Stream.COMPUTE:
                continue
            name, place = span.operator, mesh.position(span.rank)
            what, _, axis = name.partition(" ")
            stage, last = place["pp"], mesh.sizes["pp"] - 1
            other = last - stage if axis == "ends" else stage
            other += {"F": 1, "B": -1}[axis] if what == "send" else 0
            ranks = [span.rank, mesh.rank_at({**place, "pp": other})]
            if other == stage:
                ranks = mesh.members(place, (axis or "tp",))
            crosses = len({hosts[rank] for rank in ranks}) > 1
            assert span.stream is (Stream.INTER if crosses else Stream.INTRA), (name, span.rank, axis)
            seen += 1
    assert seen > 20


def places(*hosts: str) -> list[ProcessPlace]:
    return [ProcessPlace(machine=host) for host in hosts]


def test_neighbours_and_ends_of_a_pipeline(tmp_path: Path, data: Path) -> None:
    """Of three stages on the nodes a, b, a the first and the last share a table, inside a node."""
    config = small_config(
        tmp_path / "runs", parallel={"pp": 3}, model={"layers": 3, "tied_head": True}, train={"steps": 2}
    )
    hosts = ["a", "b", "a"]
    _, traces = run(config, data, ProcessLauncher(config, places(*hosts)))
    check_spans(traces, config.layout().mesh, hosts)
    found = {(span.operator.partition(" ")[2], span.stream) for span in spans_of(traces.step(1))}
    assert {("ends", Stream.INTRA), ("F", Stream.INTER), ("B", Stream.INTER)} <= found


def test_a_profile_knows_what_every_axis_goes_over_and_both_links_at_once(tmp_path: Path) -> None:
    """tp inside each of two nodes, ep between them."""
    model = {"family": "moe", "experts": 4, "top_k": 2}
    config = small_config(tmp_path, model=model, parallel={"tp": 2, "dp": 2, "ep": 2})
    shape = config.check(BYTES_VOCABULARY)
    profile = find_or_measure(config, shape, ProcessLauncher(config, places("a", "a", "b", "b"))).profile
    assert (profile.streams["tp"], profile.streams["ep"]) == (Stream.INTRA, Stream.INTER)
    layer = model_graphs(config, shape, profile.streams)["layer"].forward
    local, cross = layer.named("attention_gather"), layer.named("dispatch")
    assert (local.stream, cross.stream) == (Stream.INTRA, Stream.INTER)
    assert (profile.classes[local.key], profile.classes[cross.key]) == ("intra", "inter")
    pairs = {"inter<intra", "intra<inter", f"{local.key}<inter", f"{cross.key}<intra"}
    assert pairs <= profile.slowdowns.keys()


def test_a_tensor_group_over_two_nodes_is_said(tmp_path: Path, data: Path) -> None:
    """Results are what they were."""
    losses = []
    for number, hosts in enumerate((("a", "b"), ("a", "a"))):
        config = small_config(tmp_path / f"runs{number}", parallel={"tp": 2}, train={"steps": 2})
        events, traces = run(config, data, ProcessLauncher(config, places(*hosts)))
        check_spans(traces, config.layout().mesh, hosts)
        (notes,) = [event.notes for event in events if isinstance(event, Started)]
        assert bool(notes) == (hosts == ("a", "b"))
        if notes:
            says = "1 of 1 tensor-parallel groups lie over several nodes (rank 0 on a, rank 1 on b)"
            assert says in notes[0]
        losses.append([event.record.loss for event in events if hasattr(event, "record")])
    assert losses[0] == losses[1]
