"""A standby's engine is its primary's, to the last bit; hostile peers on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.algorithms import find
from aiops.common import urls
from aiops.common.generations import next_term, term
from aiops.engine import statistics
from aiops.engine.capture import needed_rows, settings_of
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.errors import ConnectionLost, Superseded, UsageError
from aiops.model.parts import LARGEST, Part
from aiops.net.disk import SystemDisk
from aiops.serving.config import Config
from aiops.serving.embedded import config_of
from aiops.serving.server import Server
from aiops.serving.standby.server import StandbyServer
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import StateFiles
from aiops.state.directory import GenerationFile, journal_name
from aiops.state.frames import SegmentHead, frame
from aiops.state.row_kinds import RowKind
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader
from aiops.wire.connection import Connection, Limits, with_sinks
from aiops.wire.messages import PROTOCOL, Error, Hello, Message, Push, Welcome
from aiops.wire.sinks import Discard
from aiops.wire.standby_messages import (
    JournalRows,
    RowsKept,
    SnapshotPart,
    StandbyHello,
    StandbyWelcome,
)
from tests.durable.test_recorder import Recorded
from tests.engine.seeded_run import Case
from tests.peers import eventually
from tests.serving.state.test_kept_state import PLAIN, RUNS, START, train
from tests.support import PATIENCE, LoopThread, ServerThread


class StandbyThread(LoopThread[StandbyServer]):
    """A standby."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._config = config_of({"port": 0, **settings})

    @property
    def served(self) -> Server | None:
        """The server, once it is promoted."""
        return None if self._running is None else self._running.server

    @property
    def error(self) -> BaseException | None:
        """The error with which it has ended, once it has: it is waited for."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it did not end"
        return self._error

    def wait(self, row: int) -> None:
        """Wait until a row has been applied and synced."""
        for _ in range(int(PATIENCE / 0.02)):
            copy = self.call(lambda standby: standby._made)
            if copy.applied >= row <= copy.synced:
                return
            threading.Event().wait(0.02)
        why = self.call(lambda standby: standby._why)
        raise AssertionError(f"{copy.applied} of {row}, {why}")

    def _end(self) -> None:
        assert self._running is not None
        self._running.stop()

    async def _main(self) -> None:
        standby = StandbyServer(self._config)
        self._begun(standby, await standby.start())
        await standby.serve()


@pytest.mark.parametrize("every", [0.05, 1000.0], ids=["snapshots", "rows"])
@pytest.mark.parametrize("run", RUNS)
def test_its_engine_is_the_primarys(run: str, every: float, tmp_path: Path) -> None:
    settings, start = RUNS[run], PLAIN if run == "coded" else START
    kept = {"snapshot_every": every, **settings}
    with (
        ServerThread(state=tmp_path / "a", **kept) as server,
        StandbyThread(state=tmp_path / "b", standby=server.url, **kept) as standby,
    ):
        threads = [
            threading.Thread(target=train, args=(server.url, start, seed, 12)) for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def shown(engine: Any) -> tuple[str, dict[str, Any]]:
            return digest(engine), statistics.decided(engine.report())

        row = server.call(lambda running: running.run_state.kept.newest)
        expected, report = server.call(lambda running: shown(running.engine))
        while row != (row := server.call(lambda running: running.run_state.kept.newest)):
            expected, report = server.call(lambda running: shown(running.engine))
        standby.wait(row)
        found, standbys = standby.call(lambda running: shown(running._engine()))
        assert found == expected
        for key in ("staleness", "refused", "ignored", "version", "updates"):
            assert standbys.get(key) == report.get(key), key


@pytest.mark.parametrize("every", [0.05, 1000.0], ids=["snapshots", "rows"])
@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
def test_its_delta_replica_is_the_primarys(codec: str, every: float, tmp_path: Path) -> None:
    """Though the primary's takes most steps in exchanges that are answered at once."""
    pytest.importorskip("numba")
    model = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(3, np.float32)}
    kept = {"snapshot_every": every, "policy": "asgd", "fetch_codec": codec, "kernels": "numba"}

    def shown(engine: Any) -> tuple[Any, ...]:
        replica, version = engine.replica, engine.replica.current
        payloads = [payload.tobytes() for payload in replica.payloads()]
        values = version.arena.data.tobytes(), version.number, version.tensor_versions.tolist()
        return engine.store.version, repr(replica.state()), payloads, values, digest(engine)

    with (
        ServerThread(state=tmp_path / "a", **kept) as server,
        StandbyThread(state=tmp_path / "b", standby=server.url, **kept) as standby,
    ):
        eventually(lambda: bool(server.call(lambda running: running.warm)), "it is warm")
        threads = [threading.Thread(target=train, args=(server.url, model, s, 40)) for s in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        row, expected = server.call(
            lambda running: (running.run_state.kept.newest, shown(running.engine))
        )
        assert expected[0] == 80
        assert row < 2 * 80  # on the general way each push has a row, its update, and most a step
        standby.wait(row)
        assert standby.call(lambda running: shown(running._engine())) == expected


# ---------------------------------------------------------------- hostile peers


class Peer:
    """One side of a feed, as bytes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: str
    ) -> None:
        self._reader, self._writer = reader, writer
        self.wire = Connection(side, Limits(header=64 << 20))  # type: ignore[arg-type]
        self._messages: list[Message] = []

    def send(self, message: Message, *payloads: bytes) -> None:
        views = [[memoryview(payload)] for payload in payloads]
        for buffer in self.wire.send(message, views):
            self._writer.write(bytes(buffer))

    async def receive(self) -> Message | None:
        """Return the next message; None: the connection has ended."""
        while not self._messages:
            data = await asyncio.wait_for(self._reader.read(65536), PATIENCE)
            if not data:
                return None
            view = memoryview(data)
            while view:
                room = self.wire.next_buffer()[: len(view)]
                room[:], view = view[: len(room)], view[len(room) :]
                found = self.wire.received(len(room))
                whole = with_sinks(self.wire, found, lambda message: Discard())
                self._messages += [message for message, _sink in whole]
        return self._messages.pop(0)

    async def ended(self) -> None:
        """Wait until the connection has ended."""
        with contextlib.suppress(ConnectionError):
            while await self.receive() is not None:
                pass

    def close(self) -> None:
        self._writer.close()


def hello(run: str = "", generation: int = 0, row: int = 0) -> StandbyHello:
    named = PROTOCOL, "f", 1, "b", True, bytes(16), "test"
    return StandbyHello(0, *named, run, generation, row)


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)
        yield server
        train(server.url, PLAIN, 2, 3)  # whatever its peers have sent


async def connected(url: str) -> Peer:
    return Peer(*await asyncio.open_connection(*urls.parse(url)), "client")


@pytest.mark.parametrize(
    "kept", [(2**53 - 1, 0, 0), (0, 1, 0), (0, 0, 1), (2**53 - 1,) * 3, (3, 2**53 - 1, 3)]
)
def test_a_standby_that_has_what_it_cannot_have_is_dropped(
    kept: tuple[int, int, int], primary: ServerThread
) -> None:
    async def run() -> None:
        peer = await connected(primary.url)
        peer.send(hello())
        assert isinstance(await peer.receive(), StandbyWelcome)
        peer.send(RowsKept(0, *kept))
        await peer.ended()
        peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("run", "generation", "row"),
    [
        ("", 2**53 - 1, 2**53 - 1),
        ("x" * 2048, 1, 1),
        ("ffff", 1, 2**53 - 1),
        ("the run", 1, 4),
        ("the run", None, 2**53 - 1),
        ("the run", 0, 5),
        ("the run", None, 4),
    ],
)
def test_any_greeting_of_a_standby_is_answered(
    run: str, generation: int | None, row: int, primary: ServerThread
) -> None:
    """Rows are the same only in the generation in which the primary fed it."""
    assert primary.server is not None
    run = primary.server.run if run == "the run" else run
    known = primary.server.run_state.generation if generation is None else generation

    async def greet() -> Message | None:
        peer = await connected(primary.url)
        peer.send(hello(run, known, row))
        found = await peer.receive()
        peer.close()
        return found

    welcome = asyncio.run(greet())
    assert isinstance(welcome, StandbyWelcome)
    assert welcome.row == (4 if (generation, row) == (None, 4) else 0)


def test_clients_that_push_to_a_standby_are_told_and_not_dropped(
    primary: ServerThread, tmp_path: Path
) -> None:
    """The second push that was larger than 64 KiB ended its connection with a traceback."""
    push = Push(1, 1, False, -1, (Part(0, 128 << 10, "raw", 128 << 10, 0),))

    async def run(url: str) -> None:
        peers = [await connected(url) for _ in range(2)]
        for peer in peers:
            peer.send(Hello(0, PROTOCOL, "x", 1, "x", "observer", False, bytes(16), ""))
            assert isinstance(await peer.receive(), Welcome)
        for peer in peers:
            peer.send(push, bytes(128 << 10))
        for peer in peers:
            answer = await peer.receive()
            assert isinstance(answer, Error)
            assert answer.code == "standby"
            peer.close()

    settings = {"policy": "asgd", "state": tmp_path / "b"}
    with StandbyThread(standby=primary.url, **settings) as standby:
        asyncio.run(run(standby.call(lambda running: running.url)))


def test_a_standby_whose_token_is_wrong_ends(tmp_path: Path) -> None:
    """No later attempt could be better, and each would be a line in the primary's log."""
    with (
        ServerThread(policy="asgd", state=tmp_path / "a", token="open sesame") as server,
        StandbyThread(
            policy="asgd", state=tmp_path / "b", standby=server.url, token="barley"
        ) as standby,
    ):
        assert isinstance(standby.error, UsageError)
        assert str(standby.error).startswith(f"--standby {server.url}: ")
        assert "token" in str(standby.error)
    assert not (tmp_path / "b" / "identity").exists()


def test_a_standby_goes_on_to_a_primary_that_takes_its_token(tmp_path: Path) -> None:
    """A stranger at the first of its primaries' addresses is none of them."""
    given: dict[str, Any] = {"policy": "asgd", "token": "open sesame"}
    with (
        ServerThread(policy="asgd", state=tmp_path / "c", token="barley") as other,
        ServerThread(state=tmp_path / "a", **given) as server,
    ):
        with aiops.Worker(server.url, PLAIN, token="open sesame") as worker:
            worker.step({"w": np.ones(64, np.float32)})
        several = f"{other.url},{server.url.removeprefix('aiops://')}"
        with StandbyThread(state=tmp_path / "b", standby=several, **given) as standby:
            standby.wait(server.call(lambda running: running.run_state.kept.newest))
        given["token"] = "simsim"
        with StandbyThread(state=tmp_path / "d", standby=several, **given) as standby:
            assert isinstance(standby.error, UsageError)
            said = rf"--standby {other.url}: .*token.*; {server.url}: .*token"
            assert re.match(said, str(standby.error))


def test_a_standby_that_was_fed_waits_while_its_token_is_wrong(tmp_path: Path) -> None:
    """A stranger at the primary's address for a while ends no standby that is to take its place."""
    given: dict[str, Any] = {"policy": "asgd", "token": "open sesame"}
    with contextlib.ExitStack() as stack:
        with ServerThread(state=tmp_path / "a", **given) as server:
            with aiops.Worker(server.url, PLAIN, token="open sesame") as worker:
                worker.step({"w": np.ones(64, np.float32)})
            made = StandbyThread(state=tmp_path / "b", standby=server.url, **given)
            standby = stack.enter_context(made)
            standby.wait(server.call(lambda running: running.run_state.kept.newest))
            port = urls.parse(server.url)[1]
        other = ServerThread(policy="asgd", token="barley", state=tmp_path / "c", port=port)
        stack.enter_context(other)
        for _ in range(int(PATIENCE / 0.02)):
            if "token" in standby.call(lambda running: running._why):
                break
            threading.Event().wait(0.02)
        assert "token" in standby.call(lambda running: running._why)
        assert standby.call(lambda running: running.whole)


def test_random_bytes_behind_a_greeting(primary: ServerThread) -> None:
    rng = np.random.default_rng(1)

    async def run() -> None:
        for _ in range(50):
            peer = await connected(primary.url)
            peer.send(hello())
            await peer.receive()
            peer._writer.write(rng.bytes(int(rng.integers(1, 300))))
            peer._writer.write_eof()
            await peer.ended()
            peer.close()

    asyncio.run(run())


def parts(*nbytes: int) -> tuple[Part, ...]:
    ends = np.cumsum(nbytes).tolist()
    return tuple(Part(end - n, end, "raw", n, 0) for n, end in zip(nbytes, ends, strict=True))


HEAD = SegmentHead(1, 1, "8c2f", 7).pack()


@pytest.mark.parametrize(
    ("welcome", "message", "payloads"),
    [
        ((0, 0), JournalRows(0, 1, 1, 1, parts(64)), [HEAD]),
        ((0, 0), JournalRows(0, 1, 2**53 - 1, 2**53 - 1, parts(64)), [HEAD]),
        ((0, 0), JournalRows(0, 2, 1, 1, parts(64)), [HEAD]),
        ((0, 0), JournalRows(0, 1, 1, 1), []),
        ((0, 0), JournalRows(0, 1, 1, 1, parts(3, 5)), [b"abc", bytes(5)]),
        ((0, 0), SnapshotPart(0, parts(8)), [bytes(8)]),
        ((5, 16), SnapshotPart(0, parts(16)), [bytes(16)]),
        ((5, 16), SnapshotPart(0, parts(17)), [bytes(17)]),
        ((5, 16), JournalRows(0, 6, 6, 6, parts(64)), [HEAD]),
        ((2**53 - 1, 0), JournalRows(0, 1, 1, 1, parts(64)), [HEAD]),
    ],
)
def test_a_standby_outlives_what_a_primary_sends(
    welcome: tuple[int, int], message: Message, payloads: list[bytes], tmp_path: Path
) -> None:
    """It drops the connection, tries again, and answers meanwhile."""
    ended = threading.Semaphore(0)
    row, snapshot = welcome
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, "server")
        try:
            if isinstance(await peer.receive(), StandbyHello):
                named = b"", "8c2f", 1, row, snapshot, {"starts": ((1, 0, ()),)}
                peer.send(StandbyWelcome(0, PROTOCOL, *named))
                peer.send(message, *payloads)
                await peer.ended()
        finally:
            peer.close()
            ended.release()

    listener = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    port = listener.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        url = f"aiops://127.0.0.1:{port}"
        with StandbyThread(policy="asgd", state=tmp_path / "b", standby=url) as standby:
            for _ in range(2):
                assert ended.acquire(timeout=PATIENCE)
            report = standby.call(lambda running: running._report())
            assert report["version"] == 0
            assert not standby.call(lambda running: running._made.whole)
    finally:
        loop.call_soon_threadsafe(listener.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def test_the_journal_keeps_what_a_new_standby_is_still_to_be_sent(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)
        assert server.call(lambda running: running.run_state._feeds.first_needed()) == LARGEST

        async def greet() -> int:
            peer = await connected(server.url)
            peer.send(hello())
            assert isinstance(await peer.receive(), StandbyWelcome)
            assert isinstance(await peer.receive(), JournalRows)
            found = server.call(lambda running: running.run_state._feeds.first_needed())
            peer.close()
            return int(found)

        def slow(running: Any) -> None:  # a new standby that has not caught up
            for standby in running.run_state._feeds._standbys.values():
                standby.needed = 3

        with StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url) as standby:
            standby.wait(server.call(lambda running: running.run_state.kept.newest))
            assert server.call(lambda running: running.run_state._feeds.first_needed()) == LARGEST
            server.call(slow)
            assert server.call(lambda running: running.run_state._feeds.first_needed()) == 3
        assert asyncio.run(greet()) in (1, LARGEST)


