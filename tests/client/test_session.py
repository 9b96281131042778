"""A session with a real engine, through memory: whatever the chunks, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiops
from aiops.algorithms import find
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests
from aiops.client.session import Session
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Event, Joined, Left, Options, Received, Reply
from aiops.errors import (
    BadPush,
    ConnectionLost,
    NotReady,
    Refused,
    RemoteProtocolError,
    Restarted,
    StaleGradient,
    Unauthorised,
    Unavailable,
    UsageError,
)
from aiops.model.layout import Array, Layout
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.encoding import encode
from aiops.wire.fields import MAX_COUNT
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import Error, Message
from aiops.wire.sinks import Sink
from aiops.wire.token_keys import only
from tests.driven import Driven
from tests.rows import each_row
from tests.strategies import DETERMINISTIC
from tests.wire.test_connection import feed, frame

URL = "aiops://memory:7171"
ARRAYS: Mapping[str, Array] = {
    "w": np.array([[1, 2], [3, 4]], np.float32),
    "b": np.array([5, 6, 7], np.float16),
    "s": np.array(8, np.float64),
}
ONES = {name: np.ones_like(array) for name, array in ARRAYS.items()}


class Server:
    """A server without sockets: an engine, and one end of a connection at a time.

    With ``hold`` updates wait for `run_kernel`.
    """

    def __init__(
        self,
        policy: str = "asgd",
        token: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        algorithm = find(policy).make({"lr": 0.5, **(settings or {})})
        self.engine = Engine(algorithm, Options(**options))
        self.token = token
        self.received: list[Message] = []
        self.down = b""  # to the client
        self.outstanding: list[Apply] = []
        self.hold = False
        self._peer = 0
        self.connected()

    @property
    def version(self) -> int:
        assert self.engine.store is not None
        return self.engine.store.version

    def params(self) -> dict[str, list[Any]]:
        assert self.engine.store is not None
        views = self.engine.store.current.arena.views
        return {name: view.tolist() for name, view in views.items()}

    def connected(self) -> None:
        """Begin on a new connection."""
        self._peer += 1
        self._handshake = ServerHandshake(
            self.token and only(self.token), self._peer.to_bytes(16, "big")
        )
        self.wire = Driven("server", self.engine.admission.sink_for)
        self.down = b""

    def receive(self, data: bytes) -> None:
        """Have bytes arrive."""
        for message, sink in feed(self.wire, data):
            self.received.append(message)
            self._take(message, sink)

    def lost(self) -> None:
        """Hear that the connection is gone."""
        self.wire.lost()
        if self._handshake.admitted:
            self._post(Left(0.0, self._peer))

    def run_kernel(self) -> None:
        """Finish the update that was held."""
        effect = self.outstanding.pop()
        self._post(Applied(0.0, effect.ticket, effect.run()))

    def say(self, message: Message, *payloads: bytes) -> None:
        """Say something that nobody asked for."""
        views = [[memoryview(payload)] for payload in payloads]
        self.down += b"".join(self.wire.send(message, views))

    def _take(self, message: Message, sink: Sink | None) -> None:
        if self._handshake.admitted:
            self._post(Received(0.0, self._peer, message, sink))
            return
        reply = self._handshake.receive(message)
        if isinstance(reply, Admitted):
            self._post(Joined(0.0, self._peer, *reply[:2]))
        else:
            self.say(reply)

    def _post(self, event: Event) -> None:
        events = [event]
        while events:
            for effect in self.engine.handle(events.pop(0)):
                if isinstance(effect, Apply) and self.hold:
                    self.outstanding.append(effect)
                elif isinstance(effect, Apply):
                    events.append(Applied(0.0, effect.ticket, effect.run()))
                elif isinstance(effect, Reply):
                    lease = effect.lease
                    parts = getattr(effect.message, "parts", ())
                    views = [] if lease is None else lease.borrowed_views(parts)
                    payloads = [b"".join(view) for view in views]
                    if effect.peer == self._peer and self.wire.state != "closed":
                        self.say(effect.message, *payloads)
                    if lease is not None:
                        lease.release()


class Pair:
    """A client and a server, and the bytes between them."""

    def __init__(
        self,
        server: Server | None = None,
        token: str | None = None,
        role: str = "worker",
        client: str = "me",
    ) -> None:
        self.server = server or Server()
        self.nonces = 0
        self.session = Session(
            URL, client=client, name="w0", role=role, token=token, nonce=self._nonce, pongs=False
        )
        self.requests = Requests(self.session)
        self.up = b""  # to the server
        self.sizes: list[int] = []
        self.received: list[bytes] = []

    def _nonce(self) -> bytes:
        self.nonces += 1
        return self.nonces.to_bytes(16, "little")

    def connect(self) -> None:
        """Open a connection, and say what a client says on it."""
        self.server.connected()
        self.up = b"".join(self.session.connected())

    def cut(self) -> None:
        """Lose the connection, and what is under way on it."""
        self.up = b""
        self.server.down = b""
        self.session.lost()
        self.server.lost()

    def move(self, up: int | None = None, down: int | None = None) -> bool:
        """Deliver so many bytes each way (None: all); return whether there were any."""
        self.up += b"".join(self.session.outgoing())
        up = len(self.up) if up is None else up
        sent, self.up = self.up[:up], self.up[up:]
        if sent:
            self.server.receive(sent)
        down = len(self.server.down) if down is None else down
        came, self.server.down = self.server.down[:down], self.server.down[down:]
        rest = came
        while rest:
            room = self.session.next_buffer()
            count = min(len(room), len(rest))
            room[:count], rest = rest[:count], rest[count:]
            self.session.received(count)
        self.up += b"".join(self.session.outgoing())
        return bool(sent or came)

    def settle(self) -> None:
        """Deliver everything, in chunks of `sizes`."""
        turn = 0
        while True:
            size = self.sizes[turn % len(self.sizes)] if self.sizes else None
            turn += 1
            if not self.move(size, size):
                return

    def ask(self, request: Request) -> Any:
        """Deliver everything; return the request's result."""
        self.settle()
        assert request.done
        return request.value()

    def room(self) -> Params:
        assert self.session.info.layout is not None
        return Params(self.session.info.layout)


