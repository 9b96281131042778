"""One client's session with one server, sans-I/O, over as many connections as it takes.

A driver (`aiops.client.sync.connection`, `aiops.client.asyncio.connection`) connects, moves bytes
and waits; the session decides what is sent and what an answer means::

    request = Requests(session).fetch(params)            # or push, define, stats, ...
    send(session.connected())                            # on each new connection
    session.received(recv_into(session.next_buffer()))
    send(session.outgoing())                             # after each request, and after received()
    session.lost()                                       # the connection is gone: connect again
    ... until request.done

Theory of operation
-------------------
**A connection.** `connected` makes a new `aiops.wire.connection.Connection` and sends a hello. A
challenge is answered, the welcome is checked, and the session is `ready`; `lost` and `leave` end
that. A session outlives its connections: it keeps the requests, the numbers below, the model's
layout, the encoders of coded gradients, and the byte counts.

**A request.** `ask` gives it an id and keeps it in `_pending`. It is sent at once if the session is
ready, otherwise as soon as it is. Its message is made at each sending, since it names the versions
that are held then. It leaves `_pending` once: with the answer of its id (a refusal is one), by
`abandon`, by `fail`, or with `Restarted`. Requests may be pipelined, and answered in another order.

**Numbers.** An id pairs an answer with its request; a request that is asked again has a new one. A
sequence number belongs to a push (of gradients, of rows, or to apply the last gradient again) and
is the same at each sending. The epoch counts this client's connections; of two that are open the
server drops the older. `Params` are stamped with the client and the epoch that they came by.

**Reconnect and resend.** `lost` discards unsent bytes, half-received answers and what was learnt of
the steady exchange. Requests stay. On the next connection `_begin` asks all of them again, in
order. Payloads may be views of the caller's arrays, so these must not change before the answer.

**Exactly once.** To the server a push is new if its sequence number is above the client's last. It
does not apply an earlier one again, but answers it: when the first sending is answered, or with the
answer that it remembers, or, if it remembers none, with a refusal. It remembers
`aiops.wire.messages.REMEMBERED` answers per client, so a driver keeps no more pushes under way. A
push that was abandoned may have been applied; `again` sends it under the same sequence number.
The server forgets the answers at `leave`, and everything at a restart; when more than
`aiops.engine.membership.DEPARTED` clients are gone, it forgets those that left first. Other
requests have no such number: a definition that is sent twice may report the second outcome.

**Restarts of the server.** A welcome names the server's run, and versions count within a run. If it
is another run, then a push of parameters that this client received in an earlier one is not sent:
it fails with `Restarted`, and what was encoded for it is taken back. (If it was sent before, it may
have been part of the earlier run's model.) Parameters of an earlier run count as not held, so the
next fetch brings all of them. A model with other tensors is refused (`Unauthorised`).

**Parameters that arrive.** The connection gets a sink from `_sink_for` before it stores a payload.
Raw values go straight into the caller's arrays, which mix two versions until the last byte: they
are marked as not held meanwhile, and stay so if the connection is lost. The answer to an abandoned
request goes into a `Discard`. If it is being received already, `abandon` returns True; the rest
would still be written to the caller's arrays, so the driver ends the connection.

**Shards.** Requests go to the lead, which answers them; both headers list the parts on all shards.
`Shards` keeps a branch (`ShardChannel`) to each other shard that holds any of the model. It sends
each its portion of a push, and completes an answer when all portions are in place. A portion may
arrive before the lead has announced it; the branch is then not read until the lead has. The session
is ready when all branches are attached; when one connection is lost, all are ended.

**Shared memory.** On a connection within one machine a payload may be lent. `Outbox` owns the
client's segments, and uses one again only after the request that lent it has been answered. The
server owns its own; a client returns what it was lent with a release, which is sent before all
that waits (`back`). A push is sent inline if the model is at most 64 KiB or lies on several shards.

**The steady exchange.** From the push and the answer of one general exchange `_learn_steady` makes
the templates of `Steady`, if both carried the whole model raw, and nothing else is special (coding,
increments, gates, shards, lent payloads, more than 1 MiB). When the session is `idle`, the driver
may run the next exchange by it: it takes its id and sequence number from the session, sends the
bytes that the general path would send, and counts them here. Anything unexpected (another message,
a wait that is long, another request, an error) hands it over: it becomes a pending `Push` of the
same id and sequence number, the bytes that are not sent yet are sent, and those that have come are
parsed here. After `lost` it is resent as any other push.

**Owners and concurrency.** The session has no lock and never waits: one driver calls it, in one
thread at a time (`Worker` has a lock for its two threads). Only copies and encoding may use several
threads (`parallel_map`), within a call. The driver owns sockets and clocks, the connection the
message in progress, the session `out` and `back`, the caller its arrays. A blocking client has one
request under way; an async client has several.

**Forks.** A session belongs to one process. In a fork the clients close their copies of the
descriptors, mark the session as not ready, send nothing, and refuse every call but `close`, which
does nothing. The parent's connection is not affected.

**Errors.** A refusal of one request resolves that request. `received` raises what ends the
connection: at `ConnectionLost` the driver connects again, with growing pauses, until its deadline;
at `RemoteProtocolError` or a fatal refusal it does not. Deadlines are the driver's: it abandons the
request that is late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiops._version import __version__
from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.coding import Coding
from aiops.client.outbox import Outbox
from aiops.client.params import Params
from aiops.client.receive_params import ParameterSink
from aiops.client.request_kinds import Push, Request
from aiops.client.rows import Rows, RowsSink
from aiops.client.shard_channel import following
from aiops.client.shards import Shards
from aiops.client.steady import LARGEST, Steady
from aiops.codecs.choice import CodecChoice
from aiops.codecs.raw import NAME as RAW
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    Restarted,
    Unauthorised,
    UsageError,
    refusal,
)
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.layout import Layout
from aiops.model.parts import Parts
from aiops.model.tables import Tables
from aiops.wire import handshake, messages
from aiops.wire.connection import Buffer, Connection, Limits, Places, SinkFor
from aiops.wire.messages import Ack, Error, Message, Model, Welcome
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.sinks import Discard, Sink

_LIMITS = Limits(header=8 << 20)  # a model comes back with offsets: longer than it was offered
_LONGEST_WAIT = 1e9  # seconds that a server may announce
_NEWS = (Ack, messages.Params)
_ANSWERS = frozenset((Ack, messages.Params))  # the most frequent messages
_LONGEST_NAME = 1024  # bytes: the whole greeting must stay under 4 KiB


def stream(place: SinkFor) -> Connection:
    """Return a client's end of a connection that carries bytes."""
    return Connection("client", place, _LIMITS)


