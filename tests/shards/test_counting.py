"""The count of traffic, for statistics."""

from __future__ import annotations

from aiops.common.failure_waits import FailureWaits
from aiops.engine.events import Order, Received, Reply, Reported
from aiops.engine.receive import PushSink
from aiops.model.layout import split
from aiops.model.placement import RAW, Placement
from aiops.shards.lead import Lead
from aiops.wire.messages import Push, Report, Stats
from aiops.wire.server_messages import CountTraffic, ExpectPush, PushArrived, TrafficCounted
from tests.shards.test_filtered import servers


def test_a_count_is_late_since_it_was_ordered() -> None:
    """A request may have waited behind a push of its client for longer than a follower has."""
    lead = servers(2, "off").lead
    assert isinstance(lead, Lead)
    layout = lead.engine.defined_store.layout
    pieces = Placement.even(layout, 2).divide(tuple(split(0, layout.nbytes, RAW, 0)))
    parts = Placement.even(layout, 2).announced([theirs for theirs, _views in pieces])
    push = Push(1, 1, False, -1, parts)
    sink, [announced] = lead.sink_for(1, push)
    assert isinstance(sink, PushSink)
    assert isinstance(announced.message, ExpectPush)
    assert lead.handle(Received(1.0, 1, push, sink)) == []
    assert lead.handle(Received(2.0, 1, Stats(2))) == []
    arrived = PushArrived(announced.message.id, {})
    effects = lead.handle(Reported(40.0, 1, arrived))
    counts = [each for each in effects if isinstance(each, Order)]
    assert any(isinstance(each.message, CountTraffic) for each in counts)
    waits = FailureWaits()
    assert lead.late(39.0 + waits.count, waits) == {}
    [(shard, why)] = lead.late(40.0 + waits.count, waits).items()
    assert (shard, why) == (1, "it has not counted its traffic for statistics in 20 s")


def test_a_count_that_none_waits_for() -> None:
    """Metrics begin one, and a request for statistics that comes meanwhile waits for the same."""
    world = servers(2, "off")
    lead = world.lead
    assert isinstance(lead, Lead)
    [first] = lead.count_traffic(1.0)
    assert isinstance(first, Order)
    assert isinstance(first.message, CountTraffic)
    assert lead.count_traffic(1.5) == [], "one is under way"
    assert lead.handle(Received(2.0, 1, Stats(2))) == []
    counted = TrafficCounted(first.message.id, {}, {}, {})
    replies = lead.handle(Reported(3.0, 1, counted))
    assert [type(each.message) for each in replies if isinstance(each, Reply)] == [Report]
    assert len(lead.count_traffic(4.0)) == 1
