"""Serves the live page of a run: small, read-only, for this machine unless a token guards it.

Who may enter: docs/design.md, Doors.

Files are read only while somebody looks, four times a second at most, in a thread of their own. A page is
told by server-sent events *that* something is new and asks for it: one that is slow or was away misses
nothing but states that are old by then, and holds up nobody.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from braid.dashboards.run_data import RunData

POLL_SECONDS: Final = 0.25
QUIET_SECONDS: Final = 5.0
"""After so long without news a page is sent a sign of life."""
WRITE_SECONDS: Final = 20.0
"""A page that takes nothing for so long is let go; it comes back by itself."""
MOST_PAGES: Final = 64
SHORTEST_TOKEN: Final = 16

_COOKIE: Final = "braid_session"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Watcher:
    """Reads the run while there are pages, and wakes them when something is new."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        self.news: dict[str, Any] = {}
        self._pages = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read what is new now."""
        async with self._reading:
            news = await asyncio.to_thread(self.data.refresh)
        if news != self.news:
            async with self._changed:
                self.news = news
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        """For as long as the context lasts, a page is looking."""
        self._pages += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            self._pages -= 1

    @property
    def pages(self) -> int:
        """How many pages are looking."""
        return self._pages

    async def _poll(self) -> None:
        while self._pages:
            await self.read()
            await asyncio.sleep(POLL_SECONDS)

    async def after(self, seen: dict[str, Any]) -> dict[str, Any]:
        """The newest state once it differs from ``seen``; what lay between is skipped."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.news != seen)
            return self.news

    async def close(self) -> None:
        """Stop reading."""
        self._pages = 0
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


WATCHER: Final = web.AppKey("watcher", Watcher)


def make_app(
    run_directory: Path,
    *,
    token: str | None = None,
    host: str = "127.0.0.1",
    extra_routes: Iterable[web.RouteDef] = (),
) -> web.Application:
    """The application; ``host`` is the address that it will listen on. `ValueError` if there is no run."""
    data = RunData(run_directory)
    data.check()
    _check_guard(host, token)
    app = web.Application(middlewares=[_guard(host, token)])
    pages = {f"/{name}": content for name, content in _page_files().items()}

    async def page(request: web.Request) -> web.Response:
        path = "/index.html" if request.path == "/" else request.path
        return web.Response(body=pages[path], headers={"Content-Type": _TYPES[Path(path).suffix]})

    get = web.get
    app.add_routes([get(path, page, allow_head=False) for path in ("/", *pages)])
    app.add_routes(
        [
            get("/api/state", _state, allow_head=False),
            get("/api/metrics", _metrics, allow_head=False),
            get("/api/ranks", _ranks, allow_head=False),
            get("/api/timeline", _timeline, allow_head=False),
            get("/api/events", _events, allow_head=False),
            *extra_routes,
        ]
    )

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        app[WATCHER] = Watcher(data)
        yield
        await app[WATCHER].close()

    app.cleanup_ctx.append(lifetime)
    return app


def _page_files() -> dict[str, bytes]:
    """The page's files by name: read once, so that no request ever names a path."""
    folder = files("braid.dashboards").joinpath("page")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if Path(entry.name).suffix in _TYPES}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_guard(host: str, token: str | None) -> None:
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ValueError(f"the token has {len(token)} characters; give it at least {SHORTEST_TOKEN}")
    if token is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} lets other machines read the run: guard it with --token-file, "
            f"or leave it at 127.0.0.1 and forward the port (ssh -L)"
        )


def _guard(host: str, token: str | None) -> Any:
    """Refuses what is not a GET of this page by somebody who may see it, and sets the headers."""
    session = secrets.token_urlsafe(32)

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            refused = _refused(request, host) or _entered(request, token, session)
            response = await handler(request) if refused is None else refused
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.reason, headers=_allow(error))
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    return guard


