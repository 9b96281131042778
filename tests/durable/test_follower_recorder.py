"""What a follower keeps of its lead's first orders."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.durable.commit_gate import Acks, CommitGate
from aiops.durable.follower_recorder import BeginShard, FollowerRecorder
from aiops.durable.recorder import AppendRow
from aiops.engine.events import Joined, Options, Received
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.shards.follower import Follower
from aiops.shards.shard import LoadSink
from aiops.wire.messages import PROTOCOL
from aiops.wire.server_messages import FinishPush, HoldVersion, LeadHello, LoadShard, NoteHistory
from aiops.wire.traffic import Traffic

ROWS = Layout([("w", "float32", (32,))]).rows


@pytest.mark.parametrize("acks", Acks)
def test_nothing_is_kept_before_there_is_a_model(acks: Acks) -> None:
    """Such an order ended the follower, and a model that it refuses began a state of it."""
    algorithm = find("asgd").make({})
    follower = Follower(algorithm, Options(shards=2, backend="numpy", shard_bytes=1), kept=True)
    recorder = FollowerRecorder(follower, CommitGate(acks), 1, recording=acks > Acks.APPLIED)
    said = PROTOCOL, "lead", 1, "lead", "run", True, bytes(16), ""
    hello = LeadHello(0, *said, algorithm.name, algorithm.settings())
    recorder.handle(Joined(0.0, 7, hello, b"", Traffic()))
    model = LoadShard(0, {}, ROWS, (("", 7001, 64),), 1, (Part(64, 128, "raw", 64, 0),))
    wrong = LoadShard(0, {}, ROWS, (("", 7001, 64),), 5, (Part(64, 128, "raw", 64, 0),))
    orders = HoldVersion(1, 0, True, False), FinishPush(2, False), NoteHistory(3, (1,), (0,)), wrong
    for order in orders:
        sink = LoadSink([64]) if order is wrong else None
        effects = recorder.handle(Received(0.0, 7, order, sink))
        assert not any(isinstance(each, AppendRow | BeginShard) for each in effects)
        recorder.handle(Joined(0.0, 7, hello, b"", Traffic()))
    assert recorder.next == 1
    sink = LoadSink([64])
    sink.data[:] = np.zeros(64, np.uint8)
    effects = recorder.handle(Received(0.0, 7, model, sink))
    assert [each for each in effects if isinstance(each, BeginShard)] == [BeginShard("run", 1, 2)]
    rows = [each.number for each in effects if isinstance(each, AppendRow)]
    assert rows == ([1, 2] if acks > Acks.APPLIED else [])
    assert recorder.next == 1 + (rows or [1])[-1]
