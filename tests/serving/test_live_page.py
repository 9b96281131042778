"""The live page of a real server over a real socket: its files and its events."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import aiops
from aiops.common.gathering import Gathering
from aiops.errors import Kicked
from aiops.serving.config import Config
from aiops.serving.live_page import LivePage
from aiops.serving.members import Members
from aiops.serving.monitoring import Monitoring
from aiops.serving.norms import ParameterNorms
from tests.support import PATIENCE, ServerThread


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken as often as they may."""
    monkeypatch.setattr("aiops.serving.live_page._EVERY", 0.01)
    monkeypatch.setattr("aiops.serving.live_page._UNSEEN", 0.01)


@pytest.fixture
def at_once(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken all the time, and so are norms."""
    monkeypatch.setattr("aiops.serving.live_page._SHARE", 0.5)
    monkeypatch.setattr("aiops.serving.norms._EVERY", 0.01)


MODEL = {"w": np.ones((8, 8), np.float32), "b": np.ones(3, np.float32)}


@contextlib.contextmanager
def shown(**settings: Any) -> Iterator[tuple[ServerThread, str]]:
    """A server with a live page, and the page's URL."""
    with ServerThread(dashboard=True, kernels="numpy", **settings) as server:
        yield server, server.call(lambda running: running.metrics_url)


def get(url: str) -> tuple[int, Mapping[str, str], bytes]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@contextlib.contextmanager
def events(url: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The events of a page, as they come."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.status == 200

    def read() -> Iterator[tuple[str, dict[str, Any]]]:
        while True:
            kind, data, end = (answer.readline().decode() for _ in range(3))
            assert end == "\n"
            yield kind[7:-1], json.loads(data[6:])

    try:
        yield read()
    finally:
        connection.close()


def gradients() -> dict[str, np.ndarray]:
    return {name: 0.01 * np.ones_like(array) for name, array in MODEL.items()}


@pytest.mark.usefixtures("at_once")
def test_a_run_as_a_viewer_sees_it() -> None:
    with shown(policy="fasgd") as (server, url), events(url) as coming:
        kind, whole = next(coming)
        assert kind == "whole"
        assert whole["state"]["ready"] == "no worker has defined a model yet"
        with aiops.Worker(server.url, MODEL, name="a") as worker:
            for _ in range(5):
                worker.step(gradients())
            kind, tick = next(coming)
            assert kind == "tick"
            while not tick.get("rows") or tick["rows"][0][3] < 5:
                kind, tick = next(coming)
            assert tick["rows"][0][1:4] == ["a", "worker", 5]
            if "tensors" in tick:
                assert [line[:2] for line in tick["tensors"]] == [["w", 64], ["b", 3]]
            assert tick["state"]["version"] == 5
            while not tick.get("tensors") or tick["tensors"][0][4] is None:
                kind, tick = next(coming)
            # Each of 5 updates took 0.01 times at most 0.005 / sqrt(eps) off parameters of 1.
            assert tick["tensors"][0][4] == pytest.approx(8.0, rel=0.1)
            assert tick["tensors"][1][4] == pytest.approx(3**0.5, rel=0.1)
            with events(url) as others:
                kind, whole = next(others)
                assert kind == "whole"
                assert whole["rows"][0][1] == "a", "the rows that the others have"
        texts = [text for _time, _kind, text in tick.get("events", ())]
        while "a left" not in texts:
            _kind, tick = next(coming)
            texts += [text for _time, _kind, text in tick.get("events", ())]
        assert tick["gone"]


def test_the_files_and_what_a_browser_may_do_with_them() -> None:
    with shown(policy="asgd") as (_server, url):
        status, headers, page = get(f"{url}/")
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert b"://" not in page, "it needs nothing from elsewhere"
        for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css"):
            assert name.encode() in page
            assert get(f"{url}/{name}")[0] == 200
        assert get(f"{url}/uPlot.LICENSE")[0] == 404
        assert get(f"{url}/../live_page.py")[0] == 404
        assert get(f"{url}/metrics")[0] == 404, "that is for --metrics-port"
        assert get(f"{url}/healthz")[0] == 200


def test_without_the_flag_there_is_no_page() -> None:
    pytest.importorskip("prometheus_client")
    with ServerThread(metrics_port=0, policy="asgd", kernels="numpy") as server:
        url = server.call(lambda running: running.metrics_url)
        assert get(f"{url}/")[0] == get(f"{url}/events")[0] == 404


def post(url: str, token: str, body: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, body.encode(), {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class TestAdministrators:
    def test_one_removes_a_worker_and_takes_a_snapshot(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "aiops.server")
        with shown(policy="asgd", token="secret", state=tmp_path / "s") as (server, url):
            assert post(f"{url}/snapshot", "secret")[0] == 409, "there is no model"
            with aiops.Worker(server.url, MODEL, name="a", token="secret") as worker:
                worker.step(gradients())
                status, said = post(f"{url}/snapshot", "secret")
                assert (status, said) == (200, "a snapshot of version 1 was taken\n")
                assert post(f"{url}/remove", "secret", "b")[0] == 409
                status, said = post(f"{url}/remove", "secret", "a")
                assert (status, said) == (200, "a was sent away, with 1 connection\n")
                with pytest.raises(Kicked, match="on the live page"):
                    worker.step(gradients())
                worker.close(flush=False)
        by = "token '--token', on the live page"
        assert f"a snapshot was asked for by {by}" in caplog.text
        assert f"this client was sent away by {by}" in caplog.text

    def test_others_may_not(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("aiops.serving.live_page._GUESS", 0.05)
        with (
            shown(policy="asgd", token="secret") as (server, url),
            aiops.Worker(server.url, MODEL, name="a", token="secret") as worker,
        ):
            begun = time.monotonic()
            for token in ("", "wrong", "secre", "secret2"):
                assert post(f"{url}/remove", token, "a")[0] == 401
            assert time.monotonic() - begun > 4 * 0.05, "a guess costs time"
            said = "a request from the live page was refused: "
            assert 1 <= caplog.text.count(said) < 4, "more than one a minute is counted alone"
            assert post(f"{url}/snapshot", "secret")[0] == 409, "it keeps no state"
            assert get(f"{url}/remove")[0] == 405
            worker.step(gradients())

    @pytest.mark.usefixtures("at_once")
    @pytest.mark.parametrize("settings", [{}, {"token": "secret", "metrics_host": "0.0.0.0"}])
    def test_without_tokens_or_beyond_the_machine_the_page_only_reads(
        self, settings: dict[str, str]
    ) -> None:
        with shown(policy="asgd", **settings) as (_server, url):
            url = url.replace("0.0.0.0", "127.0.0.1")
            assert post(f"{url}/remove", "secret", "a")[0] == 404
            with events(url) as coming:
                assert not next(coming)[1]["about"]["administered"]


class Source:
    """A server that reports its number of reports."""

    not_ready = ""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.asked: list[int] = []  # the rows that were asked for each time
        self.sampled = asyncio.Condition()

    def report(self, shown: int) -> Mapping[str, Any]:
        self.times.append(asyncio.get_running_loop().time())
        return {"version": len(self.times)}

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        yield
        return self.report(shown)

    def members(self, most: int) -> Members:
        self.asked.append(most)
        self.telling = asyncio.ensure_future(self._tell())
        return Members(0.0)

    def norms(self) -> Callable[[], list[float]] | None:
        return None

    def administrator(self, token: str) -> str:
        raise AssertionError(token)

    async def take_snapshot(self, by: str) -> str:
        raise AssertionError(by)

    def send_away(self, by: str, client: str) -> str:
        raise AssertionError(client)

    async def _tell(self) -> None:
        async with self.sampled:
            self.sampled.notify_all()

    async def reports(self, count: int) -> None:
        """Wait until this many were made."""
        async with asyncio.timeout(PATIENCE), self.sampled:
            await self.sampled.wait_for(lambda: len(self.asked) >= count)


@contextlib.asynccontextmanager
async def page_of(source: Source) -> AsyncIterator[LivePage]:
    norms = ParameterNorms(lambda: source)
    page = LivePage({}, lambda: source, norms)
    page.begin()
    try:
        yield page
    finally:
        page.close()
        norms.close()


@pytest.mark.usefixtures("often")
async def test_rows_are_gathered_for_viewers_alone() -> None:
    source = Source()
    async with page_of(source) as page:
        await source.reports(1)
        async with asyncio.timeout(PATIENCE), contextlib.aclosing(page.events()) as stream:
            assert (await anext(stream)).startswith(b"event: whole\n")
            assert (await anext(stream)).startswith(b"event: tick\n")
        assert source.asked[0] == 0
        assert source.asked[-1] > 0


@pytest.mark.usefixtures("often")
async def test_a_wall_clock_that_is_set_back_changes_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    async with page_of(source) as page:
        monkeypatch.setattr(time, "time", lambda: 5.0)
        async with asyncio.timeout(PATIENCE), contextlib.aclosing(page.events()) as stream:
            whole = json.loads((await anext(stream)).partition(b"data: ")[2])
            assert min(whole["series"]["t"]) >= whole["about"]["since"] > 1e9


@pytest.mark.usefixtures("at_once")
async def test_a_viewer_that_is_behind_is_sent_the_whole_document() -> None:
    source = Source()
    async with page_of(source) as page, contextlib.aclosing(page.events()) as stream:
        await anext(stream)
        await source.reports(len(source.asked) + 4)
        assert (await anext(stream)).startswith(b"event: whole\n")


@pytest.mark.usefixtures("often")
async def test_samples_take_a_hundredth_of_a_processor_at_most() -> None:
    class Slow(Source):
        def report(self, shown: int) -> Mapping[str, Any]:
            found = super().report(shown)
            until = time.thread_time() + 0.003
            while time.thread_time() < until:
                pass
            return found

    source = Slow()
    async with page_of(source):
        await source.reports(3)
    assert np.diff(source.times).min() >= 100 * 0.003


@pytest.mark.usefixtures("often")
async def test_a_sample_that_fails_is_logged_and_the_next_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Source):
        def report(self, shown: int) -> Mapping[str, Any]:
            found = super().report(shown)
            if len(self.times) < 3:
                raise LookupError("there is none yet")
            return found

    source = Failing()
    async with page_of(source):
        await source.reports(1)
    assert caplog.text.count("the live page has no sample: LookupError('there is none yet')") == 1


@pytest.mark.usefixtures("often")
async def test_norms_are_computed_on_a_thread_for_viewers_alone_and_rarely() -> None:
    class Normed(Source):
        computed = 0

        def report(self, shown: int) -> Mapping[str, Any]:
            tensors = {"names": ["w"], "sizes": [9]}
            return {**super().report(shown), "by_tensor": tensors}

        def norms(self) -> Callable[[], list[float]]:
            def compute() -> list[float]:
                assert threading.current_thread() is not threading.main_thread()
                self.computed += 1
                return [3.0]

            return compute

    source = Normed()
    async with page_of(source) as page:
        await source.reports(1)
        assert source.computed == 0
        async with asyncio.timeout(PATIENCE), contextlib.aclosing(page.events()) as stream:
            whole = await anext(stream)
            assert b'["w",9,null,null,null]' in whole
            while b'["w",9,null,null,3.0]' not in await anext(stream):
                pass
            await anext(stream)
        assert source.computed == 1


@pytest.mark.usefixtures("often")
async def test_norms_that_take_long_do_not_hold_samples_up() -> None:
    class Large(Source):
        begun, ended, over = 0, 0, threading.Event()

        def norms(self) -> Callable[[], list[float]]:
            self.begun += 1

            def compute() -> list[float]:
                assert self.over.wait(PATIENCE)
                self.ended += 1
                raise LookupError("the model is gone")

            return compute

    source = Large()
    async with (
        asyncio.timeout(PATIENCE),
        page_of(source) as page,
        contextlib.aclosing(page.events()) as stream,
    ):
        for _ in range(4):
            await anext(stream)
        assert (source.begun, source.ended) == (1, 0), "the next waits for the first"
        source.over.set()
        while not source.ended:
            await anext(stream)
        await anext(stream)
        assert source.ended == 1


async def test_a_viewer_is_told_what_there_is_while_samples_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiops.serving.live_page._FIRST", 0.01)
    page = LivePage({}, lambda: None, ParameterNorms(lambda: None))
    async with asyncio.timeout(PATIENCE), contextlib.aclosing(page.events()) as stream:
        whole = json.loads((await anext(stream)).partition(b"data: ")[2])
    assert (whole["tick"], whole["rows"]) == (0, [])
    assert whole["state"]["ready"] == "it is starting"


async def test_before_there_is_a_server_the_page_waits() -> None:
    async with Monitoring(Config(dashboard=True), lambda: None) as monitoring:
        status, _headers, _page = await asyncio.to_thread(get, f"{monitoring.url}/")
        assert status == 200


@pytest.mark.usefixtures("at_once")
async def test_a_standby_has_a_page_too(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"port": 0, "policy": "asgd", "kernels": "numpy"}
    async with aiops.serve(state=tmp_path / "a", acks="replicated", **settings) as primary:
        own = {**settings, "dashboard": True, "state": str(tmp_path / "b")}
        async with aiops.serve(standby=primary.url, **own) as standby:

            def first() -> dict[str, Any]:
                with events(standby.metrics_url) as coming:
                    return next(coming)[1]

            whole = await asyncio.to_thread(first)
            assert whole["state"]["ready"] == f"it is a standby of {primary.url}"
            assert whole["state"]["standby_of"] == primary.url
