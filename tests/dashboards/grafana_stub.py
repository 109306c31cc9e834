"""An HTTP server that answers ``braid grafana push`` as Grafana does, and keeps what it is given.

Written after Grafana's documentation of its HTTP interface (folders, data sources, dashboards). It checks
tokens and bodies, and can be told to fail.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tests.dashboards.grafana_schema import DashboardBody, DataSourceBody, FolderBody
from tests.servers import Asked, served

TOKEN = "glsa_0123456789abcdefghijklmnopqrstuv_01234567"


@dataclass
class Failure:
    """An answer in place of the right one: to requests whose path begins so, after a wait."""

    path: str
    status: int = 200
    body: str = ""
    wait_seconds: float = 0.0


@dataclass
class State:
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    datasources: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    failure: Failure | None = None

    def kept(self) -> str:
        return json.dumps([self.folders, self.datasources, self.dashboards], sort_keys=True)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [request for request in self.asked if request[0] != "GET"]


def _answer(state: State, method: str, path: str, body: Any) -> tuple[int, Any]:
    """Status and content. Raise `ValidationError` if a body is not as it must be."""
    match method, path.strip("/").split("/")[1:]:
        case "GET", ["folders"]:
            return 200, [{"uid": f["uid"], "title": f["title"]} for f in state.folders.values()]
        case "POST", ["folders"]:
            FolderBody.model_validate(body)
            uid = f"f{len(state.folders)}"
            state.folders[uid] = {"uid": uid, "title": body["title"], "version": 1}
            return 200, state.folders[uid]
        case "GET", ["datasources", "uid", uid] if uid in state.datasources:
            return 200, state.datasources[uid]
        case "GET", ["dashboards", "uid", uid] if uid in state.dashboards:
            return 200, state.dashboards[uid]
        case ("POST", ["datasources"]) | ("PUT", ["datasources", "uid", _]):
            DataSourceBody.model_validate(body)
            before = state.datasources.get(body["uid"], {"id": len(state.datasources) + 1, "version": 0})
            made = {**body, "id": before["id"], "version": before["version"] + 1}
            state.datasources[made["uid"]] = made
            return 200, {"datasource": made}
        case "POST", ["dashboards", "db"]:
            DashboardBody.model_validate(body)
            return _write_dashboard(state, body["dashboard"], body["folderUid"], body["overwrite"])
    return 404, {"message": "Not found"}


def _write_dashboard(state: State, content: Any, folder: str, overwrite: bool) -> tuple[int, Any]:
    if folder not in state.folders:
        return 400, {"message": "folder not found"}
    before = state.dashboards.get(content["uid"])
    if before is not None and not overwrite:
        return 412, {"message": "The dashboard has been changed by someone else"}
    known = before["dashboard"] if before else {"id": len(state.dashboards) + 1, "version": 0}
    of_server = {"id": known["id"], "version": known["version"] + 1}
    state.dashboards[content["uid"]] = {"dashboard": content | of_server, "meta": {"folderUid": folder}}
    return 200, {"uid": content["uid"], "status": "success"} | of_server


@contextmanager
def grafana(prefix: str = "") -> Iterator[tuple[str, State]]:
    """A server on a free port of this machine: its URL, and its state."""
    state = State()
    ended = threading.Event()

    def answer(asked: Asked) -> tuple[int, str]:
        state.asked.append((asked.method, asked.path))
        failure = state.failure
        if failure is not None and asked.path.startswith(failure.path):
            ended.wait(failure.wait_seconds)
            return failure.status, failure.body
        if not asked.path.startswith(f"{prefix}/api/"):
            return 404, "<html>no such page</html>"
        if asked.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, json.dumps({"message": "Invalid API key"})
        body = json.loads(asked.body) if asked.body else None
        path = asked.path.removeprefix(prefix).partition("?")[0]
        try:
            status, content = _answer(state, asked.method, path, body)
        except ValidationError as error:
            status, content = 400, {"message": f"bad request data: {error}"}
        return status, json.dumps(content)

    with served(answer) as port:
        yield f"http://127.0.0.1:{port}{prefix}", state
        ended.set()
