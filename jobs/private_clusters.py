"""Ray clusters that a command starts for itself: nobody else who is logged in on the machine gets in."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """These variables for as long as the block lasts; afterwards all are as they were before."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Clusters that are started in the block want a token, which lies in a file for its owner only."""
    file = folder / "token"
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32), encoding="utf-8")
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}):
            os.environ.pop("RAY_AUTH_TOKEN", None)  # of another cluster; it would come first
            _read_again()
            yield
    finally:
        _read_again()


def _read_again() -> None:
    """Ray reads mode and token once in a process; the mode first, or it looks for a token that is gone."""
    import ray._raylet

    raylet: Any = ray._raylet  # compiled, without types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
