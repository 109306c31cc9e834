"""Variables of ranks (``cluster.env``): secrets are inherited and never written down."""

import re
from collections.abc import Mapping
from typing import Any

from braid.actors.config.model import ConfigError

_WORDS = {"key", "keys", "token", "tokens", "pass", "pwd", "private", "passphrase"}
_PARTS = ("secret", "passw", "credential", "apikey", "accesskey", "privatekey")


_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable seems secret: by its name (``WANDB_API_KEY``), or as a URL with a
    password."""
    word = name.lower()
    return (
        bool(_WORDS & set(re.split(r"[^a-z0-9]+", word)))
        or any(part in word for part in _PARTS)
        or _PASSWORD_IN_URL.search(value) is not None
    )


def check_variables(given: Any) -> Any:
    """Return ``given``; raise `ValueError`, without the value, if it gives a value to a variable that looks
    secret."""
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if value is not None and looks_secret(str(name), str(value)):
            raise ValueError(
                f"{name} looks like a secret, and a configuration is written down and shown; write "
                f"{name}: null, and set the variable where the run is started"
            )
    return given


def inherited(wanted: Mapping[str, str | None], outside: Mapping[str, str]) -> dict[str, str]:
    """Return values from the environment ``outside`` for names without a value; raise `ConfigError` for an
    unset name.

    The result may be passed from process to process, but must never be written down.
    """
    names = [name for name, value in wanted.items() if value is None]
    if missing := next((name for name in names if name not in outside), None):
        raise ConfigError(
            f"cluster.env.{missing}=null: the variable comes from the environment of the run's command, "
            f"where it is not set; set it there, or leave it out"
        )
    return {name: outside[name] for name in names}
