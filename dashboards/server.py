"""Serves the live page of a run: small, read-only, for this machine only unless a token guards it.

Access rules: docs/design.md, Doors.

Files are read only while a page is open, at most four times a second, in a separate thread. Server-sent
events only tell a page *that* something is new; it then requests it. So a slow or absent page misses only
outdated states, and delays nobody.
"""

import asyncio
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from braid.dashboards.run_data import RunData, compact_json

POLL_SECONDS: Final = 0.25
QUIET_SECONDS: Final = 5.0
"""Seconds without news after which a page gets a keep-alive message."""
WRITE_SECONDS: Final = 20.0
"""Seconds after which a page that reads nothing is disconnected; it reconnects by itself."""
MOST_PAGES: Final = 64
SHORTEST_TOKEN: Final = 16

_COOKIE: Final = "braid_session"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors"
)
_HEADERS: Final = {
    "Content-Security-Policy": f"{_POLICY} 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FRAMED: Final = {
    **_HEADERS,
    "Content-Security-Policy": f"{_POLICY} http://127.0.0.1:* http://localhost:*",
}
"""Headers of a page without a token: notebooks of this machine may show it in a frame."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Watcher:
    """Reads the run on request, at most every `POLL_SECONDS` for all requests together."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self.news: dict[str, Any] = {}
        """The newest versions (`RunData.refresh`)."""
        self.pages = 0
        """Number of connected pages."""
        self._reading = asyncio.Lock()
        self._due = 0.0

    async def ask(self, question: Callable[[RunData], str | None] = lambda data: None) -> str | None:
        """Read new content, then answer a question; one at a time, in a separate thread."""
        async with self._reading:
            if time.monotonic() >= self._due:
                news = await asyncio.to_thread(self._data.refresh)
                self._due = time.monotonic() + POLL_SECONDS
                self.news = self.news if news == self.news else news
            return await asyncio.to_thread(question, self._data)


WATCHER: Final = web.AppKey("watcher", Watcher)


def make_app(
    run_directory: Path,
    *,
    token: str | None = None,
    host: str = "127.0.0.1",
    extra_routes: Iterable[web.RouteDef] = (),
) -> web.Application:
    """Make the web application; ``host`` is the address on which it will listen.

    Raise `ValueError` if there is no run, or other machines could read it without a token.
    """
    data = RunData(run_directory)
    data.check()
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ValueError(f"the token has {len(token)} characters; give it at least {SHORTEST_TOKEN}")
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"--host {host} lets other machines read the run: guard it with --token-file, "
            f"or leave it at 127.0.0.1 and forward the port (ssh -L)"
        )
    app = web.Application(middlewares=[_guard(host, token)])
    # read once, so that no request contains a path
    pages = {
        f"/{file.name}": (file.read_bytes(), _TYPES[suffix])
        for file in files("braid.dashboards").joinpath("page").iterdir()
        if (suffix := Path(file.name).suffix) in _TYPES
    }
    pages["/"] = pages["/index.html"]

    async def page(request: web.Request) -> web.Response:
        body, kind = pages[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    handlers = {**dict.fromkeys(pages, page), **dict.fromkeys(_ANSWERS, _answer), "/api/events": _events}
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in handlers.items()])
    app.add_routes(extra_routes)
    app[WATCHER] = Watcher(data)
    return app


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host == "localhost" or ((address := _address(host)) is not None and address.is_loopback)


def _guard(host: str, token: str | None) -> Any:
    """Make a middleware that refuses anything but an authorised GET request to this page, and sets the
    headers."""
    session = secrets.token_urlsafe(32)

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            refused = _refused(request, host) or _entered(request, token, session)
            response = await handler(request) if refused is None else refused
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.reason)
        if not response.prepared:
            response.headers.update(_HEADERS if token is not None else _FRAMED)
        return response

    return guard


