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

from pydantic import BaseModel, ValidationError

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
        """All that was stored, as text that can be compared."""
        return json.dumps([self.folders, self.datasources, self.dashboards], sort_keys=True)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [request for request in self.asked if request[0] != "GET"]


class RefusedError(Exception):
    """An error as Grafana words it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _checked(model: type[BaseModel], body: Any) -> dict[str, Any]:
    try:
        model.model_validate(body)
    except ValidationError as error:
        raise RefusedError(400, f"bad request data: {error}") from None
    assert isinstance(body, dict)
    return body


def _found(held: dict[str, dict[str, Any]], uid: str) -> dict[str, Any]:
    if uid not in held:
        raise RefusedError(404, "not found")
    return held[uid]


def _answer(state: State, method: str, path: str, body: Any) -> Any:
    match method, path.strip("/").split("/"):
        case "GET", ["api", "folders"]:
            return [{"uid": f["uid"], "title": f["title"]} for f in state.folders.values()]
        case "POST", ["api", "folders"]:
            uid = f"f{len(state.folders)}"
            state.folders[uid] = {"uid": uid, "title": _checked(FolderBody, body)["title"], "version": 1}
            return state.folders[uid]
        case "GET", ["api", "datasources", "uid", uid]:
            return _found(state.datasources, uid)
        case "POST", ["api", "datasources"]:
            made = _checked(DataSourceBody, body) | {"id": len(state.datasources) + 1, "version": 1}
            state.datasources[made["uid"]] = made
            return {"datasource": made, "message": "Datasource added"}
        case "PUT", ["api", "datasources", "uid", uid]:
            before = _found(state.datasources, uid)
            made = _checked(DataSourceBody, body) | {"id": before["id"], "version": before["version"] + 1}
            state.datasources[uid] = made
            return {"datasource": made, "message": "Datasource updated"}
        case "GET", ["api", "dashboards", "uid", uid]:
            return _found(state.dashboards, uid)
        case "POST", ["api", "dashboards", "db"]:
            return _write_dashboard(state, _checked(DashboardBody, body))
    raise RefusedError(404, "Not found")


def _write_dashboard(state: State, body: dict[str, Any]) -> dict[str, Any]:
    content, folder = body["dashboard"], body["folderUid"]
    if folder not in state.folders:
        raise RefusedError(400, "folder not found")
    before = state.dashboards.get(content["uid"])
    if before is not None and not body["overwrite"]:
        raise RefusedError(412, "The dashboard has been changed by someone else")
    own = {
        "id": before["dashboard"]["id"] if before else len(state.dashboards) + 1,
        "version": before["dashboard"]["version"] + 1 if before else 1,
    }
    state.dashboards[content["uid"]] = {"dashboard": content | own, "meta": {"folderUid": folder}}
    return {"uid": content["uid"], "status": "success"} | own


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
        try:
            if asked.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise RefusedError(401, "Invalid API key")
            body = json.loads(asked.body) if asked.body else None
            path = asked.path.removeprefix(prefix).partition("?")[0]
            return 200, json.dumps(_answer(state, asked.method, path, body))
        except RefusedError as error:
            return error.status, json.dumps({"message": str(error)})

    with served(answer) as port:
        yield f"http://127.0.0.1:{port}{prefix}", state
        ended.set()
