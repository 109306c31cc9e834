"""A headless Chromium, driven over its debugging protocol: enough to look at a page as a person would."""

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is no browser."""
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
OPTIONS += ("--disable-background-networking", "--remote-debugging-port=0")


@dataclass
class Tab:
    socket: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list)
    """What the console and the page complained of."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page asked for."""
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something; `RuntimeError` if it refuses."""
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(waiting, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    async def listen(self) -> None:
        """Sort what the browser says, until it is gone."""
        async for message in self.socket:
            content = json.loads(message.data)
            if (waiting := self._answers.pop(content.get("id"), None)) is not None:
                waiting.set_result(content)
            else:
                self._note(content.get("method"), content.get("params", {}))

    def _note(self, method: str | None, facts: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.errors.append(str([one.get("value") for one in facts["args"]]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])

    async def open(self, address: str) -> None:
        await self.send("Page.navigate", url=address)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited; `RuntimeError` if it throws."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """The value of an expression once it is true; `TimeoutError` with what the page complained of."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            with contextlib.suppress(RuntimeError):  # the page is loading
                if value := await self.evaluate(expression):
                    return value
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{expression} did not come true; errors: {self.errors}")

    async def move(self, x: float, y: float) -> None:
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextlib.asynccontextmanager
async def browser(width: int = 1366, height: int = 768) -> AsyncIterator[Tab]:
    """A browser of its own, with an empty profile; gone at the end of the context."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="braid-browser-", ignore_cleanup_errors=True) as folder:
        own = (f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank")
        nothing = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *OPTIONS, *own, stdout=nothing, stderr=nothing
        )
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(await _address(client, Path(folder)), max_msg_size=0) as socket,
            ):
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.send(f"{domain}.enable")
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await tab.send("Emulation.setDeviceMetricsOverride", **size)
                yield tab
                listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _address(client: aiohttp.ClientSession, folder: Path) -> str:
    """Where the first tab listens, once the browser has written down its port."""
    for _ in range(600):
        with contextlib.suppress(OSError, ValueError, IndexError):
            port = int((folder / "DevToolsActivePort").read_text().split()[0])
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
                return str(pages[0]["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
    raise TimeoutError("the browser did not start")