def test_the_bytes_that_a_standby_lacks_are_told(tmp_path: Path) -> None:
    """What it was sent and has not kept is not what it has, and neither is the rest."""
    with ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)

        def behind(running: Any) -> tuple[int, int, int]:
            [row] = running.run_state.report()["standbys"]
            return row["behind_rows"], row["behind_bytes"], running.run_state.kept.journal.nbytes

        async def run() -> None:
            peer = await connected(server.url)
            peer.send(hello())
            assert isinstance(await peer.receive(), StandbyWelcome)
            last = 0
            while (found := server.call(behind))[0]:
                if last < server.call(lambda running: running.run_state.kept.newest):
                    rows = await peer.receive()
                    assert isinstance(rows, JournalRows)
                    last = rows.last
                    peer.send(RowsKept(0, last, last, 0))
                await asyncio.sleep(0.01)
            assert found[1] == 0
            await asyncio.to_thread(train, server.url, PLAIN, 2, 3)
            rows_behind, nbytes, journal = server.call(behind)
            assert rows_behind > 3
            assert nbytes == journal - found[2] > 3 * 256
            peer.close()

        asyncio.run(run())


def fed_by(
    play: Callable[[Peer, StandbyHello], Awaitable[None]], folder: Path, **settings: Any
) -> contextlib.AbstractContextManager[StandbyThread]:
    """Return a context with a standby of a primary that a test plays."""

    @contextlib.contextmanager
    def running() -> Iterator[StandbyThread]:
        loop = asyncio.new_event_loop()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = Peer(reader, writer, "server")
            try:
                hello = await peer.receive()
                if isinstance(hello, StandbyHello):
                    await play(peer, hello)
            finally:
                peer.close()

        listener = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
        url = f"aiops://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            with StandbyThread(
                state=folder, standby=url, **{"policy": "asgd", **settings}
            ) as standby:
                yield standby
        finally:
            loop.call_soon_threadsafe(listener.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(PATIENCE)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.01))
            loop.close()

    return running()