def ready(server: Server | None = None, role: str = "worker") -> tuple[Pair, Params]:
    """A pair that has a model, and the client's parameters."""
    pair = Pair(server, role=role)
    pair.connect()
    pair.ask(pair.requests.define(ARRAYS))
    params = pair.room()
    pair.ask(pair.requests.fetch(params))
    return pair, params


def stepped(times: int, by: float = 0.5) -> dict[str, list[Any]]:
    """The model after so many steps of `ONES`."""
    return {name: (array - times * by).tolist() for name, array in ARRAYS.items()}


def values(params: Params) -> dict[str, list[Any]]:
    return {name: array.tolist() for name, array in params.items()}


def count_bytes(ask: Callable[[Pair, Params], Request]) -> tuple[int, int]:
    """How many bytes a request is, and its answer."""
    pair, params = ready()
    ask(pair, params)
    pair.up += b"".join(pair.session.outgoing())
    up = len(pair.up)
    pair.move(None, 0)
    return up, len(pair.server.down)


def test_a_push_says_no_more_batches_than_it_may() -> None:
    pair, params = ready()
    for count, said in ((1, 1), (MAX_COUNT, MAX_COUNT), (MAX_COUNT + 1, MAX_COUNT)):
        pair.ask(pair.requests.push(ONES, params, params, count=count))
        message = pair.server.received[-1]
        assert isinstance(message, messages.Push)
        assert message.count == said


