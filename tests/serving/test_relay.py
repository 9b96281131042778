"""A relay, in virtual time: workers that cannot reach each other, and strangers at its door."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.averaging.routes import HEAD_START
from aiops.client import AsyncModelAverager
from aiops.errors import ConflictError, UsageError
from aiops.model.layout import Array
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.relay import Relay, RelaySettings
from aiops.sim.virtual.sockets import MemorySocket
from aiops.wire import messages
from aiops.wire.connection import Connection
from aiops.wire.messages import PROTOCOL, Challenge, Error, Message, Prove
from aiops.wire.ring_messages import RelayHello, RelayReady, RingChunk
from aiops.wire.ring_proofs import relay_proof, ring_name, ring_token
from tests.peers import frame
from tests.rows import each_row

TOKEN = "shared with the relay"
ASKED: dict[str, Any] = {"interval": 1000.0, "grace": 100.0, "stall": 2.0}


class NatSocket(MemorySocket):
    """A socket of a worker behind NAT: only some ports answer it."""

    answering: set[int]

    async def connect(self, address: tuple[str, int]) -> None:
        if address[1] not in self.answering:
            await asyncio.Event().wait()
        await super().connect(address)


@contextlib.contextmanager
def behind_nat(*answering: int) -> Any:
    """Let the sockets that are made reach these ports only."""
    env = CURRENT_ENVIRONMENT.get()

    def unconnected(host: str) -> Any:
        sock = NatSocket(testing.network())
        sock.answering = set(answering)
        return sock

    CURRENT_ENVIRONMENT.set(dataclasses.replace(env, unconnected_socket=unconnected))
    try:
        yield
    finally:
        CURRENT_ENVIRONMENT.set(env)


@contextlib.asynccontextmanager
async def relaying(**settings: Any) -> AsyncIterator[tuple[Relay, int]]:
    """A relay, and its port."""
    sock = CURRENT_ENVIRONMENT.get().listening_socket("127.0.0.1")
    relay = Relay(sock, RelaySettings(**{"token": TOKEN, **settings}))
    port = sock.getsockname()[1]
    task = asyncio.create_task(relay.run())
    try:
        yield relay, port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert relay.connections == 0
        while Stranger.every:
            Stranger.every.pop().sock.close()


def meeting_point(port: int, **more: Any) -> Any:
    chosen = {"relay": f"127.0.0.1:{port}", "relay_token": TOKEN, "set": ASKED, **more}
    return aiops.serve(policy="average", kernels="numpy", **chosen)


@contextlib.asynccontextmanager
async def apart(
    relay_port: int | None = None, **settings: Any
) -> AsyncIterator[tuple[Relay, str, contextlib.AsyncExitStack]]:
    """A relay, the URL of a meeting point, and a stack of workers that can reach these only.

    The server sends them to the relay's own port, or to `relay_port`.
    """
    async with relaying(**settings) as (relay, port), meeting_point(relay_port or port) as server:
        with behind_nat(port):
            async with contextlib.AsyncExitStack() as stack:
                yield relay, server.url, stack


def model(value: float, size: int = 5) -> dict[str, Array]:
    return {"w": np.full((size, 3), value, np.float32), "b": np.full(2, value)}


async def joined(
    stack: contextlib.AsyncExitStack, url: str, *params: dict[str, Array]
) -> list[AsyncModelAverager]:
    found: list[AsyncModelAverager] = []
    for given in params:
        averager = AsyncModelAverager(url, given)
        coming = asyncio.create_task(stack.enter_async_context(averager))
        await asyncio.sleep(0.5)
        await asyncio.gather(coming, *(other.average() for other in found))
        found.append(averager)
    return found


async def failed_round(url: str) -> str:
    """Have two workers try a round that fails; return what the first says of it."""
    async with AsyncModelAverager(url, model(0.0)) as first:
        second = AsyncModelAverager(url, model(0.0), timeout=5.0)
        coming = asyncio.create_task(second.connect())
        await asyncio.sleep(0.5)
        assert await first.average() == 0
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await second.close()
        return str(first.stats.last_error)


async def average(averagers: Sequence[AsyncModelAverager]) -> list[int]:
    return await asyncio.gather(*(one.average() for one in averagers))


class TestAverage:
    @pytest.mark.parametrize("size", [2, 3])
    def test_workers_that_cannot_reach_each_other_average_through_the_relay(
        self, size: int
    ) -> None:
        async def main() -> None:
            params = [model(0.0, 20_000) for _ in range(size)]
            async with apart() as (relay, url, stack):
                averagers = await joined(stack, url, *params)
                for index, given in enumerate(params):
                    given["w"] += index
                before = sum(one.stats.traffic.bytes_out for one in averagers)
                passed = relay.passed_on
                assert await average(averagers) == [size] * size
                sent = sum(one.stats.traffic.bytes_out for one in averagers) - before
                assert [one.stats.failed for one in averagers] == [0] * size
                assert all(one.stats.relayed == one.stats.rounds for one in averagers)
            for given in params:
                np.testing.assert_array_equal(given["w"], (size - 1) / 2)
            # To the byte: the rest is what each end says to the relay itself.
            hello = RelayHello(0, PROTOCOL, bytes(32), 0, True, bytes(16))
            greeting = len(frame(hello)) + len(frame(Prove(0, bytes(32))))
            assert sent == relay.passed_on - passed + 2 * size * greeting

        testing.run(main())

    def test_the_direct_connection_is_chosen_where_it_works(self) -> None:
        async def main() -> None:
            params = [model(0.0), model(0.0)]
            async with (
                relaying() as (relay, port),
                meeting_point(port) as server,
                contextlib.AsyncExitStack() as stack,
            ):
                averagers = await joined(stack, server.url, *params)
                params[1]["w"] += 2
                assert await average(averagers) == [2, 2]
                assert [one.stats.relayed for one in averagers] == [0, 0]
                assert relay.pairs == 0
            np.testing.assert_array_equal(params[0]["w"], 1.0)

        testing.run(main())

    def test_one_worker_behind_nat_is_enough_to_need_the_relay_in_one_direction(self) -> None:
        """The worker in the open cannot connect to the one behind NAT, which connects to it."""

        async def main() -> None:
            params = [model(0.0), model(4.0)]
            async with (
                relaying() as (relay, port),
                meeting_point(port) as server,
                contextlib.AsyncExitStack() as stack,
            ):
                with behind_nat(port):
                    first = AsyncModelAverager(server.url, params[0])
                    await stack.enter_async_context(first)
                second = AsyncModelAverager(server.url, params[1])
                coming = asyncio.create_task(stack.enter_async_context(second))
                await asyncio.sleep(0.5)
                await asyncio.gather(coming, first.average())
                assert [one.stats.relayed for one in (first, second)] == [1, 1]
                assert relay.pairs == 1

        testing.run(main())

    def test_the_head_start_is_waited_for_once(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with apart() as (_relay, url, stack):
                averagers = await joined(stack, url, model(0.0), model(0.0))
                assert averagers[0].stats.seconds >= HEAD_START
                began = loop.time()
                await average(averagers)
                assert loop.time() - began < HEAD_START

        testing.run(main())

    @pytest.mark.parametrize("nbytes", range(500, 6000, 1200))
    def test_each_example_counts_once_though_connections_are_cut(self, nbytes: int) -> None:
        """Three workers share a data set; one is cut off at any byte, another one dies."""
        examples, effects = np.arange(60), {}

        async def work(url: str, number: int) -> None:
            params = {"seen": np.zeros((5, 60), np.float32)}
            async with AsyncModelAverager(url, params) as averager:
                async for batch in aiops.data.batches(averager, examples, batch_size=3):
                    await asyncio.sleep(0.1)
                    async with averager.step():
                        params["seen"][number, batch] += 1
                await averager.average()
                assert averager.stats.relayed == averager.stats.rounds
            effects[number] = params["seen"]

        async def main() -> None:
            network, often = testing.network(), {"interval": 0.2, "grace": 0.3}
            async with relaying() as (relay, port), meeting_point(port, set=often) as server:
                tasks = []
                for number in range(4):
                    with network.at(f"w{number}"), behind_nat(port):
                        tasks.append(asyncio.create_task(work(server.url, number)))
                    if number == 2:
                        network.after("w0", "up", nbytes, lambda: network.cut("w0"))
                        await asyncio.sleep(1.0 + nbytes / 5000)
                        network.kill("w1")
                        tasks.pop(1).cancel()
                await asyncio.gather(*tasks)
                assert relay.pairs > 0
                await testing.until(lambda: relay.connections == 0, "all have left")
            by = (sum(effects.values()) > 0).sum(axis=0)
            assert (by == 1).all(), "each has an effect, of one worker"

        testing.run(main())

    def test_without_a_relay_that_answers_a_round_fails_and_the_error_says_both(self) -> None:
        async def main() -> None:
            async with apart(relay_port=1) as (_relay, url, _stack):
                text = await failed_round(url)
                assert "nor does it come through the relay" in text
                assert "the relay 127.0.0.1:1 cannot be reached" in text

        testing.run(main())

    def test_a_relay_with_another_token_admits_no_ring(self) -> None:
        async def main() -> None:
            async with apart(token="another") as (_relay, url, _stack):
                assert "this is not the token of that ring" in await failed_round(url)

        testing.run(main())

    def test_a_relay_that_changes_a_chunk_voids_the_round_and_changes_no_model(self) -> None:
        async def main() -> None:
            params = [model(0.0, 2000), model(0.0, 2000)]
            async with apart() as (relay, url, stack):
                averagers = await joined(stack, url, *params)
                params[1]["w"] += 2
                change_payloads(relay)
                assert await average(averagers) == [0, 0]
                errors = [one.stats.last_error for one in averagers]
                assert any("changed on their way" in str(error) for error in errors)
            np.testing.assert_array_equal(params[0]["w"], 0.0)
            np.testing.assert_array_equal(params[1]["w"], 2.0)

        testing.run(main())


def change_payloads(relay: Relay) -> None:
    """Have a relay flip a bit late in every run of bytes that is long enough to be a payload."""
    loop = asyncio.get_running_loop()
    send = loop.sock_sendall

    async def sendall(sock: Any, data: Any) -> None:
        if len(data) > 1024 and any(sock is peer.sock for peer in relay._peers.values()):
            changed = bytearray(data)
            changed[-8] ^= 1
            data = bytes(changed)
        await send(sock, data)

    loop.sock_sendall = sendall  # type: ignore[method-assign]


class Stranger:
    """A connection to a relay in a test's hands; `relaying` closes it."""

    every: ClassVar[list[Stranger]] = []

    def __init__(self) -> None:
        self.sock = MemorySocket(testing.network())
        self.wire = Connection("client")

    @classmethod
    async def at(cls, port: int) -> Stranger:
        cls.every.append(found := cls())
        await found.sock.connect(("127.0.0.1", port))
        return found

    async def send(self, data: bytes) -> None:
        await self.sock.send_all(data)

    async def say(self, message: Message) -> None:
        for buffer in self.wire.send(message):
            await self.send(bytes(buffer))

    async def receive(self) -> Message | None:
        """The next message, or None: the relay has closed the connection."""
        while True:
            count = await self.sock.receive_into(self.wire.next_buffer())
            if not count:
                return None
            for message, _sink in self.wire.received(count):
                return message

    async def admitted(self, claim: tuple[bytes, int, bool], token: str = TOKEN) -> None:
        """Carry out the handshake, but for the last message."""
        hello = RelayHello(0, PROTOCOL, *claim, b"n" * 16)
        await self.say(hello)
        challenge = await self.receive()
        assert isinstance(challenge, Challenge)
        mine = ring_token(token, claim[0])
        await self.say(Prove(0, relay_proof(mine, "client", hello, challenge.nonce)))


