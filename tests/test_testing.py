"""The public test kit: what its page and its docstrings show is true."""

from __future__ import annotations

import asyncio
import doctest

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.errors import ConnectionLost, UsageError


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


def test_servers_and_clients_find_virtual_surroundings() -> None:
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
                    assert peer.greeter.hello is not None
                    return peer.greeter.hello.client, server.engine.options.run, seconds

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
        with pytest.raises(ConnectionLost, match="sign of life in 330 s"):
            await client.ping()
        await client.close()
        return asyncio.get_running_loop().time()

    assert testing.run(main()) >= 335.0