class TestTogether:
    @pytest.mark.slow
    @DETERMINISTIC
    @given(st.lists(st.integers(1, 90), max_size=4), st.sampled_from((None, "s3cret")))
    def test_a_whole_life_in_any_chunks(self, sizes: list[int], token: str | None) -> None:
        pair = Pair(Server(token=token), token=token)
        pair.sizes = sizes
        pair.connect()
        early = pair.requests.describe()
        with pytest.raises(NotReady):
            pair.ask(early)
        assert pair.ask(pair.requests.define(ARRAYS)) == (True, 0)
        assert pair.ask(pair.requests.define(ARRAYS)) == (False, 0)
        params = pair.room()
        assert params.version == -1
        assert pair.ask(pair.requests.fetch(params)) is True
        assert (params.version, values(params)) == (0, stepped(0))
        assert pair.ask(pair.requests.push(ONES, params, None)) == Receipt(1, 0, 0.0, None, {})
        assert pair.ask(pair.requests.push(ONES, params, params)) == Receipt(2, 1, 1.0, None, {})
        assert (params.version, values(params)) == (2, stepped(2))
        assert pair.ask(pair.requests.fetch(params)) is False
        assert pair.ask(pair.requests.ping()) is None
        report = pair.ask(pair.requests.stats())
        assert (report["version"], report["workers"][0]["pushes"]) == (2, 2)
        assert isinstance(report["waited_for"], list)
        pair.up += b"".join(pair.session.leave())
        pair.settle()
        assert [type(m) for m in pair.server.received[-1:]] == [messages.Leave]
        assert pair.server.engine.membership.present() == []
        assert pair.server.engine.admission.pool.out == 0
        traffic = pair.server.wire.traffic
        assert pair.session.traffic == (traffic.bytes_out, traffic.bytes_in)

    def test_versions_are_the_tensors_own(self) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push({"w": ONES["w"]}, params, params))
        pair.ask(pair.requests.push({"w": ONES["w"], "b": ONES["b"]}, params, params))
        versions = dict(zip(params.layout.index, params.versions.tolist(), strict=True))
        assert (params.version, versions) == (2, {"s": 0, "w": 2, "b": 1})
        receipt = pair.ask(pair.requests.push(ONES, params, None))
        assert receipt.staleness == 0, "each part says the version of its own tensors"

    def test_the_statistic_comes_by_name(self) -> None:
        pair, params = ready(Server("fasgd"))
        receipt = pair.ask(pair.requests.push(ONES, params, None))
        assert set(receipt.vbars) == set(ARRAYS)
        sizes = {name: array.size for name, array in ARRAYS.items()}
        mean = sum(receipt.vbars[name] * sizes[name] for name in sizes) / sum(sizes.values())
        assert receipt.vbar == pytest.approx(mean)

    def test_who_defines_first_defines(self) -> None:
        server = Server()
        first, params = ready(server)
        first.ask(first.requests.push(ONES, params, None))
        second = Pair(server, client="you")
        second.connect()
        other = {name: array + 1 for name, array in reversed(ARRAYS.items())}
        assert second.ask(second.requests.define(other)) == (False, 1)
        theirs = second.room()
        second.ask(second.requests.fetch(theirs))
        assert values(theirs) == stepped(1)
        with pytest.raises(BadPush, match="another one: its 'w' has shape"):
            second.ask(second.requests.define({**ARRAYS, "w": np.zeros(3, np.float32)}))

    def test_a_refused_push_leaves_everything_as_it_was(self) -> None:
        pair, params = ready()
        bad = {**ONES, "w": np.array([[1, 1], [np.nan, 1]], np.float32)}
        with pytest.raises(
            BadPush, match=r"^aiops://memory:7171: 'w' holds nan at \[1, 0\]"
        ) as got:
            pair.ask(pair.requests.push(bad, params, params))
        assert got.value.details == {"tensor": "w", "value": "nan"}
        assert (params.version, values(params), pair.server.version) == (0, stepped(0), 0)
        assert pair.ask(pair.requests.push(ONES, params, params)).version == 1

    def test_a_gradient_to_be_computed_again_brings_the_parameters(self) -> None:
        server = Server("hardsync", settings={"admission": "reject"}, workers=1)
        pair, params = ready(server)
        other = params.copy()
        pair.ask(pair.requests.push(ONES, params, params))
        with pytest.raises(StaleGradient, match="compute it again"):
            pair.ask(pair.requests.push(ONES, other, other))
        assert (other.version, values(other)) == (1, stepped(1))
        assert pair.ask(pair.requests.push(ONES, other, other)).version == 2

    def test_an_observer_may_not_push(self) -> None:
        server = Server()
        ready(server)
        pair = Pair(server, role="observer", client="watching")
        pair.connect()
        pair.settle()
        params = pair.room()
        pair.ask(pair.requests.fetch(params))
        with pytest.raises(BadPush, match="an observer may not push"):
            pair.ask(pair.requests.push(ONES, params, None))
        assert values(params) == stepped(0)

    def test_requests_are_pipelined(self) -> None:
        pair, params = ready()
        requests = [pair.requests.push(ONES, params, None) for _ in range(5)]
        last = pair.requests.fetch(params)
        pair.settle()
        assert [request.value().version for request in requests] == [1, 2, 3, 4, 5]
        assert last.value() is True
        assert values(params) == stepped(5)

    def test_done_is_told_once(self) -> None:
        pair, _params = ready()
        request = pair.requests.ping()
        told: list[bool] = []
        request.on_done = lambda: told.append(request.done)
        pair.settle()
        request.resolve(error=ConnectionLost("late"))
        assert told == [True]
        assert request.value() is None

    def test_what_is_asked_before_the_welcome_waits_for_it(self) -> None:
        server = Server()
        ready(server)
        pair = Pair(server, client="early")
        ping, stats = pair.requests.ping(), pair.requests.stats()
        assert pair.session.waiting_for == "its welcome"
        pair.connect()
        pair.move(None, 0)
        assert [m.kind for m in server.received[-1:]] == ["hello"]
        pair.settle()
        assert ping.done
        assert stats.done
        assert [m.kind for m in server.received[-3:]] == ["hello", "ping", "stats"]
        waiting = pair.requests.stats()
        assert pair.session.waiting_for == "the statistics"
        pair.session.abandon(waiting)
        assert pair.session.waiting_for == "nothing"

    def test_a_ping_is_answered(self) -> None:
        pair, _params = ready()
        pair.server.say(messages.Ping(0))
        pair.settle()
        assert pair.server.received[-1] == messages.Pong(0)

    def test_what_it_says_of_itself(self) -> None:
        pair = Pair()
        for epoch in (1, 2):
            pair.connect()
            pair.settle()
            nonce = epoch.to_bytes(16, "little")
            agent = f"aiops-python/{aiops.__version__}"
            wanted = messages.Hello(
                0, messages.PROTOCOL, "me", epoch, "w0", "worker", False, nonce, agent
            )
            assert pair.server.received[-1] == wanted
            pair.cut()

    def test_a_name_must_fit_into_a_greeting(self) -> None:
        with pytest.raises(UsageError, match="1026 bytes long"):
            Session(
                URL,
                client="c" * 32,
                name="ä" * 513,
                role="worker",
                token=None,
                nonce=lambda: b"n" * 16,
                pongs=True,
            )


