"""A server that has lost the end of its journal tells each worker how many pushes that was.

Each step adds -1 to every parameter, so the parameters say how many pushes are part of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops import AsyncClient, AsyncWorker, Client, Worker, errors
from aiops.errors import BadPush, Superseded
from aiops.state.frames import SegmentScan
from tests.support import Process

FACES: dict[str, tuple[Any, Any]] = {
    "blocking": (Worker, Client),
    "async": (AsyncWorker, AsyncClient),
}
SIZES = {"small": 64, "large": 20_000}  # the second is more than is sent within a machine


async def done(value: Any) -> Any:
    """Return the result of a call of either face."""
    return await value if inspect.isawaitable(value) else value


class KeptServer:
    """A server process with a state, at one port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        # Held bound, so that no other process is given it between a kill and a start.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = str(self._held.getsockname()[1])
        self._flags = ("--state", str(folder), "--policy", "ringmaster", "--set", "lr=1", *flags)
        self.process: Process | None = None
        self.start()

    def start(self) -> None:
        """Start it, for the first time or again."""
        flags = "--port", self.port, "--set", "r=1", "--snapshot-every", "1000", *self._flags
        self.process = Process("-m", "aiops.server", *flags)
        self.url = self.process.line()
        assert self.url, self.process.end()

    def kill(self) -> None:
        """Kill it at once."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Kill it, and let go of the port."""
        self.kill()
        self._held.close()

    def cut(self, share: float) -> None:
        """Cut the journal behind a row: the one after that share of them."""
        path = max(self.folder.glob("journal-*"))
        data = bytearray(path.read_bytes())
        frames = [(frame.number, frame.at) for frame in SegmentScan(data, path.name)]
        _number, at = frames[max(3, int(share * len(frames)))]
        path.write_bytes(data[:at] + bytes(len(data) - at))

    def back_to(self, folder: Path) -> None:
        """Have it go on from a copy of its folder."""
        shutil.rmtree(self.folder)
        shutil.copytree(folder, self.folder)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KeptServer]:
    flags = getattr(request, "param", ())
    server = KeptServer(tmp_path / "state", *flags)
    yield server
    server.close()


class Hand:
    """A worker, and the pushes of which it knows that they are part of the model."""

    def __init__(self, worker: Any, seed: int) -> None:
        self.worker, self.client, self.chance = worker, worker._client, random.Random(seed)
        self.used = 0

    def gradient(self, value: float = 1.0) -> dict[str, Any]:
        return {"w": np.full(len(self.worker.params["w"]), value, np.float32)}

    async def step(self) -> Any:
        receipt = await done(self.worker.step(self.gradient()))
        self.used += receipt.used
        return receipt

    async def push(self, params: Any) -> Any:
        """Push a gradient that was computed at these parameters, by the worker's own client."""
        # A blocking worker has a thread that uses it, too, where nothing else does.
        with getattr(self.worker, "_lock", contextlib.nullcontext()):
            return await done(self.client.push(params, self.gradient()))

    async def act(self, count: int) -> None:
        """Push that often; some pushes are refused, others are ignored."""
        for _ in range(count):
            match self.chance.choice("uuuuri"):
                case "u":
                    assert (await self.step()).used
                case "r":
                    with pytest.raises(BadPush):
                        await done(self.worker.step(self.gradient(np.nan)))
                case "i":
                    old = self.worker.params.copy()
                    await self.step()
                    assert not (await self.push(old)).used


async def applied(server: KeptServer) -> int:
    """Return the number of pushes that are part of the model."""
    async with AsyncClient(server.url) as client:
        params = await client.fetch()
        values = np.unique(params["w"])
        assert len(values) == 1
        return -int(values[0])