class Session:
    """One client's session with one server, over as many connections as it takes.

    Parameters
    ----------
    server
        The server's URL, for error texts.
    client
        This client's id: unique, the same for all its connections.
    name
        Its name in reports: at most 1,024 bytes as UTF-8.
    role
        ``"worker"`` or ``"observer"``.
    token
        The server's token, or None.
    nonce
        Makes 16 fresh random bytes.
    pongs
        Whether the driver answers pings even while no request is under way.
    wire
        Makes this side's end of a connection.
    parallel_map
        Copies large payloads to and from shared memory, and encodes large gradients, in parallel.

    Raises
    ------
    UsageError
        When the name is longer than a greeting may be.
    """

    def __init__(
        self,
        server: str,
        *,
        client: str,
        name: str,
        role: str,
        token: str | None,
        nonce: Callable[[], bytes],
        pongs: bool,
        wire: Callable[[SinkFor], Connection] = stream,
        parallel_map: ParallelMap = serial_map,
    ) -> None:
        if len(name.encode()) > _LONGEST_NAME:
            text = (
                f"the name is {len(name.encode())} bytes long; at most {_LONGEST_NAME} can be sent"
            )
            raise UsageError(text)
        self.server, self.client, self.name, self.role = server, client, name, role
        self.token, self.nonce, self.pongs = token, nonce, pongs
        self._make_wire, self._parallel_map = wire, parallel_map
        self.wire = wire(self._sink_for)
        self.out: list[Buffer] = []  # to be sent
        self.back: list[Buffer] = []  # to be sent before that: releases of what the server lent
        self._hello: messages.Hello | None = None
        self._challenge: messages.Challenge | None = None
        self._pending: dict[int, Request] = {}
        self.next_id = 1
        self.seq = 0  # of the last push
        self._epoch = 0
        self._run_since = 1  # epoch of the first connection to the server's present run
        self.ready = False
        self.answered = 0  # answers received so far
        self.connection = (client, 0)  # the client's id, and its epoch
        self.welcome: Welcome | None = None
        self.policy = ""  # the server's algorithm, its settings, and the workers' part of it
        self.settings: Mapping[str, Any] = {}
        self.plan: Mapping[str, Any] = {}
        self.layout: Layout | None = None
        self.rows = Rows()
        self.coding: Coding | None = None
        self._unheard: list[ParameterSink] = []  # of answers that are not complete yet
        self._coming: Request | None = None  # the last whose answer has begun to come
        self._header = b""  # of an answer to a push that is coming, while one is to be learnt
        self.steady: Steady | None = None  # what has been learnt of pushes and their answers
        self._learning = True  # whether it can be, on this connection
        self.increments = False  # whether fetches ask for coded increments
        self._outbox: Outbox | None = None  # made with the first connection within one machine
        self._room: Params | None = None  # room for gradients that are sent, not lent
        self.shards = Shards(self, wire, parallel_map)
        self.ledger = Ledger(own=True)
        self.ledger.traffic = self.wire.traffic

    # ------------------------------------------------------------ the connection

    def connected(self, shared: SharedPayloads | None = None) -> list[Buffer]:
        """Begin on a new connection; return what to send.

        ``shared``: the segments of both sides, if the connection is within one machine.
        """
        self._epoch += 1
        self.connection = (self.client, self._epoch)
        self.ready = False
        traffic = self.wire.traffic
        self.wire = self._make_wire(self._sink_for)
        self.wire.traffic = traffic  # counts go on over all connections
        if shared is not None:
            shared.give_back = partial(self._give_back, self.wire)
            self.wire.shared = shared
            self._outbox = self._outbox or Outbox(self._parallel_map)
        self.ledger.disconnected()
        self.out, self.back, self._challenge = [], [], None
        self._hello = messages.Hello(
            id=0,
            protocol=messages.PROTOCOL,
            client=self.client,
            epoch=self._epoch,
            name=self.name,
            role=self.role,
            pongs=self.pongs,
            nonce=self.nonce(),
            agent=f"aiops-python/{__version__}",
        )
        self._send(self._hello)
        return self.outgoing()

    @property
    def known_layout(self) -> Layout:
        """The model's tensors.

        Raises
        ------
        UsageError
            When they are not known yet.
        """
        if self.layout is None:
            raise UsageError("the model is not known yet: fetch or define it first")
        return self.layout

    @property
    def idle(self) -> bool:
        """True if the session is ready, nothing is under way, and the model is on one server."""
        return (
            (self.ready and not self._pending and not self.out and not self.back)
            and not self.wire.midway
            and not self.shards.branches
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, over all connections."""
        return self.wire.traffic.bytes_in, self.wire.traffic.bytes_out

    @property
    def missing(self) -> int:
        """The bytes of a payload in progress that are still to come."""
        return self.wire.missing

    @property
    def waiting(self) -> bool:
        """True while the next payload has no sink: never, as the lead's always have one."""
        return self.wire.waiting

    @property
    def waiting_for(self) -> str:
        """The answer that is waited for, in words."""
        if not self.ready:
            late = self.shards.unattached
            return f"its welcome ({late})" if late else "its welcome"
        lacking = self.shards.late
        if lacking is not None and lacking[0] in self._pending:
            return f"{self._pending[lacking[0]].what} ({lacking[1]})"
        return next((request.what for request in self._pending.values()), "nothing")

    def next_buffer(self) -> memoryview:
        """Return where the next received bytes belong."""
        return self.wire.next_buffer()

    def received(self, nbytes: int) -> None:
        """Process received bytes; 0 means that the server closed the connection.

        Raises
        ------
        RemoteProtocolError
            When the server broke the protocol; drop the connection.
        ConnectionLost
            When it closed the connection.
        Refused
            When it ended the connection with an error: connecting again will not help.
        """
        if nbytes == 0:
            raise ConnectionLost(f"{self.server} closed the connection")
        for message, sink in self.wire.received(nbytes):
            if type(message) in _ANSWERS:
                self.hear_answer(message, sink)
            else:
                self._hear(message, sink)
        if self.shards.branches:
            self.shards.resume()

    def count_steady(self, seq: int, nbytes: int, overhead: tuple[int, int], parts: Parts) -> None:
        """Count a push and its answer that were exchanged by `Steady`.

        ``overhead``: bytes beside the ``nbytes`` of the payload, sent and received.
        """
        traffic, (out, came) = self.wire.traffic, overhead
        traffic.messages_out += 1
        traffic.messages_in += 1
        traffic.bytes_out += out + nbytes
        traffic.bytes_in += came + nbytes
        kind = traffic.kinds_out["push"]
        kind.messages += 1
        kind.overhead += out
        kind.payload += nbytes
        kind = traffic.kinds_in["ack"]
        kind.messages += 1
        kind.overhead += came
        kind.payload += nbytes
        self.ledger.exchanged(seq, True, parts)
        self.answered += 1

    def outgoing(self) -> list[Buffer]:
        """Return what is to be sent now, and forget it."""
        out, self.out = self.out, []
        if self.back:
            out, self.back = [*self.back, *out], []
        return out

    def lost(self) -> None:
        """End the connection's state, and that of all branches.

        Requests stay; they are sent again on the next one.
        """
        self.wire.lost()
        self.shards.lost()
        self._unheard.clear()
        self._coming = None
        self.steady, self._learning, self._header = None, True, b""
        self.ready, self.out, self.back = False, [], []

    def fail(self, error: AiopsError) -> None:
        """Give all waiting requests this error."""
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.resolve(error=error)

    def abandon(self, request: Request) -> bool:
        """Wait for this request no longer; an answer that comes later is thrown away.

        Returns whether its answer is being received: the rest is written into the request's arrays
        then, unless the driver ends the connection.
        """
        coming = self._coming is request or any(
            self._pending.get(id) is request for id in self.shards.coming
        )
        self._pending = {id: other for id, other in self._pending.items() if other is not request}
        return coming

    def leave(self) -> list[Buffer]:
        """Leave the server, if the session is ready; return what to send."""
        if self.ready:
            self.ready = False
            self.next_id += 1
            self._send(messages.Leave(self.next_id - 1))
        return self.outgoing()

    # ------------------------------------------------------------ requests

    def again(self, request: Request) -> Request:
        """Ask again for what was abandoned before its answer; a push keeps its number."""
        under_way = any(other is request for other in self._pending.values())
        if under_way or (request.done and request.error is None):
            return request
        request.done, request.error = False, None
        return self.ask(request)

    def room(self) -> Params:
        """Return room for gradients, from which they are lent to a server on this machine.

        A model of at most 64 KiB is not lent: sending it takes no longer. The arrays are those of
        the last call, unless the server may still be reading them.
        """
        layout = self.known_layout
        outbox = self._outbox if self.wire.shared is not None else None
        if outbox is not None and outbox.lends(layout.nbytes):
            return Params(layout, outbox.room(layout))
        if self._room is None or self._room.layout is not layout:
            self._room = Params(layout)
        return self._room

    def check_held(self, params: Params) -> None:
        """Mark parameters as not held, unless their version is one of the server's present run.

        Versions that came by another client, or from an earlier run of the server, are not: an
        earlier run's version of the same number had other values.
        """
        client, epoch = params.connection
        if client != self.client or epoch < self._run_since:
            params.version = -1

    # ------------------------------------------------------------ inside

    def _take_back(self, request: Request) -> None:
        """Undo the encoding of a push that was not used: its gradient may be pushed again."""
        if self.coding is not None:
            self.coding.take_back(request.encoded)

    def _restarted(self) -> Restarted:
        return Restarted(
            f"{self.server} was restarted since this gradient was computed, and its parameters are"
            " others: fetch them and compute it again; it was not pushed"
        )

    def ask(self, request: Request, id: int | None = None) -> Request:
        """Send a request as soon as the session is ready; return it.

        ``id``: its id, if it has one already (of a steady exchange that was handed over).
        """
        if id is None:
            id = self.next_id
            self.next_id = id + 1
        self._pending[id] = request
        client, epoch = request.connection
        if epoch < self._run_since and client == self.client:  # computed in an earlier run
            del self._pending[id]
            self._take_back(request)
            request.resolve(error=self._restarted())
        elif self.ready:
            self._send_request(request, id)
        return request

    def _send_request(self, request: Request, id: int) -> None:
        message = request.message(id, self)
        several = self.shards.placement is not None
        if several and request.payloads and isinstance(message, messages.Push):
            self.out.extend(self.shards.push(message, request.payloads))
            self.ledger.asked(message)
            return
        places: Places = ()
        request.lent = None  # what was lent on a connection since lost is not lent again
        outbox = self._outbox
        if outbox is not None and self.wire.shared is not None and self._lends(request, outbox):
            show = partial(self.wire.shared.show, wire=self.wire)
            request.lent = outbox.lend(request.payloads, show)
            self.out.extend(request.lent.first)
            places = request.lent.places
        self._send(message, request.payloads, places)

    def _lends(self, request: Request, outbox: Outbox) -> bool:
        """Return whether payloads may be lent; a small model's pushes are sent as quickly."""
        if not request.payloads:
            return False
        small = self.layout is not None and not outbox.lends(self.layout.nbytes)
        return not (small and isinstance(request, Push))

    def _give_back(self, wire: Connection, id: int) -> None:
        """Release parameters that the server has lent."""
        if wire is self.wire and wire.state == "open":
            self.back.extend(wire.send(messages.Release(id)))

    def _send(
        self,
        message: Message,
        payloads: Sequence[Sequence[memoryview]] = (),
        places: Places = (),
    ) -> None:
        self.out.extend(self.wire.send(message, payloads, places))
        self.ledger.asked(message)

    def _sink_for(self, message: Message) -> Sink:
        request = self._pending.get(message.id)
        if request is None or request.into is None:
            return Discard()
        self._coming = request
        parts: Parts = message.parts  # type: ignore[attr-defined]
        if isinstance(request.into, RowsSink):
            sink = request.into.sink(parts)
            if sink is None:
                raise RemoteProtocolError(f"{self.server} sent other rows than were asked for")
            return sink
        if self.shards.placement is not None:
            into = self.shards.sink_for(request, message.id, parts)
        else:
            asked = request.have, request.wants
            into = ParameterSink(request.into, parts, *asked, self.server, self._parallel_map)
            if type(request) is Push and (self.steady is None or self.steady.failed):
                self._header = self.wire.header
        self._unheard.append(into)
        return into

    def _hear(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, Error) and message.fatal:
            raise refusal(message.code, f"{self.server}: {message.text}", message.details)
        if isinstance(message, messages.Challenge):
            assert self._hello is not None
            self._challenge = message
            self._send(handshake.answer(message, self._hello, self.token, self.server))
        elif isinstance(message, Welcome):
            self._hear_welcome(message)
        elif isinstance(message, messages.Ping):
            self._send(messages.Pong(message.id))
        elif not isinstance(message, messages.Share):  # the connection has mapped it already
            self.hear_answer(message, sink)

    def _hear_welcome(self, welcome: Welcome) -> None:
        assert self._hello is not None
        handshake.check_welcome(welcome, self._hello, self._challenge, self.token, self.server)
        for key in ("patience", "heartbeat", "seconds_per_byte"):
            seconds = welcome.plan.get(key, 0.0)
            if type(seconds) not in (int, float) or not 0 <= seconds <= _LONGEST_WAIT:
                text = f"{self.server} announces a {key} of {seconds!r:.60} seconds"
                raise RemoteProtocolError(text)
        if welcome.model or welcome.tables:
            self.learn(welcome)
        if self.welcome is not None and welcome.run != self.welcome.run:
            self._run_since = self._epoch
            self.rows.versions.clear()
        self.rows.connection = self.connection
        self.welcome = welcome
        self.policy, self.settings, self.plan = welcome.policy, welcome.settings, welcome.plan
        if self.layout is not None and self.coding is None:
            self._plan_coding()
        if welcome.shards:
            self.shards.branch_off(welcome.shards, defined=bool(welcome.model))
        if not self.shards.branches:
            self._begin()

    def follow(self) -> messages.ShardHello:
        """Return this client's hello to another shard."""
        assert self.welcome is not None
        return following(self, self.welcome.run, self._epoch, self.nonce())

    def branch_attached(self) -> None:
        """Begin, if the shard that was attached now is the last one."""
        if self.shards.attached and not self.ready:
            self._begin()

    def waits_for(self, id: int) -> bool:
        """Return whether a request is under way."""
        return id in self._pending

    def _begin(self) -> None:
        """Be ready, and send what was asked for before."""
        self.ready = True
        # In the order in which they were asked; each gets a new id, a push keeps its number.
        pending, self._pending = self._pending, {}
        for request in pending.values():
            self.ask(request)

    def hear_answer(self, answer: Message, sink: Sink | None) -> None:
        """Resolve the request that a message answers, once all portions are in place."""
        message = answer
        if self.shards.placement is not None:
            whole = self.shards.complete(answer, sink)
            if whole is None:
                return
            message = whole
        self.answered += 1
        self.ledger.answered(message, not isinstance(sink, Discard))
        request = self._pending.pop(message.id, None)
        if isinstance(sink, ParameterSink):
            self._unheard.remove(sink)
        if request is self._coming:
            self._coming = None
        if request is None:
            return  # it was abandoned
        if request.lent is not None and self._outbox is not None:  # the server has read it
            self._outbox.take_back(request.lent)
            request.lent = None
        if isinstance(message, Error):
            self._note_parameters(request, message, sink)
            error = refusal(message.code, f"{self.server}: {message.text}", message.details)
            self._take_back(request)
            request.resolve(error=error)
            return
        try:
            self._note_parameters(request, message, sink)
            if isinstance(message, Ack) and not message.used:
                self._take_back(request)
            request.encoded.clear()
            if type(message) is not request.answer:
                raise ValueError(f"a {request.answer.kind!r} was asked for")
            request.resolve(request.finish(message, self))
            if self._header:
                self._learn_steady(request, message, sink)
        except (RemoteProtocolError, Refused) as error:
            request.resolve(error=error)
        except ValueError as error:
            text = f"{self.server} answered {request.what!r} with a {message.kind!r}: {error}"
            request.resolve(error=RemoteProtocolError(text))

    def _learn_steady(self, request: Request, message: Message, sink: Sink | None) -> None:
        """Make the templates of the steady exchange, if this one is of its kind."""
        header, self._header = self._header, b""
        push = request.sent if type(request) is Push else None
        layout = self.layout
        if not (
            (self._learning and type(message) is Ack and message.used and not message.gate)
            and (
                isinstance(sink, ParameterSink)
                and sink.plain
                and push is not None
                and layout is not None
            )
            and (push.count == 1 and not push.wants and push.have >= 0 and len(push.parts) == 1)
            and push.parts[0][:4] == (0, layout.nbytes, RAW, layout.nbytes)
            and (self.coding is None and not self.increments and self.shards.placement is None)
            and (self._outbox is None or not self._outbox.lends(layout.nbytes))
            and layout.nbytes <= LARGEST
        ):
            return
        if self.steady is not None and self.steady.still(push, header):
            return
        try:
            self.steady = Steady(self, layout, push, header)
        except ValueError:  # the server writes these numbers in varying widths
            self.steady, self._learning = None, False

    def _note_parameters(self, request: Request, message: Message, sink: Sink | None) -> None:
        """Note the version of the parameters that an answer has brought."""
        if isinstance(message, _NEWS):
            count = len(message.vbars) / 4
            if count and self.layout is not None and count != len(self.layout.tensors):
                raise ValueError(f"statistics of {count:g} tensors")
            request.told = message
            version = message.current if isinstance(message, Ack) else message.version
        elif isinstance(message, Error) and message.parts:
            version = message.version
        else:
            return
        late = sink.finish() if isinstance(sink, ParameterSink) else ()
        if request.into is not None and not isinstance(request.into, RowsSink):
            request.into.connection = self.connection
            request.into.now_at(version, request.wants, late)
        # Pipelined: the next answer may already be coming into the same arrays, which `now_at` has
        # just marked as whole.
        for other in self._unheard:
            other.mark()

    def learn(self, told: Model | Welcome) -> None:
        """Take over the server's model; once known, it may not become another one."""
        rows = told.model
        try:
            layout = Layout.shared((row[:3] for row in rows), empty=bool(told.tables))
            tables = Tables.told(told.tables, layout.index)
        except UsageError as error:
            text = f"{self.server} has a model that this client cannot hold: {error}"
            raise RemoteProtocolError(text) from None
        if [tensor.offset for tensor in layout.tensors] != [row[3] for row in rows]:
            raise RemoteProtocolError(f"{self.server} describes a model in another order of bytes")
        if [named.name for named in tables.each] != [row[0] for row in told.tables]:
            raise RemoteProtocolError(f"{self.server} describes its tables in another order")
        if self.shards.learn(self.server, layout, told.shards):
            self.coding = None  # `_plan_coding` makes it for the new placement
        if self.layout is None:
            self.layout = self.ledger.layout = layout
            self._plan_coding()
            self.rows.learn(tables)
            return
        difference = layout.difference(self.layout) or tables.difference(self.rows.tables)
        if difference is None and layout is not self.layout and layout.rows != self.layout.rows:
            difference = "its tensors are in another order"
        if difference:
            raise Unauthorised(f"{self.server} now has another model: {difference}")

    def _plan_coding(self) -> None:
        """Take over the codecs of pushes and fetches from the server's plan."""
        if self.welcome is None or self.layout is None:
            return
        plan = self.welcome.plan
        self.coding = Coding.planned(self.layout, plan, self.shards.placement, self._parallel_map)
        # An observer is sent the values themselves, never increments.
        increments = CodecChoice.told(plan.get("fetch_codec", ()))
        self.increments = self.role == "worker" and bool(increments)