RING = ring_name(b"s" * 32, 1)


def claim(ring: bytes = RING, sender: int = 0, sends: bool = True) -> tuple[bytes, int, bool]:
    return ring, sender, sends


class TestStrangers:
    @each_row(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xce\xff\xff\xff\xff",
            frame(messages.Ping(1)),
            frame(Prove(0, b"guess")),
            frame(RelayReady(0, b"guess")),
            frame(RingChunk(0, 1)),
            frame(RelayHello(0, PROTOCOL, b"", 0, True, b"n" * 16)),
            frame(RelayHello(0, PROTOCOL, RING, 1 << 16, True, b"n" * 16)),
            frame(RelayHello(0, PROTOCOL + 1, RING, 0, True, b"n" * 16)),
            frame(RelayHello(0, PROTOCOL, RING, 0, True, b"n" * 16)) * 2,
            b"\xce\x00\x00",
            b"",
        ],
    )
    def test_what_they_say_ends_their_connection_only(self, said: bytes) -> None:
        async def main() -> None:
            async with relaying(hello_deadline=5.0) as (relay, port):
                stranger = await Stranger.at(port)
                await stranger.send(said)
                while await stranger.receive() is not None:
                    pass
                assert relay.connections == relay.waiting == 0
                assert asyncio.get_running_loop().time() <= 5.1
                await meet(port)

        testing.run(main())

    def test_another_ring_s_token_is_refused_and_told_why(self) -> None:
        async def main() -> None:
            async with relaying() as (relay, port):
                stranger = await Stranger.at(port)
                await stranger.admitted(claim(), token="another run's")
                answer = await stranger.receive()
                assert isinstance(answer, Error)
                assert answer.code == "unauthorised"
                assert await stranger.receive() is None
                assert relay.waiting == 0

        testing.run(main())

    def test_a_member_of_one_ring_is_not_admitted_to_another_of_the_same_run(self) -> None:
        async def main() -> None:
            async with relaying() as (relay, port):
                member = await Stranger.at(port)
                hello = RelayHello(0, PROTOCOL, *claim(ring_name(b"t" * 32, 2)), b"n" * 16)
                await member.say(hello)
                challenge = await member.receive()
                assert isinstance(challenge, Challenge)
                told = ring_token(TOKEN, RING)  # for the ring that it is a member of
                await member.say(Prove(0, relay_proof(told, "client", hello, challenge.nonce)))
                answer = await member.receive()
                assert isinstance(answer, Error)
                assert answer.code == "unauthorised"
                assert relay.waiting == 0

        testing.run(main())

    def test_who_speaks_before_the_other_end_is_there_is_dropped(self) -> None:
        async def main() -> None:
            async with relaying() as (relay, port):
                early = await Stranger.at(port)
                await early.admitted(claim())
                await testing.until(lambda: relay.waiting == 1, "it waits")
                await early.send(b"x")
                assert await early.receive() is None
                assert relay.waiting == 0

        testing.run(main())

    def test_an_end_that_leaves_is_forgotten(self) -> None:
        async def main() -> None:
            async with relaying() as (relay, port):
                one = await Stranger.at(port)
                await one.admitted(claim())
                await testing.until(lambda: relay.waiting == 1, "it waits")
                one.sock.close()
                await testing.until(lambda: relay.connections == 0, "it is forgotten")
                assert relay.waiting == 0

        testing.run(main())

    def test_an_end_that_comes_again_takes_its_own_place(self) -> None:
        async def main() -> None:
            async with relaying() as (relay, port):
                first, again = await Stranger.at(port), await Stranger.at(port)
                await first.admitted(claim())
                await testing.until(lambda: relay.waiting == 1, "it waits")
                await again.admitted(claim())
                assert await first.receive() is None
                assert relay.waiting == 1
                other = await Stranger.at(port)
                await other.admitted(claim(sends=False))
                assert isinstance(await again.receive(), RelayReady)

        testing.run(main())

    @pytest.mark.parametrize(
        "other", [claim(ring_name(b"s" * 32, 2), 0, False), claim(sender=1, sends=False)]
    )
    def test_ends_of_different_connections_do_not_meet(self, other: Any) -> None:
        async def main() -> None:
            async with relaying(meeting_deadline=3.0) as (relay, port):
                ends = [await Stranger.at(port), await Stranger.at(port)]
                await ends[0].admitted(claim())
                await ends[1].admitted(other)
                assert [await end.receive() for end in ends] == [None, None]
                assert relay.pairs == 0
                assert 3.0 <= asyncio.get_running_loop().time() < 4.0

        testing.run(main())

    def test_a_pair_through_which_nothing_passes_ends(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with relaying(idle_deadline=7.0) as (relay, port):
                sender, receiver = await meet(port)
                await asyncio.sleep(5.0)
                await sender.send(b"x")
                assert await receiver.sock.receive_into(memoryview(bytearray(8))) == 1
                began = loop.time()
                assert await receiver.sock.receive_into(memoryview(bytearray(8))) == 0
                assert 7.0 <= loop.time() - began < 7.1
                assert relay.passed_on == 1

        testing.run(main())

    def test_a_receiver_that_takes_nothing_holds_its_sender_back(self) -> None:
        """Of what a sender would send the relay keeps a buffer, and the sockets theirs."""

        async def main() -> None:
            loop, nothing = asyncio.get_running_loop(), bytes(64 << 10)
            listener = socket.create_server(("127.0.0.1", 0))
            relay = Relay(listener, RelaySettings(token=TOKEN, idle_deadline=0.5))
            task, port = asyncio.create_task(relay.run()), listener.getsockname()[1]

            async def flood(end: RealEnd) -> None:
                with contextlib.suppress(TimeoutError, OSError):  # or the pair has ended
                    async with asyncio.timeout(0.3):
                        while True:
                            await loop.sock_sendall(end.sock, nothing)

            senders, floods = [], []
            tracemalloc.start()
            for sender in range(8):
                ends = [RealEnd(port, claim(sender=sender, sends=sends)) for sends in (True, False)]
                for end in ends:
                    await end.admitted()
                for end in ends:
                    assert isinstance(await end.receive(), RelayReady)
                senders += ends
                floods.append(loop.create_task(flood(ends[0])))  # at once: else it may end, idle
            await asyncio.gather(*floods)
            _now, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            # The process's other threads are in it.
            assert most < 16 * 6 * len(nothing), "a buffer in each direction of 8 pairs, and more"
            assert relay.passed_on > 8 * len(nothing)
            # A pair through which nothing passes any more ends by itself.
            async with asyncio.timeout(20.0):
                await asyncio.gather(*(peer.task for peer in relay._peers.values() if peer.task))
            for end in senders:
                end.sock.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())

    def test_connections_are_bounded_and_strangers_make_room_for_workers(self) -> None:
        async def main() -> None:
            async with relaying(most=4) as (relay, port):
                idle = [await Stranger.at(port) for _ in range(9)]
                await testing.until(lambda: relay.connections == 4, "they are there")
                first = await meet(port)
                second = await meet(port, sender=1)
                assert relay.connections == 4
                late = await Stranger.at(port)
                assert await late.receive() is None, "an admitted connection gives up no room"
                assert [await one.receive() for one in idle] == [None] * 9
                for sender, receiver in (first, second):
                    await sender.send(b"x")
                    assert await receiver.sock.receive_into(memoryview(bytearray(8))) == 1

        testing.run(main())


