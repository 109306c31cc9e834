"""Refuses a Ray cluster that listens beyond loopback and accepts requests without a token.

The cluster itself is asked, with a request that carries no token: authentication variables in this
environment prove nothing about the other side. Whoever reaches an open Ray head can run code on its nodes.
"""

import ipaddress
import urllib.error
import urllib.request

from braid.actors.config import ConfigError
from braid.jobs.output import complain

_SECONDS = 10.0
_CLIENT = "ray://"
"""Prefix of addresses of Ray's client server, which has a protocol of its own."""
_ANSWERED = ("OK", "UNIMPLEMENTED")
"""Status codes of gRPC that mean open access: no token is required, and the request is understood (no
TLS)."""


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_cluster(address: str, allowed: bool) -> None:
    """Refuse a Ray head, ``HOST:PORT`` or ``ray://HOST:PORT``, beyond loopback that answers without a token.

    Raise `ConfigError`; if ``allowed`` (``cluster.allow_unauthenticated``), only warn.
    """
    host = address.removeprefix(_CLIENT).rpartition(":")[0]
    if not is_loopback(host) and _status(address) in _ANSWERED:
        _complain(f"the Ray cluster at {address}", allowed)


def check_job_server(url: str, host: str, allowed: bool) -> None:
    """Refuse a job server, ``http://HOST:PORT``, beyond loopback that answers without a token, as
    `check_cluster` does."""
    if not is_loopback(host) and _http_answers(f"{url.rstrip('/')}/api/jobs/"):
        _complain(f"the Ray job server at {url}", allowed)


def head_is_silent(address: str) -> bool:
    """Return whether a server at a Ray head's address accepts a request and never answers."""
    return _status(address) == "DEADLINE_EXCEEDED"


def _complain(what: str, allowed: bool) -> None:
    if not allowed:
        raise ConfigError(
            f"{what} listens beyond loopback and takes orders without a token: whoever reaches it can run "
            f"code on its nodes. Make a token (ray get-auth-token --generate), give it to every node, set "
            f"RAY_AUTH_MODE=token there (before ray start) and here; or, on a network that nobody else can "
            f"reach, set cluster.allow_unauthenticated=true"
        )
    complain(
        f"warning: {what} takes orders without a token from whoever reaches it "
        f"(cluster.allow_unauthenticated=true)"
    )


def _status(address: str) -> str:
    """Return the gRPC status name of a read-only request in Ray's own protocol."""
    import grpc  # comes with ray[default]

    method = "NodeInfoGcsService/GetAllNodeInfo"
    if address.startswith(_CLIENT):
        method = "RayletDriver/ClusterInfo"
    with grpc.insecure_channel(
        address.removeprefix(_CLIENT), options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}", bytes, bytes)(b"", timeout=_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _http_answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code not in (401, 403)
    except OSError:
        return False  # nobody is there; the real connection gives a better message