def welcomed(row: int, snapshot: int) -> StandbyWelcome:
    return StandbyWelcome(0, PROTOCOL, b"", "8c2f", 1, row, snapshot, {"starts": ((1, 0, ()),)})


def tick(number: int) -> bytes:
    head = SegmentHead(number, 1, "8c2f", 7).pack()
    return head + b"".join(frame(number, RowKind.TICK, 0.0, 0, b"\x90", salt=7))


def test_a_snapshot_that_did_not_come_whole_is_fetched_again(tmp_path: Path) -> None:
    """Its rows alone are no state, whatever the standby has of them; nothing of it is synced."""
    hellos, kept = list[StandbyHello](), list[RowsKept]()
    enough = threading.Semaphore(0)

    async def play(peer: Peer, hello: StandbyHello) -> None:
        hellos.append(hello)
        peer.send(welcomed(5, 16))
        peer.send(SnapshotPart(0, parts(8)), bytes(8))
        data = tick(6)
        peer.send(JournalRows(0, 6, 6, 6, parts(len(data))), data)
        while not (kept and kept[-1].written == 6):
            message = await peer.receive()
            if isinstance(message, RowsKept):
                kept.append(message)
        await asyncio.sleep(0.05)
        enough.release()

    for _ in range(2):  # the second time the standby has been started again
        with fed_by(play, tmp_path / "b"):
            assert enough.acquire(timeout=PATIENCE)
            kept.clear()
            assert enough.acquire(timeout=PATIENCE)
    assert len(hellos) >= 4
    assert {hello.row for hello in hellos} == {0}
    assert {message.synced for message in kept} == {0}


