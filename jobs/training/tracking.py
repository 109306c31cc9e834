"""Chooses the tools on a network that a run tells of itself, and tells them its steps and events."""

from dataclasses import asdict
from typing import Any

from braid.actors.config.machines import TelemetryConfig
from braid.actors.controller.records.run_records import (
    CheckpointSaved,
    Event,
    Finished,
    Incident,
    Started,
    StepDone,
)
from braid.dashboards.sinks import Sinks

_FAILURES = ("failed", "restarted", "guard")
"""Kinds of incidents that count as failures."""


def network_tools(telemetry: TelemetryConfig) -> dict[str, dict[str, Any]]:
    """Return the options of MLflow and the webhook, as far as they are asked for."""
    tools: dict[str, dict[str, Any]] = {}
    if telemetry.mlflow.uri is not None:
        tools["mlflow"] = telemetry.mlflow.model_dump()
    if telemetry.webhook.url is not None:
        tools["webhook"] = telemetry.webhook.model_dump()
    return tools


def tell_event(sinks: Sinks, event: Event) -> None:
    """Tell start, steps, checkpoints, failures and end; other events have no listeners."""
    match event:
        case StepDone(record=record):
            sinks.tell("step", asdict(record))
        case Started():
            sinks.tell("start", asdict(event))
        case CheckpointSaved():
            sinks.tell("checkpoint", asdict(event))
        case Incident(kind=kind) if kind in _FAILURES:
            sinks.tell("failure", asdict(event))
        case Finished(complete=complete, report=report):
            steps = report["steps"]
            loss = steps[-1]["loss"] if steps else None
            sinks.tell("end", {"complete": complete, "steps": len(steps), "loss": loss})
