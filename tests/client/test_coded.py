"""Gates, coded pushes and coded fetches over real sockets, through every client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import aiops
from aiops.client import AsyncWorker, Client, Worker
from aiops.client.params import Params
from aiops.client.strategies import strategy_for
from aiops.errors import BadPush, UsageError
from aiops.model.layout import Array
from aiops.serving.server import Server
from tests.adapter import Adapter
from tests.proxy import Proxy
from tests.recording import replayed
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

SIZE = 6000
START: dict[str, Array] = {
    "w": np.linspace(-3, 3, SIZE).astype(np.float32).reshape(60, 100),
    "narrow": np.linspace(-1, 1, 2000).astype(np.float16),
    "b": np.full(3, 2, np.float64),
}
Compute = Callable[[Any], dict[str, Array]]
Step = Callable[[Compute], Any]

PUSH, FETCH = ["topk:0.05", "int8@narrow"], ["int8"]


def gradients(params: Any) -> dict[str, Array]:
    """A pull towards 1."""
    return {name: np.asarray(array - array.dtype.type(1)) for name, array in params.items()}


@contextlib.contextmanager
def with_worker(url: str) -> Iterator[tuple[Step, Any]]:
    with Worker(url, START, timeout=PATIENCE) as worker:
        yield worker.step, worker.params


@contextlib.contextmanager
def with_async_worker(url: str) -> Iterator[tuple[Step, Any]]:
    with Adapter(asyncio.new_event_loop, url, START, of=AsyncWorker, timeout=PATIENCE) as worker:
        yield worker.step, worker.params


@contextlib.contextmanager
def with_client(url: str) -> Iterator[tuple[Step, Any]]:
    with Client(url, role="worker", timeout=PATIENCE) as client:
        yield from _following(client)


@contextlib.contextmanager
def with_async_client(url: str) -> Iterator[tuple[Step, Any]]:
    adapter = Adapter(asyncio.new_event_loop, url, role="worker", timeout=PATIENCE)
    with adapter as client:
        yield from _following(client)


def _following(client: Any) -> Iterator[tuple[Step, Any]]:
    """Follow the plan with a bare client."""
    routine = strategy_for(client.plan, client.define(START))

    def step(compute: Compute) -> Any:
        routine.apply(compute(routine.params))
        transfer = routine.transfer()
        if transfer is None:
            return None
        receipt = client.carry(transfer)
        routine.arrived(receipt)
        return receipt

    yield step, routine.params
    rest = routine.rest()
    if rest is not None:
        routine.arrived(client.carry(rest))


CLIENTS = {
    "worker": with_worker,
    "async-worker": with_async_worker,
    "client": with_client,
    "async": with_async_client,
}


class Ended:
    """What a run came to."""

    def __init__(self, engine: Any) -> None:
        self.version = engine.store.version
        self.digest = hashlib.sha256(engine.store.current.arena.data.tobytes()).hexdigest()
        report = engine.report()
        self.gradients, self.staleness = report["gradients"], report["staleness"]
        replica = engine.replica
        self.replica = None if replica is None else replica.current.arena.data.tobytes()
        self.values = {k: v.copy() for k, v in engine.store.current.arena.views.items()}
        self.buffers = engine.admission.pool.out

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Ended)
        mine, theirs = (
            (run.version, run.digest, run.gradients, run.staleness, run.replica)
            for run in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]


def ended(server: ServerThread) -> Ended:
    found: Ended = server.call(lambda running: Ended(running.engine))
    return found


def model(server: ServerThread) -> bytes:
    """The parameters themselves."""

    def read(running: Server) -> bytes:
        store = running.engine.store
        assert store is not None
        return store.current.arena.data.tobytes()

    found: bytes = server.call(read)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "codecs": {"push_codec": PUSH, "fetch_codec": FETCH},
    "gate": {"gate": "constant:p_push=0.4,p_fetch=0.4"},
    "by tensor": {"gate": "bfasgd:c_push=0.2,c_fetch=0.2,by=tensor", "fetch_codec": "topk:0.1"},
    "reapply": {"gate": "bfasgd:c_push=0.2,c_fetch=0.2,skipped=reapply", "push_codec": "onebit"},
    "all": {"gate": "periodic:k_push=2,k_fetch=3", "push_codec": PUSH, "fetch_codec": "bf16"},
}


@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_trains(settings: str, client: str) -> None:
    """Two workers bring a quadratic's parameters nearer, and what they hold is the replica's."""
    faults: list[BaseException] = []

    def run(url: str) -> None:
        try:
            with CLIENTS[client](url) as (step, _params):
                for _ in range(60):
                    step(gradients)
        except BaseException as fault:
            faults.append(fault)

    options = SETTINGS[settings]
    with ServerThread(policy="fasgd", set={"lr": 0.02}, kernels="numpy", **options) as server:
        threads = [threading.Thread(target=run, args=(server.url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not faults
        end = ended(server)
    assert end.version > 10
    assert end.buffers == 0
    for name, array in START.items():
        assert end.values[name].dtype == array.dtype
        assert np.abs(end.values[name] - 1).mean() < np.abs(array - 1).mean(), name


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_fewer_bytes(client: str) -> None:
    sizes = {}
    for codec in (False, True):
        options: dict[str, Any] = (
            {"push_codec": "topk:0.01", "fetch_codec": "topk:0.05"} if codec else {}
        )
        with ServerThread(policy="asgd", set={"lr": 0.01}, kernels="numpy", **options) as server:
            with CLIENTS[client](server.url) as (step, _params):
                for _ in range(40):
                    step(gradients)
            (row,) = server.call(lambda s: s.engine.report()["workers"])
            sizes[codec] = row["bytes_pushed"] + row["bytes_fetched"]
    assert sizes[True] < sizes[False] / 5


class TestServe:
    def test_a_codec_alone_or_several(self) -> None:
        for codec in ("topk:0.01", ["topk:0.01"]):
            with ServerThread(policy="fasgd", gate="bfasgd:c_push=0.1", push_codec=codec) as server:
                plan = server.call(lambda running: running.engine.plan)
            assert plan["push_codec"] == [["*", "topk", "fraction=0.01"]]
            assert (plan["routine"], plan["gate"]["c_push"]) == ("gated", 0.1)
            assert "fetch_codec" not in plan

    @each_row(
        ("settings", "words"),
        [
            ({"gate": "bfasgd"}, "goes by a statistic of the gradients, and asgd keeps none"),
            ({"gate": "turnstile"}, "no gate is called 'turnstile'"),
            ({"push_codec": "topk:2"}, "topk"),
            ({"push_codec": "zip"}, "no codec is called 'zip'"),
            ({"fetch_codec": "@w"}, "'@w' is no choice of a codec"),
            ({"recall": -1}, "recall"),
        ],
    )
    def test_what_cannot_be_is_refused_before_it_listens(
        self, settings: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(UsageError, match=words), ServerThread(policy="asgd", **settings):
            pass  # pragma: no cover

    def test_who_only_looks_on_is_shown_the_model(self) -> None:
        with (
            ServerThread(policy="asgd", fetch_codec="topk:0.01", kernels="numpy") as server,
            Worker(server.url, START) as worker,
            Client(server.url) as onlooker,
        ):
            seen = onlooker.fetch()
            for _ in range(5):
                worker.step(gradients)
                onlooker.fetch(seen)
            assert seen.arena.data.tobytes() == model(server)
            assert worker.params.arena.data.tobytes() != model(server)


PLACES = (1, 30, 200, 700, 2500)


@pytest.fixture(scope="module")
def undisturbed() -> Ended:
    return faulty([])


def faulty(cuts: list[tuple[Literal["up", "down"], int]], client: str = "client") -> Ended:
    """Have one worker take steps, with a cut before some of them; return what it came to."""
    options: dict[str, Any] = {"push_codec": PUSH, "fetch_codec": ["topk:0.3"], "kernels": "numpy"}
    with ServerThread(policy="fasgd", **options) as server, Proxy(server.url) as proxy:
        with CLIENTS[client](proxy.url) as (step, params):
            for number in range(12):
                fault = proxy.cut(*cuts[number - 3]) if 0 <= number - 3 < len(cuts) else None
                step(gradients)
                if fault is not None:
                    fault.wait()
            end = ended(server)
            assert end.replica == params.arena.data.tobytes()
        assert proxy.connections == 1 + len(cuts)
        return end


class TestCuts:
    @pytest.mark.parametrize("after", PLACES)
    @pytest.mark.parametrize("direction", ["up", "down"])
    def test_nothing_is_lost_or_doubled(
        self, undisturbed: Ended, direction: Literal["up", "down"], after: int
    ) -> None:
        """Pushes, rests, increments and the replica are to the bit as if nothing had been cut."""
        assert faulty([(direction, after)]) == undisturbed

    @pytest.mark.parametrize("client", sorted(CLIENTS))
    def test_again_and_again(self, undisturbed: Ended, client: str) -> None:
        cuts: list[tuple[Literal["up", "down"], int]] = [
            ("up", 200), ("down", 900), ("down", 10), ("up", 10), ("down", 3000), ("up", 2000)
        ]  # fmt: skip
        assert faulty(cuts, client) == undisturbed

    @pytest.mark.parametrize(
        ("direction", "after"),
        [("up", 5), ("up", 40), ("down", 5), ("down", 100), ("down", 1500)],  # it is a short word
    )
    def test_a_word_to_apply_again_is_obeyed_once(
        self, direction: Literal["up", "down"], after: int
    ) -> None:
        ends = []
        for cut in (False, True):
            gate = "periodic:k_push=1000,k_fetch=1,skipped=reapply"
            options: dict[str, Any] = {"gate": gate, "fetch_codec": "int8", "kernels": "numpy"}
            with ServerThread(policy="asgd", **options) as server, Proxy(server.url) as proxy:
                with Worker(proxy.url, START) as worker:
                    for number in range(8):
                        fault = proxy.cut(direction, after) if cut and number == 4 else None
                        worker.step(gradients)
                        if fault is not None:
                            fault.wait()
                    assert worker.last is not None
                    assert worker.last.used
                ends.append(ended(server))
        assert ends[0] == ends[1]
        assert ends[0].gradients == 8


class TestPipelined:
    """Several requests at once, into the same arrays."""

    @each_row("codec", ["int8", "topk:0.2", "bf16"])
    def test_an_increment_is_added_once(self, codec: str) -> None:
        async def run(url: str) -> tuple[Params, bytes]:
            async with aiops.AsyncClient(url, role="worker") as client:
                params = await client.define(START)
                given = gradients(params)
                for _ in range(3):
                    # All are asked before any is answered: each at the version held now.
                    await asyncio.gather(
                        *(client.exchange(params, given) for _ in range(4)),
                        *(client.fetch(params) for _ in range(3)),
                    )
                await client.fetch(params)
                return params, params.arena.data.tobytes()

        with ServerThread(policy="asgd", fetch_codec=codec, kernels="numpy") as server:
            params, held = asyncio.run(run(server.url))
            end = ended(server)
        assert end.gradients == 12
        assert params.version == end.version == 12
        assert held == end.replica

    def test_one_set_of_arrays_for_two_clients(self) -> None:
        """What came by another client is not held, so it comes whole."""
        with (
            ServerThread(policy="asgd", fetch_codec="int8", kernels="numpy") as server,
            Client(server.url, role="worker") as one,
            Client(server.url, role="worker") as other,
        ):
            params = one.define(START)
            other.define(START)
            for client in (one, other, one, one, other):
                client.exchange(params, gradients(params))
            assert params.arena.data.tobytes() == ended(server).replica


class TestRefusals:
    def test_a_bad_value_costs_nothing_but_its_step(self) -> None:
        """Clients that are refused now and then end with the same bits as one that is not."""
        ends = []
        for clumsy in (False, True):
            options: dict[str, Any] = {"push_codec": PUSH, "fetch_codec": "int8"}
            with ServerThread(policy="asgd", kernels="numpy", **options) as server:
                with Worker(server.url, START) as worker:
                    for step in range(10):
                        if clumsy and step % 3 == 1:
                            for name in START:
                                bad = gradients(worker.params)
                                bad[name].reshape(-1)[1] = np.nan
                                with pytest.raises(BadPush, match=f"{name!r} holds nan at"):
                                    worker.step(bad)
                            wrong = gradients(worker.params)
                            wrong["w"] = wrong["w"][1:]
                            with pytest.raises(UsageError, match="the gradient has shape"):
                                worker.step(wrong)
                        worker.step(gradients)
                ends.append(ended(server))
        assert ends[0] == ends[1]
        assert ends[0].buffers == 0

    def test_a_gradient_too_large_for_its_codec(self) -> None:
        with (
            ServerThread(policy="asgd", push_codec="int8", kernels="numpy") as server,
            Worker(server.url, {"w": np.zeros(2000)}) as worker,
        ):
            for value in (1e18, 1e300, -np.inf):
                with pytest.raises(BadPush, match="below 1e18 in magnitude; nothing of this push"):
                    worker.step({"w": np.full(2000, value)})
            assert worker.step({"w": np.ones(2000)}).version == 1

    def test_what_float16_cannot_hold_is_its_largest(self) -> None:
        """Two gradients of 60,000 and what the first left over: beyond 65,504."""
        start = {"h": np.zeros(2000, np.float16)}
        with (
            ServerThread(
                policy="asgd", set={"lr": 1e-4}, push_codec="onebit", kernels="numpy"
            ) as server,
            Worker(server.url, start) as worker,
        ):
            gradient = np.full(2000, 60_000, np.float16)
            gradient[::2] = 30_000
            for _ in range(6):
                worker.step({"h": gradient})
            assert np.isfinite(worker.params["h"]).all()


class TestRestarts:
    @pytest.mark.parametrize("settings", sorted(SETTINGS))
    def test_a_server_that_has_lost_its_model(self, settings: str) -> None:
        """It is offered the worker's, and all goes on, with a new replica."""
        options: dict[str, Any] = {"policy": "fasgd", "kernels": "numpy", **SETTINGS[settings]}
        with ServerThread(**options) as server:
            worker = Worker(server.url, START)
            for _ in range(10):
                worker.step(gradients)
            port = int(server.url.rpartition(":")[2])
        with ServerThread(port=port, **options) as server:
            with worker:
                for _ in range(30):
                    worker.step(gradients)
                worker.refresh()
                end = ended(server)
                held = worker.params.arena.data.tobytes()
                assert held == (end.replica or model(server))
            assert ended(server).version > 3

    def test_the_next_server_has_other_codecs(self) -> None:
        with ServerThread(policy="asgd", push_codec="topk:0.1", kernels="numpy") as server:
            worker = Worker(server.url, START)
            worker.step(gradients)
            port = int(server.url.rpartition(":")[2])
        settings: dict[str, Any] = {"fetch_codec": "int8", "port": port, "kernels": "numpy"}
        with ServerThread(policy="asgd", **settings) as server, worker:
            for _ in range(6):
                worker.step(gradients)
            end = ended(server)
            assert end.version >= 5
            assert worker.params.arena.data.tobytes() in (end.replica, model(server))


class TestRecord:
    @pytest.mark.parametrize("settings", sorted(SETTINGS))
    def test_replays_to_the_same_bits(self, settings: str, tmp_path: Path) -> None:
        path, faults = tmp_path / "run.journal", []

        def run(url: str) -> None:
            try:
                with Worker(url, START) as worker:
                    for _ in range(15):
                        worker.step(gradients)
            except BaseException as fault:
                faults.append(fault)

        with ServerThread(policy="fasgd", record=path, **SETTINGS[settings]) as server:
            threads = [threading.Thread(target=run, args=(server.url,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            live = ended(server)
        assert not faults
        for backend in ("numpy", "numba"):
            again = replayed(path, backend)
            assert again.complete
            assert Ended(again.engine) == live