def test_a_standby_whose_journal_has_ended_takes_no_further_row(tmp_path: Path) -> None:
    """What it would have then is nowhere, and a promotion would follow nothing."""
    with ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)
        standby = StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url)
        with standby:
            standby.wait(server.call(lambda running: running.run_state.kept.newest))

            def fail(running: StandbyServer) -> None:
                run = running._made._run
                assert run is not None
                assert run.writer is not None
                run.writer._ended(0.0, OSError(errno.EIO, "Input/output error"))

            standby.call(fail)
            train(server.url, PLAIN, 2, 1)
            assert "Input/output error" in str(standby.error)


def test_a_promotion_that_gets_no_port_spends_no_generation(tmp_path: Path) -> None:
    """The primary would be fenced by a server that serves no client."""
    taken = list[socket.socket]()

    def take(host: str, port: int) -> bool:
        taken.append(socket.create_server((host, port)))
        return True

    def generation() -> int:
        return GenerationFile.unpack((tmp_path / "b" / "generation").read_bytes()).generation

    with ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)
        with StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url) as standby:
            standby.wait(server.call(lambda running: running.run_state.kept.newest))
            before = generation()

            def promote(running: StandbyServer) -> None:
                running._env = replace(running._env, free_port=take)
                running._hold_port = lambda: None  # as where it listens at several addresses
                running.promote()

            standby.call(promote)
            assert "was not promoted, and ends: cannot listen on" in str(standby.error)
    for sock in taken:
        sock.close()
    assert len(taken) == 1
    assert generation() == before


