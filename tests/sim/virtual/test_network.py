"""The network in memory: who gets how much when, and what asyncio's transports promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aiops import testing
from aiops.errors import UsageError
from aiops.sim.virtual.links import SimulatedLink
from aiops.testing import Host
from tests.rows import each_row

MB = 1_000_000


class Recorder(asyncio.BufferedProtocol):
    """One end: what it hears, and when."""

    def __init__(self, keep_open: bool = False) -> None:
        self.buffer = bytearray(1 << 20)
        self.heard = b""
        self.times: list[tuple[float, int]] = []
        self.events: list[tuple[float, str]] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.keep_open = keep_open

    def now(self) -> float:
        return round(asyncio.get_running_loop().time(), 9)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append((self.now(), "made"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += self.buffer[:nbytes]
        self.times.append((self.now(), len(self.heard)))

    def eof_received(self) -> bool:
        self.events.append((self.now(), "eof"))
        return self.keep_open

    def pause_writing(self) -> None:
        self.events.append((self.now(), "pause"))

    def resume_writing(self) -> None:
        self.events.append((self.now(), "resume"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append((self.now(), "lost"))
        self.lost.set_result(exc)


async def pair(
    here: str = "alice", there: str = "bob", keep_open: bool = False
) -> tuple[Recorder, Recorder]:
    """Connect two hosts, the other way about than bytes will go; return both ends."""
    loop, network = asyncio.get_running_loop(), testing.network()
    far = Recorder(keep_open)
    with network.at(there):
        listener = await loop.create_server(lambda: far, "127.0.0.1")
        port = listener.sockets[0].getsockname()[1]
    with network.at(here):
        _transport, near = await loop.create_connection(Recorder, there, port)
    await asyncio.sleep(100)
    near.events.clear(), far.events.clear()
    return near, far


def limited(name: str, rate: float, **other: Any) -> None:
    testing.network().add(Host(name, (SimulatedLink(rate),), (SimulatedLink(rate),), **other))


class TestTimes:
    def test_bytes_take_their_time_and_then_travel(self) -> None:
        async def main() -> list[tuple[float, int]]:
            limited("alice", MB, latency=0.25)
            near, far = await pair()
            near.transport.write(bytes(MB // 2))
            await asyncio.sleep(2)
            return far.times

        ((when, count),) = testing.run(main())
        assert (when % 100, count) == (pytest.approx(0.5 + 2 * 0.25 + 0.25), MB // 2)

    def test_connecting_takes_a_round_trip(self) -> None:
        async def main() -> None:
            limited("alice", MB, latency=0.5)
            limited("bob", MB, latency=1.0)
            loop = asyncio.get_running_loop()
            with testing.network().at("bob"):
                far = Recorder()
                await loop.create_server(lambda: far, "127.0.0.1", 7)
            with testing.network().at("alice"):
                _transport, near = await loop.create_connection(Recorder, "bob", 7)
            near.transport.write(b"hello")
            await asyncio.sleep(10)
            assert near.events == [(3.0, "made")]
            assert far.events == [(4.5, "made")]
            assert far.times == [(4.500005, 5)]

        testing.run(main())

    def test_two_flows_share_a_line_and_one_alone_has_all_of_it(self) -> None:
        async def main() -> tuple[list[tuple[float, int]], ...]:
            limited("bob", MB)
            one, two = await pair("alice"), await pair("carol")
            begin = asyncio.get_running_loop().time()
            one[0].transport.write(bytes(MB))
            await asyncio.sleep(0.5)  # alone: half of it crosses
            two[0].transport.write(bytes(MB // 4))
            await asyncio.sleep(10)
            return tuple([(when - begin, n) for when, n in far.times] for _near, far in (one, two))

        first, second = testing.run(main())
        assert second == [(pytest.approx(1.0), MB // 4)]
        assert first == [(pytest.approx(1.25), MB)]

    def test_both_ways_do_not_share(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            near.transport.write(bytes(MB))
            far.transport.write(bytes(MB))
            await asyncio.sleep(10)
            for end in (near, far):
                assert end.times == [(pytest.approx(begin + 1.0), MB)]

        testing.run(main())

    def test_every_write_arrives_when_its_own_last_byte_has(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            near.transport.writelines([bytes(MB // 10), bytes(MB // 10)])
            await asyncio.sleep(0.1)
            near.transport.write(bytes(MB // 2))
            await asyncio.sleep(10)
            assert far.times == [
                (pytest.approx(begin + 0.2), MB // 10),
                (pytest.approx(begin + 0.2), MB // 5),
                (pytest.approx(begin + 0.7), MB // 5 + MB // 2),
            ]

        testing.run(main())

    def test_a_burst_crosses_at_once_after_a_pause(self) -> None:
        async def main() -> None:
            line = SimulatedLink(MB, burst=0.1 * MB)
            testing.network().add(Host("alice", (line,), ()))
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            near.transport.write(bytes(MB))  # of which the first tenth is there
            await asyncio.sleep(0.95)
            near.transport.write(bytes(MB // 10))  # half of that has been earned since
            await asyncio.sleep(10)
            assert far.times == [
                (pytest.approx(begin + 0.9), MB),
                (pytest.approx(begin + 1.0), MB + MB // 10),
            ]
            assert line.carried == MB + MB // 10

        testing.run(main())

    def test_jitter_delays_and_never_reorders(self) -> None:
        async def main() -> list[float]:
            testing.network().add(Host("alice", latency=0.1, jitter=0.5))
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            for number in range(200):
                near.transport.write(bytes([number]))
                await asyncio.sleep(0.01)
            await asyncio.sleep(10)
            assert far.heard == bytes(range(200))
            return [when - begin - 0.01 * number for number, (when, _n) in enumerate(far.times)]

        delays = testing.run(main(), seed=3)
        assert all(0.1 - 1e-9 <= delay <= 0.6 + 1e-9 for delay in delays)
        assert len({round(delay, 6) for delay in delays}) > 20
        assert testing.run(main(), seed=3) == delays
        assert testing.run(main(), seed=4) != delays

    def test_pieces_are_pieces_of_the_same(self) -> None:
        async def main() -> tuple[bytes, int]:
            near, far = await pair()
            near.transport.write(bytes(range(256)) * 40)
            await asyncio.sleep(1)
            return far.heard, len(far.times)

        whole, pieced = testing.run(main()), testing.run(main(), pieces=100)
        assert whole[0] == pieced[0]
        assert (whole[1], pieced[1] > 100) == (1, True)


class TestFlowControl:
    def test_a_writer_is_paused_and_resumed(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            near.transport.set_write_buffer_limits(high=1000, low=100)
            assert near.transport.get_write_buffer_limits() == (100, 1000)
            near.transport.write(bytes(1000))
            assert near.events == []
            near.transport.write(bytes(500))
            assert near.events == [(begin, "pause")]
            assert near.transport.get_write_buffer_size() == 1500
            await asyncio.sleep(1)
            assert near.events[1:] == [(pytest.approx(begin + 0.0015), "resume")]
            assert near.transport.get_write_buffer_size() == 0
            assert len(far.heard) == 1500

        testing.run(main())

    def test_who_does_not_read_is_sent_no_more_than_a_window(self) -> None:
        async def main() -> None:
            near, far = await pair()
            far.transport.pause_reading()
            assert not far.transport.is_reading()
            for _ in range(80):
                near.transport.write(bytes(1 << 16))
                await asyncio.sleep(0.01)
            assert far.heard == b""
            assert 3 << 20 <= near.transport.get_write_buffer_size() <= 4 << 20
            assert near.events[-1][1] == "pause"
            far.transport.resume_reading()
            await asyncio.sleep(1)
            assert len(far.heard) == 80 << 16
            assert near.events[-1][1] == "resume"

        testing.run(main())

    def test_a_reader_that_pauses_in_the_midst_gets_the_rest_later(self) -> None:
        async def main() -> None:
            near, far = await pair()
            far.buffer = bytearray(10)
            hear = far.buffer_updated

            def once(nbytes: int) -> None:
                hear(nbytes)
                far.transport.pause_reading()

            far.buffer_updated = once  # type: ignore[method-assign]
            near.transport.write(bytes(range(35)))
            for heard in (10, 20, 30, 35):
                await asyncio.sleep(1)
                assert len(far.heard) == heard
                far.transport.resume_reading()
            assert far.heard == bytes(range(35))

        testing.run(main())


class TestEnding:
    def test_a_close_comes_after_what_was_written(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            near.transport.write(bytes(MB))
            near.transport.close()
            near.transport.write(b"too late")
            assert near.transport.is_closing()
            assert await near.lost is None
            assert await far.lost is None
            assert len(far.heard) == MB
            assert far.events == [
                (pytest.approx(begin + 1), "eof"),
                (pytest.approx(begin + 1), "lost"),
            ]

        testing.run(main())

    def test_an_abort_does_not_wait(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            near.transport.write(bytes(MB))
            await asyncio.sleep(0.5)
            near.transport.abort()
            near.transport.abort()
            assert await near.lost is None
            assert await far.lost is None
            assert far.heard == b""

        testing.run(main())

    def test_half_a_connection_can_be_closed(self) -> None:
        async def main() -> None:
            near, far = await pair(keep_open=True)
            near.transport.write(b"a question")
            near.transport.write_eof()
            with pytest.raises(RuntimeError, match="after write_eof"):
                near.transport.write(b"more")
            await asyncio.sleep(1)
            assert [what for _when, what in far.events] == ["eof"]
            far.transport.write(b"an answer")
            await asyncio.sleep(1)
            assert (near.heard, far.heard) == (b"an answer", b"a question")
            far.transport.close()
            assert await near.lost is None
            assert await far.lost is None

        testing.run(main())

    def test_who_writes_to_a_closed_end_is_reset(self) -> None:
        async def main() -> None:
            testing.network().add(Host("bob", latency=0.1))
            near, far = await pair(keep_open=True)
            near.transport.close()
            await asyncio.sleep(1)
            assert [what for _when, what in far.events] == ["eof"]
            far.transport.write(b"are you there?")
            assert isinstance(await far.lost, ConnectionResetError)

        testing.run(main())

    def test_a_cut_resets_both_ends(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            near, far = await pair()
            near.transport.write(bytes(MB))
            await asyncio.sleep(0.5)
            assert testing.network().cut("alice") == 1
            for end in (near, far):
                assert isinstance(await end.lost, ConnectionResetError)
            assert far.heard == b""
            assert testing.network().cut("alice") == 0

        testing.run(main())

    def test_a_flow_that_is_cut_leaves_the_line_to_the_others(self) -> None:
        async def main() -> None:
            limited("bob", MB)
            one, two = await pair("alice"), await pair("carol")
            begin = asyncio.get_running_loop().time()
            one[0].transport.write(bytes(MB))
            two[0].transport.write(bytes(MB))
            await asyncio.sleep(1)  # half of each has crossed
            testing.network().cut("alice")
            await asyncio.sleep(9)
            assert two[1].times == [(pytest.approx(begin + 1.5), MB)]

        testing.run(main())


class TestHosts:
    def test_a_killed_host_makes_no_connections_until_it_is_revived(self) -> None:
        async def main() -> None:
            network, loop = testing.network(), asyncio.get_running_loop()
            _near, far = await pair()
            assert network.kill("alice") == 1
            assert isinstance(await far.lost, ConnectionResetError)
            port = next(port for (_host, port) in network._listeners)
            with network.at("alice"), pytest.raises(OSError, match="'alice' was killed"):
                await loop.create_connection(Recorder, "bob", port)
            network.revive("alice")
            with network.at("alice"):
                await loop.create_connection(Recorder, "bob", port)

        testing.run(main())

    def test_what_a_silent_host_says_is_heard_when_it_is_restored(self) -> None:
        async def main() -> None:
            network = testing.network()
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            testing.play("1 silence alice\n 5 restore alice")
            await asyncio.sleep(2)
            near.transport.write(b"one ")
            near.transport.write(b"two ")
            far.transport.write(b"hello?")
            await asyncio.sleep(1)
            assert (far.heard, near.heard) == (b"", b"")
            connecting = asyncio.ensure_future(pair())
            await asyncio.sleep(2)
            near.transport.write(b"three")
            await asyncio.sleep(1)
            assert far.heard == b"one two three"
            assert near.times == [(begin + 5, 6)]
            assert network.hosts["alice"].restored.is_set()
            await connecting

        testing.run(main())

    @each_row(("closed", "latency"), [(2.0, 0.0), (0.5, 1.0)])
    @each_row("silent", ["alice", "bob"])
    def test_the_end_of_a_connection_comes_when_a_silent_host_is_restored(
        self, silent: str, closed: float, latency: float
    ) -> None:
        """Closed while it is silent, or before, and the end is on its way."""

        async def main() -> None:
            testing.network().add(Host("alice", latency=latency))
            near, far = await pair()
            begin = asyncio.get_running_loop().time()
            testing.play(f"1 silence {silent}\n 5 restore {silent}")
            await asyncio.sleep(closed)
            near.transport.close()
            await near.lost
            await far.lost
            assert asyncio.get_running_loop().time() == begin + 5
            await asyncio.sleep(1)
            for name in ("alice", "bob"):
                assert not testing.network().host(name).ends
                assert not testing.network().host(name).held

        testing.run(main())

    def test_a_fault_of_nobody(self) -> None:
        async def main() -> None:
            await pair()
            testing.play("1 cut alcie")
            await asyncio.sleep(2)

        with pytest.raises(UsageError, match="no host is called 'alcie'; did you mean 'alice'"):
            testing.run(main())

    def test_a_server_that_comes_back_is_found(self) -> None:
        async def main() -> None:
            network, loop = testing.network(), asyncio.get_running_loop()
            network.add(Host("bob", latency=1.0))
            with network.at("bob"):
                (await loop.create_server(Recorder, "127.0.0.1", 7)).close()
            with network.at("alice"):
                connecting = asyncio.ensure_future(loop.create_connection(Recorder, "bob", 7))
            await asyncio.sleep(1)
            with network.at("bob"):
                await loop.create_server(Recorder, "127.0.0.1", 7)
            await connecting
            assert loop.time() == 2.0

        testing.run(main())

    def test_nobody_listens(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            with pytest.raises(ConnectionRefusedError):
                await loop.create_connection(Recorder, "bob", 7)
            listener = await loop.create_server(Recorder, "127.0.0.1", 7)
            with pytest.raises(OSError, match="in use"):
                await loop.create_server(Recorder, "127.0.0.1", 7)
            await loop.create_connection(Recorder, "127.0.0.1", 7)
            listener.close()
            assert not listener.is_serving()
            with pytest.raises(ConnectionRefusedError):
                await loop.create_connection(Recorder, "127.0.0.1", 7)

        testing.run(main())

    @each_row(
        ("make", "says"),
        [
            (lambda: Host("a", latency=-1), "latency of -1 s cannot be"),
            (lambda: Host("a", jitter=float("nan")), "jitter of nan s cannot be"),
            (lambda: Host("a", (SimulatedLink(0.0),)), "carries nothing"),
            (lambda: testing.network().add(testing.network().host("x")), "'x' already"),
        ],
    )
    def test_what_cannot_be(self, make: Callable[[], Any], says: str) -> None:
        async def main() -> None:
            with pytest.raises(UsageError, match=says):
                make()

        testing.run(main())


class TestStreams:
    def test_asyncio_streams_work(self) -> None:
        """Asyncio's layers on transports: readers, writers, drain, its server."""

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line.upper())
                await writer.drain()
            writer.close()
            await writer.wait_closed()

        async def main() -> tuple[list[bytes], float]:
            limited("bob", 1000, latency=0.5)
            with testing.network().at("bob"):
                server = await asyncio.start_server(echo, "127.0.0.1", 7)
            answers = []
            with testing.network().at("alice"):
                reader, writer = await asyncio.open_connection("bob", 7)
            assert writer.get_extra_info("peername") == ("bob", 7)
            assert writer.get_extra_info("socket") is None
            begin = asyncio.get_running_loop().time()
            for line in (b"one\n", b"two\n"):
                writer.write(line)
                await writer.drain()
                answers.append(await reader.readline())
            took = asyncio.get_running_loop().time() - begin
            writer.write_eof()
            answers.append(await reader.read())
            writer.close()
            await writer.wait_closed()
            server.close()
            await server.wait_closed()
            return answers, took

        answers, took = testing.run(main())
        assert answers == [b"ONE\n", b"TWO\n", b""]
        assert took == pytest.approx(2 * 0.5 + 0.5 + 16 / 1000 + 0.5, abs=1e-9)

    @pytest.mark.parametrize("call", [asyncio.open_connection, asyncio.start_server])
    def test_no_tls(self, call: Callable[..., Awaitable[Any]]) -> None:
        async def main() -> None:
            if call is asyncio.start_server:
                await call(lambda *_: None, "127.0.0.1", 7, ssl=object())
            else:
                await call("127.0.0.1", 7, ssl=object())

        with pytest.raises((UsageError, TypeError)):
            testing.run(main())