class TestLostConnections:
    PUSH_UP, PUSH_DOWN = count_bytes(lambda pair, params: pair.requests.push(ONES, params, params))
    FETCH_DOWN = count_bytes(lambda pair, params: pair.requests.fetch(pair.room()))[1]

    @pytest.mark.parametrize("down", [0, 1, 40, PUSH_DOWN - 1])
    def test_a_push_cut_anywhere_is_applied_once(self, down: int) -> None:
        """``up`` bytes of it arrive, and ``down`` of its answer, before the connection is lost."""
        for up in range(self.PUSH_UP + 1):
            self.check_push(up, down)

    def check_push(self, up: int, down: int) -> None:
        pair, params = ready()
        request = pair.requests.push(ONES, params, params)
        pair.move(up, down)
        assert not request.done
        arrived = pair.server.version
        assert arrived == (1 if up == self.PUSH_UP else 0)
        pair.cut()
        assert pair.server.engine.admission.pool.out == 0
        pair.connect()
        receipt = pair.ask(request)
        assert (receipt.version, receipt.staleness) == (1, 0)
        assert (pair.server.version, pair.server.params()) == (1, stepped(1))
        assert (params.version, values(params)) == (1, stepped(1))
        pushed = [m.seq for m in pair.server.received if isinstance(m, messages.Push)]
        assert pushed == [1] * (1 + arrived), "it is sent again under the same number"
        assert pair.ask(pair.requests.push(ONES, params, None)).version == 2
        assert pair.server.received[-1].seq == 2  # type: ignore[attr-defined]

    @pytest.mark.parametrize("sent", [False, True])
    def test_a_restart_says_whether_a_push_was_sent(self, sent: bool) -> None:
        """The earlier run may have applied what was sent to it; the error must not deny that."""
        pair, params = ready(Server(run="one"))
        if sent:
            request = pair.requests.push(ONES, params, params)
            pair.move(None, 0)
            assert pair.server.version == 1
        pair.cut()
        pair.server = Server(run="two")
        pair.connect()
        pair.settle()
        if not sent:
            request = pair.requests.push(ONES, params, params)
        told = "may have been applied to the parameters of the earlier run"
        with pytest.raises(Restarted, match=told if sent else "it was not pushed"):
            pair.ask(request)
        assert not any(isinstance(message, messages.Push) for message in pair.server.received)

    def test_a_fetch_cut_anywhere_is_made_again_in_full(self) -> None:
        for down in range(self.FETCH_DOWN):
            self.check_fetch(down)

    @staticmethod
    def check_fetch(down: int) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push(ONES, params, None))
        held = params.arena.data.copy()
        request = pair.requests.fetch(params)
        pair.move(None, down)
        touched = bool((params.arena.data != held).any())
        assert params.version == -1 or not touched, "half of it must not pass for a version"
        assert params.version in (-1, 0)
        pair.cut()
        pair.connect()
        assert pair.ask(request) is True
        haves = [m.have for m in pair.server.received if isinstance(m, messages.Fetch)]
        assert haves[-1] == -1 or not touched, "all of it, not what is newer"
        assert (params.version, values(params)) == (1, stepped(1))
        assert params.versions.tolist() == [1, 1, 1]

    def test_half_a_fetch_marks_the_parameters(self) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push(ONES, params, None))
        pair.requests.fetch(params)
        pair.move(None, self.FETCH_DOWN - 1)
        pair.cut()
        assert params.version == -1
        pair.connect()
        pair.settle()
        assert pair.server.received[-1].have == -1  # type: ignore[attr-defined]
        assert params.version == 1

    @each_row("finished", ["before it comes back", "after", "while it is away"])
    def test_a_push_that_is_being_applied_when_the_connection_is_lost(self, finished: str) -> None:
        pair, params = ready()
        pair.server.hold = True
        request = pair.requests.push(ONES, params, params)
        pair.settle()
        pair.cut()
        if finished == "while it is away":
            pair.server.run_kernel()
        pair.connect()
        pair.move()
        if finished == "before it comes back":
            pair.server.run_kernel()
        pair.settle()
        if finished == "after":
            assert not request.done
            pair.server.run_kernel()
        assert pair.ask(request).version == 1
        assert pair.server.outstanding == []
        assert pair.server.params() == values(params) == stepped(1)
        assert pair.server.engine.admission.pool.out == 0

    def test_a_repeated_push_while_another_update_is_made_in_place(self) -> None:
        """Its answer brings the parameters, which cannot be read just now; it waits for them."""
        server = Server()
        pair, params = ready(server)
        request = pair.requests.push(ONES, params, params)
        pair.move(None, 0)
        pair.cut()
        other = Pair(server, client="you")
        other.connect()
        other.settle()
        server.hold = True
        second = params.copy()
        other.requests.push(ONES, second, None)
        other.settle()
        assert server.engine.store is not None
        assert not server.engine.store.readable
        pair.connect()
        pair.settle()
        assert not request.done
        server.run_kernel()
        assert pair.ask(request) == Receipt(1, 0, 0.0, None, {})
        assert (params.version, values(params)) == (2, stepped(2))

    @each_row("up", range(0, 3 * PUSH_UP + 1, 7))
    def test_several_pushes_are_sent_again_in_order(self, up: int) -> None:
        pair, params = ready()
        requests = [pair.requests.push(ONES, params, None) for _ in range(3)]
        last = pair.requests.fetch(params)
        pair.move(up, 0)
        arrived = pair.server.version
        pair.cut()
        pair.connect()
        pair.settle()
        assert [request.value().version for request in requests] == [1, 2, 3]
        assert last.value() is True
        assert (pair.server.version, values(params)) == (3, stepped(3))
        pushed = [m.seq for m in pair.server.received if isinstance(m, messages.Push)]
        assert pushed == [*range(1, arrived + 1), 1, 2, 3]

    def test_a_define_cut_midway_lets_the_next_one_define(self) -> None:
        pair = Pair()
        pair.connect()
        pair.settle()
        request = pair.requests.define(ARRAYS)
        pair.up += b"".join(pair.session.outgoing())
        pair.move(len(pair.up) - 3, 0)
        pair.cut()
        other = Pair(pair.server, client="you")
        other.connect()
        assert other.ask(other.requests.define(ONES)) == (True, 0)
        pair.connect()
        assert pair.ask(request) == (False, 0)

    def test_lost_again_and_again(self) -> None:
        pair, params = ready()
        request = pair.requests.push(ONES, params, params)
        for up in range(0, 200, 17):
            pair.move(up, 0)
            pair.cut()
            pair.connect()
            assert not request.done
        assert pair.ask(request).version == 1
        epochs = [m.epoch for m in pair.server.received if isinstance(m, messages.Hello)]
        assert epochs == sorted(set(epochs))
        assert values(params) == stepped(1)

    def test_traffic_counts_over_all_connections(self) -> None:
        pair, _params = ready()
        before = pair.session.traffic
        pair.cut()
        pair.connect()
        pair.settle()
        traffic = pair.server.wire.traffic
        came, went = traffic.bytes_out, traffic.bytes_in
        assert pair.session.traffic == (before[0] + came, before[1] + went)

    def test_giving_up(self) -> None:
        pair, params = ready()
        requests = [pair.requests.push(ONES, params, None), pair.requests.ping()]
        pair.session.pending.fail(ConnectionLost("the end"))
        for request in requests:
            with pytest.raises(ConnectionLost, match="the end"):
                request.value()
        pair.settle()
        assert pair.server.version == 1, "it was sent; nobody hears what became of it"

    def test_nothing_is_said_to_nobody(self) -> None:
        pair = Pair()
        assert pair.session.leave() == []
        pair.connect()
        assert pair.session.leave() == []

    def test_the_server_closes(self) -> None:
        pair, _params = ready()
        with pytest.raises(ConnectionLost, match="aiops://memory:7171 closed the connection"):
            pair.session.received(0)


