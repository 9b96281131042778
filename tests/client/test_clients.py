"""Every client passes one suite: what is asked for, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import uvloop

import aiops
from aiops import testing
from aiops.client import AsyncClient, Client, Params, Receipt
from aiops.errors import (
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    NotReady,
    Refused,
    Unauthorised,
    UsageError,
)
from aiops.model.layout import Array
from aiops.wire import messages
from aiops.wire.messages import Report, Stats
from tests.adapter import Adapter
from tests.peers import Peer
from tests.proxy import Proxy
from tests.support import PATIENCE, ServerThread, assert_same
from tests.transports import TRANSPORTS, choose

DTYPES = ("float64", "float32", "float16", "bfloat16")


Connect = Callable[..., Any]


LOOPS = {"tcp": "asyncio", "near": "uvloop", "lent": "asyncio", "shards": "uvloop"}
"""The event loop of the asynchronous client over each transport; the client is one on both."""


@pytest.fixture(params=TRANSPORTS, autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=["blocking", "async"])
def connect(request: pytest.FixtureRequest, transport: str) -> Connect:
    if request.param == "blocking":
        return Client
    on_uvloop = LOOPS[transport] == "uvloop"
    new_loop = uvloop.new_event_loop if on_uvloop else asyncio.new_event_loop
    return lambda url, **arguments: Adapter(new_loop, url, **arguments)


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as running:
        yield running


def small(seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        "layer.weight": random.integers(-8, 8, (4, 3)).astype(np.float32),
        "layer.bias": random.integers(-8, 8, 3).astype(np.float32),
    }


def ones(params: Params, times: float = 1) -> dict[str, Array]:
    return {name: np.full(a.shape, times, a.dtype) for name, a in params.items()}


class TestModel:
    def test_the_first_offer_defines_the_model(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as first, connect(server.url) as second:
            params = first.define(small())
            assert params.version == 0
            assert_same(params, small())
            assert_same(second.fetch(), small())

    def test_a_later_offer_gets_what_is_there(self, connect: Connect, server: Any) -> None:
        with (
            connect(server.url, role="worker") as first,
            connect(server.url, role="worker") as second,
        ):
            params = first.define(small(1))
            first.push(params, ones(params))
            got = second.define(small(2))
            assert got.version == 1
            assert_same(got, {name: array - 1 for name, array in small(1).items()})

    def test_another_model_is_refused_with_the_difference(
        self, connect: Connect, server: Any
    ) -> None:
        others: list[tuple[dict[str, Array], str]] = [
            ({"layer.weigth": np.zeros((4, 3), np.float32)}, "did you mean 'layer.weight'"),
            ({"layer.weight": np.zeros((3, 4), np.float32)}, "'layer.weight' has shape"),
            ({"layer.weight": np.zeros((4, 3), np.float64)}, "'layer.weight' is float32"),
            ({"layer.weight": np.zeros((4, 3), np.float32)}, "'layer.bias' is missing"),
        ]
        with connect(server.url, role="worker") as client:
            client.define(small())
            for other, text in others:
                with pytest.raises(BadPush, match=text):
                    client.define(other)
                assert_same(client.fetch(), small())

    def test_an_observer_defines_nothing(self, connect: Connect, server: Any) -> None:
        with connect(server.url) as observer:
            with pytest.raises(BadPush, match="only a worker may define"):
                observer.define(small())
            with pytest.raises(NotReady):
                observer.fetch()

    def test_what_cannot_be_a_model_is_not_sent(self, connect: Connect, server: Any) -> None:
        wrong: list[tuple[dict[str, Array], str]] = [
            ({}, "1 to"),
            ({"ids": np.zeros(3, np.int64)}, "'int64' of 'ids' cannot be trained"),
            ({"nothing": np.zeros((0, 4), np.float32)}, "every tensor is empty"),
        ]
        with connect(server.url, role="worker") as client:
            for arrays, text in wrong:
                with pytest.raises(UsageError, match=text):
                    client.define(arrays)
                assert client.ping() >= 0

    def test_a_model_with_a_bad_value_is_refused(self, connect: Connect, server: Any) -> None:
        bad = small()
        bad["layer.bias"][2] = np.nan
        with connect(server.url, role="worker") as client:
            with pytest.raises(BadPush, match=r"'layer.bias' holds nan at \[2\]") as caught:
                client.define(bad)
            assert caught.value.details["tensor"] == "layer.bias"
            assert_same(client.define(small()), small())


class TestValues:
    @pytest.mark.parametrize("dtype", [*DTYPES, "mixed"])
    def test_every_dtype(self, connect: Connect, server: Any, dtype: str) -> None:
        names = DTYPES if dtype == "mixed" else (dtype,) * 3
        random = np.random.default_rng(3)
        arrays = {
            f"t{index}": random.integers(-9, 9, (5, index + 1)).astype(ml_dtypes_of(name))
            for index, name in enumerate(names)
        }
        with connect(server.url, role="worker") as client:
            params = client.define(arrays)
            assert_same(params, arrays)
            receipt = client.exchange(params, ones(params, 2))
            assert receipt == Receipt(1, 0, 0.0, None, {})
            assert_same(
                params, {name: array - array.dtype.type(2) for name, array in arrays.items()}
            )

    def test_scalars_and_empty_tensors(self, connect: Connect, server: Any) -> None:
        arrays = {
            "empty first": np.zeros((0, 7), np.float32),
            "scalar": np.array(3.0, np.float32),
            "empty between": np.zeros((2, 0), np.float32),
            "vector": np.arange(3, dtype=np.float32),
            "half scalar": np.array(1.5, np.float16),
            "empty last": np.zeros(0, np.float16),
        }
        with connect(server.url, role="worker") as client:
            params = client.define(arrays)
            assert_same(params, arrays)
            client.exchange(params, ones(params))
            client.exchange(params, {"scalar": np.array(1, np.float32)})
            assert params["scalar"] == 1.0
            np.testing.assert_array_equal(params["vector"], [-1, 0, 1])
            assert params["half scalar"] == 0.5

    def test_a_thousand_tensors(self, connect: Connect, server: Any) -> None:
        arrays = {
            f"block.{index}.weight": np.full(1 + index % 7, index, np.float32)
            for index in range(1000)
        }
        with connect(server.url, role="worker") as client:
            params = client.define(arrays)
            client.exchange(params, ones(params))
            gradients = ones(params)
            odd = {name: gradients[name] for name in list(params)[1::2]}
            receipt = client.exchange(params, odd)
            assert receipt.version == 2
            expected = {name: array - (2 if name in odd else 1) for name, array in arrays.items()}
            assert_same(params, expected)
            assert params.versions.tolist() == [1, 2] * 500
            with pytest.raises(UsageError, match=r"no tensor 'block.1000.weight'; did you mean"):
                client.push(params, {"block.1000.weight": np.zeros(1, np.float32)})
            with pytest.raises(BadPush, match="it has no tensor 'quite another name'"):
                client.define({"quite another name": np.zeros(1, np.float32)})
            assert_same(client.fetch(), expected)

    @pytest.mark.parametrize("nbytes", [1 << 14, (1 << 16) - 4, 1 << 16, 5 << 20, (9 << 20) + 4])
    def test_every_size_arrives_whole(self, connect: Connect, server: Any, nbytes: int) -> None:
        start = np.random.default_rng(4).integers(-99, 99, nbytes // 4).astype(np.float32)
        with connect(server.url, role="worker") as client:
            params = client.define({"w": start})
            gradient = np.arange(start.size, dtype=np.float32) % 64
            for step in range(1, 4):
                assert client.exchange(params, {"w": gradient}).version == step
            np.testing.assert_array_equal(params["w"], start - 3 * gradient)
            np.testing.assert_array_equal(client.fetch()["w"], params["w"])

    def test_gradients_of_any_memory_layout(self, connect: Connect, server: Any) -> None:
        wide = np.arange(24, dtype=np.float32).reshape(4, 6)
        with connect(server.url, role="worker") as client:
            params = client.define({"w": wide.T})
            np.testing.assert_array_equal(params["w"], wide.T)
            client.exchange(params, {"w": wide.T})
            assert not params["w"].any()
            client.exchange(params, {"w": np.full((6, 8), -1, np.float32)[:, ::2]})
            np.testing.assert_array_equal(params["w"], np.ones((6, 4)))

    def test_bytes_in_the_other_order_are_turned_round(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            params = client.define({"w": np.arange(3, dtype=">f4")})
            np.testing.assert_array_equal(params["w"], [0, 1, 2])
            client.exchange(params, {"w": np.ones(3, ">f4")})
            np.testing.assert_array_equal(params["w"], [-1, 0, 1])


def ml_dtypes_of(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


class TestPushes:
    def test_push_exchange_and_fetch_agree(self, connect: Connect, server: Any) -> None:
        with (
            connect(server.url, role="worker") as one,
            connect(server.url, role="worker") as other,
        ):
            params, mine = one.define(small()), other.define(small())
            arrays = list(params.values())
            receipt = one.push(params, ones(params))
            assert (receipt.version, receipt.staleness) == (1, 0)
            assert params.version == 0, "a push fetches nothing"
            receipt = other.exchange(mine, ones(mine, 2))
            assert (receipt.version, receipt.staleness, receipt.mean_staleness) == (2, 1, 1.0)
            expected = {name: array - 3 for name, array in small().items()}
            assert_same(mine, expected)
            assert one.fetch(params) is params
            assert params.version == 2
            assert_same(params, expected)
            assert all(a is b for a, b in zip(arrays, params.values(), strict=True))

    def test_staleness_is_each_tensors_own(self, connect: Connect, server: Any) -> None:
        arrays = {"a": np.zeros(30, np.float32), "b": np.zeros(10, np.float32)}
        with connect(server.url, role="worker") as client:
            old = client.define(arrays)
            new = old.copy()
            for _ in range(4):
                client.exchange(new, {"a": np.ones(30, np.float32)})
            assert new.versions.tolist() == [4, 0]
            assert client.push(old, {"b": np.ones(10, np.float32)}).staleness == 0
            receipt = client.push(old, ones(old))
            assert receipt.staleness == 4
            assert receipt.mean_staleness == pytest.approx((4 * 30 + 1 * 10) / 40)
            assert client.stats()["staleness"] == {"0": 5, "4": 1}

    def test_an_unchanged_model_is_not_sent_again(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            params = client.define({"w": np.zeros(1 << 20, np.float32)})
            came, _ = client.traffic
            client.fetch(params)
            assert client.traffic[0] - came < 200
            client.push(params, {"w": np.ones(1 << 20, np.float32)})
            came, _ = client.traffic
            client.fetch(params)
            assert client.traffic[0] - came > 4 << 20

    def test_an_arena_of_gradients_is_one_payload(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            params = client.define(small())
            gradients = params.like()
            gradients["layer.bias"][:] = 3
            client.exchange(params, gradients)
            np.testing.assert_array_equal(params["layer.bias"], small()["layer.bias"] - 3)
            np.testing.assert_array_equal(params["layer.weight"], small()["layer.weight"])

    def test_params_of_an_older_version_may_be_pushed(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            params = client.define(small())
            for _ in range(3):
                client.push(params, ones(params))
            assert client.stats()["staleness"] == {"0": 1, "1": 1, "2": 1}


class TestRefusals:
    def test_nothing_is_there_yet(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            with pytest.raises(NotReady, match="no worker has defined the model yet"):
                client.fetch()
            assert client.stats()["version"] == 0

    def test_what_does_not_fit_is_not_sent(self, connect: Connect, server: Any) -> None:
        wrong: list[tuple[Any, str]] = [
            ({}, "push at least one"),
            ({"layer.bia": np.zeros(3, np.float32)}, "did you mean 'layer.bias'"),
            ({"layer.bias": np.zeros(4, np.float32)}, r"'layer.bias'.*shape \(4,\).*\(3,\)"),
            ({"layer.bias": np.zeros((3, 1), np.float32)}, r"'layer.bias'.*shape \(3, 1\)"),
            ({"layer.bias": np.zeros(3, np.float64)}, r"'layer.bias'.*astype\('float32'\)"),
            ({"layer.bias": [1.0, 2.0, 3.0]}, r"'layer.bias'.*astype\('float32'\)"),
        ]
        with connect(server.url, role="worker") as client:
            params = client.define(small())
            for gradients, text in wrong:
                for send in (client.push, client.exchange):
                    with pytest.raises(UsageError, match=text):
                        send(params, gradients)
            assert client.exchange(params, ones(params)).version == 1

    def test_a_bad_value_names_its_tensor_and_changes_nothing(
        self, connect: Connect, server: Any
    ) -> None:
        values = (np.nan, np.inf, -np.inf, 1e20, -1e19)
        with connect(server.url, role="worker") as client:
            params = client.define(small())
            for value in values:
                gradients = ones(params)
                gradients["layer.weight"][2, 1] = value
                match = r"'layer.weight' holds .* at \[2, 1\]"
                with pytest.raises(BadPush, match=match) as caught:
                    client.exchange(params, gradients)
                assert caught.value.details["tensor"] == "layer.weight"
                assert_same(client.fetch(), small())
            assert client.exchange(params, ones(params)).version == 1
            assert client.stats()["refused"] == {"bad-push": len(values)}

    def test_the_future_is_refused(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            params = client.define(small())
            params.versions += 5
            with pytest.raises(BadPush, match="computed at version 5, but the server is at 0"):
                client.push(params, ones(params))
            assert_same(client.fetch(), small())

    def test_an_observer_pushes_nothing(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as worker, connect(server.url) as observer:
            worker.define(small())
            params = observer.fetch()
            with pytest.raises(BadPush, match="connect with role='worker'"):
                observer.push(params, ones(params))
            assert_same(observer.fetch(), small())

    def test_a_stale_gradient_brings_the_parameters(self, connect: Connect) -> None:
        settings = {"policy": "hardsync", "workers": 1, "set": {"admission": "reject", "lr": 1}}
        with (
            ServerThread(kernels="numpy", **settings) as server,
            connect(server.url, role="worker") as client,
        ):
            params = client.define(small())
            client.push(params, ones(params))
            with pytest.raises(aiops.errors.StaleGradient) as caught:
                client.exchange(params, ones(params))
            assert caught.value.details["staleness"] == 1
            assert params.version == 1
            assert_same(params, {name: array - 1 for name, array in small().items()})
            assert client.exchange(params, ones(params)).version == 2


class TestConnections:
    def test_ping_and_stats(self, connect: Connect, server: Any) -> None:
        with connect(server.url, name="watcher") as client:
            assert 0 <= client.ping() < PATIENCE
            stats = client.stats()
            assert stats["policy"] == "asgd"
            assert stats["settings"]["lr"] == 1.0
            assert [w["name"] for w in stats["workers"]] == ["watcher"]
            assert client.policy == "asgd"
            assert client.plan["recompute"] is False

    def test_token(self, connect: Connect) -> None:
        with ServerThread(policy="asgd", token="open sesame") as server:
            with connect(server.url, token="open sesame") as client:
                client.ping()
            with pytest.raises(Unauthorised, match="the token is wrong"):
                connect(server.url, token="open barley")
            with pytest.raises(Unauthorised, match="set AIOPS_TOKEN"):
                connect(server.url)

    def test_a_server_without_the_token_is_not_trusted(self, connect: Connect, server: Any) -> None:
        with pytest.raises(Unauthorised, match="asked for no token"):
            connect(server.url, token="open sesame")

    def test_token_from_the_environment(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_TOKEN", "open sesame")
        with (
            ServerThread(policy="asgd", token="open sesame") as server,
            connect(server.url) as client,
        ):
            client.ping()

    def test_an_empty_token_in_the_environment_is_none(
        self, connect: Connect, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_TOKEN", "")
        with connect(server.url) as client:
            client.ping()

    @pytest.mark.parametrize("transport", ["tcp", "near"], indirect=True)  # there is no server
    def test_nobody_there(self, connect: Connect) -> None:
        with socket.socket() as bound:  # so that no other test takes the port meanwhile
            bound.bind(("127.0.0.1", 0))
            url = f"aiops://127.0.0.1:{bound.getsockname()[1]}"
            # Time for at least one attempt, also where others take the processor meanwhile.
            with pytest.raises(ConnectionLost, match=f"{url} cannot be reached .*is the server"):
                connect(url, timeout=1.0)

    def test_somebody_else_there(self, connect: Connect, server: Any) -> None:
        with Proxy(server.url) as proxy:
            proxy.stall("down", after=0)
            with pytest.raises(ConnectionLost):
                connect(proxy.url, timeout=0.3)

    @pytest.mark.parametrize("url", ["http://h:1", "aiops://", "aiops://h:x", "aiops://h:1/path"])
    def test_no_address(self, connect: Connect, url: str) -> None:
        with pytest.raises(UsageError, match="aiops://host:port"):
            connect(url)

    def test_no_such_role(self, connect: Connect, server: Any) -> None:
        with pytest.raises((UsageError, Refused), match="neither 'worker' nor 'observer'"):
            connect(server.url, role="boss")

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
    def test_no_time(self, connect: Connect, timeout: float) -> None:
        with pytest.raises(UsageError, match="timeout must be more than 0"):
            connect("aiops://h:1", timeout=timeout)

    def test_close(self, connect: Connect, server: Any) -> None:
        with connect(server.url, role="worker") as client:
            client.define(small())
            client.close()
            client.close()
            with pytest.raises(UsageError, match="closed"):
                client.ping()

    @pytest.mark.parametrize(
        ("call", "what"), [("ping", "a sign of life"), ("stats", "the statistics")]
    )
    def test_deadline(self, connect: Connect, server: Any, call: str, what: str) -> None:
        """No barrier holds these answers: the server's patience with workers is not added."""
        assert server.call(lambda s: s.engine.plan["patience"]) > PATIENCE
        with Proxy(server.url) as proxy, connect(proxy.url) as client:
            client.ping()
            getattr(client, "client", client).timeout = 0.3
            proxy.stall("down", after=0)
            with pytest.raises(DeadlineExceeded, match=rf"{what} in .*timeout=\.\.\."):
                getattr(client, call)()

    def test_a_lost_connection_is_made_anew(self, connect: Connect, server: Any) -> None:
        with Proxy(server.url) as proxy, connect(proxy.url, role="worker") as client:
            params = client.define(small())
            proxy.cut_all()
            assert client.exchange(params, ones(params)).version == 1
            assert proxy.connections >= 2


