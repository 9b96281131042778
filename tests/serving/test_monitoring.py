"""Metrics of a real server over a real socket, /healthz and /readyz, for a server and a standby."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common.gathering import Gathering
from aiops.errors import Refused, UsageError
from aiops.serving import monitoring as monitoring_module
from aiops.serving.config import Config
from aiops.serving.in_turns import in_turns
from aiops.serving.monitoring import Monitoring
from tests.metrics.lint import families
from tests.peers import eventually
from tests.support import PATIENCE, Process, ServerThread, server_process

pytest.importorskip("prometheus_client")

MODEL = {"w": np.ones((64, 64), np.float32), "b": np.ones(3, np.float32)}

Scraped = dict[str, list[tuple[str, dict[str, str], float]]]


@contextlib.contextmanager
def monitored(**settings: Any) -> Iterator[tuple[ServerThread, str]]:
    """A server, and the URL of its metrics."""
    with ServerThread(metrics_port=0, kernels="numpy", **settings) as server:
        yield server, server.call(lambda running: running.metrics_url)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(url: str) -> Scraped:
    status, text = get(f"{url}/metrics")
    assert status == 200, text
    return families(text)


def number(found: Scraped, name: str, **labels: str) -> float:
    """Return the value of one series."""
    [value] = [each for _name, have, each in found[name] if have == labels]
    return value


def gradients(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: 0.01 * np.ones_like(array) for name, array in params.items()}


def test_a_run_as_it_trains() -> None:
    """Counters never fall while workers train, and at the end are what was counted."""
    steps, stop = 30, threading.Event()
    seen: list[Scraped] = []

    def watch(url: str) -> None:
        while not stop.is_set():
            seen.append(scrape(url))

    with monitored(policy="fasgd", push_codec="int8", no_shm=True) as (server, url):
        watcher = threading.Thread(target=watch, args=(url,))
        watcher.start()
        with (
            aiops.Worker(server.url, MODEL, name="a") as a,
            aiops.Worker(server.url, MODEL, name="b") as b,
        ):
            for _ in range(steps):
                a.step(gradients(a.params))
                b.step(gradients(b.params))
            stop.set()
            watcher.join(PATIENCE)
            seen.append(scrape(url))
            with aiops.Client(server.url) as client:
                report = client.stats()
    for before, after in pairwise(seen):
        for name in before:
            counters = {(n, *sorted(s.items())): v for n, s, v in before[name]}
            for series, labels, value in after[name] if name.endswith("_total") else ():
                assert value >= counters.get((series, *sorted(labels.items())), 0), series
    found = seen[-1]
    assert number(found, "aiops_updates_total") == report["version"] == 2 * steps
    assert number(found, "aiops_model_version") == 2 * steps
    assert number(found, "aiops_gradients_used_total") == report["gradients"]
    counts = {n: v for n, s, v in found["aiops_staleness_updates"] if s.get("le", "+Inf") == "+Inf"}
    assert counts["aiops_staleness_updates_count"] == 2 * steps
    total = counts["aiops_staleness_updates_sum"] / (2 * steps)
    assert total == pytest.approx(report["mean_staleness"])
    assert number(found, "aiops_vbar") == pytest.approx(report["vbar"])
    assert {labels["tensor"] for _n, labels, _v in found["aiops_tensor_vbar"]} == {"w", "b"}
    ledger = report["ledger"]
    for direction, key in (("push", "pushed"), ("fetch", "fetched")):
        coded, raw = (
            number(found, "aiops_payload_bytes_total", direction=direction, encoding=encoding)
            for encoding in ("coded", "raw")
        )
        assert raw + coded == ledger[key]["payload"]
        assert coded == ledger[key]["coded"]
        uncoded = number(found, "aiops_payload_uncoded_bytes_total", direction=direction)
        assert uncoded == ledger[key]["raw"]
    coded = number(found, "aiops_payload_bytes_total", direction="push", encoding="coded")
    assert 0 < coded < number(found, "aiops_payload_uncoded_bytes_total", direction="push")
    for name in "ab":
        assert number(found, "aiops_worker_pushes_total", worker=name) == steps
    info = found["aiops_info"][0][1]
    assert (info["policy"], info["push_codec"]) == ("fasgd", "int8")
    assert number(found, "process_resident_memory_bytes") > 0
    assert number(found, "aiops_memory_bound_bytes") == report["memory"]["bound"]


def test_norms_of_the_parameters_as_they_were_at_a_scrape_before() -> None:
    with monitored(policy="asgd") as (server, url):
        with aiops.Worker(server.url, MODEL):
            pass
        eventually(lambda: "aiops_tensor_norm" in scrape(url), "norms have been computed")
        found = scrape(url)
    assert number(found, "aiops_tensor_norm", tensor="w") == 64.0
    assert number(found, "aiops_tensor_norm", tensor="b") == pytest.approx(3**0.5)


def test_refusals_by_reason_a_filter_and_a_budget() -> None:
    settings = {"policy": "asgd", "filter": "norm", "bandwidth_budget": "100MB/s"}
    with monitored(**settings) as (server, url):
        with aiops.Client(server.url, role="worker", name="bad") as client:
            client.define(MODEL)
            for _ in range(40):  # the first teach the filter
                client.push(client.fetch(), gradients(MODEL))
            poisoned = gradients(MODEL)
            poisoned["w"][0, 0] = np.nan
            with pytest.raises(Refused):
                client.push(client.fetch(), poisoned)
            found = scrape(url)
        assert number(found, "aiops_pushes_refused_total", reason="bad-push") == 1
        assert number(found, "aiops_worker_refused_total", worker="bad") == 1
        assert number(found, "aiops_pushes_filtered_total") == 0
        assert number(found, "aiops_quarantined_workers") == 0
        norm = np.linalg.norm(gradients(MODEL)["b"])
        assert number(found, "aiops_tensor_gradient_norm", tensor="b") == pytest.approx(norm)
        assert number(found, "aiops_gradient_largest") == pytest.approx(0.01)
        assert number(found, "aiops_budget_bytes_per_second") == 100e6
        assert found["aiops_info"][0][1]["filter"] == "norm"


def test_a_gate() -> None:
    with monitored(policy="asgd", gate="periodic:k_push=4,k_fetch=2") as (server, url):
        with aiops.Worker(server.url, MODEL) as worker:
            for _ in range(16):
                worker.step(gradients(worker.params))
        found = scrape(url)
        name = "aiops_transfers_total"
        assert number(found, name, direction="push", outcome="sent") == 4
        assert number(found, name, direction="push", outcome="skipped") == 12
        assert number(found, name, direction="fetch", outcome="not_wanted") > 0
        avoided = number(found, "aiops_avoided_bytes_total", direction="push", reason="skipped")
        assert avoided == 12 * sum(array.nbytes for array in MODEL.values())


def test_a_state(tmp_path: Path) -> None:
    with monitored(policy="asgd", state=tmp_path / "state", acks="durable") as (server, url):
        with aiops.Worker(server.url, MODEL) as worker:
            worker.step(gradients(worker.params))
        found = scrape(url)
        assert number(found, "aiops_journal_rows_total") > 0
        assert number(found, "aiops_journal_lag_rows") >= 0
        assert number(found, "aiops_journal_ended") == number(found, "aiops_acks_reduced") == 0
        assert get(f"{url}/readyz")[0] == 200

        def end(running: Any) -> None:  # as after a write that failed
            running.run_state.kept.recorder.ended = "the disk is full"

        server.call(end)
        assert number(scrape(url), "aiops_journal_ended") == 1
        assert number(scrape(url), "aiops_ready") == 0
        status, why = get(f"{url}/readyz")
        assert (status, why) == (503, "its state is not kept any more: the disk is full\n")
        assert get(f"{url}/healthz") == (200, "ok\n")


def test_ready_when_there_is_a_model_and_pushes_are_taken() -> None:
    with monitored(policy="asgd") as (server, url):
        assert get(f"{url}/healthz") == (200, "ok\n")
        assert get(f"{url}/readyz") == (503, "no worker has defined a model yet\n")
        assert number(scrape(url), "aiops_ready") == 0
        with aiops.Client(server.url, role="worker") as client:
            client.define(MODEL)
            assert get(f"{url}/readyz") == (200, "ready\n")
            assert number(scrape(url), "aiops_ready") == 1
            server.call(lambda running: running.engine.closure.pause("an upgrade"))
            status, why = get(f"{url}/readyz")
            assert status == 503
            assert "an upgrade" in why


def test_workers_beyond_the_bound_are_summed() -> None:
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(monitored(policy="asgd", metrics_workers=2))
        names = ["same", 'a"\n\\', "same", "other", "w" * 500]
        workers = [
            stack.enter_context(aiops.Worker(server.url, MODEL, name=name)) for name in names
        ]
        stack.enter_context(aiops.Client(server.url)).stats()
        for steps, worker in enumerate(workers, 1):
            for _ in range(steps):
                worker.step(gradients(worker.params))
        found = scrape(url)
        series = {s["worker"]: v for _n, s, v in found["aiops_worker_pushes_total"]}
        assert series == {"same": 1, 'a"\n\\': 2}, "the sum of the others would fall"
        assert number(found, "aiops_workers", state="active") == 5
        assert number(found, "aiops_workers", state="silent") == 0
        assert number(found, "aiops_workers", state="observer") == 1
        silence = {s["worker"] for _n, s, _v in found["aiops_worker_silence_seconds"]}
        assert silence == {*series, "other"}


def test_counters_begin_at_0_after_a_crash(tmp_path: Path) -> None:
    """Prometheus would take restored counts for new ones."""
    settings = {"policy": "asgd", "state": tmp_path / "state", "no_shm": True}
    with (
        monitored(**settings) as (server, url),
        aiops.Worker(server.url, MODEL, name="w") as worker,
    ):
        for _ in range(5):
            worker.step(gradients(worker.params))
        assert number(scrape(url), "aiops_worker_pushes_total", worker="w") == 5
    with monitored(**settings) as (server, url):
        found = scrape(url)
        assert number(found, "aiops_model_version") == 5
        counters = {
            (n, *s.items()): v for f in found for n, s, v in found[f] if f.endswith("_total")
        }
        restored = {key: value for key, value in counters.items() if key[0].startswith("aiops_")}
        restored.pop(("aiops_journal_bytes_total",))
        assert set(restored.values()) == {0}, restored
        assert {v for _n, _s, v in found["aiops_staleness_updates"]} == {0}
        with aiops.Worker(server.url, MODEL, name="w") as worker:
            for _ in range(2):
                worker.step(gradients(worker.params))
            found = scrape(url)
        assert number(found, "aiops_model_version") == 7
        assert number(found, "aiops_updates_total") == 2
        assert number(found, "aiops_worker_pushes_total", worker="w (#2)") == 2
        pushed = number(found, "aiops_message_bytes_total", direction="push", part="payload")
        assert pushed == 2 * sum(array.nbytes for array in MODEL.values())


@pytest.mark.slow
def test_shards() -> None:
    """The lead has the series of all shards; of what followers have counted, those before."""
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(monitored(policy="fasgd", shards=2, no_shm=True))
        with aiops.Worker(server.url, MODEL, name="a") as worker:
            for _ in range(3):
                worker.step(gradients(worker.params))
            with aiops.Client(server.url) as client:
                report = client.stats()
            found = scrape(url)
            assert number(found, "aiops_shard_up", shard="0") == 1
            assert number(found, "aiops_shard_up", shard="1") == 1
            held = [number(found, "aiops_shard_bytes", shard=each) for each in "01"]
            assert sum(held) == sum(array.nbytes for array in MODEL.values())
            assert min(held) > 0
            for _ in range(3):
                worker.step(gradients(worker.params))
            worker.stats()
            wanted = 2 * report["ledger"]["pushed"]["payload"]
            paid = 0.0
            deadline = time.monotonic() + PATIENCE
            before = number(found, "aiops_traffic_bytes_total", direction="push")
            while paid < wanted and time.monotonic() < deadline:  # each scrape has it counted
                found = scrape(url)
                paid = number(found, "aiops_traffic_bytes_total", direction="push")
            assert paid >= wanted
            assert paid > before
            assert get(f"{url}/readyz") == (200, "ready\n")


async def test_a_standby_until_it_is_promoted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"port": 0, "policy": "asgd", "kernels": "numpy"}
    async with contextlib.AsyncExitStack() as stack:
        async with aiops.serve(state=tmp_path / "a", acks="replicated", **settings) as primary:
            own = {**settings, "metrics_port": 0, "state": str(tmp_path / "b")}
            standby = await stack.enter_async_context(aiops.serve(standby=primary.url, **own))
            url = standby.metrics_url
            async with aiops.AsyncWorker(primary.url, MODEL, name="w") as worker:
                await worker.step(gradients(worker.params))
            status, why = await asyncio.to_thread(get, f"{url}/readyz")
            assert (status, why) == (503, f"it is a standby of {primary.url}\n")
            found = await asyncio.to_thread(scrape, url)
            assert number(found, "aiops_standby_fed") == 1
            assert number(found, "aiops_ready") == 0
            assert number(found, "aiops_standby_unapplied_rows") >= 0
        standby.promote()
        await asyncio.wait_for(standby.promoted(), PATIENCE)
        assert await asyncio.to_thread(get, f"{url}/readyz") == (200, "ready\n")
        found = await asyncio.to_thread(scrape, url)
        assert number(found, "aiops_model_version") == 1
        assert number(found, "aiops_updates_total") == 0, "those since it was promoted"
        assert "aiops_standby_fed" not in found


class Source:
    """A server that takes its time to report, and notes when it was asked."""

    not_ready = ""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []

    def norms(self) -> None:
        return None

    def report(self, shown: int) -> Mapping[str, Any]:
        self.times.append(time.perf_counter())
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return {"version": len(self.times)}

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        yield
        return self.report(shown)


async def test_gathering_takes_a_tenth_of_the_loops_time_at_most() -> None:
    source = Source(0.02)
    async with Monitoring(Config(metrics_port=0), lambda: source) as monitoring:
        for _ in range(3):
            every = [asyncio.to_thread(scrape, monitoring.url) for _ in range(4)]
            await asyncio.gather(*every)
    gaps = np.diff(source.times)
    assert len(gaps) >= 2
    assert gaps.min() >= 10 * source.seconds
    assert len(source.times) < 12, "scrapes at the same time share what was gathered"


async def test_waiting_for_a_processor_is_no_time_of_gathering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring_module, "_LONGEST", PATIENCE)
    source = Source(0.0)
    report = source.report

    def suspended(shown: int) -> Mapping[str, Any]:
        found = report(shown)
        time.sleep(0.2)  # as a thread without a processor: it takes none of one
        return found

    source.report = suspended  # type: ignore[method-assign]
    async with Monitoring(Config(metrics_port=0), lambda: source) as monitoring:
        for _ in range(2):
            await asyncio.to_thread(scrape, monitoring.url)
    assert np.diff(source.times).max() < 0.2 / 0.1


async def test_a_scrape_waits_for_its_turn_for_a_while_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring_module, "_LONGEST", 0.01)
    monkeypatch.setattr(monitoring_module, "_SHARE", 1e-6)  # the next turn is hours away
    source = Source(0.002)
    async with Monitoring(Config(metrics_port=0), lambda: source) as monitoring:
        for _ in range(2):
            await asyncio.to_thread(scrape, monitoring.url)
    assert len(source.times) == 2


async def test_other_work_is_done_in_the_pauses_of_gathering() -> None:
    loop, turns = asyncio.get_running_loop(), list[int]()

    def gather() -> Gathering[int]:
        for pause in range(3):
            loop.call_soon(turns.append, pause)
            yield
            assert turns == list(range(pause + 1))
        return 7

    found, took = await in_turns(gather())
    assert found == 7
    assert took > 0


async def test_writing_takes_a_tenth_of_a_processor_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aiops.metrics import exposition

    source = Source(0.0)

    def slow(report: Mapping[str, Any], info: Mapping[str, str]) -> bytes:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return b""

    monkeypatch.setattr(exposition, "text", slow)
    async with Monitoring(Config(metrics_port=0), lambda: source) as monitoring:
        for _ in range(3):
            await asyncio.to_thread(get, f"{monitoring.url}/metrics")
    assert np.diff(source.times).min() >= 10 * 0.03


async def test_without_a_server_yet() -> None:
    async with Monitoring(Config(metrics_port=0), lambda: None) as monitoring:
        found = await asyncio.to_thread(scrape, monitoring.url)
        assert number(found, "aiops_ready") == 0
        assert await asyncio.to_thread(get, f"{monitoring.url}/readyz") == (503, "it is starting\n")


async def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiops.metrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "aiops.metrics.exposition", raising=False)
    monkeypatch.delattr(aiops.metrics, "exposition", raising=False)
    with pytest.raises(UsageError, match=re.escape("pip install 'aiops-ps[metrics]'")):
        await Monitoring(Config(metrics_port=0), lambda: None).connect()
    async with Monitoring(Config(), lambda: None) as monitoring:
        assert monitoring.url == ""


@pytest.mark.parametrize("host", ["", "*"])
async def test_all_addresses(host: str) -> None:
    async with Monitoring(Config(metrics_port=0, metrics_host=host), lambda: None) as monitoring:
        assert monitoring.url.startswith("http://0.0.0.0:")
        assert await asyncio.to_thread(get, f"{monitoring.url}/healthz") == (200, "ok\n")


async def test_beyond_loopback_it_says_who_can_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiops.server")
    config = Config(metrics_port=0, metrics_host="0.0.0.0")
    async with Monitoring(config, lambda: None):
        assert "can read the metrics" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_stalled_scraper_does_not_delay_the_end(number: signal.Signals) -> None:
    """Its deadline, of 5 s, is an hour here, which nothing waits for."""
    program = (
        "import runpy; from aiops.net.http_listener import HttpListener\n"
        "HttpListener.__init__.__kwdefaults__['patience'] = 3600.0\n"
        "runpy.run_module('aiops.server', run_name='__main__')"
    )
    flags = ("--port", "0", "--metrics-port", "0", "--kernels", "numpy")
    with contextlib.ExitStack() as stack:
        server = Process("-c", program, *flags)
        stack.callback(server.kill)
        assert server.popen.stderr is not None
        lines = iter(server.popen.stderr.readline, "")
        [port] = next(
            m for m in (re.findall(r"metrics at http://.*:(\d+)/", x) for x in lines) if m
        )
        with socket.create_connection(("127.0.0.1", int(port)), PATIENCE) as stalled:
            stalled.sendall(b"GET /metrics HT")
            assert get(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
            server.signal(number)
            status, _out, _err = server.end()
            assert status == 0


@pytest.mark.slow
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}")
        with said, server_process(f"--metrics-port={port}"):
            pass