class TestTokens:
    def test_a_client_without_a_token(self) -> None:
        pair = Pair(Server(token="s3cret"))
        pair.connect()
        with pytest.raises(Unauthorised, match="asks for a token"):
            pair.settle()

    def test_a_client_with_a_wrong_token(self) -> None:
        pair = Pair(Server(token="s3cret"), token="guess")
        pair.connect()
        with pytest.raises(Unauthorised, match=f"^{URL}: the token is wrong"):
            pair.settle()

    def test_a_server_without_the_token_is_told_nothing(self) -> None:
        pair = Pair(Server(), token="s3cret")
        request = pair.requests.define(ARRAYS)
        pair.connect()
        with pytest.raises(Unauthorised, match="asked for no token"):
            pair.settle()
        assert not request.done
        assert not pair.session.ready
        assert pair.session.outgoing() == []
        assert [m.kind for m in pair.server.received] == ["hello"]

    def test_a_server_that_pretends(self) -> None:
        """It challenges, but cannot show that it knows the token."""
        pair = Pair(token="s3cret")
        request = pair.requests.define(ARRAYS)
        pair.connect()
        pair.server.wire.state = "greeted"
        pair.server.say(messages.Challenge(0, b"x" * 16))
        pair.move(0, None)
        pair.server.wire.state = "proved"
        pair.server.say(
            messages.Welcome(0, messages.PROTOCOL, "", b"p" * 32, "asgd", {}, {}, 0, (), 0)
        )
        with pytest.raises(Unauthorised, match="does not know the token"):
            pair.move(0, None)
        assert not request.done
        assert not pair.session.ready
        assert b"define" not in pair.up

    def test_an_earlier_challenge_is_no_challenge(self) -> None:
        pair = Pair(Server(token="s3cret"), token="s3cret")
        pair.connect()
        pair.settle()
        pair.cut()
        pair.server = Server()
        pair.connect()
        with pytest.raises(Unauthorised, match="asked for no token"):
            pair.settle()

    def test_each_connection_has_its_own_nonce(self) -> None:
        pair = Pair(Server(token="s3cret"), token="s3cret")
        for _ in range(2):
            pair.connect()
            pair.settle()
            assert pair.session.ready
            pair.cut()
        proofs = [m.proof for m in pair.server.received if isinstance(m, messages.Prove)]
        assert len(set(proofs)) == 2


