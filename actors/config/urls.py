"""Opens file systems by URL: object stores, the web, memory. Their packages are loaded when they are
needed."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from braid.actors.config.model import ConfigError
from braid.scheduling.text.suggestions import nearest

EXTRA = "object-stores"
"""Name of this package's extra that supports S3, Google's and Azure's object stores."""
_IN_EXTRA = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl")


def is_url(place: str) -> bool:
    """Return whether a place is a URL instead of a path."""
    return "://" in place or "::" in place


def checked_address(address: str, schemes: Sequence[str], variables: Sequence[str] = ()) -> str:
    """Return the address of a tool; raise `ValueError` for another scheme, a missing host, or a password in
    it. ``variables``: from which the tool takes user and password."""
    scheme, _, rest = address.partition(":")
    parts = urlsplit(address)
    if scheme not in schemes or not rest:
        raise ValueError(f"must begin with {' or '.join(f'{one}:' for one in schemes)}")
    if scheme in ("http", "https") and not parts.hostname:
        raise ValueError("names no host; write it as http://HOST:PORT")
    if parts.password is not None:
        instead = f" and set {' and '.join(variables)}" if variables else ""
        raise ValueError(
            f"has a password, and a configuration is written down and shown; leave it out{instead}"
        )
    return address


def check_protocol(key: str, url: str) -> None:
    """Raise `ConfigError` if a URL's protocol is unknown; the protocol's package need not be installed
    here."""
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    if protocol not in (known := fsspec.available_protocols()):
        near = nearest(protocol, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{key}={url!r}: no file system is called {protocol!r}{hint}")


def file_system(key: str, url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raise `ConfigError`, which names the key
    and the remedy."""
    import fsspec

    check_protocol(key, url)
    try:
        files, place = fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = fsspec.utils.get_protocol(url)
        remedy = f"; pip install 'braid[{EXTRA}]'" if protocol in _IN_EXTRA else ""
        raise ConfigError(f"{key}={url!r}: {error}{remedy}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={url!r}: {error}") from None
    return files, str(place)
