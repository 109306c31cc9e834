"""A stand-in for the Hugging Face Hub on loopback: what `huggingface_hub` and `datasets` ask for."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.servers import Asked, served

GATED = "org/gated"
"""A repository that exists, but that this user may not read."""


@dataclass
class Hub:
    """What the Hub holds; all may change meanwhile."""

    repositories: dict[str, dict[str, bytes]]
    """Content of files, by repository and file."""
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    url: str = ""
    read: list[str] = field(default_factory=list)
    """Commit or branch, and file, of everything that was read: ``main/tokenizer.json``."""


def repository(folder: Path) -> dict[str, bytes]:
    """The files in a folder as a repository."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _answer(hub: Hub, asked: Asked) -> tuple[int, str | bytes, dict[str, str]]:
    path = unquote(urlsplit(asked.path).path).removeprefix("/api").removeprefix("/models")
    org, name, what, *rest = [*path.removeprefix("/datasets").strip("/").split("/"), "", "", ""]
    rest = [part for part in rest if part]
    files, repo = hub.repositories.get(f"{org}/{name}"), f"{org}/{name}"
    if repo == GATED:
        return 403, "{}", {"X-Error-Code": "GatedRepo"}
    if files is None:
        return 404, "{}", {"X-Error-Code": "RepoNotFound"}
    if what == "resolve":
        if (content := files.get("/".join(rest[1:]))) is None:
            return 404, "", {"X-Error-Code": "EntryNotFound"}
        if asked.method == "GET":
            hub.read.append("/".join(rest))
        return 200, content, {"ETag": f'"{_tag(content)}"', "X-Repo-Commit": hub.commit}
    if what == "tree":
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": _tag(content)}
            for file, content in files.items()
            if file.startswith("/".join(rest[1:]))
        ]
        return 200, json.dumps(entries), {}
    facts = {"id": repo, "sha": hub.commit, "siblings": [{"rfilename": file} for file in files]}
    return 200, json.dumps(facts), {}


@contextmanager
def serving(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A Hub with these repositories, at `Hub.url`."""
    hub = Hub(repositories)
    with served(partial(_answer, hub)) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub
