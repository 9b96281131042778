"""Requests about rows in the short way, over real sockets, and handed over wherever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.steady_rows import RowsExchange
from aiops.client.sync import rows_exchange, short_way
from aiops.errors import BadPush
from aiops.model.tables import Table
from tests.support import PATIENCE, ServerThread

ROWS = 500
TABLES = {"t": Table(ROWS, 3, scale=0.5), "u": Table(40, 2, "float64")}


@pytest.fixture(scope="module", params=[1, 3], ids=["one server", "three servers"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    spread = {"spread_tables": True} if request.param > 1 else {}
    with ServerThread(policy="asgd", set={"lr": 1}, shards=request.param, **spread) as server:
        yield server


@contextlib.contextmanager
def client(server: ServerThread) -> Iterator[aiops.Client]:
    with aiops.Client(server.url, role="worker", timeout=PATIENCE) as client:
        client.define({}, TABLES)
        yield client


class Ways:
    """Counts the requests that were carried in the short way, and those that were handed over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done, self.handed, self.why = 0, 0, list[Any]()
        finish, hand_over = RowsExchange.finish, RowsExchange.hand_over

        def finished(exchange: RowsExchange) -> None:
            self.done += 1
            finish(exchange)

        def handed(exchange: RowsExchange) -> Any:
            self.handed += 1
            self.why.append([(s.fits, s.sent, s.size, s.received) for s in exchange.shares])
            return hand_over(exchange)

        patch.setattr(RowsExchange, "finish", finished)
        patch.setattr(RowsExchange, "hand_over", handed)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


def course(client: aiops.Client) -> Iterator[Any]:
    """Yield the outcomes of requests of every kind, each beside what it is expected to be."""
    ids = np.array([3, 77, 3, 499, 0, 120])
    once = np.unique(ids)
    before = client.fetch_rows("t", ids)
    grads = np.arange(18, dtype=np.float32).reshape(6, 3)
    receipt = client.push_rows("t", ids, grads)
    yield receipt.staleness, 0
    sums = np.zeros((ROWS, 3), np.float32)
    np.add.at(sums, ids, grads)
    yield client.fetch_rows("t", ids).tolist(), (before - sums[ids]).tolist()
    out = np.empty((len(once), 3), np.float32)
    again, rows = client.exchange_rows("t", [77], np.ones((1, 3), np.float32), once, out=out)
    sums[77] += 1
    first = np.array([before[np.argmax(ids == id)] for id in once])
    yield (again.version, rows is out), (receipt.version + 1, True)
    yield rows.tolist(), (first - sums[once]).tolist()
    yield client.fetch_rows("u", [39]).shape, (1, 2)
    yield client.fetch_rows("t", []).shape, (0, 3)


def accounts(client: aiops.Client) -> Any:
    """Return what a client has counted of rows."""
    session = client._session
    traffic, ledger = session.wire.traffic, session.ledger
    kinds = (traffic.kinds_out["push_rows"], traffic.kinds_out["fetch_rows"])
    counted = [(k.messages, k.overhead, k.payload) for k in (*kinds, traffic.kinds_in["rows"])]
    acknowledged = session.pending.acknowledged.runs
    return counted, ledger.rows_pushed, ledger.rows_fetched, session.answered, acknowledged


def test_requests_are_carried_in_the_short_way(
    server: ServerThread, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server in this process that imports Numba may take longer than a beat for its answers.
    monkeypatch.setattr(rows_exchange, "_BEAT", int(1000 * PATIENCE))
    found = []
    for short in (True, False):
        with client(server) as one, pytest.MonkeyPatch.context() as patch:
            if not short:
                patch.setattr(RowsExchange, "begun", lambda *_arguments: None)
            for outcome, meant in course(one):
                assert outcome == meant
            found.append((accounts(one), one.stats()["workers"][-1]["ledger"]["pushed"]))
    assert (ways.done, ways.handed) == (5, 0), ways.why
    assert found[0] == found[1]


@pytest.mark.parametrize("received", [0, 1, 5, 70, 90, 110, 130])
@pytest.mark.parametrize("sent", [0, 1, 100, 1 << 20])
def test_it_is_handed_over_wherever_it_is(
    server: ServerThread, ways: Ways, monkeypatch: pytest.MonkeyPatch, sent: int, received: int
) -> None:
    """Of each share some has been sent, and of each answer some has come: nothing is done twice."""

    def some(exchange: RowsExchange, sockets: Any, look: Any) -> bool:
        for share, sock in zip(exchange.shares, sockets, strict=True):
            whole = b"".join(map(bytes, share.buffers))[:sent]
            if whole:
                sock.sendall(whole)
            share.sent = len(whole)
        for share, sock in zip(exchange.shares, sockets, strict=True):
            while share.sent == share.size and share.received < min(received, share.whole):
                room = [each[: received - share.received] for each in share.room][:1]
                share.took(sock.recvmsg_into(room)[0], exchange.id)
        return False

    monkeypatch.setattr(short_way, "carry_rows", some)
    with client(server) as one:
        versions = [line["version"] for line in one.stats()["tables"]]
        for found, meant in course(one):
            assert found == meant
        assert ways.handed == 5
        assert one.stats()["tables"][0]["version"] == versions[0] + 2


def test_a_refusal_is_no_answer_that_fits(server: ServerThread, ways: Ways) -> None:
    with client(server) as one:
        one.fetch_rows("t", [1])
        ones = np.ones((1, 3), np.float32)
        with pytest.raises(BadPush, match="fetch them again"):
            one.push_rows("t", [1], ones, version=10_000)
        assert one.push_rows("t", [1], ones).used
    assert ways.done == 2


def test_a_server_that_is_late_is_waited_for_by_the_general_path(
    server: ServerThread, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_exchange, "_wait", lambda sock, event: False)
    monkeypatch.setattr(short_way.ShortWay, "_glance", lambda self: None)
    with client(server) as one:
        for found, meant in course(one):
            assert found == meant
    assert ways.done + ways.handed == 5


def test_connections_that_are_lost_meanwhile(
    server: ServerThread, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is sent again on new ones, and applied once."""
    carry = rows_exchange.carry_rows
    cut = [0]

    def lost(exchange: RowsExchange, sockets: Any, look: Any) -> bool:
        cut[0] += 1
        if cut[0] % 2:
            return carry(exchange, sockets, look)
        for share, sock in zip(exchange.shares, sockets, strict=True):
            sock.sendall(b"".join(map(bytes, share.buffers)))
            share.sent = share.size
        raise ConnectionResetError("cut by the test")

    monkeypatch.setattr(short_way, "carry_rows", lost)
    with client(server) as one:
        versions = one.stats()["tables"][0]["version"]
        for found, meant in course(one):
            assert found == meant
        assert one.stats()["tables"][0]["version"] == versions + 2
    assert ways.handed >= 2
