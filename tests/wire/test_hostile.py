"""Peers that mean harm, or are just broken, against a live server that others go on using."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np
import pytest

from aiops.client import Client, Worker
from aiops.errors import ConnectionLost, Unavailable
from aiops.model.parts import LARGEST, Part
from aiops.wire import messages
from aiops.wire.encoding import encode
from aiops.wire.handshake import proof
from aiops.wire.messages import Error, Message, Pong, Push
from aiops.wire.token_keys import token_id
from tests.peers import Peer, Process, define, enclose, eventually, frame, header_of, push, serving
from tests.support import PATIENCE, ServerThread

MIB = 1 << 20
SIZE = 64 * 1024
"""Bytes of the model that most of these servers hold."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

QUICK = ("--stall-deadline", "0.3", "--hello-deadline", "1", "--log-level", "error")
PATIENT = ("--hello-deadline", "60")  # for those who greet by the hundred on a busy machine


class Live:
    """A server process with a model, and the honest worker that has to get its steps in."""

    def __init__(self, process: Process, nbytes: int) -> None:
        self.process = process
        self.url = process.url
        self.nbytes = nbytes
        self.worker = Client(self.url, role="worker", name="honest")
        self.params = self.worker.define({"w": np.zeros(nbytes // 4, np.float32)})
        self.gradient = {"w": np.ones(nbytes // 4, np.float32)}
        self.value = np.zeros(nbytes // 4, np.float32)
        self.step()

    def step(self) -> None:
        """See that the server still does its work, and that nobody else changed the model."""
        version = self.params.version
        assert self.worker.exchange(self.params, self.gradient).version == version + 1
        self.value -= 1
        np.testing.assert_array_equal(self.params["w"], self.value)

    def accept(self) -> None:
        """Take the model as it is now: a test has let somebody else push."""
        self.worker.fetch(self.params)
        assert np.isfinite(self.params["w"]).all()
        self.value[:] = self.params["w"]

    def present(self) -> int:
        """Return how many clients are connected."""
        return sum(row["present"] for row in self.worker.stats()["workers"])

    def check(self) -> None:
        """See that it works, has said nothing about errors, and holds nobody's buffer."""
        self.step()
        eventually(
            lambda: self.worker.stats()["receive_bytes"] == 0, "all receive buffers are back"
        )
        assert self.process.stderr() == ""


@contextlib.contextmanager
def living(nbytes: int = SIZE, *flags: str) -> Iterator[Live]:
    with serving("--policy", "asgd", "--set", "lr=1", *QUICK, *flags) as process:
        live = Live(process, nbytes)
        try:
            yield live
            live.check()
        finally:
            live.worker.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with living() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server that harmless tests share; each of them leaves it as it was."""
    yield shared
    shared.check()


# ---------------------------------------------------------------- what is not the wire at all

TLS_HELLO = bytes.fromhex(
    "16030100c8010000c40303" + "ab" * 32 + "20" + "cd" * 32 + "0002130100" + "00" * 90
)

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n",
    "tls": TLS_HELLO,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "noise": random.Random(1).randbytes(1_000_000),
    "empty frame": enclose(b""),
    "no map": enclose(msgpack.packb([1, 2, 3])),
    "huge header": b"\xce\xff\xff\xff\xff",
    "header longer than a greeting": enclose(bytes(5000)),
    "deep": enclose(b"\x81\xa4kind" + b"\x91" * 3000 + b"\xc0"),
    "ext": enclose(b"\x81\xa4kind\xd4\x01\x00"),
    "payload first": b"\xc6\x00\x00\x00\x04abcd",
    "fetch first": frame(messages.Fetch(1, -1)),
    "unknown kind": enclose(header_of(kind="shutdown", id=1)),
    "field too many": enclose(header_of(kind="ping", id=1, evil=True)),
    "field missing": enclose(header_of(kind="hello", id=1)),
    "wrong version": frame(messages.Hello(0, 99, "c", 1, "n", "worker", False, bytes(16), "a")),
    "wrong role": frame(
        messages.Hello(0, messages.PROTOCOL, "c", 1, "n", "boss", False, bytes(16), "a")
    ),
    "short nonce": enclose(
        header_of(
            kind="hello",
            id=0,
            protocol=messages.PROTOCOL,
            client="c",
            epoch=1,
            name="n",
            role="worker",
            pongs=False,
            nonce=b"1",
            agent="a",
        )
    ),
}


class TestStrangers:
    @pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
    def test_they_are_shown_out(self, live: Live, said: bytes) -> None:
        with Peer(live.url, greet=False) as peer:
            with contextlib.suppress(ConnectionError):  # it may hang up before all is said
                peer.send(said)
            assert peer.dropped()

    def test_connecting_and_leaving(self, live: Live) -> None:
        for _ in range(200):
            Peer(live.url, greet=False).close()

    def test_saying_hello_twice(self, live: Live) -> None:
        with Peer(live.url) as peer:
            peer.send(frame(peer.hello()))
            assert peer.dropped()

    def test_answers_to_nothing(self, live: Live) -> None:
        for message in (
            messages.Ack(1, 1, 1, True, 0, 0.0, None, b""),
            messages.FetchedParams(1, 1),
            messages.Report(1, {}),
            messages.Error(1, "bad-push", "no", {}, False),
        ):
            with Peer(live.url) as peer:
                peer.send(frame(message))
                assert peer.dropped()


# ---------------------------------------------------------------- tokens


class TestToken:
    @pytest.fixture
    def server(self) -> Iterator[ServerThread]:
        with ServerThread(policy="asgd", token="open sesame", kernels="numpy") as server:
            yield server

    @pytest.mark.parametrize("given", [b"", b"guess", bytes(32), bytes(4000)])
    def test_a_wrong_proof(self, server: ServerThread, given: bytes) -> None:
        with Peer(server.url, greet=False) as peer:
            challenge = peer.ask(peer.hello())
            assert isinstance(challenge, messages.Challenge)
            answer = peer.ask(messages.Prove(0, given, token_id("open sesame")))
            assert isinstance(answer, Error)
            assert (answer.code, answer.fatal) == ("unauthorised", True)
            assert peer.dropped()
        assert server.call(lambda s: list(s.engine.membership)) == []

    @pytest.mark.parametrize(
        "message", [messages.Fetch(1, -1), messages.Stats(1), messages.Ping(1), push(12, 1)]
    )
    def test_nothing_is_answered_before_the_proof(
        self, server: ServerThread, message: Message
    ) -> None:
        with Peer(server.url, greet=False) as peer:
            peer.ask(peer.hello())
            peer.send(frame(message))
            assert peer.dropped()

    def test_a_proof_is_good_for_one_connection(self, server: ServerThread) -> None:
        with Peer(server.url, greet=False) as honest, Peer(server.url, greet=False) as thief:
            challenge = honest.ask(honest.hello())
            assert isinstance(challenge, messages.Challenge)
            said = (honest.nonce, challenge.nonce, honest.client)
            overheard = proof("open sesame", "client", *said)
            stolen = messages.Prove(0, overheard, token_id("open sesame"))
            assert isinstance(honest.ask(stolen), messages.Welcome)
            thief.client, thief.nonce = honest.client, honest.nonce
            assert isinstance(thief.ask(thief.hello()), messages.Challenge)
            refused = thief.ask(stolen)
            assert isinstance(refused, Error)
            assert refused.code == "unauthorised"
            assert isinstance(honest.ask(messages.Ping(1)), Pong), "it keeps its seat"

    def test_the_servers_own_proof_opens_nothing(self, server: ServerThread) -> None:
        """Its answer, sent back to it, is not the client's."""
        with Peer(server.url, greet=False) as peer:
            challenge = peer.ask(peer.hello())
            assert isinstance(challenge, messages.Challenge)
            mirrored = proof("open sesame", "server", peer.nonce, challenge.nonce, peer.client)
            answer = peer.ask(messages.Prove(0, mirrored, token_id("open sesame")))
            assert isinstance(answer, Error)
            assert answer.code == "unauthorised"

    def test_challenges_differ(self, server: ServerThread) -> None:
        nonces = set()
        for _ in range(20):
            with Peer(server.url, greet=False) as peer:
                challenge = peer.ask(peer.hello())
                assert isinstance(challenge, messages.Challenge)
                nonces.add(challenge.nonce)
        assert len(nonces) == 20


# ---------------------------------------------------------------- members that misbehave


def one_part(**changes: Any) -> Part:
    return Part(0, SIZE, "raw", SIZE, 0)._replace(**changes)


BAD_PUSHES: dict[str, tuple[Push, bytes]] = {
    "no part": (Push(1, 1, False, -1, ()), b""),
    "beyond the model": (Push(1, 1, False, -1, (one_part(stop=2 * SIZE),)), bytes(SIZE)),
    "half a tensor": (
        Push(1, 1, False, -1, (Part(0, SIZE // 2, "raw", SIZE // 2, 0),)),
        bytes(SIZE // 2),
    ),
    "too short": (Push(1, 1, False, -1, (one_part(nbytes=8),)), bytes(8)),
    "unknown codec": (Push(1, 1, False, -1, (one_part(codec="zip"),)), bytes(SIZE)),
    "from the future": (Push(1, 1, False, -1, (one_part(version=1 << 40),)), bytes(SIZE)),
    "twice the same": (Push(1, 1, False, -1, (one_part(), one_part())), bytes(SIZE)),
    "not a number": (push(SIZE, 1), struct.pack("<f", float("nan")) * (SIZE // 4)),
}


class TestMembers:
    @pytest.mark.parametrize("name", BAD_PUSHES)
    def test_a_bad_push_is_refused_and_the_connection_lives(self, live: Live, name: str) -> None:
        message, payload = BAD_PUSHES[name]
        with Peer(live.url) as peer:
            answer = peer.ask(message, *[payload] * len(message.parts))
            assert isinstance(answer, Error)
            assert (answer.code, answer.fatal) == ("bad-push", False)
            assert isinstance(peer.ask(messages.Ping(2)), Pong)

    def test_an_observer_changes_nothing(self, live: Live) -> None:
        with Peer(live.url, "observer") as peer:
            answer = peer.ask(push(SIZE, 1), np.ones(SIZE // 4, np.float32).tobytes())
            assert isinstance(answer, Error)
            assert "connect with role='worker'" in answer.text
            peer.send(define({"w": np.zeros(SIZE // 4, np.float32)}))
            answer = peer.receive()
            assert isinstance(answer, Error)
            assert "only a worker may define" in answer.text

    def test_a_push_with_something_behind_it(self, live: Live) -> None:
        """Garbage after a whole push: its buffer comes back, as `Live.check` sees."""
        whole = frame(push(SIZE, 1), bytes(SIZE))
        for _ in range(50):
            with Peer(live.url) as peer:
                with contextlib.suppress(ConnectionError):
                    peer.send(whole + b"garbage")
                assert peer.dropped()
        live.accept()
        assert not (live.value % 1).any(), "zeros were pushed, or nothing"

    def test_a_lie_about_a_payloads_length(self, live: Live) -> None:
        for length in (0, 1, SIZE - 1, SIZE + 1, (1 << 32) - 1):
            with Peer(live.url) as peer:
                header = encode(push(SIZE, 1))
                peer.send(enclose(header) + b"\xc6" + length.to_bytes(4, "big") + bytes(100))
                assert peer.dropped()

    def test_the_same_push_again_and_again(self, live: Live) -> None:
        payload = np.ones(SIZE // 4, np.float32).tobytes()
        with Peer(live.url) as peer:
            version = live.params.version
            answers = [peer.ask(push(SIZE, 1, id=id), payload) for id in range(1, 9)]
            assert all(isinstance(answer, messages.Ack) for answer in answers)
            live.accept()
            assert live.params.version == version + 1, "applied once"

    def test_models_that_no_machine_can_hold(self) -> None:
        shapes: list[tuple[int, ...]] = [
            (1 << 62,),
            (1 << 40, 1 << 40),
            (0, 1 << 62, 1 << 62),
            (1 << 45,),
            (3,) * 32,
        ]
        with ServerThread(policy="asgd", max_model=1 << 61, kernels="numpy") as server:
            for shape in shapes:
                with Peer(server.url) as peer:
                    size = int(np.prod(np.array(shape, object))) * 4
                    part = Part(0, max(1, min(size, 1 << 30)), "raw", 16, 0)
                    offer = messages.Define(1, (("w", "float32", shape),), (part,))
                    answer = peer.ask(offer, bytes(16))
                    assert isinstance(answer, Error), shape
                    assert answer.code == "bad-push"
            with Peer(server.url) as peer:
                peer.send(define({"w": np.zeros(3, np.float32)}))
                assert isinstance(peer.receive(), messages.Model), "an honest offer gets through"

    def test_a_model_larger_than_the_memory(self) -> None:
        """It passes every check of its numbers, and still there is no room for it."""
        length, count = (1 << 32) - (1 << 12), 1 << 16
        parts = tuple(
            Part(index * length, (index + 1) * length, "raw", length, 0) for index in range(count)
        )
        offer = messages.Define(1, (("w", "float32", (count * length // 4,)),), parts)
        with ServerThread(policy="asgd", max_model=1 << 61, kernels="numpy") as server:
            with Peer(server.url) as peer:
                peer.send(enclose(encode(offer), bytes(8)))
                assert peer.dropped(), "the payload was not what was announced"
            with Peer(server.url) as peer:
                peer.send(define({"w": np.zeros(3, np.float32)}))
                assert isinstance(peer.receive(), messages.Model)

    def test_a_description_with_very_many_names(self, live: Live) -> None:
        """A few megabytes of names must not keep the server busy for minutes."""
        rows = [(str(index), "float32", (1,)) for index in range(60_000)]
        rows[-1] = rows[-2]
        part = Part(0, 4, "raw", 4, 0)
        with Peer(live.url) as peer:
            answer = peer.ask(messages.Define(1, tuple(rows), (part,)), bytes(4))
            assert isinstance(answer, Error)
            assert "two tensors are called '59998'" in answer.text

    def test_an_error_that_quotes_a_long_name_can_be_read(self, live: Live) -> None:
        name = "ω" * 4096
        with Peer(live.url) as peer:
            offer = messages.Define(1, ((name, "float32", (1,)),), (Part(0, 4, "raw", 4, 0),))
            answer = peer.ask(offer, bytes(4))
            assert isinstance(answer, Error)
            assert "another one" in answer.text

    @pytest.mark.slow
    def test_long_names_do_not_break_the_statistics(self) -> None:
        with living() as live:
            for index in range(2500):
                with Peer(live.url, "observer", greet=False) as peer:
                    hello = messages.Hello(
                        *(
                            0,
                            messages.PROTOCOL,
                            str(index),
                            1,
                            "n" * 3800,
                            "observer",
                            False,
                            bytes(16),
                            "a",
                        )
                    )
                    assert isinstance(peer.ask(hello), messages.Welcome)
            assert live.worker.stats()["version"] == live.params.version


# ---------------------------------------------------------------- slow and silent peers


class TestSlow:
    @pytest.mark.parametrize("begun", [0, 1, 4, 9, 60], ids=lambda n: f"{n} bytes said")
    def test_saying_nothing(self, live: Live, begun: int) -> None:
        with Peer(live.url, greet=False) as peer:
            peer.send(frame(peer.hello())[:begun])
            assert peer.dropped()

    @pytest.mark.parametrize("where", ["greeting", "header", "payload"])
    def test_a_byte_at_a_time(self, live: Live, where: str) -> None:
        """It is not silence that counts, but speed."""
        with Peer(live.url, greet=False) as peer:
            said = frame(peer.hello())
            if where != "greeting":
                peer.greet()
                whole = frame(push(SIZE, 1), bytes(SIZE))
                begin = 20 if where == "header" else 20_000
                peer.send(whole[:begin])
                said = whole[begin:]
            for index in range(len(said)):
                if closed_within(peer.sock, 0.02):
                    break
                try:
                    peer.send(said[index : index + 1])
                except ConnectionError:
                    break
            else:
                pytest.fail("the server took it all")

    def test_a_member_may_be_silent_between_messages(self, live: Live) -> None:
        with Peer(live.url, "observer") as quiet, Peer(live.url, greet=False) as stranger:
            assert stranger.dropped(), "the deadline has passed by now"
            assert isinstance(quiet.ask(messages.Ping(1)), Pong)

    @linux
    @pytest.mark.slow
    def test_a_reader_that_does_not_read(self) -> None:
        """It is dropped; meanwhile others go on, and it costs no more than what it asked for."""
        with (
            living(64 * MIB) as live,
            Peer(live.url, "observer", receive_buffer=1 << 14) as reader,
        ):
            before = live.process.rss()
            reader.send(frame(messages.Fetch(1, -1)))
            reader.sock.recv(1)
            for _ in range(3):
                live.step()
            eventually(lambda: live.present() == 1, "it is dropped")
            eventually(lambda: live.worker.stats()["versions_alive"] == 1, "its version is let go")
            assert live.process.rss() - before < 3 * 64 * MIB

    @linux
    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["fetch", "stats", "ping"])
    def test_asking_and_asking_without_reading(self, what: str) -> None:
        """A few kilobytes of requests must not make gigabytes of answers."""
        request = {
            "fetch": messages.Fetch(1, -1),
            "stats": messages.Stats(1),
            "ping": messages.Ping(1),
        }[what]
        with living(16 * MIB, "--live-versions", "2") as live:
            live.process.forget_peak()
            before = live.process.rss()
            with contextlib.ExitStack() as stack:
                for _ in range(4):
                    peer = stack.enter_context(Peer(live.url, "observer", receive_buffer=1 << 14))
                    flood(peer, frame(request) * 500)
                    live.step()  # each of them holds another version, more than may live
                for _ in range(3):
                    live.step()
                assert live.process.peak() - before < 16 * 16 * MIB
                if what == "fetch":  # the others' answers need no reader: they fit into the socket
                    eventually(lambda: live.present() == 1, "they are dropped")

    def test_not_reading_is_no_reason_to_be_accused_of_not_writing(self) -> None:
        """A client may be busy with reading a long answer; it has not stopped sending."""
        size = 16 * MIB
        with (
            ServerThread(policy="asgd", stall_deadline=1.0, min_rate=1, kernels="numpy") as server,
            Client(server.url, role="worker") as definer,
        ):
            definer.define({"w": np.zeros(size // 4, np.float32)})
            with Peer(server.url, "observer", receive_buffer=1 << 14) as peer:
                half = frame(messages.Ping(2))[:9]
                peer.send(frame(messages.Fetch(1, -1)) + half)
                pace, until = threading.Event(), time.monotonic() + 2.5
                while (
                    time.monotonic() < until
                ):  # more than twice the deadline, reading all the while
                    assert peer.sock.recv(1 << 14)
                    pace.wait(0.01)
                [link] = server.call(
                    lambda s: [p.link for p in s.connections.peers.values() if p.link.unsent]
                )
                assert link.wire.midway
                assert link.reading, "the next push may come while the answer goes"


def closed_within(sock: socket.socket, seconds: float) -> bool:
    """Wait that long for the other side to hang up."""
    readable, _, _ = select.select([sock], [], [], seconds)
    if not readable:
        return False
    try:
        return not sock.recv(1 << 16)
    except ConnectionError:
        return True


def flood(peer: Peer, data: bytes) -> None:
    """Send as much of it as the server takes."""
    peer.sock.settimeout(0.2)
    with contextlib.suppress(OSError):  # a time-out is one
        peer.send(data)
    peer.sock.settimeout(PATIENCE)


# ---------------------------------------------------------------- very many of them


@linux
@pytest.mark.slow
class TestMany:
    def test_many_large_pushes_at_once(self) -> None:
        """200 peers announce 64 MiB each: the buffers have a bound, and an honest step gets in."""
        size, bound = 64 * MIB, 4 * 64 * MIB
        with living(size) as live, contextlib.ExitStack() as stack:
            live.process.forget_peak()
            before = live.process.rss()
            peers = [stack.enter_context(Peer(live.url)) for _ in range(200)]
            head = frame(push(size, 1)) + b"\xc6" + size.to_bytes(4, "big")
            for peer in peers:
                peer.send(head)
            for peer in peers:
                flood_start(peer, size)
            with Client(live.url) as observer:
                stats = observer.stats()
            assert stats["receive_bytes"] <= bound
            with ThreadPoolExecutor(1) as pool:
                honest = pool.submit(live.step)
                for peer in peers[:184]:  # most give up, a few stay and must be dropped
                    peer.close()
                honest.result(PATIENCE)
            for peer in peers[184:]:
                assert peer.dropped()
            assert live.process.peak() - before < bound + 3 * size
            live.check()

    def test_many_honest_peers_at_once(self) -> None:
        steps = 5
        with living() as live, contextlib.ExitStack() as stack:
            before = live.params.version
            peers = [stack.enter_context(Peer(live.url)) for _ in range(200)]
            payload = np.ones(SIZE // 4, np.float32).tobytes()
            for seq in range(1, steps + 1):
                for peer in peers:
                    peer.send(frame(push(SIZE, seq, fetch=True), payload))
                for peer in peers:
                    answer = peer.receive()
                    assert isinstance(answer, messages.Ack), answer
                    got = np.frombuffer(peer.payloads[0], np.float32)
                    assert (got == -answer.version).all()
            live.accept()
            assert live.params.version == before + 200 * steps

    def test_idle_connections_cost_little(self) -> None:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 2048:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
        with living(SIZE, *PATIENT) as live, contextlib.ExitStack() as stack:
            for _ in range(10):  # what is made once is made now
                stack.enter_context(Peer(live.url, "observer"))
            before = live.process.rss()
            peers = [stack.enter_context(Peer(live.url, "observer")) for _ in range(1000)]
            assert live.process.rss() - before < 64 * MIB
            assert isinstance(peers[-1].ask(messages.Ping(1)), Pong)

    def test_large_headers_cost_what_is_sent(self) -> None:
        """Announcing four megabytes of header is free; the server must not pay for it either."""
        with living() as live, contextlib.ExitStack() as stack:
            live.process.forget_peak()
            before = live.process.rss()
            peers = [stack.enter_context(Peer(live.url)) for _ in range(200)]
            for peer in peers:
                peer.send(b"\xce" + (4 * MIB - 100).to_bytes(4, "big") + b"\x00")
            for peer in peers:
                assert peer.dropped()
            assert live.process.peak() - before < 128 * MIB

    def test_one_connection_too_many(self) -> None:
        flags = "--max-connections", "50", *PATIENT
        with living(SIZE, *flags) as live, contextlib.ExitStack() as stack:
            for _ in range(49):
                stack.enter_context(Peer(live.url, "observer"))
            for _ in range(2):
                with pytest.raises(Unavailable, match="has its 50 connections already"):
                    Client(live.url, timeout=2.0)
            stack.close()
            eventually(lambda: connects(live.url), "there is room again")


def connects(url: str) -> bool:
    try:
        Client(url, timeout=2.0).close()
    except (Unavailable, ConnectionLost):
        return False
    return True


def flood_start(peer: Peer, size: int) -> None:
    """Send what the server takes of a payload at once, without waiting."""
    peer.sock.setblocking(False)
    chunk = bytes(256 * 1024)
    with contextlib.suppress(OSError):
        for _ in range(size // len(chunk) // 4):
            peer.sock.send(chunk)
    peer.sock.settimeout(PATIENCE)


# ---------------------------------------------------------------- mutated frames


END = 424242
"""The id of the request that ends a batch."""


class Mutator:
    """Makes frames that are wrong in every way that a seed can think of."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        payload = np.ones(SIZE // 4, np.float32).tobytes()
        small = bytes(1024)
        self._whole: list[bytes] = [
            frame(messages.Ping(1)),
            frame(messages.Pong(1)),
            frame(messages.Fetch(2, 0)),
            frame(messages.Describe(3)),
            frame(messages.Stats(4)),
            frame(messages.Prove(0, bytes(32))),
            frame(push(1024, 1), small),
            frame(push(SIZE, 2, fetch=True), payload),
            frame(Push(5, 3, True, -1, (one_part(stop=SIZE - 4, nbytes=1024),)), small),
            define({"w": np.zeros(256, np.float32), "b": np.zeros((2, 3), np.float16)}),
            frame(messages.Leave(9)),
        ]
        self._edits: list[Callable[[bytearray], bytearray]] = [
            self._flip,
            self._overwrite,
            self._truncate,
            self._insert,
            self._remove,
            self._splice,
            self._lengths,
        ]

    def soft(self) -> bytes:
        """Return a well-formed message that makes no sense."""
        random = self.random
        number = random.choice([0, 1, 7, SIZE, 1 << 20, LARGEST])
        kind = random.randrange(6)
        if kind == 0:
            return frame(messages.Fetch(number, random.choice([-1, 0, 5, number])))
        if kind == 1:
            start, stop = sorted((random.randrange(SIZE), random.randrange(1, 2 * SIZE)))
            part = Part(start, max(stop, start + 1), random.choice(["raw", "zip"]), 64, number)
            return frame(Push(number, random.randrange(9), True, -1, (part,)), bytes(64))
        if kind == 2:
            empty = tuple(Part(i, i + 1, "raw", 0, 0) for i in range(random.randrange(4)))
            return frame(Push(number, number, False, number, empty), *[b""] * len(empty))
        if kind == 3:
            rows = tuple(
                (
                    random.choice("ab"),
                    random.choice(["float32", "int8", "x"]),
                    (random.randrange(3),),
                )
                for _ in range(random.randrange(4))
            )
            return frame(messages.Define(number, rows, ()))
        if kind == 4:
            return frame(messages.Pong(number))
        return frame(messages.Ping(number))

    def hard(self) -> bytes:
        """Return a frame that was good before it was damaged."""
        data = bytearray(self.random.choice(self._whole))
        for _ in range(self.random.choice([1, 1, 1, 2, 5])):
            data = self.random.choice(self._edits)(data)
        return bytes(data)

    def _near_the_front(self, data: bytearray) -> int:
        """Return a place; the header is where most damage can be done."""
        return self.random.randrange(
            max(1, min(len(data), self.random.choice([6, 80, 200, 1 << 30])))
        )

    def _flip(self, data: bytearray) -> bytearray:
        if data:
            data[self._near_the_front(data)] ^= 1 << self.random.randrange(8)
        return data

    def _overwrite(self, data: bytearray) -> bytearray:
        place = self._near_the_front(data)
        data[place : place + 4] = self.random.randbytes(4)
        return data

    def _truncate(self, data: bytearray) -> bytearray:
        return data[: self._near_the_front(data)]

    def _insert(self, data: bytearray) -> bytearray:
        place = self._near_the_front(data)
        data[place:place] = self.random.randbytes(self.random.randrange(1, 9))
        return data

    def _remove(self, data: bytearray) -> bytearray:
        place = self._near_the_front(data)
        del data[place : place + self.random.randrange(1, 9)]
        return data

    def _splice(self, data: bytearray) -> bytearray:
        other = self.random.choice(self._whole)
        return data[: self._near_the_front(data)] + other[self.random.randrange(len(other)) :]

    def _lengths(self, data: bytearray) -> bytearray:
        """Lie about a length."""
        lie = self.random.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, self.random.randrange(1 << 16)])
        place = data.find(b"\xc6") if self.random.random() < 0.5 else 0
        if place >= 0:
            data[place + 1 : place + 5] = lie.to_bytes(4, "big")
        return data


@linux
@pytest.mark.slow
class TestMutations:
    def test_twenty_thousand_frames(self) -> None:
        """16 that make no sense and 4 that are damaged on each of 1,000 connections."""
        connections, soft, hard = 1_000, 16, 4
        mutator = Mutator(seed=7)
        with living() as live:
            grown_from, answered = None, 0
            for index in range(connections):
                with Peer(live.url) as peer:
                    peer.send(b"".join(mutator.soft() for _ in range(soft)))
                    last = peer.ask(messages.Ping(END))
                    while last.id != END:
                        answered += 1
                        last = peer.receive()
                    speak(peer, b"".join(mutator.hard() for _ in range(hard)))
                if index == connections // 2:  # what a server remembers of clients has a bound
                    grown_from = live.process.rss()
            assert answered > connections * soft // 2, "all but pongs are answered"
            assert grown_from is not None
            assert live.process.rss() - grown_from < 32 * MIB
            live.accept()  # some mutations are honest pushes

    def test_greetings(self) -> None:
        mutator = Mutator(seed=8)
        with living() as live:
            for _ in range(1_000):
                with Peer(live.url, greet=False) as peer:
                    said = bytearray(frame(peer.hello()))
                    edit = mutator.random.choice(mutator._edits)
                    speak(peer, bytes(edit(said)) + mutator.hard())
            live.accept()  # some mutations are honest pushes


def speak(peer: Peer, data: bytes) -> None:
    """Say it, hang up, and take in whatever is answered until the server does, too."""
    with contextlib.suppress(OSError):
        peer.send(data)
        peer.sock.shutdown(socket.SHUT_WR)
        while peer.sock.recv(1 << 20):
            pass


def test_the_worker_is_none_the_wiser() -> None:
    """A whole training loop, with all kinds of strangers at the door meanwhile."""
    with living() as live, Worker(live.url, {"w": np.zeros(SIZE // 4, np.float32)}) as worker:
        first = worker.version
        for step, said in enumerate(STRANGERS.values(), start=1):
            with Peer(live.url, greet=False) as peer:
                with contextlib.suppress(ConnectionError):
                    peer.send(said)
                assert worker.step({"w": np.ones(SIZE // 4, np.float32)}).version == first + step
        live.accept()
