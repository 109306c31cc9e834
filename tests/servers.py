"""HTTP servers on loopback whose answers a function gives."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@contextmanager
def served(
    answer: Callable[[Asked], tuple[Any, ...] | None], kind: str = "application/json"
) -> Iterator[int]:
    """The port of a server that gives status, content, which is of a kind, or HTML, and perhaps headers; it
    cuts the connection of what is not answered."""

    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answer(Asked(self.command, self.path, self.headers, body))
            if found is None:
                self.close_connection = True
                return
            status, content, *headers = found
            content = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if content.startswith(b"<") else kind)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers[0].items() if headers else ():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
