"""The server's doors: who may read what, and that nobody holds up the others."""

import asyncio
import json
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar, web
from aiohttp.test_utils import TestClient, TestServer

from braid.dashboards.server import WATCHER, make_app
from tests.dashboards.made_up_runs import MadeUpRun, made_up
from tests.end_to_end.command import start
from tests.in_process import Capture, called, refused

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    made_up(path, 2, 3)
    (path / "secret.txt").write_text("not for readers")
    return path


def asked(run: Path, question: Callable[[TestClient[Any, Any]], Awaitable[Any]], **options: Any) -> Any:

    async def ask() -> Any:
        made = TestServer(make_app(run, **options))
        async with TestClient(made, cookie_jar=CookieJar(unsafe=True)) as client:
            return await question(client)

    return asyncio.run(ask())


def answer(run: Path, path: str, method: str = "GET", headers: Any = None, **options: Any) -> tuple[int, Any]:
    """Status and headers of the answer to one request."""

    async def ask(client: TestClient[Any, Any]) -> tuple[int, Any]:
        async with client.request(method, path, headers=headers, allow_redirects=False) as found:
            return found.status, found.headers

    status, told = asked(run, ask, **options)
    return int(status), told


PAGES = ("/", "/main.js", "/style.css", "/api/state", "/api/metrics", "/api/ranks", "/api/timeline?step=1")


def test_answers_and_their_headers(run: Path) -> None:
    for path in PAGES:
        code, headers = answer(run, path)
        assert code == 200, path
        assert "script-src 'self';" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


NO_PAGES = (
    *("/secret.txt", "/../secret.txt", "/..\\secret.txt", "/index.html/../secret.txt", "/config.yaml"),
    *("/trace/rank-00000.0000.arrows", "/page/../run_data.py", "/run_data.py", "/main.js/"),
    *("/main.js%00.html", "/main.js\x00", "//etc/passwd", "/..%2f..%2fetc/passwd", "/....//....//etc/passwd"),
    "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
)


def test_only_the_pages_own_files(run: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> None:
        for path in NO_PAGES:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            found = await asyncio.wait_for(reader.read(100_000), 10)
            writer.close()
            assert found.split()[1] in (b"404", b"400"), path
            assert b"not for readers" not in found
            assert b"root:" not in found

    asked(run, ask)


async def more(request: web.Request) -> web.Response:
    return web.Response(text="more")


BEARER = {"Authorization": f"Bearer {TOKEN}"}
GUARDED = {"token": TOKEN}
WIDE = {"host": "0.0.0.0", **GUARDED}
FURTHER = {"extra_routes": [web.get("/metrics", more)]}
STRANGERS = ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "", "[")
ODD_STEPS = ("", "?step=-1", "?step=9999999999999", "?step=1&ranks=a")
ORIGINS = ("http://localhost", "https://localhost:7", "http://evil.example", "null")
HERE = {"Host": "localhost:7"}


@pytest.mark.parametrize(
    ("code", "path", "headers", "options"),
    [
        *((400, f"/api/timeline{query}", {}, {}) for query in ODD_STEPS),
        (204, "/api/timeline?step=99", {}, {}),
        *((200, "/api/state", {"Host": host}, {}) for host in ("localhost:80", "127.0.0.1", "[::1]:8000")),
        *((403, "/api/state", {"Host": host}, {}) for host in STRANGERS),
        (200, "/api/state", {**HERE, "Origin": "http://localhost:7"}, {}),
        *((403, "/api/state", {**HERE, "Origin": origin}, {}) for origin in ORIGINS),
        *((401, path, {}, GUARDED) for path in (*PAGES, "/api/events", "/nothing", "/?token=wrong")),
        *((401, path, {"Authorization": f"Bearer {TOKEN}x"}, GUARDED) for path in (*PAGES, "/nothing")),
        (401, "/", {"Cookie": "braid_session=é"}, GUARDED),
        (200, "/api/state", BEARER, GUARDED),
        (200, "/api/state", {**BEARER, "Host": "10.1.2.3:80"}, WIDE),
        (403, "/api/state", {**BEARER, "Host": "evil.example"}, WIDE),
        (200, "/metrics", {}, FURTHER),
        (403, "/metrics", {"Host": "evil.example"}, FURTHER),
        (401, "/metrics", {}, {**FURTHER, **GUARDED}),
    ],
)
def test_who_may_read_what(run: Path, code: int, path: str, headers: Any, options: Any) -> None:
    assert answer(run, path, headers=headers, **options)[0] == code


