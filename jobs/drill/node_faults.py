"""Nodes that come and go under a run: the fault itself, what Ray knows of it, and how the run followed."""

import time

from braid.actors.controller.records import read_lines
from braid.jobs.drill.command import Command, DrillError
from braid.jobs.drill.nodes import Nodes
from braid.jobs.drill.plan import Planned
from braid.jobs.drill.report import Outcome


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
