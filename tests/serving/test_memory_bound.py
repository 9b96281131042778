"""The bound on a server's memory: its terms, and that a hostile crowd does not exceed it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from aiops.client import Client, Worker
from aiops.engine.events import Options
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.serving.memory_bound import Holdings, terms
from aiops.shards.measuring import SAMPLES
from aiops.wire import messages
from tests.peers import Peer, eventually, frame, push, serving

MIB = 1 << 20
LAYOUT = Layout.of({"w": np.zeros(100 * MIB // 4, np.float32)})
HOLDINGS = Holdings(connections=100, states=2)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class TestTerms:
    def test_of_a_model(self) -> None:
        found = terms(HOLDINGS, Options(live=4), LAYOUT)
        assert found["versions"] == 6 * LAYOUT.nbytes
        assert found["receive buffers"] == 4 * LAYOUT.nbytes
        assert found["optimiser"] == 2 * LAYOUT.nbytes
        assert {"lent versions", "snapshot", "workers' versions", "delta replica"}.isdisjoint(found)

    def test_a_small_model_may_have_many_versions(self) -> None:
        small = Layout.of({"w": np.zeros(MIB // 4, np.float32)})
        assert terms(HOLDINGS, Options(live=4), small)["versions"] == 66 * MIB

    def test_before_there_is_a_model_it_is_the_largest(self) -> None:
        options = Options(live=4, max_model=LAYOUT.nbytes, filter="robust")
        before, after = (terms(HOLDINGS, options, layout) for layout in (None, LAYOUT))
        assert {**before, "clients": 0} == {**after, "clients": 0}

    def test_half_precision_has_masters_and_wide_state(self) -> None:
        half = Layout.of({"w": np.zeros(100 * MIB // 4, np.float16)})
        found = terms(HOLDINGS, Options(live=4), half)
        assert found["versions"] == 6 * half.nbytes
        assert found["optimiser"] == 3 * LAYOUT.nbytes

    def test_each_setting_has_its_price(self) -> None:
        given = Holdings(connections=100, states=2, reads=True, near=True, tls=True, kept=True)
        options = Options(live=4, fetch_codec=("int8",), gate="bfasgd:skipped=reapply")
        plain, found = terms(HOLDINGS, Options(live=4), LAYOUT), terms(given, options, LAYOUT)
        more = {name for name, count in found.items() if count > plain.get(name, 0)}
        assert more == {
            *("lent versions", "workers' versions", "connections", "snapshot", "kept gradients"),
            *("delta replica", "answers"),
        }
        evaluated = terms(replace(HOLDINGS, evaluates=True), Options(live=4), LAYOUT)
        assert evaluated == {**plain, "versions for evaluation": 4 * LAYOUT.nbytes}
        saved = terms(replace(HOLDINGS, saves=True), Options(live=4), LAYOUT)
        assert saved == {**plain, "saved copy": LAYOUT.nbytes}
        lead = terms(
            replace(HOLDINGS, saves=True), Options(shards=2), Placement.even(LAYOUT, 2).layouts[0]
        )
        assert lead["saved copy"] == LAYOUT.nbytes, "that of all servers"
        filtered = terms(HOLDINGS, Options(live=4, filter="robust"), LAYOUT)
        assert filtered.keys() - plain.keys() == {"filters"}
        held = Placement.even(LAYOUT, 2).layouts[0]
        spread = terms(HOLDINGS, Options(live=4, filter="robust", shards=2), held)
        assert spread["filters"] == filtered["filters"] + SAMPLES
        counted = terms(given, Options(live=4, workers=3), LAYOUT)["workers' versions"]
        assert counted == 3 * LAYOUT.nbytes


@linux
@pytest.mark.slow
def test_readers_of_parameters_for_evaluation_stay_within_the_bound() -> None:
    """Each stalls at a version of its own."""
    size = 16 * MIB
    flags = ("--policy", "schedule-free", "--set", "orthogonal=false", "--no-shm")
    with serving(*flags, "--max-connections", "100") as server, contextlib.ExitStack() as stack:
        gradient = {"w": np.ones(size // 4, np.float32)}
        with Worker(server.url, gradient) as worker, Client(server.url) as asking:
            for _ in range(24):
                worker.step(gradient)
                reader = stack.enter_context(Peer(server.url, "observer", receive_buffer=1 << 14))
                reader.send(frame(messages.Fetch(1, -1, (), False, True)))
                reader.sock.recv(1)
            found = asking.stats()
            memory = found["memory"]
            assert found["readers_cut"] >= 24 - 3
            assert memory["terms"]["versions for evaluation"] == 4 * size
            assert server.peak() <= memory["bound"]
            assert server.peak() - 256 * MIB <= 16 * size, "not a version for each reader"
            assert asking.fetch(evaluation=True).version == worker.version


@linux
@pytest.mark.slow
def test_a_hostile_crowd_stays_within_the_bound() -> None:
    """Readers that stall, each at a version of its own, and writers that stall amid a push."""
    size = 16 * MIB
    flags = ("--policy", "asgd", "--no-shm", "--live-versions", "4", "--max-connections", "100")
    with serving(*flags) as server, contextlib.ExitStack() as stack:
        gradient = {"w": np.ones(size // 4, np.float32)}
        with Worker(server.url, gradient) as worker, Client(server.url) as asking:
            worker.step(gradient)
            for _ in range(24):
                reader = stack.enter_context(Peer(server.url, "observer", receive_buffer=1 << 14))
                reader.send(frame(messages.Fetch(1, -1)))
                reader.sock.recv(1)
                writer = stack.enter_context(Peer(server.url))
                head = frame(push(size, 1)) + b"\xc6" + size.to_bytes(4, "big")
                writer.send(head)
                writer.close()
                worker.step(gradient)
            found = asking.stats()
            assert found["readers_cut"] >= 24 - 4
            assert found["versions_alive"] + found["versions_spare"] <= 6
            memory = found["memory"]
            assert memory["terms"]["versions"] == 6 * size
            assert server.peak() <= memory["bound"]
            assert server.peak() - 256 * MIB <= 13 * size, "versions, buffers, and little else"
            eventually(lambda: asking.stats()["receive_bytes"] == 0, "buffers come back")
        assert "memory: at most" in server.stderr()
        assert "with a model of 16.8 MB" in server.stderr()
