"""Brings folder, data source and dashboards to a Grafana server, through its HTTP interface.

Whatever goes wrong becomes a `GrafanaError`: one line that names the key, the value and a remedy. The token
is in none of them, nor in any other output.
"""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from braid.dashboards.grafana import all_dashboards
from braid.dashboards.grafana.panels import Json

DATASOURCE_UID: Final = "braid-prometheus"
DATASOURCE_NAME: Final = "Braid Prometheus"
TOKEN_VARIABLE: Final = "GRAFANA_TOKEN"

_PERMISSIONS: Final = "a service account with the role Editor, or Admin to write the data source too"
_LONGEST: Final = 200
"""Characters of a server's words that are shown."""


class GrafanaError(ValueError):
    """What the user can mend: the message names key, value and remedy."""


@dataclass(frozen=True)
class Address:
    """A Grafana server's URL in parts; ``prefix`` is "" or ends with a slash."""

    protocol: str
    host: str
    port: int | None
    prefix: str


def parse_url(url: str, key: str = "--url") -> Address:
    """The parts of ``http[s]://host[:port][/prefix]``; `GrafanaError` for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise GrafanaError(f"{key}={url!r} is no URL; write it like http://127.0.0.1:3000") from None
    if parts.username or parts.password:  # not shown, for it is a secret
        raise GrafanaError(f"{key} holds a name or password; leave it out and give a token instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise GrafanaError(f"{key}={url!r} is no URL of a server; write it like http://127.0.0.1:3000")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    prefix = parts.path.strip("/")
    return Address(parts.scheme, host, port, f"{prefix}/" if prefix else "")


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """The token from a file that only its owner can read, or from ``GRAFANA_TOKEN``."""
    if file is None:
        token = environment.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise GrafanaError(
                f"there is no token; set {TOKEN_VARIABLE}, or write one to a file for --token-file"
            )
        where = TOKEN_VARIABLE
    else:
        where = f"--token-file={file}"
        try:
            if stat.S_IMODE(file.stat().st_mode) & 0o077:
                raise GrafanaError(f"{where} can be read by others; run: chmod 600 {file}")
            token = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise GrafanaError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise GrafanaError(f"{where} is not text; it must hold the token and nothing else") from None
        if not token:
            raise GrafanaError(f"{where} is empty; it must hold the token and nothing else")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise GrafanaError(f"{where} holds more than a token; it must be one word")
    return token


class Server:
    """A Grafana server, spoken to through grafana-api."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 10.0) -> None:
        try:
            from grafana_api.grafana_face import GrafanaFace
        except ImportError:
            raise GrafanaError(
                "grafana-api is not installed; run: pip install 'braid[grafana]', or use braid grafana export"
            ) from None
        address = parse_url(url)
        self._url, self._token, self._timeout = url, token, timeout_seconds
        self._face = GrafanaFace(
            auth=token,
            host=address.host,
            port=address.port,
            url_path_prefix=address.prefix,
            protocol=address.protocol,
            timeout=timeout_seconds,
        )

    def push(self, folder: str, prometheus_url: str | None, say: Callable[[str], None]) -> None:
        """Create or update the folder, the data source (if its URL is given) and both dashboards.

        Doing it again changes nothing. ``say`` hears a line for each thing. Raises `GrafanaError`.
        """
        uid, new = self._folder(folder)
        say(f"folder {folder!r}: {'created' if new else 'was there'}")
        if prometheus_url is not None:
            parse_url(prometheus_url, "--prometheus-url")
            say(f"data source {DATASOURCE_NAME!r}: {self._datasource(prometheus_url)}")
        for content in all_dashboards():
            say(f"dashboard {content['title']!r}: {self._dashboard(content, uid)}")

    def _folder(self, title: str) -> tuple[str, bool]:
        """Uid of the folder of that title, and whether it is new."""
        for found in self._asked("list folders", self._face.folder.get_all_folders, list):
            if isinstance(found, dict) and found.get("title") == title:
                return self._uid(found), False
        made = self._asked(f"create --folder={title!r}", lambda: self._face.folder.create_folder(title), dict)
        return self._uid(made), True

    def _uid(self, folder: Mapping[str, Any]) -> str:
        uid = folder.get("uid")
        if not isinstance(uid, str) or not uid:
            raise GrafanaError(f"--url={self._url}: a folder without uid; Braid needs Grafana 10 or newer")
        return uid

    def _datasource(self, prometheus_url: str) -> str:
        path = f"/datasources/uid/{DATASOURCE_UID}"  # numeric ids are off in Grafana 13
        wanted: Json = {
            "uid": DATASOURCE_UID,
            "name": DATASOURCE_NAME,
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus_url,
        }
        there = self._asked("read the data source", lambda: self._face.api.GET(path), dict, missing=True)
        if there is None:
            body = wanted | {"jsonData": {"httpMethod": "POST"}}
            self._asked(
                "create the data source", lambda: self._face.api.POST("/datasources", json=body), dict
            )
            return "created"
        if all(there.get(key) == value for key, value in wanted.items()):
            return "as it should be"
        # What somebody has set there besides (headers, intervals) stays.
        merged = there | wanted
        self._asked("update the data source", lambda: self._face.api.PUT(path, json=merged), dict)
        return "updated"

    def _dashboard(self, content: Json, folder: str) -> str:
        uid = content["uid"]
        there = self._asked(
            f"read dashboard {uid}", lambda: self._face.dashboard.get_dashboard(uid), dict, missing=True
        )
        if there is not None and _same(there, content, folder):
            return "as it should be"
        body = {
            "dashboard": content,
            "folderUid": folder,
            "overwrite": True,
            "message": "braid grafana push",
        }
        self._asked(f"write dashboard {uid}", lambda: self._face.dashboard.update_dashboard(body), dict)
        return "created" if there is None else "updated"

    def _asked(self, what: str, call: Callable[[], Any], kind: type, *, missing: bool = False) -> Any:
        """The answer to a call, of a kind; None for what is not there, where ``missing`` allows for it."""
        import requests
        from grafana_api.grafana_api import GrafanaException

        where = f"--url={self._url}: cannot {what}"
        try:
            answer = call()
        except GrafanaException as error:
            # A proxy that knows no such page says 404 as well, but not as Grafana does.
            if missing and error.status_code == 404 and isinstance(error.response, dict):
                return None
            raise GrafanaError(f"{where}: {self._explained(error.status_code, str(error))}") from None
        except requests.exceptions.Timeout:
            raise GrafanaError(
                f"{where}: no answer in {self._timeout:g} s; is the address right, and the server well?"
            ) from None
        except (requests.exceptions.JSONDecodeError, TypeError, KeyError):
            # The last two: grafana-api trips over errors that are not JSON objects.
            answer = None
        except requests.exceptions.SSLError as error:
            raise GrafanaError(f"{where}: {self._clean(error)}; is its certificate trusted here?") from None
        except requests.exceptions.RequestException as error:
            raise GrafanaError(f"{where}: {_cause(error)}; is Grafana running there?") from None
        if not isinstance(answer, kind):
            raise GrafanaError(
                f"{where}: the answer is not Grafana's JSON; is this Grafana, with its path (like /grafana)?"
            )
        return answer

    def _explained(self, status: int, message: str) -> str:
        match status:
            case 401:
                return f"401, the token is not accepted; make a new one for {_PERMISSIONS}"
            case 403:
                return f"403, the token may not do that; give it {_PERMISSIONS} ({self._clean(message)})"
            case 404:
                return "404, there is no such page; does the URL lack Grafana's path (like /grafana)?"
            case 409 | 412:
                return f"{status}, the name is taken; rename or remove what holds it ({self._clean(message)})"
            case _ if status >= 500:
                return f"{self._clean(message)}; look into Grafana's log"
            case _:
                return self._clean(message)

    def _clean(self, message: object) -> str:
        """A server's words on one line, without the token."""
        text = " ".join(str(message).replace(self._token, "***").split())
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _cause(error: Exception) -> str:
    """The system's own words for why there is no connection, from the depth of an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        reason = cause.args[0] if cause.args else None
        inner = getattr(reason, "reason", reason)
        cause = inner if isinstance(inner, BaseException) else cause.__cause__ or cause.__context__
    return type(error).__name__


def _same(there: Mapping[str, Any], content: Json, folder: str) -> bool:
    """Whether a dashboard is there as it should be; its number and version are the server's own."""
    meta, found = there.get("meta"), there.get("dashboard")
    if not isinstance(meta, dict) or not isinstance(found, dict):
        return False
    own = ("id", "version")
    return meta.get("folderUid") == folder and (
        {key: value for key, value in found.items() if key not in own}
        == {key: value for key, value in content.items() if key not in own}
    )