def test_the_port_is_held_while_it_is_promoted(tmp_path: Path) -> None:
    """Another process might take it: one that listens at any port, or connects to something."""
    taken = list[socket.socket]()

    def take(host: str, port: int) -> bool:
        taken.append(socket.create_server((host, port)))
        return True

    def promote(running: StandbyServer) -> None:
        running._env = replace(running._env, free_port=take)
        running.promote()

    ended = pytest.raises(Superseded)  # the primary
    with ended, ServerThread(policy="asgd", state=tmp_path / "a") as server:
        train(server.url, PLAIN, 1, 3)
        with StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url) as standby:
            standby.wait(server.call(lambda running: running.run_state.kept.newest))
            standby.call(promote)
            train(standby.url, PLAIN, 2, 1)
            assert standby.served is not None
            assert standby.served.version == 4
    assert not taken


NOWHERE = "aiops://127.0.0.1:1"
"""A primary that is not reached."""


def test_a_standby_whose_snapshot_lacks_rows_fetches_all_again(tmp_path: Path) -> None:
    """After a loss of power: its engine is not the primary's, and may still be promoted."""
    case = Case("fasgd")
    run = Recorded(case, 1).run(60)
    while not any(needed_rows(found.owners) for found in run.kept.snapshots.values()):
        run.time += 0.01
        run._any()
    row, found = next(
        (row, found) for row, found in run.kept.snapshots.items() if needed_rows(found.owners)
    )
    files = StateFiles(tmp_path / "b", SystemDisk(), "a test", "8c2f", lambda: 1)
    settings: dict[str, Any] = {"policy": "fasgd", "kernels": "numpy"}
    config = Config(**settings)
    same = settings_of(Engine(find("fasgd").make(config.settings()), config.options()))
    header = SnapshotHeader(row, 1, files.run, [1], same, {}, found.owners)
    SnapshotWriter(files.disk, files.folder, files.segments).write(found, header)
    files.close()
    hellos, welcomed_again = list[StandbyHello](), threading.Event()

    async def play(peer: Peer, hello: StandbyHello) -> None:
        hellos.append(hello)
        peer.send(welcomed(0, 0))
        assert isinstance(await peer.receive(), RowsKept)
        welcomed_again.set()
        await peer.ended()

    with StandbyThread(state=tmp_path / "b", standby=NOWHERE, **settings) as standby:
        assert standby.call(lambda running: running._made.whole)
        assert standby.call(lambda running: running._made.row) == row
    with fed_by(play, tmp_path / "b", **settings) as standby:
        assert welcomed_again.wait(PATIENCE)
        assert standby.call(lambda running: running._made.row) == 0
    assert hellos[0].row == 0
    assert not list((tmp_path / "b").glob("snapshot-*"))


