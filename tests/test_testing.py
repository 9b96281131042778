"""The public test kit: what its page and its docstrings show is true."""

from __future__ import annotations

import asyncio
import doctest

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.errors import ConnectionLost, DeadlineExceeded, UsageError


def test_what_the_docstrings_show() -> None:
    failed, run = doctest.testmod(testing)
    assert run
    assert not failed


def test_every_name_is_there() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__doc__


def test_there_is_no_network_elsewhere() -> None:
    async def main() -> None:
        testing.network()

    with pytest.raises(UsageError, match="in a coroutine that run"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1 cut", "'1 cut': write seconds, a fault and a host's name"),
        ("soon cut alice", "write seconds"),
        ("1 cut alice bob", "write seconds"),
        ("-1 cut alice", "0 or more seconds"),
        ("nan cut alice", "0 or more seconds"),
        ("1 cat alice", "no fault is called 'cat'; did you mean 'cut'"),
    ],
)
def test_a_script_that_makes_no_sense(line: str, says: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=f"line 3 of the script.*{says}"):
            testing.play(f"# first\n0 kill server\n{line}")
        await asyncio.sleep(1)
        assert testing.network().host("server").alive, "a script that is wrong does nothing"

    testing.run(main())


def test_servers_and_clients_use_the_virtual_environment() -> None:
    """Ids, nonces and names too: nothing of the machine is in them."""

    async def main() -> tuple[str, str, float]:
        async with aiops.serve(policy="asgd", kernels="numpy") as server:
            with testing.network().at("alice"):
                async with aiops.AsyncClient(server.url, role="worker") as client:
                    await client.define({"w": np.zeros(3, np.float32)})
                    await asyncio.sleep(100)
                    (worker,) = (await client.stats())["workers"]
                    assert worker["name"] == "worker-alice"
                    seconds = (await client.stats())["seconds"]
                    (peer,) = server.connections.peers.values()
                    assert peer.handshake.hello is not None
                    return peer.handshake.hello.client, server.engine.options.run, seconds

    first, again = testing.run(main(), seed=1), testing.run(main(), seed=1)
    assert first == again != testing.run(main(), seed=2)
    assert first[2] == 100.0


def test_a_run_leaves_nothing_behind() -> None:
    async def main() -> None:
        assert asyncio.get_running_loop().time() == 0.0

    testing.run(main())

    async def real() -> float:
        async with aiops.serve(policy="asgd", port=0, kernels="numpy") as server:
            return server._now()

    assert asyncio.run(real()) > 0.0


def test_who_is_cut_connects_again_and_pushes_nothing_twice() -> None:
    async def main() -> float:
        async with aiops.serve(policy="asgd", set={"lr": 1.0}, kernels="numpy") as server:
            testing.play("\n".join(f"{0.37 * k} cut alice" for k in range(1, 20)))
            with testing.network().at("alice"):
                async with aiops.AsyncWorker(server.url, {"w": np.zeros(1, np.float32)}) as worker:
                    for _ in range(100):
                        await asyncio.sleep(0.05)
                        await worker.step({"w": np.ones(1, np.float32)})
                    return float(worker.params["w"][0])

    assert testing.run(main()) == -100.0


def test_a_server_that_is_silent_too_long_is_given_up() -> None:
    async def main() -> float:
        testing.play("1 silence server")
        with testing.network().at("server"):
            serving = aiops.serve(policy="asgd", kernels="numpy")
            server = await serving.__aenter__()
        with testing.network().at("alice"):
            client = await aiops.AsyncClient(server.url, timeout=30.0).connect()
        await asyncio.sleep(5)
        with pytest.raises(ConnectionLost, match=r"cannot be reached \(no answer in time\)"):
            await client.ping()  # the connection is given up within 5 s, and no other is made
        await client.close()
        return asyncio.get_running_loop().time()

    assert 30.0 <= testing.run(main()) <= 35.0


class TestVirtual:
    @pytest.mark.parametrize("seconds", [1.0, 1e5])
    @testing.virtual(limit=1e6)
    async def test_a_test_with_parameters(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        assert asyncio.get_running_loop().time() == seconds

    def test_it_is_as_run_says(self) -> None:
        @testing.virtual(limit=1.0)
        async def late() -> None:
            await asyncio.sleep(2)

        assert late.__name__ == "late"
        with pytest.raises(DeadlineExceeded, match="not over after 1 virtual seconds"):
            late()


class TestUntil:
    @testing.virtual()
    async def test_it_sees_what_was_so_for_no_time(self) -> None:
        """At the moment it came about, and before time goes on to what ends it."""
        loop, there = asyncio.get_running_loop(), set[str]()
        loop.call_later(3, there.add, "it")
        loop.call_later(3 + 1e-9, there.clear)
        await testing.until(lambda: "it" in there, "it is there")
        assert loop.time() == 3
        await testing.until(lambda: not there, "it is gone")
        assert loop.time() == 3 + 1e-9

    @testing.virtual()
    async def test_everything_of_the_moment_happens_first(self) -> None:
        said: list[str] = []

        async def one(name: str) -> None:
            for _ in range(5):
                await asyncio.sleep(0)
                said.append(name)

        tasks = [asyncio.create_task(one(name)) for name in "ab"]
        await testing.until(lambda: bool(said), "a host spoke")
        assert said == list("ababababab")
        await asyncio.gather(*tasks)

    @testing.virtual()
    async def test_several_wait_and_one_is_cancelled(self) -> None:
        loop, heard = asyncio.get_running_loop(), list[int]()
        loop.call_later(1, heard.append, 1)
        waits = [
            asyncio.create_task(testing.until(lambda n=n: len(heard) >= n, f"{n} came"))  # type: ignore[misc]
            for n in (1, 1, 2)
        ]
        await asyncio.sleep(0)
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        await waits[1]
        assert loop.time() == 1
        assert not waits[2].done()
        heard.append(2)
        await waits[2]
        assert isinstance(loop, testing.VirtualLoop)
        assert not loop.observers

    @testing.virtual()
    async def test_it_does_not_come_about(self) -> None:
        asyncio.create_task(asyncio.Event().wait(), name="who should")  # noqa: RUF006
        says = r"not within 5 virtual seconds: it is done; .*'who should' waits in Event\.wait"
        with pytest.raises(DeadlineExceeded, match=says):
            await testing.until(lambda: False, "it is done", limit=5)
        assert asyncio.get_running_loop().time() == 5

    @testing.virtual()
    async def test_what_the_check_raises(self) -> None:
        with pytest.raises(ZeroDivisionError):
            await testing.until(lambda: 1 / 0 > 0, "it is infinite")

    async def test_elsewhere(self) -> None:
        with pytest.raises(UsageError, match="in a coroutine that run"):
            await testing.until(lambda: True, "it is")
