"""An HTTP server that answers ``braid grafana push`` as Grafana does, and keeps what it is given.

Written after Grafana's documentation of its HTTP interface (folders, data sources, dashboards). It checks
tokens and bodies, and can be told to fail.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel, ValidationError

from tests.dashboards.grafana_schema import DashboardBody, DataSourceBody, FolderBody

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
    """What the server holds."""

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
        """Requests that change something."""
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


def _answer(state: State, method: str, path: str, body: Any) -> Any:
    match method, path.strip("/").split("/"):
        case "GET", ["api", "folders"]:
            return [{"id": f["id"], "uid": f["uid"], "title": f["title"]} for f in state.folders.values()]
        case "POST", ["api", "folders"]:
            return _new_folder(state, _checked(FolderBody, body))
        case "GET", ["api", "datasources", "uid", uid]:
            if uid not in state.datasources:
                raise RefusedError(404, "Data source not found")
            return state.datasources[uid]
        case "POST", ["api", "datasources"]:
            return _new_datasource(state, _checked(DataSourceBody, body))
        case "PUT", ["api", "datasources", "uid", uid]:
            if uid not in state.datasources:
                raise RefusedError(404, "Data source not found")
            before = state.datasources[uid]
            made = _checked(DataSourceBody, body) | {"id": before["id"], "version": before["version"] + 1}
            state.datasources[uid] = made
            return {
                "datasource": made,
                "id": made["id"],
                "message": "Datasource updated",
                "name": made["name"],
            }
        case "GET", ["api", "dashboards", "uid", uid]:
            if uid not in state.dashboards:
                raise RefusedError(404, "Dashboard not found")
            return state.dashboards[uid]
        case "POST", ["api", "dashboards", "db"]:
            return _new_dashboard(state, _checked(DashboardBody, body))
    raise RefusedError(404, "Not found")


def _new_folder(state: State, body: dict[str, Any]) -> dict[str, Any]:
    uid = body.get("uid") or f"f{len(state.folders)}"
    if uid in state.folders:
        raise RefusedError(412, "a folder with that uid already exists")
    folder = {"id": len(state.folders) + 1, "uid": uid, "title": body["title"], "version": 1}
    state.folders[uid] = folder
    return folder


def _new_datasource(state: State, body: dict[str, Any]) -> dict[str, Any]:
    if any(body["name"] == other["name"] for other in state.datasources.values()):
        raise RefusedError(409, "data source with the same name already exists")
    made = body | {"id": len(state.datasources) + 1, "version": 1, "readOnly": False}
    state.datasources[body["uid"]] = made
    return {"datasource": made, "id": made["id"], "message": "Datasource added", "name": made["name"]}


def _new_dashboard(state: State, body: dict[str, Any]) -> dict[str, Any]:
    content, folder = body["dashboard"], body["folderUid"]
    if folder not in state.folders:
        raise RefusedError(400, "folder not found")
    before = state.dashboards.get(content["uid"])
    if before is not None and not body["overwrite"]:
        raise RefusedError(412, "The dashboard has been changed by someone else")
    version = 1 if before is None else before["dashboard"]["version"] + 1
    number = before["dashboard"]["id"] if before else len(state.dashboards) + 1
    state.dashboards[content["uid"]] = {
        "dashboard": content | {"id": number, "version": version},
        "meta": {"folderUid": folder, "slug": content["uid"], "version": version},
    }
    return {"id": number, "uid": content["uid"], "status": "success", "version": version}


@contextmanager
def grafana(prefix: str = "") -> Iterator[tuple[str, State]]:
    """A server on a free port of this machine: its URL, and its state."""
    state = State()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.asked.append((self.command, self.path))
            failure = state.failure
            if failure is not None and self.path.startswith(failure.path):
                ended.wait(failure.wait_seconds)
                self._send(failure.status, failure.body, "text/html")
                return
            if not self.path.startswith(f"{prefix}/api/"):
                self._send(404, "<html>no such page</html>", "text/html")
                return
            try:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise RefusedError(401, "Invalid API key")
                body = json.loads(data) if data else None
                made = _answer(state, self.command, self.path.removeprefix(prefix).partition("?")[0], body)
                self._send(200, json.dumps(made))
            except RefusedError as error:
                self._send(error.status, json.dumps({"message": str(error)}))

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass  # what was asked is in the state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}", state
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
