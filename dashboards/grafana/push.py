"""Sends folder, data source and dashboards to a Grafana server, through its HTTP interface.

Every failure becomes a `ValueError`: one line that names the key, the value and a remedy. No message or other
output contains the token.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from braid.dashboards.grafana import Json, all_dashboards, datasource, parse_url

_ROLE: Final = "a service account with the role Editor, or Admin to write the data source too"
_REMEDIES: Final = {
    401: f"the token is not accepted; make a new one for {_ROLE}",
    403: f"the token may not do that; give it {_ROLE}",
    404: "there is no such page; does the URL lack Grafana's path (like /grafana)?",
}
_NO_GRAFANA: Final = "the answer is not Grafana's JSON; is this Grafana, with its path (like /grafana)?"


def read_token(file: Path | None) -> str:
    """Read the token from a file that only its owner can read, or from ``GRAFANA_TOKEN``."""
    where = "GRAFANA_TOKEN" if file is None else f"--token-file={file}"
    try:
        if file is not None and stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ValueError(f"{where} can be read by others; run: chmod 600 {file}")
        text = os.environ.get(where, "") if file is None else file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from None
    token = text.strip()
    if not token:
        raise ValueError(f"{where} is empty; set GRAFANA_TOKEN, or name a file with --token-file")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where} holds more than a token; it must be one word")
    return token


class Server:
    def __init__(self, url: str, token: str, *, timeout_seconds: float = 10.0) -> None:
        try:
            from grafana_api.grafana_api import GrafanaAPI
        except ImportError:
            raise ValueError(
                "grafana-api is not installed; run: pip install 'braid[grafana]', or use braid grafana export"
            ) from None
        parts = parse_url(url)
        prefix = f"{parts.path.strip('/')}/".lstrip("/")
        self._url, self._token = url, token
        self._api = GrafanaAPI(token, parts.netloc, None, prefix, parts.scheme, timeout=timeout_seconds)

    def push(self, folder: str, prometheus_url: str | None, say: Callable[[str], None]) -> None:
        """Create or update the folder, the data source (if its URL is given) and both dashboards.

        Repeating this changes nothing. ``say`` gets a line for each object. Raise `ValueError` if a request
        fails.
        """
        source = None if prometheus_url is None else datasource(prometheus_url)
        folders = self._ask("list folders", "GET", "/folders", kind=list) or ()
        there = next((known for known in folders if known.get("title") == folder), None)
        made = there or self._ask(f"create --folder={folder!r}", "POST", "/folders", {"title": folder})
        say(f"folder {folder!r}: {'was there' if there else 'created'}")
        if source is not None:
            say(f"data source {source['name']!r}: {self._datasource(source)}")
        for content in all_dashboards():
            say(f"dashboard {content['title']!r}: {self._dashboard(content, str(made.get('uid')))}")

    def _datasource(self, source: Json) -> str:
        path = f"/datasources/uid/{source['uid']}"  # numeric ids are off in Grafana 13
        there = self._ask("read the data source", "GET", path)
        if there is None:
            self._ask("create the data source", "POST", "/datasources", source)
            return "created"
        # Other settings that somebody has added (headers, intervals) stay.
        wanted = there | {key: value for key, value in source.items() if key != "jsonData"}
        if there == wanted:
            return "as it should be"
        self._ask("update the data source", "PUT", path, wanted)
        return "updated"

    def _dashboard(self, content: Json, folder: str) -> str:
        uid = content["uid"]
        there = self._ask(f"read dashboard {uid}", "GET", f"/dashboards/uid/{uid}")
        if there is not None:
            of_server = {"id": None, "version": None}
            known, parent = there.get("dashboard") or {}, (there.get("meta") or {}).get("folderUid")
            if parent == folder and {**known, **of_server} == {**content, **of_server}:
                return "as it should be"
        body = {"dashboard": content, "folderUid": folder, "overwrite": True, "message": "braid grafana push"}
        self._ask(f"write dashboard {uid}", "POST", "/dashboards/db", body)
        return "created" if there is None else "updated"

    def _ask(self, what: str, method: str, path: str, body: Json | None = None, kind: type = dict) -> Any:
        """Send a request and return the answer, which must be of type ``kind``; None if the object does not
        exist."""
        import requests
        from grafana_api.grafana_api import GrafanaException

        try:
            answer = getattr(self._api, method)(path, json=body)
            if isinstance(answer, kind):
                return answer
            reason = _NO_GRAFANA
        except GrafanaException as error:
            # A proxy without such a page answers 404 as well, but in another form than Grafana.
            if method == "GET" and error.status_code == 404 and isinstance(error.response, dict):
                return None
            remedy = _REMEDIES.get(error.status_code, "look into Grafana's log")
            reason = f"{error.status_code}, {remedy} ({self._clean(error)})"
        except (requests.exceptions.JSONDecodeError, TypeError, KeyError):
            reason = _NO_GRAFANA  # grafana-api fails on errors that are not JSON objects
        except requests.exceptions.RequestException as error:
            name = type(error).__name__
            reason = f"no answer ({name}); is Grafana running there, and its certificate trusted here?"
        raise ValueError(f"--url={self._url}: cannot {what}: {reason}")

    def _clean(self, message: object) -> str:
        """Return the beginning of a server's message, on one line, without the token."""
        return " ".join(str(message).replace(self._token, "***").split())[:200]