@contextlib.asynccontextmanager
async def hand(face: str, size: str, server: KeptServer) -> AsyncIterator[Hand]:
    worker = FACES[face][0](server.url, {"w": np.zeros(SIZES[size], np.float32)})
    if face == "async":
        await worker.connect()
    try:
        yield Hand(worker, 1)
    finally:
        with contextlib.suppress(errors.ConnectionLost):
            await done(worker.close())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "size"),
    [(("--no-shm",), "small"), ((), "small"), ((), "large")],
    ids=["tcp", "near", "lent"],
    indirect=["server"],
)
@pytest.mark.parametrize("face", FACES)
def test_told_is_lost(
    face: str, size: str, server: KeptServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        told = 0
        async with hand(face, size, server) as worker:
            for share in (0.9, 0.2):
                await worker.act(25)
                acknowledged = worker.used - told
                caplog.clear()
                server.kill()
                server.cut(share)
                server.start()
                left = await applied(server)
                lost = acknowledged - left
                assert lost > 0
                receipt = await worker.step()
                assert not receipt.used  # it was computed at a version that is lost
                told += lost
                assert worker.worker.rolled_back == worker.client.rolled_back == told
                pushes = "1 push" if lost == 1 else f"{lost:,} pushes"
                assert f"came back at version {left:,}: {pushes} that it had" in caplog.text
                assert (await worker.step()).used
                assert await applied(server) == left + 1
                stats = await done(worker.worker.stats())
                [line] = [row for row in stats["workers"] if row["present"]]
                assert line["rolled_back"] == stats["state"]["rolled_back"] >= lost

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    [("--acks", "applied", "--snapshot-every", "0.05", *near) for near in ((), ("--no-shm",))],
    ids=["near", "tcp"],
    indirect=True,
)
@pytest.mark.parametrize("face", FACES)
def test_what_applied_loses_is_told(face: str, server: KeptServer) -> None:
    """Without a journal a killed server comes back as its last snapshot was."""

    async def main() -> None:
        async with hand(face, "small", server) as worker:
            for _ in range(4):
                while not (await done(worker.worker.stats()))["state"]["snapshot"]:
                    await worker.act(5)
                await worker.act(40)
                server.kill()
                server.start()
                left = await applied(server)
                await worker.step()  # not used if its version is lost
                assert worker.worker.rolled_back == worker.client.rolled_back
                assert worker.used - worker.worker.rolled_back == await applied(server) >= left
                assert (await worker.step()).used
        assert worker.worker.rolled_back > 0
        assert not list(server.folder.glob("journal-*"))

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
def test_it_is_told_after_a_start_from_a_copy(
    face: str, server: KeptServer, tmp_path: Path
) -> None:
    """The disk was lost, and a copy of the same generation is put back."""

    async def main() -> None:
        async with hand(face, "small", server) as worker:
            await worker.act(20)
            shutil.copytree(server.folder, tmp_path / "copy")
            kept = worker.used
            await worker.act(30)
            server.kill()
            server.back_to(tmp_path / "copy")
            server.start()
            assert await applied(server) == kept
            assert (await done(worker.worker.step(lambda params: worker.gradient()))).used
            assert worker.worker.recomputed == 1
            assert worker.worker.rolled_back == worker.used - kept
            assert await applied(server) == kept + 1

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("server", [("--no-shm",)], ids=["tcp"], indirect=True)
@pytest.mark.parametrize("face", FACES)
def test_nothing_is_told_where_nothing_is_lost(face: str, server: KeptServer) -> None:
    async def main() -> None:
        async with hand(face, "small", server) as worker:
            for _ in range(3):
                await worker.act(10)
                server.kill()
                server.start()
                assert (await worker.step()).used
            assert worker.worker.recomputed == worker.worker.rolled_back == 0
            assert await applied(server) == worker.used

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("server", [("--set", "r=1000")], indirect=True)
@pytest.mark.parametrize("face", FACES)
def test_a_version_that_survived_is_as_good_as_ever(face: str, server: KeptServer) -> None:
    async def main() -> None:
        async with hand(face, "small", server) as slow, hand(face, "small", server) as fast:
            for _ in range(3):
                await slow.step()
            for _ in range(20):
                await fast.step()
            server.kill()
            server.cut(0.6)
            server.start()
            left = await applied(server)
            assert 3 < left < 23
            receipt = await slow.step()
            assert receipt.used
            assert receipt.staleness == left - 3
            assert slow.worker.rolled_back == slow.worker.recomputed == 0
            assert not (await fast.step()).used
            assert fast.worker.rolled_back == 23 - left

    asyncio.run(main())


@pytest.mark.slow
def test_a_copy_that_was_started_as_often_is_another_generation(
    server: KeptServer, tmp_path: Path
) -> None:
    """It either goes on as the later one, and tells what is lost, or ends as the earlier one."""

    async def main() -> None:
        async with hand("blocking", "small", server) as worker:
            await worker.step()
            server.kill()
            shutil.copytree(server.folder, tmp_path / "copy")
            server.start()
            for _ in range(5):
                await worker.step()
            server.kill()
            server.back_to(tmp_path / "copy")
            server.start()
            worker.client.timeout = 2.0
            try:
                assert not (await worker.step()).used
            except Superseded:
                assert server.process is not None
                assert server.process.end()[0] == 3
            else:
                assert worker.worker.rolled_back == 5
                assert await applied(server) == 1

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
def test_a_server_that_was_superseded_ends(face: str, server: KeptServer, tmp_path: Path) -> None:
    """Its folder is a copy of an earlier generation: another server may go on with the run."""

    async def main() -> None:
        async with hand(face, "small", server) as worker:
            await worker.step()
            server.kill()
            shutil.copytree(server.folder, tmp_path / "copy")
            for _ in range(2):
                server.start()
                await worker.step()
                server.kill()
            server.back_to(tmp_path / "copy")
            server.start()
            worker.client.timeout = 2.0
            with pytest.raises(Superseded, match=r"superseded by another one .* \(generation 3\)"):
                await worker.step()
            assert server.process is not None
            status, _out, err = server.process.end()
            assert status == 3
            assert err.endswith("with --standby and the URL of that\n")
            assert "Traceback" not in err

    asyncio.run(main())