def _allow(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": "GET"} if error.status == 405 else {}


def _refused(request: web.Request, host: str) -> web.Response | None:
    if request.method != "GET":
        return web.Response(status=405, text="Only GET is answered.", headers={"Allow": "GET"})
    name = _host_name(request.headers.get("Host", ""))
    if not _is_ours(name, host):
        return web.Response(status=403, text="This name is not one of the page's host.")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"{request.scheme}://{request.headers['Host']}":
        return web.Response(status=403, text="Requests of other sites are not answered.")
    return None


def _host_name(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_ours(name: str, host: str) -> bool:
    """Names of loopback, and the address that is listened on: no name that somebody else's DNS may give."""
    if is_loopback(name) or name == host.lower():
        return True
    if host not in ("0.0.0.0", "::"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == socket.gethostname().lower()
    return True


def _entered(request: web.Request, token: str | None, session: str) -> web.Response | None:
    """None for who may come in; else the answer: the way in by ``?token=``, or a refusal."""
    if token is None:
        return None
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and _same(given.strip(), token):
        return None
    if _same(request.cookies.get(_COOKIE, ""), session):
        return None
    if _same(request.query.get("token", ""), token):
        # The address is shown and remembered: from now on a cookie stands for the token.
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


def _number(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 12:
        raise web.HTTPBadRequest(reason=f"{name} must be a whole number")
    return int(text)


def _json(content: Any) -> web.Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return web.Response(text=text, content_type="application/json")


async def _run(request: web.Request) -> RunData:
    """The run, read now unless it is being read all the time."""
    watcher = request.app[WATCHER]
    if not watcher.pages or not watcher.news:
        await watcher.read()
    return watcher.data


async def _state(request: web.Request) -> web.Response:
    return _json(await asyncio.to_thread((await _run(request)).state))


async def _metrics(request: web.Request) -> web.Response:
    after, epoch = _number(request, "after", 0), _number(request, "epoch", 0)
    return _json(await asyncio.to_thread((await _run(request)).metrics, after, epoch))


async def _ranks(request: web.Request) -> web.Response:
    step = _number(request, "step", 0) or None
    return _json(await asyncio.to_thread((await _run(request)).ranks, step))


async def _timeline(request: web.Request) -> web.Response:
    step, first = _number(request, "step"), _number(request, "ranks", 0)
    body = await asyncio.to_thread((await _run(request)).timeline, step, first)
    if body is None:
        return web.Response(status=204)  # no error: pages ask for steps whose spans have just been removed
    return web.Response(text=body, content_type="application/json")


async def _events(request: web.Request) -> web.StreamResponse:
    """Server-sent events, each the newest versions of everything; a page waits for nobody but itself."""
    watcher = request.app[WATCHER]
    if watcher.pages >= MOST_PAGES:
        raise web.HTTPServiceUnavailable(reason="too many pages look at this run")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
    seen: dict[str, Any] = {}
    async with watcher.page():
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):
            await _send(response, "retry: 1000\n\n")
            while True:
                try:
                    async with asyncio.timeout(QUIET_SECONDS):
                        seen = await watcher.after(seen)
                except TimeoutError:
                    await _send(response, ": still here\n\n")
                else:
                    await _send(response, f"data: {json.dumps(seen, allow_nan=False)}\n\n")
    return response


async def _send(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(text.encode())


def read_token(path: Path) -> str:
    """The token in a file. `ValueError` if there is none, or a short one."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"--token-file {path} cannot be read: {reason}") from None
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(
            f"--token-file {path} holds {len(token)} characters; a token has at least {SHORTEST_TOKEN}"
        )
    return token


def serve(
    run_directory: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    announce: Callable[[str], None] = print,
    extra_routes: Iterable[web.RouteDef] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; ``announce`` is told the address. `ValueError` for what cannot be."""
    host = "127.0.0.1" if host == "localhost" else host  # one address, so that a free port is one port
    app = make_app(run_directory, token=token, host=host, extra_routes=extra_routes)
    asyncio.run(_serve(app, host, port, announce))


async def _serve(app: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
        address = runner.addresses[0]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{address[1]}/")
        await stop.wait()
    finally:
        await runner.cleanup()