def test_nothing_is_lost_or_reordered_whatever_happens() -> None:
    """Random writes of random sizes both ways over a busy network, with pauses and jitter."""

    async def main(seed: int) -> None:
        rng = np.random.default_rng(seed)
        limited("bob", MB)
        for name in ("alice", "carol", "dan"):
            limited(name, float(rng.uniform(0.1, 2)) * MB, latency=0.01, jitter=0.02)
        ends = [await pair(name) for name in ("alice", "carol", "dan")]
        sent: dict[int, bytes] = {id(end): b"" for two in ends for end in two}
        for _ in range(150):
            two = ends[rng.integers(3)]
            way = int(rng.integers(2))
            data = rng.bytes(int(10 ** rng.uniform(0, 5.3)))
            two[way].transport.write(memoryview(data))
            sent[id(two[1 - way])] += data
            reader = two[rng.integers(2)].transport
            (reader.pause_reading if rng.integers(2) else reader.resume_reading)()
            await asyncio.sleep(float(rng.uniform(0, 0.1)))
        for two in ends:
            for end in two:
                end.transport.resume_reading()
        await asyncio.sleep(1000)
        for two in ends:
            for end in two:
                assert end.heard == sent[id(end)]
                assert end.transport.get_write_buffer_size() == 0
                assert all(a <= b for a, b in pairwise(when for when, _n in end.times))
        assert not any(line.flows for host in testing.network().hosts.values() for line in host.up)

    for seed in range(5):
        testing.run(main(seed), seed=seed, pieces=None if seed % 2 else 5000)
