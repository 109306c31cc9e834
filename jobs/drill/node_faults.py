"""Nodes that come, go and slow down under a run: the fault itself, what Ray knows of it, and how the run
followed."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

from braid.actors.controller.json_lines import read_lines
from braid.jobs.drill.command import Command, DrillError
from braid.jobs.drill.nodes import Nodes
from braid.jobs.drill.plan import Planned
from braid.jobs.drill.report import Outcome

_STOPPED_S, _RUNS_S = 0.04, 0.02
"""By turns, of a rank on a slow node: a third of its speed."""


def slow_node(one: Planned, nodes: Nodes, command: Command, quarantine_s: float) -> Outcome:
    """Slow a node down until the run goes on without it; it must stay out until its quarantine ends."""
    begun = time.time()
    outcome = Outcome(one, begun)
    name = nodes.names[int(one.place * len(nodes.names))]
    address = nodes.address_of(name)
    with _slow(command, address):
        command.wait(f"the run to go on without {address}", lambda: _ranks(command) == _of(one) - 1)
    left_out = command.incidents(begun, resized=True)[0]["time"]

    def comes_back() -> bool:
        if address in _addresses(command):
            if time.time() < left_out + quarantine_s:
                raise DrillError(f"{one.name}: {address} was taken again before its quarantine ended")
            return _ranks(command) == _of(one)
        return False

    command.wait(f"{address} to be taken again after {quarantine_s:g} s", comes_back)
    _describe(outcome, command, begun)
    return outcome


def _of(one: Planned) -> int:
    assert one.nodes is not None
    return one.nodes


def _ranks(command: Command) -> int:
    """Of the newest step."""
    return len(command.newest().get("peak_bytes", ()))


def _placed(command: Command) -> list[dict[str, str | int]]:
    """Where the run's ranks are, as it says; nowhere while it writes that down."""
    with contextlib.suppress(OSError, ValueError):
        ranks: list[dict[str, str | int]] = json.loads((command.broken / "cluster.json").read_text())["ranks"]
        return ranks
    return []


def _addresses(command: Command) -> set[str | int]:
    return {rank["address"] for rank in _placed(command)}


@contextlib.contextmanager
def _slow(command: Command, address: str) -> Iterator[None]:
    """Stop and continue the ranks on a node, many times a second."""
    over = threading.Event()

    def by_turns() -> None:
        while not over.is_set():
            processes = [int(rank["process"]) for rank in _placed(command) if rank["address"] == address]
            for number, seconds in ((signal.SIGSTOP, _STOPPED_S), (signal.SIGCONT, _RUNS_S)):
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(seconds)

    thread = threading.Thread(target=by_turns, name="slow node")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def change_nodes(one: Planned, nodes: Nodes, command: Command) -> Outcome:
    """Let a node come or go, and wait until Ray knows and the run has as many ranks as nodes."""
    begun = time.time()
    outcome = Outcome(one, begun)
    if one.kind == "node-joins":
        node = nodes.join()
        command.wait(f"Ray to have the node of {one.name}", lambda: nodes.alive(node))
        outcome.fired = time.time()
    else:
        node = nodes.names[int(one.place * len(nodes.names))]
        if not nodes.alive(node):
            raise DrillError(f"{one.name}: the node was gone before")
        if one.kind == "node-lost":
            nodes.lose(node)
        elif not nodes.drain(node):
            raise DrillError(f"{one.name}: Ray does not drain the node")

    def followed() -> bool:
        ranks = len(command.newest().get("peak_bytes", ()))
        return ranks == one.nodes_after and bool(command.incidents(begun, resized=True))

    command.wait(f"{one.nodes_after} ranks after {one.name}", followed)
    if one.kind == "node-drained":
        nodes.lose(node)  # what was announced
    if one.kind != "node-joins":
        command.wait(f"Ray to know of {one.name}", lambda: not nodes.alive(node))
    _describe(outcome, command, begun)
    return outcome


def _describe(outcome: Outcome, command: Command, since: float) -> None:
    """What the run says of its first change after the fault."""
    change = command.incidents(since, resized=True)[0]
    begun = detected = change["time"]
    if outcome.fault.kind == "node-lost":  # ranks are missed first; then it shows that nothing replaces them
        events = read_lines(command.broken / "events.jsonl")
        missed = [line["time"] for line in events if line["kind"] == "restarted"]
        detected = min((when for when in missed if when >= outcome.fired), default=begun)
    outcome.detected_after = max(0.0, detected - outcome.fired)
    outcome.recovered_after = begun + change["recovered_after_seconds"] - detected
    outcome.steps_lost = change["steps_lost"]
    kept = change["step"] - change["steps_lost"]
    outcome.restored_from = f"checkpoint step-{kept}" if kept else "the beginning"
    outcome.parts, outcome.noticed = {"room": begun - detected, **change["parts"]}, change["text"]
