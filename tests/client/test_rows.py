"""Rows of tables through every client, over real sockets: fetched, pushed, lost and found."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.errors import BadPush, ConflictError, NotReady, Restarted, UsageError
from aiops.kernels.row_initialiser import RowInitialiser, first_rows
from tests.adapter import Adapter
from tests.peers import eventually
from tests.proxy import Proxy
from tests.recording import replayed
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread, server_process

TABLES = {"embedding": aiops.Table(1000, 4, scale=0.5), "bias": aiops.Table(9, 1, "float64")}
DENSE = {"w": np.ones(3, np.float32)}


@contextlib.contextmanager
def worker(url: str, **settings: Any) -> Iterator[Any]:
    with aiops.Worker(url, DENSE, tables=TABLES, timeout=PATIENCE, **settings) as worker:
        yield worker


@contextlib.contextmanager
def async_worker(url: str, **settings: Any) -> Iterator[Any]:
    with Adapter(
        *(asyncio.new_event_loop, url, DENSE),
        of=aiops.AsyncWorker,
        tables=TABLES,
        timeout=PATIENCE,
        **settings,
    ) as worker:
        yield worker


@contextlib.contextmanager
def client(url: str, **settings: Any) -> Iterator[Any]:
    with aiops.Client(url, role="worker", timeout=PATIENCE, **settings) as client:
        client.define(DENSE, TABLES)
        yield client


@contextlib.contextmanager
def async_client(url: str, **settings: Any) -> Iterator[Any]:
    adapter = Adapter(asyncio.new_event_loop, url, role="worker", timeout=PATIENCE, **settings)
    with adapter as client:
        client.define(DENSE, TABLES)
        yield client


CLIENTS = {
    "worker": worker,
    "async-worker": async_worker,
    "client": client,
    "async": async_client,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerThread]:
    """A server for tests that only read, or that do not mind what the others push."""
    with ServerThread(policy="asgd", set={"lr": 0.5}) as server:
        yield server


def begun(ids: Any) -> Any:
    return first_rows(RowInitialiser("uniform", 0.5, 0), np.asarray(ids), 4, np.dtype(np.float32))


@pytest.mark.parametrize("name", CLIENTS)
class TestEveryClient:
    def test_fetch_push_and_exchange(self, name: str) -> None:
        with (
            ServerThread(policy="sasgd", set={"lr": 0.5}) as server,
            CLIENTS[name](server.url) as ps,
        ):
            ids = np.array([7, 3, 7])
            np.testing.assert_array_equal(ps.fetch_rows("embedding", ids), begun(ids))
            grads = np.arange(12, dtype=np.float32).reshape(3, 4)
            receipt = ps.push_rows("embedding", ids, grads)
            assert (receipt.version, receipt.staleness, receipt.mean_staleness) == (1, 0, 0.0)
            seven, three = grads[0] + grads[2], grads[1]
            step = np.float32(0.5)
            out = np.empty((2, 4), np.float32)
            got = ps.fetch_rows("embedding", [3, 7], out)
            assert got is out
            np.testing.assert_array_equal(out, begun([3, 7]) - step * np.array([three, seven]))
            asked = "embedding", [3], grads[:1], [3, 8]
            receipt, rows = ps.exchange_rows(*asked, version=np.int64(0))  # type: ignore[arg-type]
            assert (receipt.version, receipt.staleness) == (2, 1)
            np.testing.assert_array_equal(rows[0], out[0] - step * grads[0])
            np.testing.assert_array_equal(rows[1], begun([8])[0])
            bias = ps.fetch_rows("bias", range(9))
            assert (bias.dtype, bias.shape) == (np.float64, (9, 1))
            assert [line["version"] for line in ps.stats()["tables"]] == [0, 2]

    def test_what_does_not_fit_is_said_before_it_travels(
        self, name: str, shared: ServerThread
    ) -> None:
        with CLIENTS[name](shared.url) as ps:
            before = ps.traffic
            grads = np.zeros((1, 4), np.float32)
            for said, call in (
                ("no table 'embeding'; did you mean 'embedding'", ("fetch_rows", "embeding", [1])),
                ("no row 1000", ("fetch_rows", "embedding", [1000])),
                ("no row -3", ("push_rows", "embedding", [-3], grads)),
                ("shape", ("push_rows", "embedding", [1, 2], grads)),
                ("holds no row", ("push_rows", "embedding", [], grads[:0])),
                ("out= must be", ("fetch_rows", "embedding", [1], np.zeros((1, 4)))),
                ("out= must be", ("fetch_rows", "embedding", [1], grads.T)),
                ("must be a NumPy array, not list", ("fetch_rows", "embedding", [1], [[0] * 4])),
                ("version must be a whole", ("push_rows", "embedding", [1], grads, -1)),
                ("version must be a whole", ("push_rows", "embedding", [1], grads, "a")),
                ("version must be a whole", ("push_rows", "embedding", [1], grads, 1.5)),
                ("version must be a whole", ("push_rows", "embedding", [1], grads, 1 << 53)),
                ("no row 1000", ("exchange_rows", "embedding", [1], grads, [1000])),
            ):
                with pytest.raises(UsageError, match=said):
                    getattr(ps, call[0])(*call[1:])
            read_only = np.zeros((1, 4), np.float32)
            read_only.flags.writeable = False
            with pytest.raises(UsageError, match="read-only"):
                ps.fetch_rows("embedding", [1], read_only)
            assert ps.fetch_rows("embedding", []).shape == (0, 4)
            assert ps.traffic == before

    def test_a_bad_value_is_refused_and_the_connection_lives(
        self, name: str, shared: ServerThread
    ) -> None:
        with CLIENTS[name](shared.url) as ps:
            ids, grads = [900, 901], np.zeros((2, 4), np.float32)
            grads[1, 2] = np.inf
            with pytest.raises(BadPush, match=r"row 901 \(number 1 of the push\) holds inf"):
                ps.push_rows("embedding", ids, grads)
            np.testing.assert_array_equal(ps.fetch_rows("embedding", ids), begun(ids))

    @each_row("when", ["question", "answer"])
    @each_row("exchange", [False, True])
    def test_a_push_is_applied_once_whenever_the_connection_is_cut(
        self, name: str, exchange: bool, when: str
    ) -> None:
        with (
            ServerThread(policy="asgd", set={"lr": 1.0}) as server,
            Proxy(server.url) as proxy,
            CLIENTS[name](proxy.url) as ps,
        ):
            ids = np.arange(1000)
            grads = np.ones((1000, 4), np.float32)
            before = ps.fetch_rows("embedding", ids)
            ps.push_rows("embedding", ids, grads)
            fault = proxy.cut("up" if when == "question" else "down", 50)
            if exchange:
                receipt, rows = ps.exchange_rows("embedding", ids, grads, ids)
            else:
                receipt = ps.push_rows("embedding", ids, grads)
                rows = ps.fetch_rows("embedding", ids)
            assert fault.happened.is_set()
            assert proxy.connections >= 2
            assert receipt.version == 2
            np.testing.assert_array_equal(rows, before - grads - grads)

    def test_a_fetch_that_was_cut_is_made_again(self, name: str, shared: ServerThread) -> None:
        with Proxy(shared.url) as proxy, CLIENTS[name](proxy.url) as ps:
            ids = np.arange(500, 800)
            proxy.cut("down", 1000)
            np.testing.assert_array_equal(ps.fetch_rows("embedding", ids), begun(ids))
            assert proxy.connections >= 2


class TestDefining:
    def test_another_table_is_refused_by_its_difference(self, shared: ServerThread) -> None:
        with worker(shared.url):
            pass
        for tables, said in (
            ({**TABLES, "bias": aiops.Table(8, 1, "float64")}, "rows of its table 'bias' is 9"),
            ({"bias": TABLES["bias"]}, "its table 'embedding' is missing here"),
            (None, "is missing here"),
        ):
            with pytest.raises(BadPush, match=said):
                aiops.Worker(shared.url, DENSE, tables=tables, timeout=PATIENCE)

    @pytest.mark.parametrize("policy", ["hardsync", "softsync"])
    def test_a_policy_that_collects_says_why_not(self, policy: str) -> None:
        with ServerThread(policy=policy, workers=1) as server:
            with pytest.raises(BadPush, match=f"{policy} collects gradients before a step"):
                aiops.Worker(server.url, DENSE, tables=TABLES, timeout=PATIENCE)
            with aiops.Worker(server.url, DENSE, timeout=PATIENCE) as ps:
                assert ps.step(lambda params: DENSE).version == 1

    def test_tables_without_names(self, shared: ServerThread) -> None:
        with pytest.raises(UsageError, match=r"a mapping of names to aiops\.Table, not list"):
            aiops.Worker(shared.url, DENSE, tables=[*TABLES.values()])  # type: ignore[arg-type]

    def test_a_name_for_two_things(self, shared: ServerThread) -> None:
        with pytest.raises(UsageError, match="'w' is the name of a table and of a tensor"):
            aiops.Worker(shared.url, DENSE, tables={"w": TABLES["bias"]}, timeout=PATIENCE)

    def test_a_model_of_tables_alone(self) -> None:
        with (
            ServerThread(policy="fasgd") as server,
            aiops.Client(server.url, timeout=PATIENCE) as early,
        ):
            with pytest.raises(NotReady):
                early.fetch_rows("embedding", [1])
            with aiops.Worker(server.url, {}, tables=TABLES, timeout=PATIENCE) as ps:
                assert (len(ps.params), ps.version, ps.refresh()) == (0, 0, 0)
                ps.push_rows("embedding", [1], np.ones((1, 4), np.float32))
                np.testing.assert_array_equal(
                    early.fetch_rows("embedding", [1]), ps.fetch_rows("embedding", [1])
                )
                with pytest.raises(UsageError, match="holds no tensor"):
                    ps.step({})

    def test_tensors_and_tables_side_by_side(self) -> None:
        with ServerThread(policy="asgd", set={"lr": 1.0}) as server, worker(server.url) as ps:
            ps.push_rows("bias", [0], np.ones((1, 1)))
            receipt = ps.step({"w": np.ones(3, np.float32)})
            assert (receipt.version, receipt.staleness) == (1, 0)
            np.testing.assert_array_equal(ps.params["w"], np.zeros(3))


class TestVersions:
    def test_a_push_says_the_version_its_rows_were_fetched_at(self) -> None:
        with (
            ServerThread(policy="sasgd", set={"lr": 1.0}) as server,
            worker(server.url) as slow,
            worker(server.url) as quick,
        ):
            before = slow.fetch_rows("embedding", [5])
            grads = np.ones((1, 4), np.float32)
            for _ in range(4):
                quick.push_rows("embedding", [6], grads)
            receipt = slow.push_rows("embedding", [5], grads)
            assert receipt.staleness == 4
            np.testing.assert_array_equal(slow.fetch_rows("embedding", [5]), before - 0.25)
            assert slow._client.row_versions == {"embedding": 5}
            assert slow.push_rows("embedding", [5], grads).staleness == 0

    @pytest.mark.slow
    def test_rows_of_an_earlier_run_of_the_server_are_not_pushed_to(self) -> None:
        grads = np.ones((1, 4), np.float32)
        with server_process("--policy", "asgd") as first:
            port = first.url.rpartition(":")[2]
            ps = aiops.Client(first.url, role="worker", timeout=PATIENCE)
            ps.define(DENSE, TABLES)
            ps.fetch_rows("embedding", [1])
            ps.push_rows("embedding", [1], grads)
        with ps, server_process("--policy", "asgd", "--port", port):
            with aiops.Client(first.url, role="worker", timeout=PATIENCE) as other:
                other.define(DENSE, TABLES)
            ps.ping()
            with pytest.raises(Restarted, match="was restarted"):
                ps.push_rows("embedding", [1], grads)
            np.testing.assert_array_equal(ps.fetch_rows("embedding", [1]), begun([1]))
            assert ps.push_rows("embedding", [1], grads).version == 1

    def test_a_server_that_has_lost_its_model_is_offered_it_again(self) -> None:
        grads = np.ones((1, 4), np.float32)
        with ServerThread(policy="asgd", set={"lr": 1.0}) as first:
            port = int(first.url.rpartition(":")[2])
            ps = aiops.Worker(first.url, DENSE, tables=TABLES, timeout=PATIENCE)
            ps.push_rows("bias", [1], np.ones((1, 1)))
        with ps, ServerThread(policy="asgd", set={"lr": 1.0}, port=port):
            with pytest.raises(Restarted):
                ps.push_rows("embedding", [3], grads)
            np.testing.assert_array_equal(ps.fetch_rows("embedding", [3]), begun([3]))
            assert ps.push_rows("embedding", [3], grads).version == 1
            assert ps.stats()["version"] == 0
            receipt = ps.step({"w": np.ones(3, np.float32)})
            assert (receipt.used, receipt.version) == (False, 0)
            assert ps.step({"w": np.ones(3, np.float32)}).version == 1

    def test_tasks_of_an_asyncio_worker_offer_it_once(self) -> None:
        """Two that fetch rows, and one in whose step gradients are being computed of rows."""

        async def lose(ps: aiops.AsyncWorker) -> None:
            async def gradients(params: aiops.Params) -> dict[str, Any]:
                await ps.fetch_rows("embedding", [2])
                return {"w": np.ones(3, np.float32)}

            fetches = [ps.fetch_rows("embedding", [id]) for id in (1, 2)]
            *rows, receipt = await asyncio.gather(*fetches, ps.step(gradients))
            for id, found in zip((1, 2), rows, strict=True):
                np.testing.assert_array_equal(found, begun([id]))
            assert receipt.version == 1
            assert (await ps.stats())["version"] == 1

        async def run() -> None:
            with ServerThread(policy="asgd", set={"lr": 1.0}) as first:
                port = int(first.url.rpartition(":")[2])
                ps = aiops.AsyncWorker(first.url, DENSE, tables=TABLES, timeout=PATIENCE)
                await ps.connect()
                offers, offer = [], ps._client.offer

                async def counted(*model: Any) -> bool:
                    offers.append(model)
                    return await offer(*model)

                ps._client.offer = counted  # type: ignore[method-assign]
            async with ps:
                with ServerThread(policy="asgd", set={"lr": 1.0}, port=port):
                    await lose(ps)
                    assert len(offers) == 1

        asyncio.run(run())

    def test_concurrent_calls_are_answered_one_by_one(self, shared: ServerThread) -> None:
        async def many() -> None:
            async with aiops.AsyncClient(shared.url, role="worker", timeout=PATIENCE) as ps:
                await ps.define(DENSE, TABLES)
                ids = [np.array([600 + n, 600 + n]) for n in range(100)]
                grads = np.full((2, 4), 0.25, np.float32)
                receipts = await asyncio.gather(
                    *(ps.push_rows("embedding", id, grads) for id in ids)
                )
                assert len({receipt.version for receipt in receipts}) == 100
                rows = await asyncio.gather(*(ps.fetch_rows("embedding", id) for id in ids))
                for id, got in zip(ids, rows, strict=True):
                    np.testing.assert_array_equal(got, begun(id) - np.float32(0.25))

        asyncio.run(many())


def taken(running: Any) -> int:
    """Bytes of the room for answers with rows that are in use."""
    running.engine.admission.row_pool.settle()
    out: int = running.engine.admission.row_pool.out
    return out


class TestMuch:
    @testing.virtual()
    async def test_a_reader_that_does_not_read_its_rows_keeps_nobody_from_pushing(self) -> None:
        wide = {"big": aiops.Table(1 << 12, 1 << 10)}
        ids, network = np.arange(512), testing.network()
        async with (
            aiops.serve(policy="asgd") as server,
            aiops.AsyncClient(server.url, role="worker", timeout=200.0) as ps,
        ):
            params = await ps.define(DENSE, wide)
            server.engine.admission.row_pool.bound = 4 << 20
            server.engine.admission.pool.bound = 4 << 20
            network.add(
                testing.Host("reader", down=(testing.SimulatedLink(1e3),))
            )  # bytes per second
            with network.at("reader"):
                reader = await aiops.AsyncClient(server.url).connect()
            await reader.fetch(params.copy())
            many = [asyncio.create_task(reader.fetch_rows("big", ids)) for _ in range(8)]
            await testing.until(  # 2 MiB each, of which next to nothing is read
                lambda: server.engine.admission.row_pool.waiting == 1, "the room for rows is taken"
            )
            pushes = [(await ps.exchange(params, DENSE)).version for _ in range(3)]
            assert pushes == [1, 2, 3], "who pushes tensors does not notice"
            await ps.push_rows("big", ids[:8], np.ones((8, 1 << 10), np.float32))
            got = await ps.fetch_rows("big", ids)
            assert got.shape == (512, 1 << 10), "who wants rows waits until the other is gone"
            assert asyncio.get_running_loop().time() > 1, "which is when it has read too little"
            for one in many:
                one.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            await reader.close()
            await testing.until(lambda: taken(server) == 0, "back")

    def test_large_answers_give_their_room_back(self) -> None:
        table = {"big": aiops.Table(1 << 21, 8, init="normal")}
        with ServerThread(policy="asgd") as server:
            with aiops.Worker(server.url, {}, tables=table, timeout=PATIENCE) as ps:
                ids = np.arange(300_000)
                first = ps.fetch_rows("big", ids)
                assert first.nbytes > 1 << 22
                for _ in range(3):
                    np.testing.assert_array_equal(ps.fetch_rows("big", ids), first)
                with pytest.raises(UsageError, match="at most 1,048,576 of this width"):
                    ps.fetch_rows("big", np.zeros(1 << 21, np.int64))

            eventually(lambda: server.call(taken) == 0, "the buffers are back")

    def test_many_workers_push_to_the_same_rows(self) -> None:
        """Integers, so that the sum does not depend on the order."""
        table = {"t": aiops.Table(50, 2, init="zeros")}
        with ServerThread(policy="asgd", set={"lr": 1.0}) as server:

            def run(number: int) -> None:
                rng = np.random.default_rng(number)
                with aiops.Worker(server.url, {}, tables=table, timeout=PATIENCE) as ps:
                    for _ in range(30):
                        ids = rng.integers(0, 50, 40)
                        ps.exchange_rows("t", ids, np.ones((40, 2), np.float32), ids[:3])

            threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            with aiops.Client(server.url, timeout=PATIENCE) as ps:
                rows = ps.fetch_rows("t", np.arange(50))
                [line] = ps.stats()["tables"]
            assert rows.sum() == -4 * 30 * 40 * 2
            assert (line["version"], line["made"], line["rows_pushed"]) == (120, 50, 4800)

    @pytest.mark.slow
    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_a_table_takes_the_memory_of_what_was_pushed_to_it(self) -> None:
        """100 million rows with FASGD's state are 25.6 GB; a thousand of them a few MB."""
        table = {"huge": aiops.Table(100_000_000, 16)}
        with (
            server_process("--policy", "fasgd", "--kernels", "numpy") as server,
            aiops.Worker(server.url, {}, tables=table, timeout=PATIENCE) as ps,
        ):
            rng = np.random.default_rng(0)
            ps.push_rows("huge", [0], np.ones((1, 16), np.float32))
            before = resident(server.popen.pid)
            for _ in range(10):
                ps.fetch_rows("huge", rng.integers(0, 100_000_000, 10_000))
            assert resident(server.popen.pid) - before < 8 << 20
            ids = rng.integers(0, 100_000_000, 1000)
            ps.push_rows("huge", ids, np.ones((1000, 16), np.float32))
            assert resident(server.popen.pid) - before < 24 << 20
            [line] = ps.stats()["tables"]
            assert line["made"] == len(np.unique(ids)) + 1
            assert line["bytes"] == line["made"] * 4 * 64


