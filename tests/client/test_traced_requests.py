"""The spans of fetches and of rows: at real servers, those of both sides are one trace."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import tracing
from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.session import Session
from aiops.client.steady_rows import RowsExchange
from aiops.client.traced_requests import RequestTracingLedger
from aiops.engine.engine import Engine
from aiops.tracing import Tracing
from aiops.tracing.spans import (
    FETCH,
    FETCH_ROWS,
    PUSH_ROWS,
    Sampler,
    Span,
    span_of,
    trace_of,
    trace_of_fetch,
)
from aiops.wire.messages import Error, Fetch, FetchedParams
from tests.client.calls import median
from tests.support import PATIENCE, ServerThread
from tests.tracing.collected import Collected, collecting

MODEL = {"w": np.zeros(1000, np.float32)}
GRADIENT = {"w": np.ones(1000, np.float32)}
FETCH_CALLS = 42


@pytest.fixture
def collected() -> Iterator[Collected]:
    with collecting() as found:
        yield found


def serving(policy: str = "asgd", **settings: Any) -> ServerThread:
    return ServerThread(policy=policy, kernels="numpy", trace="otlp:", **settings)


def pairs(collected: Collected, name: str = FETCH) -> list[tuple[Span, Span]]:
    """Return the client's and the server's span of each request; every span has its other one."""
    sides = [
        {span.trace: span for span in collected.spans(name, kind)} for kind in ("client", "server")
    ]
    assert set(sides[0]) == set(sides[1])
    assert len(collected.spans(name)) == 2 * len(sides[0])
    return [(mine, sides[1][trace]) for trace, mine in sides[0].items()]


@pytest.mark.parametrize("near", [False, True])
def test_a_fetch_is_one_trace(
    near: bool, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not near:
        monkeypatch.setenv("AIOPS_NO_SHM", "1")
    with serving() as server, aiops.Client(server.url, role="worker", name="alice") as client:
        params = client.define(MODEL)
        client.push(params, GRADIENT)
        client.fetch(params)
    found = pairs(collected)
    assert [mine.attributes["aiops.version"] for mine, _theirs in found] == [0, 1]
    for mine, theirs in found:
        number = mine.attributes["aiops.request"]
        assert isinstance(number, int)
        assert mine.trace == trace_of_fetch(client._session.identity.client, number)
        assert (mine.parent, theirs.parent) == (0, mine.id)
        assert mine.begin <= theirs.begin <= theirs.end <= mine.end
        for span in (mine, theirs):
            assert span.attributes["aiops.worker"] == "alice"
            assert span.attributes["aiops.answer_bytes"] == 4000
            assert not span.error
    assert mine.resource["service.instance.id"] == "alice"


async def test_those_of_an_async_client(collected: Collected) -> None:
    async with (
        aiops.serve(port=0, policy="asgd", kernels="numpy", trace="otlp:") as server,
        aiops.AsyncClient(server.url, role="worker") as client,
    ):
        await client.define(MODEL)
        await client.fetch()
    assert len(pairs(collected)) == 2


def test_a_worker_s_own(collected: Collected) -> None:
    """That which begins it, and one that a gate lets through without a push."""
    with serving() as server, aiops.Worker(server.url, MODEL) as worker:
        worker.step(GRADIENT)
        worker.refresh()
    assert [mine.attributes["aiops.version"] for mine, _theirs in pairs(collected)] == [0, 1]
    assert len(collected.spans("aiops.step")) == 1


def test_a_model_on_two_servers(collected: Collected) -> None:
    """The lead has the fetch's number, too."""

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE),
            aiops.serve(
                port=0, policy="asgd", shards=2, shard_bytes=8, kernels="numpy", trace="otlp:"
            ) as server,
        ):
            await asyncio.to_thread(fetch, server.url)

    def fetch(url: str) -> None:
        with aiops.Client(url, role="worker") as client:
            client.define(MODEL)
            client.fetch()

    asyncio.run(main())
    assert len(pairs(collected)) == 2


def test_those_who_watch_have_none_and_no_queue(collected: Collected) -> None:
    with (
        serving() as server,
        aiops.Worker(server.url, MODEL),
        aiops.Client(server.url) as client,
    ):
        client.fetch()
        assert client._tracing is None
        assert type(client.ledger) is Ledger
    assert len(pairs(collected)) == 1  # the worker's


