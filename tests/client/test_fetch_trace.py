"""The spans of fetches: at real servers, those of both sides are one trace."""

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
from aiops.client.fetch_trace import FetchTracingLedger
from aiops.tracing import Tracing
from aiops.tracing.spans import FETCH, Sampler, Span, span_of, trace_of_fetch
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


def pairs(collected: Collected) -> list[tuple[Span, Span]]:
    """Return the client's and the server's span of each fetch; every span has its other one."""
    sides = [
        {span.trace: span for span in collected.spans(FETCH, kind)} for kind in ("client", "server")
    ]
    assert set(sides[0]) == set(sides[1])
    assert len(collected.spans(FETCH)) == 2 * len(sides[0])
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


class TestLedger:
    @pytest.fixture
    def found(self) -> list[Span]:
        return []

    @pytest.fixture
    def ledger(self, found: list[Span]) -> FetchTracingLedger:
        class Kept(Tracing):
            def offer(self, spans: Sequence[Span]) -> None:
                found.extend(spans)

        clock = iter(range(1, 100))
        kept = Kept(Sampler(0, 1.0), lambda: next(clock), {}, lambda: pytest.fail("no queue"))
        return FetchTracingLedger(kept, "c", {})

    def test_one_that_is_sent_again_has_another_number(
        self, ledger: FetchTracingLedger, found: list[Span]
    ) -> None:
        ledger.asked(Fetch(3, -1))
        ledger.disconnected()
        ledger.asked(Fetch(4, -1))
        ledger.answered(FetchedParams(4, 7))
        [span] = found
        trace = trace_of_fetch("c", 4)
        assert (span.trace, span.id, span.begin, span.end) == (trace, span_of(trace, FETCH), 2, 3)
        assert not ledger._sent

    def test_one_that_is_refused(self, ledger: FetchTracingLedger, found: list[Span]) -> None:
        ledger.asked(Fetch(3, -1))
        ledger.answered(Error(3, "not_ready", "no model", (), fatal=False))
        [span] = found
        assert span.error == "not_ready: no model"
        assert set(span.attributes) == {"aiops.request"}

    def test_it_keeps_the_account_of_a_plain_one(self, ledger: FetchTracingLedger) -> None:
        plain = Ledger(own=True)
        for each in (plain, ledger):
            each.asked(Fetch(1, 0))
            each.answered(FetchedParams(1, 2))
        assert ledger._fetches == plain._fetches == 1
        assert not ledger._open

    def test_what_fails_in_tracing_fails_no_fetch(
        self, ledger: FetchTracingLedger, found: list[Span], caplog: pytest.LogCaptureFixture
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
        client._connection._spin.resting = 1 << 30  # else a wait may poll
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