class TestAsync:
    """What only the async client can do."""

    async def test_concurrent_calls_share_a_connection(self, server: ServerThread) -> None:
        async with AsyncClient(server.url, role="worker") as client:
            params = await client.define(small())
            copies = [params.copy() for _ in range(10)]
            calls: list[Coroutine[Any, Any, Any]] = [
                call
                for mine in copies
                for call in (
                    client.exchange(mine, ones(mine)),
                    client.fetch(),
                    client.stats(),
                    client.ping(),
                    client.fetch(),
                )
            ]
            results = await asyncio.gather(*calls)
            assert sorted(r.version for r in results if isinstance(r, Receipt)) == list(
                range(1, 11)
            )
            assert server.call(lambda s: len(s.connections.peers)) == 1
            final = await client.fetch()
            assert_same(final, {name: array - 10 for name, array in small().items()})

    @pytest.mark.parametrize("steady", [False, True])
    async def test_as_many_pushes_are_under_way_as_the_server_remembers(
        self, server: ServerThread, steady: bool
    ) -> None:
        """A steady exchange that others overtake is one of them."""
        async with AsyncClient(server.url, role="worker") as client:
            params = await client.define(small())
            await client.exchange(params, ones(params))
            calls: list[Coroutine[Any, Any, Receipt]] = [
                client.push(params.copy(), ones(params)) for _ in range(100)
            ]
            if steady:
                calls.insert(0, client.exchange(params, ones(params)))
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0)  # each has begun, and no answer has come yet
            assert len(client._session.pending.by_id) == messages.REMEMBERED == 64
            receipts = await asyncio.gather(*tasks)
            assert sorted(r.version for r in receipts) == list(range(2, len(calls) + 2))

    async def test_more_pushes_than_the_server_remembers(self, server: ServerThread) -> None:
        """All are applied once, although the connection is lost before any is answered."""
        with Proxy(server.url) as proxy:
            async with AsyncClient(proxy.url, role="worker") as client:
                params = await client.define(small())
                fault = proxy.stall("down", after=0)
                calls = [
                    asyncio.ensure_future(client.push(params, ones(params))) for _ in range(300)
                ]
                await asyncio.to_thread(fault.wait)
                proxy.cut_all()
                receipts = await asyncio.gather(*calls)
                assert sorted(r.version for r in receipts) == list(range(1, 301))
                final = await client.fetch()
                assert_same(final, {name: array - 300 for name, array in small().items()})

    async def test_a_cancelled_push_lets_go_of_its_gradient(self, server: ServerThread) -> None:
        """The caller may overwrite it at once: what is applied, if anything, is all of it."""
        size = 8 << 20
        with Proxy(server.url) as proxy:
            async with AsyncClient(proxy.url, role="worker") as client:
                params = await client.define({"w": np.zeros(size // 4, np.float32)})
                gradient = np.ones(size // 4, np.float32)
                fault = proxy.stall("up", after=1 << 20)
                call = asyncio.ensure_future(client.push(params, {"w": gradient}))
                await asyncio.to_thread(fault.wait)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                gradient[:] = 7
                fault.release()
                after = await client.fetch()
                assert set(np.unique(after["w"])) <= {0.0, -1.0}
                assert len(np.unique(after["w"])) == 1

    @testing.virtual()
    async def test_a_deadline_leaves_the_connection_usable(self) -> None:
        network, loop = testing.network(), asyncio.get_running_loop()
        async with aiops.serve(policy="asgd", kernels="numpy") as server:
            with network.at("alice"):
                client = await AsyncClient(server.url, timeout=2.0).connect()
            assert client.patience == 2 + server.config.worker_deadline
            network.silence("alice")
            with pytest.raises(DeadlineExceeded, match="sign of life in 2 s"):
                await client.ping()
            assert loop.time() == 2.0
            loop.call_later(1.0, network.restore, "alice")
            client.timeout = PATIENCE
            assert await client.ping() == pytest.approx(1.0)
            assert len(server.connections.peers) == 1
            await client.close()

    @testing.virtual()
    async def test_who_waits_when_it_is_closed_hears_so(self) -> None:
        network = testing.network()
        async with aiops.serve(policy="asgd", kernels="numpy") as server:
            with network.at("alice"):
                client = await AsyncClient(server.url).connect()
            network.silence("alice")
            call = asyncio.ensure_future(client.ping())
            await asyncio.sleep(1)
            await client.close()
            with pytest.raises(ConnectionLost, match="closed before the answer came"):
                await call

    @testing.virtual()
    async def test_closing_does_not_wait_for_a_server_that_reads_nothing(self) -> None:
        network, loop = testing.network(), asyncio.get_running_loop()
        async with aiops.serve(policy="asgd", kernels="numpy") as server:
            line = testing.SimulatedLink(1e6)
            network.add(testing.Host("alice", (line,), (line,)))
            with network.at("alice"):
                client = await AsyncClient(server.url, role="worker").connect()
            call = asyncio.ensure_future(client.define({"w": np.zeros(8 << 20, np.float32)}))
            await asyncio.sleep(1)
            network.silence("localhost")
            closing = loop.time()
            await client.close()
            assert loop.time() - closing <= 5
            with pytest.raises(ConnectionLost):
                await call
            network.restore("localhost")

    async def test_a_client_that_never_connected_can_be_closed(self) -> None:
        client = AsyncClient("aiops://127.0.0.1:1")
        await client.close()
        with pytest.raises(UsageError, match="closed"):
            await client.ping()


class TestTraffic:
    def test_both_sides_count_alike(self, connect: Connect, server: Any) -> None:
        with (
            connect(server.url, role="worker", name="w") as worker,
            Peer(server.url, "observer") as observer,
        ):
            params = worker.define(small())
            for _ in range(3):
                worker.exchange(params, ones(params))
            worker.fetch(params)
            stats = observer.ask(Stats(1))
            assert isinstance(stats, Report)
            [row] = [w for w in stats.report["workers"] if w["name"] == "w"]
            assert (row["bytes_fetched"], row["bytes_pushed"]) == worker.traffic
