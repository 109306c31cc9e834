"""A rank's connections: those that were opened meanwhile are paced and shut, no others."""

import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from braid.actors.stage.rank.membership import _SO_MAX_PACING_RATE, Connections, store_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def pace_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE)


def test_own_connections_send_at_the_rate_and_no_others() -> None:
    before = connected()
    connections = Connections()
    own = connected()
    connections.made()
    after = connected()
    connections.pace(100.0)
    assert [pace_of(one) for one in own] == [12_500_000] * 2
    assert not {pace_of(one) for one in (*before, *after)} & {12_500_000}
    connections.shut()
    assert own[0].recv(1) == b"", "shut"
    before[0].sendall(b"x")
    assert before[1].recv(1) == b"x"
    for one in (*before, *own, *after):
        one.close()


def test_what_was_closed_meanwhile_is_left_alone() -> None:
    connections = Connections()
    one, other = connected()
    connections.made()
    one.close()
    connections.pace(50.0)
    connections.shut()
    assert other.recv(1) == b""
    other.close()


def test_a_store_listens_on_one_address_alone() -> None:
    store = store_on("127.0.0.1", timedelta(seconds=5))
    store.set("key", "value")
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if int(port, 16) == store.port and state == "0A":
                listening.append(address)
    assert listening == ["0100007F"]
