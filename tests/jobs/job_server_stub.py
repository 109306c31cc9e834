"""An HTTP server that answers Ray's own client for jobs, and keeps what it is given.

Written after Ray's documentation of its jobs interface. It may want a token; tests tell it of jobs.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.servers import Asked, served


@dataclass
class State:
    """What the server holds; ``on_submit`` answers a submission in place of keeping it."""

    port: int = 0
    wants_token: bool = False
    jobs: list[dict[str, Any]] = field(default_factory=list)
    packages: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    silent_after: int | None = None
    """Requests that are answered; connections of later ones are cut."""
    on_submit: Callable[[dict[str, Any]], tuple[int, str]] | None = None

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [request for request in self.asked if request[0] != "GET"]

    def add(self, name: str, status: str, metadata: dict[str, str]) -> None:
        """A job, started after all others."""
        start = 1_700_000_000_000 + len(self.jobs)
        self.jobs.append(
            {
                "type": "SUBMISSION",
                "submission_id": name,
                "status": status,
                "metadata": metadata,
                "entrypoint": "python -m braid train run.yaml",
                "message": f"it is {status}",
                "start_time": start,
                "end_time": None if status in ("PENDING", "RUNNING") else start + 60_000,
            }
        )


def _answer(state: State, asked: Asked) -> tuple[int, str] | None:
    state.asked.append((asked.method, asked.path))
    if state.silent_after is not None and len(state.asked) > state.silent_after:
        return None
    if state.wants_token:
        return 401, "Unauthorized"
    name = asked.path.rpartition("/")[2]
    match asked.method, asked.path.split("/")[1:]:
        case "GET", ["api", "version"]:
            return 200, json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "none"})
        case "GET", ["api", "packages", *_]:
            return (200, "{}") if name in state.packages else (404, "")
        case "PUT", ["api", "packages", *_]:
            state.packages[name] = asked.body
            return 200, ""
        case "GET", ["api", "jobs", ""]:
            return 200, json.dumps(state.jobs)
        case "GET", ["api", "jobs", job, "logs"]:
            return 200, json.dumps({"logs": f"log of {job}\n"})
        case "POST", ["api", "jobs", ""]:
            request = json.loads(asked.body)
            if state.on_submit is not None:
                return state.on_submit(request)
            state.submitted.append(request)
            state.add(request["submission_id"], "RUNNING", request["metadata"])
            return 200, json.dumps(dict.fromkeys(("job_id", "submission_id"), request["submission_id"]))
        case "POST", ["api", "jobs", _, "stop"]:
            return 200, json.dumps({"stopped": True})
    return 404, "no such page"


@contextmanager
def job_server() -> Iterator[State]:
    """A server on loopback; `State.port` is its port."""
    state = State()
    with served(partial(_answer, state)) as state.port:
        yield state
