"""A Hub on loopback with one data set, me/texts: as much of its interface as `datasets` asks for."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

DATA_SET = "me/texts"


class HubStub:
    """Serves ``files``, by name, at ``commit``; both may change meanwhile."""

    def __init__(self, files: dict[str, bytes], commit: str) -> None:
        self.files, self.commit = files, commit
        self.asked: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                stub.asked.append(path)
                body, code, headers = stub.answer(path)
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server calls

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> tuple[bytes, int, dict[str, str]]:
        """Body, status and headers."""
        facts, files = f"/api/datasets/{DATA_SET}", f"/datasets/{DATA_SET}/resolve/"
        if path == facts or path.startswith(f"{facts}/revision/"):
            listed = [{"rfilename": name} for name in self.files]
            return json.dumps({"id": DATA_SET, "sha": self.commit, "siblings": listed}).encode(), 200, {}
        if path.startswith(f"{facts}/tree/"):
            below = path.removeprefix(f"{facts}/tree/").partition("/")[2]
            found = [
                {"type": "file", "path": name, "size": len(body), "oid": self._tag(body)}
                for name, body in self.files.items()
                if name.startswith(below)
            ]
            return json.dumps(found).encode(), 200, {}
        body = self.files.get(path.removeprefix(files).partition("/")[2]) if path.startswith(files) else None
        if body is None:
            return b"", 404, {"X-Error-Code": "EntryNotFound" if DATA_SET in path else "RepoNotFound"}
        return body, 200, {"ETag": f'"{self._tag(body)}"', "X-Repo-Commit": self.commit}

    @staticmethod
    def _tag(body: bytes) -> str:
        return hashlib.sha1(body).hexdigest()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
