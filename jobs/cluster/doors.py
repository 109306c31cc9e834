"""Who may talk to a Ray cluster: a cluster that listens beyond loopback and answers strangers is refused.

The cluster itself is asked, with a request that carries no token: what the environment here says about
authentication proves nothing about the other side. Whoever reaches an open Ray head runs code on its nodes.
"""

import ipaddress
import urllib.error
import urllib.request

from braid.actors.config import ConfigError
from braid.jobs.output import complain

_SECONDS = 10.0
_CLIENT = "ray://"
"""Begins addresses of Ray's client server, which has a protocol of its own."""
_ANSWERED = ("OK", "UNIMPLEMENTED")
"""gRPC's status where a stranger gets in: no token is wanted, and the question is understood (no TLS)."""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads no further than this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_cluster(address: str, allowed: bool) -> None:
    """Refuse a Ray head, ``HOST:PORT`` or ``ray://HOST:PORT``, beyond loopback that answers without a token.

    ``allowed`` (``cluster.allow_unauthenticated``) makes it a warning. Raises `ConfigError`.
    """
    host = address.removeprefix(_CLIENT).rpartition(":")[0]
    if not is_loopback(host) and _status(address) in _ANSWERED:
        _complain(f"the Ray cluster at {address}", allowed)


def check_job_server(url: str, host: str, allowed: bool) -> None:
    """The same for a job server, ``http://HOST:PORT``."""
    if not is_loopback(host) and _http_answers(f"{url.rstrip('/')}/api/jobs/"):
        _complain(f"the Ray job server at {url}", allowed)


def head_is_silent(address: str) -> bool:
    """Whether what listens at a Ray head's address takes a question and never answers."""
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
    """The name of gRPC's status of the answer to a question of Ray's own protocol that changes nothing."""
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
        return False  # nobody there; connecting in earnest says so better