def test_nothing_but_get(run: Path) -> None:
    for method in ("POST", "HEAD", "OPTIONS", "TRACE"):
        assert [answer(run, path, method)[0] for path in ("/", "/api/state", "/nothing")] == [405] * 3


def test_a_token_in_the_address_becomes_a_cookie(run: Path) -> None:
    async def ask(client: TestClient[Any, Any]) -> tuple[Any, int, int]:
        async with client.get(f"/?token={TOKEN}", allow_redirects=False) as answer:
            assert answer.status == 302
            assert answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
        async with client.get("/api/state") as answer:
            inside = answer.status
        async with ClientSession() as stranger, stranger.get(client.make_url("/api/state")) as answer:
            return cookie, inside, answer.status

    cookie, inside, outside = asked(run, ask, token=TOKEN)
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert (inside, outside) == (200, 401)


async def next_news(stream: Any) -> dict[str, Any]:
    async for line in stream.content:
        if line.startswith(b"data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream ended")


def test_events_tell_of_new_steps_and_rest_without_readers(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path / "run", 2)

    async def ask(client: TestClient[Any, Any]) -> None:
        watcher = client.app[WATCHER]
        async with client.get("/api/events") as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            assert (await next_news(stream))["metrics"][1] == 0
            made.step()
            assert (await asyncio.wait_for(next_news(stream), 10))["metrics"][1] == 1
            assert watcher.pages == 1
        async with asyncio.timeout(10):
            while watcher.pages:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        seen = watcher.news
        made.step()
        await asyncio.sleep(0.6)
        assert watcher.news is seen, "nobody looks: nothing is read"
        async with client.get("/api/events") as stream:
            while (await asyncio.wait_for(next_news(stream), 10))["metrics"][1] < 2:
                pass

    asked(made.path, ask)


@pytest.mark.slow
def test_a_reader_that_takes_nothing_holds_up_nobody(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path / "run", 2)

    async def ask(client: TestClient[Any, Any]) -> None:
        sleepers = []
        for path in ("/api/events", "/api/metrics", "/api/state"):
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 50)
            sleepers.append(writer)
        async with client.get("/api/events") as stream:
            for step in range(1, 4):
                made.step()
                while (await asyncio.wait_for(next_news(stream), 10))["metrics"][1] < step:
                    pass
        for writer in sleepers:
            writer.close()

    asked(made.path, ask)


def test_command(run: Path, tmp_path: Path) -> None:
    """One line with the address, then silence; both signals end it, cleanly."""
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(tmp_path, "dashboard", str(run))
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split(" on ")[1].split()[0]

        async def ask(address: str = address) -> int:
            async with ClientSession() as client, client.get(address) as answer:
                return answer.status

        assert asyncio.run(ask()) == 200
        process.send_signal(number)
        output, errors = process.communicate(timeout=20)
        assert (process.returncode, output, errors) == (0, "", "")


def test_command_with_wrong_input(run: Path, tmp_path: Path, capsys: Capture) -> None:
    token = tmp_path / "token"
    token.write_text("short\n")
    token.chmod(stat.S_IRUSR)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            (("nowhere",), "is no directory"),
            ((tmp_path,), "holds no run"),
            ((run, "--host", "0.0.0.0"), "--token-file"),
            ((run, "--token-file", token), "at least 16"),
            ((run, "--token-file", "nothing"), "cannot be read"),
            ((run, "--port", "99999"), "port"),
            ((run, "--port", taken.getsockname()[1]), "cannot listen on"),
        ):
            outcome = called(capsys, "dashboard", *arguments)
            refused(outcome, message)
            assert (outcome.output, outcome.errors.count("\n")) == ("", 1)