def test_which_fetches_both_sides_choose_alike(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with serving() as server, aiops.Client(server.url, role="worker") as client:
        client.define(MODEL)
        for _ in range(30):
            client.fetch()
    assert 3 <= len(pairs(collected)) <= 28


TABLES = {"books": aiops.Table(100, 4), "users": aiops.Table(100, 2)}
IDS, OTHERS, ONES = np.arange(5), np.arange(3), np.ones((5, 2), np.float32)
ROW_CALLS = 84


class TestRows:
    @pytest.fixture(autouse=True, params=["short", "general"])
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "general":
            monkeypatch.setattr(Engine, "steady_rows", lambda *_arguments: None)
            monkeypatch.setattr(RowsExchange, "begun", lambda *_arguments: None)

    def test_each_request_is_one_trace(self, collected: Collected) -> None:
        with serving() as server, aiops.Worker(server.url, {}, tables=TABLES, name="al") as worker:
            worker.fetch_rows("users", IDS)
            worker.push_rows("users", IDS, ONES)
            worker.exchange_rows("users", IDS, ONES, OTHERS)
            client = worker._client._session.identity.client
        [(fetched, answered)] = pairs(collected, FETCH_ROWS)
        number = fetched.attributes["aiops.request"]
        assert isinstance(number, int)
        assert fetched.trace == trace_of_fetch(client, number)
        assert fetched.attributes["aiops.version"] == answered.attributes["aiops.version"] == 0
        assert fetched.attributes["aiops.answer_bytes"] == 40
        pushes = pairs(collected, PUSH_ROWS)
        assert [mine.trace for mine, _theirs in pushes] == [
            trace_of(client, 1),
            trace_of(client, 2),
        ]
        for number, (mine, theirs) in enumerate(pushes, 1):
            for span in (mine, theirs):
                assert span.attributes["aiops.push"] == span.attributes["aiops.version"] == number
                assert span.attributes["aiops.staleness"] == number - 1
                assert span.attributes["aiops.answer_bytes"] == (0, 24)[number - 1]
            assert theirs.attributes["aiops.bytes"] == (80, 104)[number - 1]
        for mine, theirs in [(fetched, answered), *pushes]:
            assert (mine.parent, theirs.parent) == (0, mine.id)
            assert mine.begin <= theirs.begin <= theirs.end <= mine.end
            for span in (mine, theirs):
                assert span.attributes["aiops.worker"] == "al"
                assert span.attributes["aiops.table"] == "users"
                assert not span.error
        assert not collected.spans(), "which would be parts of them"

    def test_one_that_is_refused(self, collected: Collected) -> None:
        with (
            serving(spread_tables=False) as server,
            aiops.Worker(server.url, {}, tables=TABLES) as worker,
            pytest.raises(aiops.errors.BadPush, match="fetch them again"),
        ):
            worker.push_rows("books", IDS, np.ones((5, 4), np.float32), version=7)
        [(mine, theirs)] = pairs(collected, PUSH_ROWS)
        assert "fetch them again" in mine.error
        assert "fetch them again" in theirs.error

    async def test_those_of_an_async_worker(self, collected: Collected) -> None:
        async with (
            aiops.serve(port=0, policy="asgd", kernels="numpy", trace="otlp:") as server,
            aiops.AsyncWorker(server.url, {}, tables=TABLES) as worker,
        ):
            await worker.fetch_rows("users", IDS)
            await worker.push_rows("users", IDS, ONES)
        assert len(pairs(collected, FETCH_ROWS)) == len(pairs(collected, PUSH_ROWS)) == 1

    def test_rows_on_two_servers(self, collected: Collected) -> None:
        """The lead has the requests' numbers; each has one span a side, however many the shares."""

        async def main() -> None:
            async with (
                asyncio.timeout(PATIENCE),
                aiops.serve(
                    port=0,
                    policy="asgd",
                    shards=2,
                    shard_bytes=8,
                    spread_tables=True,
                    kernels="numpy",
                    trace="otlp:",
                ) as server,
            ):
                await asyncio.to_thread(exchange, server.url)

        def exchange(url: str) -> None:
            with aiops.Worker(url, MODEL, tables=TABLES) as worker:
                worker.fetch_rows("users", IDS)
                worker.push_rows("users", IDS, ONES)

        asyncio.run(main())
        assert len(pairs(collected, FETCH_ROWS)) == len(pairs(collected, PUSH_ROWS)) == 1

    def test_those_who_watch_have_none(self, collected: Collected) -> None:
        with (
            serving() as server,
            aiops.Worker(server.url, {}, tables=TABLES),
            aiops.Client(server.url) as client,
        ):
            for _ in range(3):
                client.fetch_rows("users", IDS)
        assert not collected.spans(FETCH_ROWS)

    def test_one_that_a_lost_connection_repeats(
        self, collected: Collected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has its trace, and the server a span more, which says so."""
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        with serving() as server, aiops.Worker(server.url, {}, tables=TABLES) as worker:
            client = worker._client
            request = client._requests.rows_to_push("users", IDS, ONES, 0)
            client._session.ask(request)
            assert client._run(request).version == 1
            request.done = False
            client._session.ask(request)
            assert client._run(request).version == 1
        first, again = collected.spans(PUSH_ROWS, "server")
        assert first.trace == again.trace
        assert "aiops.repeated" not in first.attributes
        assert again.attributes["aiops.repeated"] is True

    def test_a_sampler_that_takes_some(
        self, collected: Collected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        with serving() as server, aiops.Worker(server.url, {}, tables=TABLES) as worker:
            for _ in range(30):
                worker.fetch_rows("users", IDS)
                worker.push_rows("users", IDS, ONES)
        for name in (FETCH_ROWS, PUSH_ROWS):
            assert 3 <= len(pairs(collected, name)) <= 28


def test_rows_handed_over_by_the_short_way_have_one_span(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins where the short way did."""
    handed_over = []

    def carry(*_arguments: Any) -> bool:
        handed_over.append(time.time_ns())
        return False

    monkeypatch.setattr("aiops.client.sync.short_way.carry_rows", carry)
    with serving() as server, aiops.Worker(server.url, {}, tables=TABLES) as worker:
        worker.fetch_rows("users", IDS)
        worker.push_rows("users", IDS, ONES)
    [(fetched, _)], [(pushed, _)] = pairs(collected, FETCH_ROWS), pairs(collected, PUSH_ROWS)
    assert [fetched.begin, pushed.begin] <= handed_over


def test_without_traces_rows_take_no_call_more() -> None:
    """The bound, of before they had spans, may only go down."""
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Client(server.url, role="worker") as client,
    ):
        client.define({}, TABLES)
        client.fetch_rows("users", IDS)
        client._connection.short.spin.resting = 1 << 30  # else a wait may poll
        found = median(client.fetch_rows, "users", IDS)
        assert type(client._session) is Session
    assert found.python <= ROW_CALLS, found.by.most_common()


class TestLedger:
    @pytest.fixture
    def found(self) -> list[Span]:
        return []

    @pytest.fixture
    def ledger(self, found: list[Span]) -> RequestTracingLedger:
        class Kept(Tracing):
            def offer(self, spans: Sequence[Span]) -> None:
                found.extend(spans)

        clock = iter(range(1, 100))
        kept = Kept(Sampler(0, 1.0), lambda: next(clock), {}, lambda: pytest.fail("no queue"))
        return RequestTracingLedger(kept, "c", {})

    def test_one_that_is_sent_again_has_another_number(
        self, ledger: RequestTracingLedger, found: list[Span]
    ) -> None:
        ledger.asked(Fetch(3, -1))
        ledger.disconnected()
        ledger.asked(Fetch(4, -1))
        ledger.answered(FetchedParams(4, 7))
        [span] = found
        trace = trace_of_fetch("c", 4)
        assert (span.trace, span.id, span.begin, span.end) == (trace, span_of(trace, FETCH), 2, 3)
        assert not ledger._sent

    def test_one_that_is_refused(self, ledger: RequestTracingLedger, found: list[Span]) -> None:
        ledger.asked(Fetch(3, -1))
        ledger.answered(Error(3, "not_ready", "no model", (), fatal=False))
        [span] = found
        assert span.error == "not_ready: no model"
        assert set(span.attributes) == {"aiops.request"}

    def test_it_keeps_the_account_of_a_plain_one(self, ledger: RequestTracingLedger) -> None:
        plain = Ledger(own=True)
        for each in (plain, ledger):
            each.asked(Fetch(1, 0))
            each.answered(FetchedParams(1, 2))
        assert ledger._fetches == plain._fetches == 1
        assert not ledger._open

    def test_what_fails_in_tracing_fails_no_fetch(
        self, ledger: RequestTracingLedger, found: list[Span], caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> int:
            raise RuntimeError("no clock")

        ledger._tracing.now = fail
        ledger.asked(Fetch(1, -1))
        ledger.answered(FetchedParams(1, 2))
        assert not found
        assert "an exchange could not be traced" in caplog.text


def test_without_traces_a_fetch_takes_no_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound, of before there were traces, may only go down."""
    monkeypatch.setenv("AIOPS_NO_SHM", "1")
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Client(server.url, role="worker") as client,
    ):
        assert type(client.ledger) is Ledger
        params = client.define(MODEL)
        client._connection.short.spin.resting = 1 << 30  # else a wait may poll
        found = median(client.fetch, params)
    assert found.python <= FETCH_CALLS, found.by.most_common()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_client_that_closes_leaves_no_thread(
    blocking: bool, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last spans are sent by then; a collector that hangs has it wait for a while, and no more.

    So that the test is quick the while is shorter.
    """
    monkeypatch.setattr(tracing.Tracing.close, "__defaults__", (0.05,))
    monkeypatch.setattr(aiops.AsyncClient, "_last_spans", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(Collected, "export", lambda self, spans: str(hangs.wait(PATIENCE)))
    monkeypatch.setattr(Collected, "close", lambda self: hangs.set())

    async def beside(url: str) -> None:
        async with aiops.AsyncClient(url, role="worker") as client:
            await client.define(MODEL)

    with ServerThread(policy="asgd", kernels="numpy") as server:
        if blocking:
            with aiops.Client(server.url, role="worker") as client:
                client.define(MODEL)
        else:
            asyncio.run(beside(server.url))
        assert hangs.is_set()
        until = time.monotonic() + PATIENCE
        while any(each.name == "aiops-tracing" for each in threading.enumerate()):
            assert time.monotonic() < until
