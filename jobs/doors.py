"""Who may talk to a Ray cluster: one that listens beyond loopback and answers strangers is refused.

Asked is the cluster itself, with a request that carries no token: what the environment here says about
authentication proves nothing about the other side. Whoever reaches an open Ray head runs code on its nodes.
"""

import ipaddress
import sys
import urllib.error
import urllib.request

from braid.actors.config import ConfigError

_SECONDS = 10.0
_QUESTIONS = {
    "ray://": "/ray.rpc.RayletDriver/ClusterInfo",
    "": "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
}
"""By the address' beginning: questions of Ray's own protocol that change nothing and may be empty."""


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
    scheme = "ray://" if address.startswith("ray://") else ""
    place = address.removeprefix(scheme)
    if not is_loopback(place.rpartition(":")[0]) and _head_answers(place, _QUESTIONS[scheme]):
        _complain(f"the Ray cluster at {address}", allowed)


def check_job_server(url: str, host: str, allowed: bool) -> None:
    """The same for a job server, ``http://HOST:PORT``."""
    if not is_loopback(host) and _http_answers(f"{url.rstrip('/')}/api/jobs/"):
        _complain(f"the Ray job server at {url}", allowed)


def _complain(what: str, allowed: bool) -> None:
    if not allowed:
        raise ConfigError(
            f"{what} listens beyond loopback and takes orders without a token: whoever reaches it can run "
            f"code on its nodes. Make a token (ray get-auth-token --generate), give it to every node, set "
            f"RAY_AUTH_MODE=token there (before ray start) and here; or, on a network that nobody else can "
            f"reach, set cluster.allow_unauthenticated=true"
        )
    print(
        f"braid: warning: {what} takes orders without a token from whoever reaches it "
        f"(cluster.allow_unauthenticated=true)",
        file=sys.stderr,
    )


def head_is_silent(address: str) -> bool:
    """Whether what listens at a Ray head's address takes a question and never answers."""
    scheme = "ray://" if address.startswith("ray://") else ""
    return _asked(address.removeprefix(scheme), _QUESTIONS[scheme]) == "DEADLINE_EXCEEDED"


def _head_answers(address: str, question: str) -> bool:
    # Refused for want of a token, or not understood at all (TLS): no stranger gets in this way.
    return _asked(address, question) in ("OK", "UNIMPLEMENTED")


def _asked(address: str, question: str) -> str:
    """The name of gRPC's status of an answer."""
    import grpc  # comes with ray[default]

    def as_it_is(message: bytes) -> bytes:
        return message

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(question, request_serializer=as_it_is, response_deserializer=as_it_is)
        try:
            ask(b"", timeout=_SECONDS)
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
