"""The connection to another shard of a model: the errors that end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiops.client.handshake import Identity
from aiops.client.shard_channel import ShardChannel
from aiops.errors import Refused, Superseded, Unavailable
from aiops.wire.connection import Connection
from aiops.wire.messages import Error
from tests.driven import Driven
from tests.rows import each_row


@each_row(
    ("code", "kind"),
    [("superseded", Superseded), ("unavailable", Unavailable), ("protocol", Refused)],
)
def test_a_follower_that_was_superseded_is_no_reason_to_end(code: str, kind: type) -> None:
    """Another server has its run: the client connects again, as to a lead that says so."""
    owner: Any = SimpleNamespace(connection=lambda: Connection("client"))
    identity = Identity("c", "worker-1", "worker", None, lambda: bytes(16), True)
    channel = ShardChannel(owner, 1, "b", 7172, identity, 1, ("8c2f", 3))
    server = Driven("server", lambda message: None)
    hello = b"".join(channel.connected())
    server.next_buffer()[: len(hello)] = hello
    server.take(len(hello))
    answer = b"".join(server.send(Error(0, code, "another one has its run", {}, True)))
    channel.next_buffer()[: len(answer)] = answer
    with pytest.raises(kind, match="shard 1 at b:7172: another one has its run") as found:
        channel.received(len(answer))
    assert type(found.value) is kind
