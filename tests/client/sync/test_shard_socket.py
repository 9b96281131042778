"""The sockets of a blocking client to several shards: what goes out at once is not waited for."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from aiops.client import Worker
from aiops.client.sync import connection
from aiops.client.sync.connection import BlockingConnection
from aiops.client.sync.shard_socket import ShardSocket
from aiops.model.shared_memory import available
from aiops.wire.connection import Buffer
from tests.support import ServerThread


class Saying:
    """A receiver that has something to say."""

    waiting = False

    def __init__(self, *said: bytes) -> None:
        self.said: list[Buffer] = [*said]

    def next_buffer(self) -> memoryview:
        return memoryview(bytearray(8))

    def received(self, nbytes: int) -> None:
        raise AssertionError("nothing comes")

    def outgoing(self) -> list[Buffer]:
        said, self.said = self.said, []
        return said


def test_what_goes_out_at_once_is_not_unsent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not ShardSocket(ours, Saying(b"said")).unsent
        assert theirs.recv(8) == b"said"
        assert ShardSocket(ours, Saying(bytes(1 << 24))).unsent, "more than a socket takes"


@pytest.mark.skipif(not available(), reason="there is no such memory here")
def test_what_was_lent_is_given_back_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for half a second for an answer to that, and there is none."""
    params = {name: np.zeros(1 << 16, np.float32) for name in "abcd"}
    given_back, waits, send_the_rest, move = 0, 0, BlockingConnection._send_the_rest, [False]
    move_all = connection.move_all

    def sending(self: BlockingConnection, until: float) -> None:
        nonlocal given_back
        given_back, move[0] = given_back + 1, True
        send_the_rest(self, until)
        move[0] = False

    def moving(*given: Any) -> bool:
        nonlocal waits
        waits += move[0]
        return move_all(*given)

    monkeypatch.setattr(BlockingConnection, "_send_the_rest", sending)
    monkeypatch.setattr(connection, "move_all", moving)
    with (
        ServerThread(policy="asgd", shards=2, shard_bytes=1) as server,
        Worker(server.url, params) as worker,
    ):
        for _ in range(4):
            worker.step(params)
    assert given_back >= 4
    assert waits == 0
