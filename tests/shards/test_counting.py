"""The count of traffic, for statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiops.common.failure_waits import FailureWaits
from aiops.common.gathering import gathered
from aiops.engine.events import Effect, Lost, Order, Received, Reply, Reported
from aiops.engine.receive import PushSink
from aiops.model.layout import split
from aiops.model.placement import RAW, Placement
from aiops.shards.lead import Lead
from aiops.wire.messages import Push, Report, Stats
from aiops.wire.server_messages import CountTraffic, ExpectPush, PushArrived, TrafficCounted
from aiops.wire.traffic import Traffic
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


def pushed(nbytes: int) -> tuple[Any, ...]:
    """Return a client's counts, after a push of so many bytes."""
    traffic = Traffic()
    traffic.received("push", 0, nbytes)
    return traffic.counts()


def bytes_pushed(lead: Lead) -> int:
    """Return what metrics would say that workers have pushed."""
    found: int = lead.of_all(gathered(lead.engine.gather(100)))["ledger"]["pushed"]["bytes"]
    return found


def lead_of(shards: int) -> tuple[Lead, str]:
    """A lead, and the client at its first connection."""
    lead = servers(shards, "off").lead
    assert isinstance(lead, Lead)
    member = lead.engine.membership.at(1)
    assert member is not None
    return lead, member.client


def number_of(effects: Sequence[Effect]) -> int:
    """Return the number of the count that they begin."""
    orders = [each for each in effects if isinstance(each, Order)]
    [number] = {each.message.id for each in orders if isinstance(each.message, CountTraffic)}
    return number


def test_a_request_waits_for_a_count_that_begins_after_it() -> None:
    """That of a scrape may lack what its client has pushed since."""
    lead, client = lead_of(3)
    first = number_of(lead.count_traffic())
    assert lead.count_traffic() == [], "one is under way"
    counts = {client: pushed(1000)}
    assert lead.handle(Reported(1.0, 1, TrafficCounted(first, counts, {}, {}))) == []
    assert lead.handle(Received(2.0, 1, Stats(2))) == []
    second = number_of(lead.handle(Reported(2.5, 2, TrafficCounted(first, {}, {}, {}))))
    assert second != first
    before = bytes_pushed(lead)
    counts = {client: pushed(1500)}
    assert lead.handle(Reported(3.0, 1, TrafficCounted(second, counts, {}, {}))) == []
    replies = lead.handle(Reported(3.5, 2, TrafficCounted(second, {}, {}, {})))
    [report] = [each.message for each in replies if isinstance(each, Reply)]
    assert isinstance(report, Report)
    assert report.report["ledger"]["pushed"]["bytes"] == before + 500
    assert len(lead.count_traffic()) == 2


def test_a_count_that_a_lost_follower_ends_changes_nothing() -> None:
    lead, client = lead_of(3)
    first, counts = number_of(lead.count_traffic()), {client: pushed(1000)}
    for shard in (1, 2):
        lead.handle(Reported(1.0, shard, TrafficCounted(first, counts, {}, {})))
    before = bytes_pushed(lead)
    second = number_of(lead.count_traffic())
    lead.handle(Reported(2.0, 1, TrafficCounted(second, counts, {}, {})))
    assert lead.handle(Received(2.5, 1, Stats(2))) == []
    effects = lead.handle(Lost(3.0, 2, "cut"))
    assert [type(each.message) for each in effects if isinstance(each, Reply)] == [Report]
    assert bytes_pushed(lead) == before


def test_no_follower_is_late_for_a_scrape() -> None:
    """But where a request waits for it, too."""
    lead, _client = lead_of(2)
    lead.handle(Received(1.0, 1, Stats(2)))
    lead.handle(Reported(1.0, 1, TrafficCounted(1, {}, {}, {})))
    assert lead.count_traffic()
    waits = FailureWaits()
    assert lead.late(1000.0, waits) == {}
    lead.handle(Received(1000.0, 1, Stats(3)))
    assert lead.late(999.0 + waits.count, waits) == {}
    assert [*lead.late(1000.0 + waits.count, waits)] == [1]