def test_rows_that_lead_to_no_state_are_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be all that is left of a primary whose snapshots were removed."""
    files = StateFiles(tmp_path / "b", SystemDisk(), "a test", "8c2f", lambda: 1)
    files.follow(6, pytest.fail).end()
    files.close()
    with StandbyThread(policy="asgd", state=tmp_path / "b", standby=NOWHERE) as standby:
        assert standby.call(lambda running: running._made.position.row) == 0
    assert "its journal begins with row 7, so it is no state" in caplog.text
    assert [path.name for path in (tmp_path / "b.aside-1").iterdir()] == [journal_name(7)]
    assert not list((tmp_path / "b").glob("journal-*"))


def test_a_server_remembers_that_it_was_superseded(tmp_path: Path) -> None:
    """Started again it serves no client that has not seen its successor."""
    settings: dict[str, Any] = {"policy": "asgd", "state": tmp_path / "a"}
    successor = next_term(0, 7), "aiops://10.0.0.6:7171"
    server = ServerThread(**settings).__enter__()
    train(server.url, PLAIN, 1, 3)
    server.call(lambda running: running.supersede(*successor))
    with pytest.raises(Superseded):
        server.__exit__()
    with pytest.raises(Superseded, match=r"--standby aiops://10.0.0.6:7171; if that") as found:
        ServerThread(**settings).__enter__()
    assert found.value.details == {"generation": successor[0], "primary": successor[1]}
    with StandbyThread(standby=NOWHERE, **settings) as standby:
        standby.call(lambda running: running.promote())
        for _ in range(int(PATIENCE / 0.02)):
            if standby.served is not None:
                break
            threading.Event().wait(0.02)
        assert standby.served is not None
        assert term(standby.served.run_state.generation) == 2


@pytest.mark.parametrize("promoted", [False, True])
def test_a_standby_inside_a_program(promoted: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policy": "asgd", "port": 0}

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            primary = aiops.serve(state=tmp_path / "a", acks="replicated", **settings)
            async with primary as server:
                other = aiops.serve(standby=server.url, state=str(tmp_path / "b"), **settings)
                standby = await stack.enter_async_context(other)
                async with aiops.AsyncWorker(server.url, PLAIN) as worker:
                    await worker.step({name: np.ones_like(each) for name, each in PLAIN.items()})
            assert standby.server is None
            if not promoted:
                return
            standby.promote()
            async with asyncio.timeout(PATIENCE):
                served = await standby.promoted()
            assert served is standby.server
            async with aiops.AsyncClient(served.url) as client:
                assert (await client.stats())["version"] == 1

    asyncio.run(main())
    with pytest.raises(ConnectionLost, match="has ended, and was not promoted"):
        asyncio.run(_ended_standby(tmp_path / "c"))


async def _ended_standby(folder: Path) -> None:
    async with aiops.serve(standby=NOWHERE, state=folder, port=0) as standby:
        pass
    await standby.promoted()


def test_a_standby_answers_while_it_reads_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    recover = StateFiles.recover
    settings: dict[str, Any] = {"policy": "asgd", "port": 0, "state": tmp_path / "b"}
    with ServerThread(**settings) as server:
        train(server.url, PLAIN, 1, 3)

    def slowly(files: StateFiles, *given: Any, **named: Any) -> Any:
        reading.set()
        assert go_on.wait(PATIENCE)
        return recover(files, *given, **named)

    async def main() -> None:
        standby = StandbyServer(config_of({**settings, "standby": NOWHERE}))
        starting = asyncio.ensure_future(standby.start())
        assert await asyncio.to_thread(reading.wait, PATIENCE)
        async with aiops.AsyncClient(standby.url, timeout=PATIENCE) as client:
            assert (await client.stats())["state"]["applied"] == 0
            go_on.set()
            await starting
            assert (await client.stats())["version"] == 3
        standby.stop()
        await standby.serve()

    monkeypatch.setattr(StateFiles, "recover", slowly)
    try:
        asyncio.run(main())
    finally:
        go_on.set()


def test_a_standby_answers_while_it_takes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifying, go_on = threading.Event(), threading.Event()
    verify = SnapshotFile.verify

    def slowly(snapshot: SnapshotFile, *given: Any) -> None:
        if snapshot._name == "the primary's snapshot":
            verifying.set()
            assert go_on.wait(2 * PATIENCE)
        verify(snapshot, *given)

    folder = tmp_path / "a"
    for _ in range(3):  # each writes a snapshot as it ends
        with ServerThread(policy="asgd", state=folder) as server:
            train(server.url, PLAIN, 1, 3)
    assert not (folder / journal_name(1)).exists()
    monkeypatch.setattr(SnapshotFile, "verify", slowly)
    with (
        ServerThread(policy="asgd", state=folder) as server,
        StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url) as standby,
    ):
        try:
            assert verifying.wait(PATIENCE)
            with aiops.Client(standby.url, timeout=PATIENCE) as client:
                assert client.stats()["state"]["applied"] == 0
        finally:
            go_on.set()
        standby.wait(server.call(lambda running: running.run_state.kept.newest))
        with aiops.Client(standby.url) as client:
            assert client.stats()["version"] == 9