class TestAnotherServer:
    def test_the_same_model_goes_on(self) -> None:
        pair, params = ready()
        pair.cut()
        pair.server = ready()[0].server
        pair.connect()
        assert pair.ask(pair.requests.push(ONES, params, params)).version == 1

    @each_row(
        ("arrays", "why"),
        [
            ({**ARRAYS, "w": np.zeros((4,), np.float32)}, "its 'w' has shape"),
            ({"w": ARRAYS["w"], "b": ARRAYS["b"]}, "'s'"),
            ({**ARRAYS, "more": np.zeros(1, np.float32)}, "'more'"),
        ],
    )
    def test_another_model_is_refused(self, arrays: Any, why: str) -> None:
        pair, params = ready()
        held = values(params)
        other = Pair()
        other.connect()
        other.ask(other.requests.define(arrays))
        request = pair.requests.push(ONES, params, params)
        pair.cut()
        pair.server = other.server
        pair.connect()
        with pytest.raises(Refused, match=f"now has another model: .*{why}"):
            pair.settle()
        assert not request.done
        assert pair.server.version == 0
        assert values(params) == held

    def test_the_same_tensors_in_another_order_are_another_model(self) -> None:
        arrays = {"a": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)}
        pair = Pair()
        pair.connect()
        pair.ask(pair.requests.define(arrays))
        other = Pair()
        other.connect()
        other.ask(other.requests.define(dict(reversed(arrays.items()))))
        pair.cut()
        pair.server = other.server
        pair.connect()
        with pytest.raises(BadPush, match=r"in another order \('z' stands where .* 'a'.*--init"):
            pair.settle()

    def test_a_server_that_forgot_everything(self) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push(ONES, params, params))
        request = pair.requests.push(ONES, params, params)
        pair.cut()
        pair.server = Server()
        pair.connect()
        with pytest.raises(NotReady):
            pair.ask(request)
        assert pair.ask(pair.requests.define(params)) == (True, 0)
        with pytest.raises(BadPush, match="computed at version 1, but the server is at 0"):
            pair.ask(pair.requests.push(ONES, params, params))
        assert pair.ask(pair.requests.fetch(params)) is True
        assert pair.ask(pair.requests.push(ONES, params, params)).version == 1
        assert values(params) == stepped(2)