def _refused(request: web.Request, host: str) -> web.Response | None:
    if request.method != "GET":
        return web.Response(status=405, text="Only GET is answered.", headers={"Allow": "GET"})
    if not _is_ours(request.headers.get("Host", ""), host):
        return web.Response(status=403, text="This name is not one of the page's host.")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"{request.scheme}://{request.headers['Host']}":
        return web.Response(status=403, text="Requests of other sites are not answered.")
    return None


def _is_ours(header: str, host: str) -> bool:
    """Return whether a Host header is a loopback name or the listening address, not a name from somebody
    else's DNS."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    if _is_loopback(name) or name == host.lower():
        return True
    everywhere = host in ("0.0.0.0", "::")
    return everywhere and (_address(name) is not None or name == socket.gethostname().lower())


def _entered(request: web.Request, token: str | None, session: str) -> web.Response | None:
    """Return None for an authorised request; else the answer: a cookie for a valid ``?token=``, or a
    refusal."""
    if token is None:
        return None
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and _same(given.strip(), token):
        return None
    if _same(request.cookies.get(_COOKIE, ""), session):
        return None
    if _same(request.query.get("token", ""), token):
        # The address is visible and stored in histories, so from now on a cookie replaces the token.
        answer = web.Response(status=302, headers={"Location": "/"})
        answer.set_cookie(_COOKIE, session, httponly=True, samesite="Strict", path="/")
        return answer
    return web.Response(
        status=401,
        text="This page needs its token: open it with ?token=..., or send Authorization: Bearer ...",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _number(request: web.Request, name: str, default: str = "0") -> int:
    text = request.query.get(name, default)
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise web.HTTPBadRequest(reason=f"{name} must be a whole number")
    return int(text)


_ANSWERS: Final[dict[str, Callable[[RunData, web.Request], Any]]] = {
    "/api/state": lambda data, asked: data.state(),
    "/api/metrics": lambda data, asked: data.metrics(_number(asked, "after"), _number(asked, "epoch")),
    "/api/ranks": lambda data, asked: data.ranks(),
    "/api/timeline": lambda data, asked: data.timeline(_number(asked, "step", ""), _number(asked, "ranks")),
}
"""Functions that answer requests, by path; they return None if there is no content."""


async def _answer(request: web.Request) -> web.Response:
    def answer(data: RunData) -> str | None:
        content = _ANSWERS[request.path](data, request)
        return None if content is None else compact_json(content)

    text = await request.app[WATCHER].ask(answer)
    if text is None:
        return web.Response(status=204)  # no error: pages ask for steps whose spans have just been removed
    return web.Response(text=text, content_type="application/json")


async def _events(request: web.Request) -> web.StreamResponse:
    """Send server-sent events, each with the newest version numbers; pages do not wait for each other."""
    watcher = request.app[WATCHER]
    if watcher.pages >= MOST_PAGES:
        raise web.HTTPServiceUnavailable(reason="too many pages look at this run")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
    watcher.pages += 1
    try:
        await response.prepare(request)
        await response.write(b"retry: 1000\n\n")
        seen: dict[str, Any] = {}
        told = time.monotonic()
        while True:
            await watcher.ask()
            news = watcher.news
            if news != seen or time.monotonic() - told > QUIET_SECONDS:
                text = ": still here" if news == seen else f"data: {compact_json(news)}"
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(f"{text}\n\n".encode())
                seen, told = news, time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
    except (ConnectionError, TimeoutError):
        return response  # the page is gone
    finally:
        watcher.pages -= 1


def read_token(path: Path) -> str:
    """Read the token in a file. Raise `ValueError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"--token-file {path} cannot be read: {reason}") from None


def serve(
    run_directory: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    announce: Callable[[str], None] = print,
    extra_routes: Iterable[web.RouteDef] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; ``announce`` gets the address. Raise `ValueError` if serving is not
    possible."""
    host = "127.0.0.1" if host == "localhost" else host  # one address, so that a free port is one port
    app = make_app(run_directory, token=token, host=host, extra_routes=extra_routes)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{listening.getsockname()[1]}/")
    web.run_app(app, sock=listening, print=None, access_log=None, shutdown_timeout=0.5)
