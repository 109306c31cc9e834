"""A stand-in for the Hugging Face Hub on loopback: repositories are folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "org/gated"
"""A repository that exists, but that this user may not read."""


@contextmanager
def hub(folder: Path, fetched: list[str]) -> Iterator[str]:
    """The address of a Hub whose repository ``org/name`` is ``folder/org/name``; what is read of files is
    added to ``fetched``."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/")
            if path.startswith("api/models/"):
                org, name, what, *_ = [*path.removeprefix("api/models/").split("/"), "revision"]
                return self._describe(f"{org}/{name}", what)
            name, _, file = path.partition(f"/resolve/{COMMIT}/")
            if not file:  # the library asks for more than repositories
                return self._send(404, b"")
            content = (folder / name / file).read_bytes()
            if self.command == "GET":
                fetched.append(file)
            etag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, ETag=f'"{etag}"')

        do_GET = do_HEAD = answer  # noqa: N815

        def _describe(self, name: str, what: str) -> None:
            if name == GATED:
                return self._send(403, b"{}", **{"X-Error-Code": "GatedRepo"})
            files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
            if not files:
                return self._send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
            names = [str(path.relative_to(folder / name)) for path in files]
            if what == "tree":
                sizes = zip(names, files, strict=True)
                entries = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in sizes
                ]
                return self._send(200, json.dumps(entries).encode())
            told = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in names]}
            return self._send(200, json.dumps(told).encode())

        def _send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in {
                "Content-Length": str(len(content)),
                "X-Repo-Commit": COMMIT,
                **headers,
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