class TestFiles:
    @pytest.mark.parametrize("dense", [True, False])
    def test_a_saved_table_goes_on_where_it_was(self, tmp_path: Path, dense: bool) -> None:
        """Saved, begun with again under a journal, and replayed: the same rows each time."""
        saved, journal = tmp_path / "model.safetensors", tmp_path / "journal"
        tensors = DENSE if dense else {}
        ids = np.array([1, 999, 30, 1])
        with (
            ServerThread(policy="fasgd", save=saved) as server,
            aiops.Worker(server.url, tensors, tables=TABLES, timeout=PATIENCE) as ps,
        ):
            ps.push_rows("embedding", ids, np.ones((4, 4), np.float32))
            rows = ps.fetch_rows("embedding", np.arange(1000))
        with (
            ServerThread(policy="fasgd", init=saved, record=journal) as server,
            aiops.Worker(server.url, tensors, tables=TABLES, timeout=PATIENCE) as ps,
        ):
            np.testing.assert_array_equal(ps.fetch_rows("embedding", np.arange(1000)), rows)
            assert [line["made"] for line in ps.stats()["tables"]] == [0, 3]
            receipt = ps.push_rows("embedding", [5, 1], np.ones((2, 4), np.float32))
            assert receipt.version == 1
            rows = ps.fetch_rows("embedding", np.arange(1000))
        again = replayed(journal)
        assert again.complete
        _bias, embedding = again.engine.tables
        out = np.empty((1000, 4), np.float32)
        embedding.gather(np.arange(1000), out)
        np.testing.assert_array_equal(out, rows)

    def test_a_policy_that_takes_no_tables_does_not_begin_with_one(self, tmp_path: Path) -> None:
        saved = tmp_path / "model.safetensors"
        with ServerThread(policy="asgd", save=saved) as server, worker(server.url):
            pass
        with (
            pytest.raises(ConflictError, match="has tables, but softsync collects"),
            ServerThread(policy="softsync", workers=1, init=saved),
        ):
            pass


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")