class TestAbandonedRequests:
    def test_a_late_answer_is_thrown_away(self) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push(ONES, params, None))
        request = pair.requests.fetch(params)
        pair.move(None, 0)
        pair.session.abandon(request)
        held = params.arena.data.copy()
        pair.settle()
        assert not request.done
        assert (params.version, (params.arena.data == held).all()) == (0, True)
        assert pair.ask(pair.requests.fetch(params)) is True
        assert (params.version, values(params)) == (1, stepped(1))

    def test_an_answer_half_of_which_has_come_leaves_a_mark(self) -> None:
        pair, params = ready()
        pair.ask(pair.requests.push(ONES, params, None))
        request = pair.requests.fetch(params)
        pair.move(None, TestLostConnections.FETCH_DOWN - 5)
        pair.session.abandon(request)
        pair.settle()
        assert not request.done
        assert params.version == -1
        assert pair.ask(pair.requests.fetch(params)) is True
        assert (params.version, values(params)) == (1, stepped(1))

    def test_an_abandoned_push_is_not_sent_again(self) -> None:
        pair, params = ready()
        request = pair.requests.push(ONES, params, params)
        pair.move(10, 0)
        pair.session.abandon(request)
        pair.cut()
        pair.connect()
        pair.settle()
        assert pair.server.version == 0
        assert pair.ask(pair.requests.push(ONES, params, params)).version == 1, (
            "a number may be skipped"
        )