class RealEnd:
    """An end of a connection to a relay, over a real socket."""

    def __init__(self, port: int, claim: tuple[bytes, int, bool]) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self._wire, self._claim = Connection("client"), claim

    async def say(self, message: Message) -> None:
        for buffer in self._wire.send(message):
            await asyncio.get_running_loop().sock_sendall(self.sock, buffer)

    async def receive(self) -> Message:
        while True:
            loop = asyncio.get_running_loop()
            count = await loop.sock_recv_into(self.sock, self._wire.next_buffer())
            assert count, "the relay closed it"
            for message, _sink in self._wire.received(count):
                return message

    async def admitted(self) -> None:
        hello = RelayHello(0, PROTOCOL, *self._claim, b"n" * 16)
        await self.say(hello)
        challenge = await self.receive()
        assert isinstance(challenge, Challenge)
        mine = ring_token(TOKEN, self._claim[0])
        await self.say(Prove(0, relay_proof(mine, "client", hello, challenge.nonce)))


async def meet(port: int, sender: int = 0) -> tuple[Stranger, Stranger]:
    """Two ends that have met."""
    ends = await Stranger.at(port), await Stranger.at(port)
    for end, sending in zip(ends, (True, False), strict=True):
        await end.admitted(claim(sender=sender, sends=sending))
    for end in ends:
        assert isinstance(await end.receive(), RelayReady)
    return ends


class TestSettings:
    @each_row(
        ("settings", "text"),
        [
            ({"token": ""}, "token is empty"),
            ({"most": 1}, "2 connections at least"),
            ({"idle_deadline": 0.0}, "--idle-deadline must be more than 0"),
            ({"hello_deadline": float("nan")}, "--hello-deadline must be more than 0"),
        ],
    )
    def test_what_cannot_work(self, settings: dict[str, Any], text: str) -> None:
        with pytest.raises(UsageError, match=text):
            RelaySettings(**settings)

    def test_beyond_loopback_a_token_is_needed(self) -> None:
        RelaySettings().check_host("127.0.0.1")
        RelaySettings(token="x").check_host("0.0.0.0")
        with pytest.raises(UsageError, match="AIOPS_RELAY_TOKEN"):
            RelaySettings().check_host("0.0.0.0")

    def test_a_server_whose_workers_do_not_average_has_no_use_for_a_relay(self) -> None:
        async def main() -> None:
            with pytest.raises(ConflictError, match="--policy average"):
                async with aiops.serve(policy="asgd", relay="127.0.0.1:7172"):
                    pass

        testing.run(main())