class TestServersThatBreakTheRules:
    """Whatever a server says, a request gets an answer or the driver one of the stated errors."""

    @staticmethod
    def asked(ask: Callable[[Pair, Params], Request]) -> tuple[Pair, Params, Request]:
        pair, params = ready()
        request = ask(pair, params)
        pair.session.outgoing()  # the real server does not hear it
        return pair, params, request

    ANSWERS: Mapping[str, Callable[[int], Message]] = {
        "model": lambda id: messages.Model(id, False, 0, ()),
        "ack": lambda id: messages.Ack(id, 1, 1, True, 0, 0.0, None, b""),
        "params": lambda id: messages.FetchedParams(id, 1),
        "report": lambda id: messages.Report(id, {}),
        "pong": messages.Pong,
    }
    ASKED: Mapping[str, Callable[[Pair, Params], Request]] = {
        "ack": lambda pair, params: pair.requests.push(ONES, params, params),
        "params": lambda pair, params: pair.requests.fetch(params),
        "report": lambda pair, params: pair.requests.stats(),
        "pong": lambda pair, params: pair.requests.ping(),
        "model": lambda pair, params: pair.requests.define(ARRAYS),
    }

    @each_row("given", ANSWERS)
    @each_row("wanted", ASKED)
    def test_an_answer_of_another_kind(self, wanted: str, given: str) -> None:
        pair, _params, request = self.asked(self.ASKED[wanted])
        pair.server.say(self.ANSWERS[given](pair.session.pending.next_id - 1))
        pair.settle()
        assert request.done
        if given == wanted and given != "model":
            assert request.error is None
        else:
            assert isinstance(request.error, RemoteProtocolError)

    def test_a_description_may_be_answered_by_nothing_else(self) -> None:
        pair, _params, request = self.asked(lambda pair, params: pair.requests.describe())
        pair.server.say(messages.Pong(pair.session.pending.next_id - 1))
        with pytest.raises(RemoteProtocolError, match="with a 'pong'"):
            pair.ask(request)

    @each_row(
        "ranges",
        [
            ((0, 7),),
            ((9, 30),),
            ((0, 8), (0, 8), (8, 30)),
            ((8, 30), (0, 8)),
            ((0, 31),),
            ((0, 30), (30, 31)),
            ((0, 2**32 - 1),),
        ],
    )
    def test_parts_that_do_not_make_up_the_model(self, ranges: Any) -> None:
        pair, params, _request = self.asked(self.ASKED["params"])
        parts = tuple(Part(a, b, "raw", b - a, 1) for a, b in ranges)
        self.said(pair, parts)
        with pytest.raises(
            RemoteProtocolError, match=r"sent (parts that do not make up|an increment of no)"
        ):
            pair.settle()
        assert (params.version, values(params)) == (0, stepped(0))

    @each_row(
        "part", [Part(0, 30, "int8", 30, 1), Part(0, 30, "raw", 29, 1), Part(0, 30, "raw", 31, 1)]
    )
    def test_parts_of_another_length_or_codec(self, part: Part) -> None:
        pair, params, _request = self.asked(self.ASKED["params"])
        self.said(pair, (part,))
        with pytest.raises(
            RemoteProtocolError, match=r"sent (parts that do not make up|an increment of no)"
        ):
            pair.settle()
        assert params.version == 0

    @staticmethod
    def said(pair: Pair, parts: tuple[Part, ...]) -> None:
        """A header is enough: no payload is waited for."""
        id = pair.session.pending.next_id - 1
        head = encode(messages.FetchedParams(id, 1, parts))
        pair.server.down += b"\xce" + len(head).to_bytes(4, "big") + head

    @each_row("vbars", [b"123", b"1234", b"x" * 16])
    def test_statistics_of_another_model(self, vbars: bytes) -> None:
        pair, _params, request = self.asked(self.ASKED["ack"])
        pair.server.say(
            messages.Ack(pair.session.pending.next_id - 1, 1, 1, True, 0, 0.0, 0.5, vbars)
        )
        with pytest.raises(RemoteProtocolError, match="with a 'ack'"):
            pair.ask(request)

    def test_an_answer_that_nobody_asked_for(self) -> None:
        pair, params = ready()
        pair.server.down += frame(
            "server", messages.FetchedParams(77, 1, (Part(0, 5, "raw", 5, 1),)), b"12345"
        )
        pair.server.say(Error(78, "refused", "no", {}, False))
        pair.settle()
        assert params.version == 0
        assert pair.ask(pair.requests.ping()) is None

    def test_a_fatal_error_is_raised_where_the_driver_sees_it(self) -> None:
        pair, _params, request = self.asked(self.ASKED["pong"])
        pair.server.say(Error(0, "unavailable", "too many of you", {"limit": 3}, True))
        with pytest.raises(Refused, match="too many of you") as caught:
            pair.settle()
        assert (caught.value.code, caught.value.details) == ("unavailable", {"limit": 3})
        assert not request.done

    def test_what_is_asked_after_a_fatal_error_is_sent_on_the_next_connection(self) -> None:
        """A driver may learn of the error before it has ended the connection."""
        pair, params = ready()
        pair.server.say(Error(0, "unavailable", "it ends", {}, True))
        with pytest.raises(Unavailable):
            pair.settle()
        request = pair.requests.push(ONES, params, params)
        assert not request.attempted
        pair.cut()
        pair.connect()
        pair.settle()
        assert request.value().version == pair.server.version == 1

    @each_row(
        "rows",
        [
            (("w", "int32", (2,), 0),),
            (("w", "float32", (2,), 0), ("w", "float32", (2,), 8)),
            (("w", "float32", (2,), 4),),
            (("b", "float16", (2,), 0), ("w", "float32", (2,), 4)),
            (("w", "float32", (2**62, 2**62), 0),),
            (("w", "float32", (0,), 0),),
        ],
    )
    def test_a_model_that_is_none(self, rows: Any) -> None:
        pair = Pair()
        pair.connect()
        pair.server.wire.state = "greeted"
        pair.server.say(messages.Welcome(0, messages.PROTOCOL, "", b"", "asgd", {}, {}, 0, rows, 0))
        with pytest.raises(RemoteProtocolError, match=URL):
            pair.move(0, None)
        pair, _params, request = self.asked(self.ASKED["model"])
        pair.server.say(messages.Model(pair.session.pending.next_id - 1, False, 0, rows))
        with pytest.raises((RemoteProtocolError, Refused), match=URL):
            pair.ask(request)

    def test_another_version_of_the_wire(self) -> None:
        pair = Pair()
        pair.connect()
        pair.server.wire.state = "greeted"
        pair.server.say(messages.Welcome(0, 77, "", b"", "asgd", {}, {}, 0, (), 0))
        with pytest.raises(RemoteProtocolError, match="speaks version 77 of the wire"):
            pair.move(0, None)

    @pytest.mark.slow
    @DETERMINISTIC
    @given(st.binary(min_size=1, max_size=40), st.integers(0, 400))
    def test_any_bytes_in_the_midst_of_a_session(self, noise: bytes, after: int) -> None:
        """An error that the driver expects, or nothing; and the next connection puts it right."""
        pair, params = ready()
        request = pair.requests.push(ONES, params, params)
        pair.move(None, after)
        rest, pair.server.down = pair.server.down, b""
        try:
            pair.server.down = noise + rest
            pair.settle()
        except (RemoteProtocolError, Refused):
            pass
        pair.cut()
        if not request.done:
            pair.connect()
            pair.settle()
        assert pair.ask(request).version == 1
        assert pair.server.version == 1
        assert params.version == 1

    def test_its_layout_is_the_servers(self) -> None:
        pair, _params = ready()
        assert pair.session.info.layout is not None
        assert pair.session.info.layout.rows == Layout.of(ARRAYS).rows
