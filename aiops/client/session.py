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
that. A session outlives its connections: it keeps the requests and the numbers below
(`PendingRequests`), what it knows of the server and its model (`ServerInfo`), and the byte counts.

**A request.** `ask` gives it an id and adds it to `pending`. It is sent at once if the session is
ready, otherwise as soon as it is. Its message is made at each sending, since it names the versions
that are held then. It leaves `pending` once: with the answer of its id (a refusal is one), by
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

**Examples.** A push whose gradients are of a server's data set (`aiops.engine.data_sets`) names
their examples (`Request.examples`). Each time that it is sent, a `cover` with them is sent before
it. If it is refused they are noted again (`ServerInfo.examples`), for the next push.

**Refusals that pass.** `Unavailable` means that the server is full or ends; nothing was changed. A
fatal one is raised as any fatal error is, and the driver connects again, to the next server that
its URL names. One that answers a request leaves the request pending, with the refusal noted in it
(`Request.refusal`), and calls ``on_refused``: the driver waits, and calls `ask_refused`, or ends
the connection to try another server. Pushes that are asked meanwhile wait behind it, since the
server takes no number below the last. A driver that gives a request up raises `given_up`: a push
whose last sending was not answered may have been applied, so its error is no `Refused`.

**Restarts of the server.** A welcome names the server's run, and versions count within a run. A
server that keeps its state goes on with its run, in the next generation; the welcome says up to
which versions it is what it was (`KnownRun`). A push of parameters that this client received in
another run, or of a version that is lost, is not sent (again): it fails with `Restarted`, which
says whether it may have become part of the model. What was encoded for it is taken back. Any other
push is sent again under its number. Parameters of lost versions count as not held, so the next
fetch brings all of them. Acknowledged pushes above the welcome's ``last_seq`` are lost: they are
counted and logged (`Restarts`). A model with other tensors is refused (`BadPush`). A server of a
lower generation than has welcomed this client is left (`Superseded`), for the next in its URL.

**Parameters that arrive.** The connection obtains a sink from `pending` before it stores a payload.
Raw values go straight into the caller's arrays, which mix two versions until the last byte: they
are marked as not held meanwhile, and stay so if the connection is lost. The answer to an abandoned
request goes into a `Discard`. If it is being received already, `abandon` returns True; the rest
would still be written to the caller's arrays, so the driver ends the connection.

**Shards.** Requests go to the lead, which answers them; both headers list the parts on all shards.
`Shards` keeps a `ShardChannel` to each other shard that holds any of the model. It sends each its
portion of a push, and completes an answer when all portions are in place. A portion may arrive
before the lead has announced it; the channel is then not read until the lead has. The session is
ready when all channels are attached; when one connection is lost, all are ended.

**Shared memory.** On a connection within one machine a payload may be lent. `Outbox` owns the
client's segments, and uses one again only after the request that lent it has been answered. The
server owns its own; a client returns what it was lent with a release, which is sent before all
that waits (`back`). A push is sent inline if the model is at most 64 KiB or lies on several shards.

**The steady exchange.** From the push and the answer of one general exchange `_learn_steady` makes
the templates of a `SteadyExchange`, if both carried the whole model (the push raw, or in codecs
whose payloads have constant lengths), and nothing else is special (gates, shards, lent payloads,
more than 1 MiB). If answers are increments it has a form for each number of them
(`aiops.client.steady_increments`). When the session is `idle`, the driver may run the next exchange
by it: it takes its id and sequence number from `pending`, and sends and counts the bytes that the
general path would send. Anything unexpected (another message, a wait that is long, another request,
an error) has the driver call `hand_over`: it becomes a pending `PushRequest` of the same id and
sequence number, the bytes that are not sent yet are sent, and those that have come are parsed by
`process`. After `lost` it is resent as any other push. Compiled code makes one in a single call
(`aiops.client.sync.short_way`), or in two with a turn of the event loop between
(`aiops.client.asyncio.short_way`).

**Rows at once.** A blocking driver may carry a request about rows in a short way of its own, too,
on one server or several (`aiops.client.steady_rows`): if nothing else is under way it takes the
numbers from `pending` (`number_rows`), and enters it in the accounts when it is answered
(`exchanged_rows`). It is handed over to the general path as a steady exchange is.

**Owners and concurrency.** The session has no lock and never waits: one driver calls it, in one
thread at a time (`Worker` has a lock for its two threads). Only copies and encoding may use several
threads (`parallel_map`), within a call. The driver owns sockets and clocks, the connection the
message in progress, the session `out` and `back`, the caller its arrays. A blocking client has one
request under way, and a worker's with ``overlap`` above 1 also the next transfers
(`aiops.client.sync.connection.MoreRequests`); an async client has several.

**Forks.** A session belongs to one process. In a fork the clients close their copies of the
descriptors, mark the session as not ready, send nothing, and refuse every call but `close`, which
does nothing. The parent's connection is not affected.

**Errors.** A refusal of one request resolves that request, unless it passes. `received` raises what
ends the connection: at `ConnectionLost` and `Unavailable` the driver connects again, with growing
pauses, until its deadline; at `RemoteProtocolError` or another fatal refusal it does not. Deadlines
are the driver's: it abandons the request that is late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.handover import without
from aiops.client.handshake import Handshake, Identity
from aiops.client.logbook import Logbook
from aiops.client.outbox import Outbox
from aiops.client.params import Params
from aiops.client.pending import PendingRequests
from aiops.client.request_kinds import PushRequest, Request, RowsRequest
from aiops.client.restarts import Restarts
from aiops.client.server_info import ServerInfo
from aiops.client.shards import Payloads, Shards
from aiops.client.steady import SteadyExchange, steady_push
from aiops.client.steady_increments import learnt
from aiops.common import urls
from aiops.common.urls import ServerAddress
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    NotReady,
    Unavailable,
    UsageError,
    fatal,
)
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.wire import messages
from aiops.wire.checked_connection import CheckedConnection
from aiops.wire.connection import Buffer, Connection, Limits, Places
from aiops.wire.data_messages import CoverPush
from aiops.wire.decoding import decode
from aiops.wire.messages import Ack, Error, Message, Model, TableRows, Welcome
from aiops.wire.shared_payloads import MAILBOX, SharedPayloads
from aiops.wire.sinks import Sink

_LIMITS = Limits(header=8 << 20)  # a model comes back with offsets: longer than it was offered
_LONGEST_NAME = 1024  # bytes: the whole greeting must stay under 4 KiB


def stream() -> Connection:
    """Return a client's end of a connection that carries bytes."""
    return Connection("client", _LIMITS)


def checked_stream() -> Connection:
    """Return the same with checksums."""
    return CheckedConnection("client", _LIMITS)


class Session:
    """One client's session with one server, over as many connections as it takes.

    Parameters
    ----------
    server
        The URL of the server, or of several that may take its place.
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
    ledger
        The account to keep, of which nothing else has part. Default: a new one.

    Attributes
    ----------
    url
        The URL that it was made with.
    server
        The URL of the server that it talks to, for error texts.
    on_refused
        Called with the refusal when a request is to be asked again, by `ask_refused`.
    info
        What is known of the server, its plan and its model.
    pending
        The requests under way.
    shards
        The connections to the other shards of the model.
    wire
        The state machine of the present connection.
    out, back
        What is to be sent, and what is to be sent before that: releases of what the server lent.
    ready
        Whether requests are sent at once.
    steady
        The steady exchange as it was learnt on this connection, or None.
    mailboxes
        Whether the connection can exchange by a mailbox models whose payloads are else lent.
    restarts
        Tells what is left when the server was started again.
    book
        What was logged, and is to be sent.

    Raises
    ------
    UsageError
        When the name is longer than a greeting may be.
    """

    wire: Connection
    shards: Shards
    server: str
    ready: bool

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
        wire: Callable[[], Connection] = stream,
        parallel_map: ParallelMap = serial_map,
        ledger: Ledger | None = None,
    ) -> None:
        if len(name.encode()) > _LONGEST_NAME:
            text = (
                f"the name is {len(name.encode())} bytes long; at most {_LONGEST_NAME} can be sent"
            )
            raise UsageError(text)
        self.url = self.server = server
        self.on_refused: Callable[[Unavailable], None] = lambda refusal: None
        self.identity: Identity = Identity(client, name, role, token, nonce, pongs)
        self._make_wire = wire
        self._ledger = ledger = Ledger(own=True) if ledger is None else ledger
        self.info: ServerInfo = ServerInfo(server, client, role, ledger, parallel_map)
        self._outbox = Outbox(parallel_map)
        self.book: Logbook = Logbook()
        self.pending: PendingRequests = PendingRequests(
            self.info, self._outbox, ledger, parallel_map
        )
        self.wire = wire()
        ledger.traffic = self.wire.traffic
        self.restarts: Restarts = Restarts(
            self.info, self.pending.acknowledged, self.pending.spread
        )
        self.shards = Shards(
            self.identity,
            self.info,
            self.pending,
            wire,
            self.wire.traffic,
            on_welcomed=self.restarts.shard_welcomed,
            on_attached=self._begin,
            on_answer=self._handle_answer,
        )
        self.out: list[Buffer] = []
        self.back: list[Buffer] = []
        self._handshake = self._greeting(b"")  # of no connection yet
        self.ready = False
        self.steady: SteadyExchange | None = None
        self.mailboxes = False
        self._learning = True  # whether a steady exchange can be learnt on this connection
        self._room: Params | None = None  # room for gradients that are sent, not lent

    # ------------------------------------------------------------ the connection

    def _greeting(self, nonce: bytes) -> Handshake:
        (_client, epoch), run = self.info.connection, self.info.run
        acked = self.pending.acknowledged.last
        return Handshake.with_server(self.identity, self.server, epoch, nonce, run, acked)

    def towards(self, server: ServerAddress, present: tuple[str, int]) -> None:
        """Note the server that the next connection is made to, and the address it is at now."""
        named = server.url
        if present != (server.host, server.port):  # a standby there speaks of the other as primary
            named = f"{urls.write(*present, tls=server.tls)} (for {named})"
        self.server = self.info.url = named
        self.shards.lead, self.shards.host = server, present[0]

    def connected(self, shared: SharedPayloads | None = None) -> list[Buffer]:
        """Begin on a new connection; return what to send.

        ``shared``: the segments of both sides, if the connection is within one machine.
        """
        client, epoch = self.info.connection
        self.info.connection = (client, epoch + 1)
        self.ready = False
        traffic = self.wire.traffic
        self.wire = self._make_wire()
        self.wire.traffic = traffic  # counts go on over all connections
        if shared is not None:
            shared.give_back = partial(self._give_back, self.wire)
            self.wire.shared = shared
        self._ledger.disconnected()
        self.out, self.back = [], []
        self._handshake = self._greeting(self.identity.nonce())
        self._send(self._handshake.hello)
        return self.outgoing()

    def announce_mailbox(self, nbytes: int) -> None:
        """Announce a mailbox, whose descriptors have been passed on."""
        self._send(messages.Share(0, MAILBOX, nbytes))

    @property
    def idle(self) -> bool:
        """True if the session is ready, nothing is under way, and the model is on one server."""
        return (
            (self.ready and not self.pending.by_id and not self.out and not self.back)
            and not self.wire.midway
            and not self.shards.channels
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, over all connections."""
        self._settle()
        return self.wire.traffic.bytes_in, self.wire.traffic.bytes_out

    @property
    def waiting(self) -> bool:
        """True while the next payload has no sink: never, as the lead's always have one."""
        return self.wire.pending is not None

    @property
    def waiting_for(self) -> str:
        """The answer that is waited for, in words."""
        if not self.ready:
            late = self.shards.unattached
            return f"its welcome ({late})" if late else "its welcome"
        requests, lacking = self.pending.by_id, self.shards.late
        if lacking is not None and lacking[0] in requests:
            return f"{requests[lacking[0]].what} ({lacking[1]})"
        return next((request.what for request in requests.values()), "nothing")

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
            When it ended the connection with an error. Connecting again helps only after
            `Unavailable`.
        """
        if nbytes == 0:
            raise ConnectionLost(f"{self.server} closed the connection")
        try:
            wire = self.wire
            received = wire.received(nbytes)
            while True:
                for message, sink in received:
                    if type(message) is Ack:  # nearly always
                        self._handle_answer(message, sink)
                    else:
                        self._handle(message, sink)
                if wire.pending is None:
                    break
                received = wire.fill(self.pending.sink_for(wire.pending))
            if self.shards.channels:
                self.shards.resume()
        except AiopsError:
            self.ready = False  # what is asked from here on waits for the next connection
            raise

    @property
    def ledger(self) -> Ledger:
        """The account of every byte, over all connections."""
        self._settle()
        return self._ledger

    @property
    def answered(self) -> int:
        """Answers received so far."""
        self._settle()
        return self.pending.answered

    def _settle(self) -> None:
        """Enter all steady exchanges in the accounts."""
        if self.steady is not None:
            self.steady.settle()

    def outgoing(self) -> list[Buffer]:
        """Return what is to be sent now, and forget it."""
        out, self.out = self.out, []
        if self.back:
            out, self.back = [*self.back, *out], []
        return out

    def lost(self) -> None:
        """End the connection's state, and that of all channels.

        Requests stay; they are sent again on the next one.
        """
        self._settle()
        self.wire.lost()
        self.shards.lost()
        self.pending.lost()
        self.steady, self._learning = None, True
        self.ready, self.out, self.back = False, [], []

    def log(self, now: float | None) -> None:
        """Have what was logged sent with what is sent next, when it is time.

        ``now``: as of `Logbook.take`.
        """
        message = self.book.take(now) if self.ready else None
        if message is not None:
            self._send(message)

    def leave(self) -> list[Buffer]:
        """Leave the server, if the session is ready; return what to send."""
        if self.ready:
            self.log(None)
            self.ready = False
            self._settle()
            id = self.pending.next_id
            self.pending.next_id = id + 1
            self._send(messages.Leave(id))
        return self.outgoing()

    # ------------------------------------------------------------ requests

    def ask(self, request: Request, id: int | None = None) -> Request:
        """Send a request as soon as the session is ready; return it.

        ``id``: its id, if it has one already (of a steady exchange that was handed over).
        """
        client, epoch = request.connection
        # Of rows that lie on several shards one may have applied its share: it goes on as it began.
        spread = request.of_rows and request.attempted and self.info.rows.shards > 1
        if epoch < self.info.run.last_change and client == self.info.client and not spread:
            outdated = self.restarts.outdated(request, self.server)
            if outdated is not None:
                self.pending.reject(request, outdated)
                return request
        pending = self.pending
        if request.of_rows and self.ready and not self._has_rows:
            pending.reject(request, NotReady(f"{self.server} has lost its model: define it again"))
            return request
        if id is None:
            if self.steady is not None and self.steady.unsettled:
                self.steady.settle()
            id = pending.next_id
            pending.next_id = id + 1
            if request.pushes and not request.seq:
                pending.seq = request.seq = pending.seq + 1
                if not request.of_rows:
                    pending.model_seq = request.seq
        pending.by_id[id] = request
        if self.ready:
            if request.pushes and pending.refused is not None:  # behind that: it has a lower number
                request.refusal = pending.refused
            else:
                self._send_request(request, id)
        return request

    def ask_refused(self) -> None:
        """Ask again for what the server could not take, in the order in which it was asked."""
        pending, self.pending.refused = self.pending, None
        if self.ready:  # else they are asked with all others
            for request in pending.take(lambda request: request.refusal is not None):
                self.ask(request)

    def again(self, request: Request) -> Request:
        """Ask again for what was abandoned before its answer; a push keeps its number."""
        under_way = any(other is request for other in self.pending.by_id.values())
        if under_way or (request.done and request.error is None):
            return request
        request.done, request.error = False, None
        return self.ask(request)

    def abandon(self, request: Request) -> bool:
        """Wait for this request no longer; an answer that comes later is thrown away.

        Returns whether its answer is being received: the rest is written into the request's arrays
        then, unless the driver ends the connection.
        """
        return self.pending.abandon(request)

    def hand_over(
        self, steady: SteadyExchange, sent: int, received: int
    ) -> tuple[Request, list[Buffer], list[memoryview]]:
        """Continue a steady exchange on the general path, with its push as a request.

        Parameters
        ----------
        steady
            The exchange, which is under way.
        sent, received
            The bytes of the push that have been sent, and those of the answer that have come.

        Returns
        -------
        The request, its unsent bytes, and the bytes for `process`.
        """
        push, id = steady.as_request()
        others, self.out, self.back = [*self.back, *self.out], [], []  # which are no part of it
        push.inline = sent > 0  # it cannot be lent any more: it is what was sent
        self.ask(push, id)
        push.inline = False
        return push, [*without(self.outgoing(), sent), *others], steady.end(received)

    def takes_rows(self, request: RowsRequest) -> bool:
        """Return whether a request about rows may be sent in the short way now.

        Then nothing is under way on any connection, and the request needs nothing beside.
        """
        client, epoch = request.connection
        return (
            (self.ready and not self.pending.by_id and not self.out and not self.back)
            and not self.wire.midway
            and all(channel.idle for channel in self.shards.channels)
            and len(self.shards.channels) == self.info.rows.shards - 1
            and (self.info.defined and not request.examples)
            and (epoch >= self.info.run.last_change or client != self.info.client)
        )

    @property
    def _has_rows(self) -> bool:
        """False if the model is lost, and its rows lay on several shards.

        A shard would keep a message about rows until there is a model again.
        """
        return self.info.defined or self.info.rows.shards == 1

    def number_rows(self, request: RowsRequest) -> int:
        """Give a request that is sent in the short way its numbers; return its id."""
        pending = self.pending
        self._settle()
        id = pending.next_id
        pending.next_id = id + 1
        if request.pushes:
            pending.seq = request.seq = pending.seq + 1
        request.inline = request.attempted = True
        return id

    def exchanged_rows(
        self,
        request: RowsRequest,
        answer: TableRows,
        messages: int,
        sent: tuple[int, int],
        came: tuple[int, int],
    ) -> None:
        """Enter a request about rows that was carried in the short way in the accounts.

        Parameters
        ----------
        request, answer
            The request, and its answer; of several servers, the lead's.
        messages
            How many there were, and as many answers.
        sent
            The bytes sent, and those of payloads among them.
        came
            The bytes received, and those beside payloads among them.
        """
        kind = "push_rows" if request.pushes else "fetch_rows"
        traffic, (out, payload), (back, overhead) = self.wire.traffic, sent, came
        traffic.messages_out += messages
        traffic.bytes_out += out
        traffic.kinds_out[kind].add(messages, out - payload, payload)
        traffic.messages_in += messages
        traffic.bytes_in += back
        traffic.kinds_in["rows"].add(messages, overhead, back - overhead)
        self._ledger.exchanged_rows(request.asked.named.index, payload, back - overhead)
        self.pending.answered += 1
        if request.pushes:
            self.pending.acknowledged.add(request.seq, request.seq)
            if self.info.rows.shards > 1:
                self.pending.spread.add(request.seq, request.seq)

    def room(self) -> Params:
        """Return room for gradients, from which they are lent to a server on this machine.

        A model of at most 64 KiB is not lent: sending it takes no longer. The arrays are those of
        the last call, unless the server may still be reading them.
        """
        layout, steady = self.info.known_layout, self.steady
        near = self.wire.shared is not None or self.shards.near
        if near and layout.nbytes > self._outbox.lends_above:
            posting = None if steady is None or steady.under_way else steady.gradient_room
            return Params(layout, posting or self._outbox.room(layout))
        if self._room is None or self._room.layout is not layout:
            self._room = Params(layout)
        return self._room

    # ------------------------------------------------------------ inside

    def _send_request(self, request: Request, id: int) -> None:
        message = request.message(id, self.info)
        payloads = request.payloads
        places: Places = ()
        request.attempted, request.refusal = True, None
        request.lent = []  # what was lent on a connection since lost is not lent again
        if request.examples:
            self._send(CoverPush(id, request.seq, request.examples))
        if request.of_rows and self.info.rows.shards > 1:
            assert isinstance(request, RowsRequest)
            outbox = None if request.inline else self._outbox
            request.lent = self.shards.ask_rows(request, id, outbox, self._ledger.asked)
        if payloads:
            placement, layout = self.info.placement, self.info.layout
            small = layout is not None and layout.nbytes <= self._outbox.lends_above
            if placement is not None and isinstance(message, messages.Push):
                message, payloads, request.lent = self.shards.push(
                    placement, message, payloads, self._outbox
                )
            inline = request.inline or (small and isinstance(request, PushRequest))
            if self.wire.shared is not None and not inline:
                # Else sending takes no longer.
                places = self._lend(request, payloads, self.wire.shared)
        self.out += self.wire.send(message, payloads, places)
        self._ledger.asked(message)

    def _lend(self, request: Request, payloads: Payloads, shared: SharedPayloads) -> Places:
        """Lend what this server is sent of a request's payloads; return where they lie."""
        lent = self._outbox.lend(payloads, shared.show)
        request.lent.append(lent)
        for share in lent.shares:
            self._send(share)
        return lent.places

    def _give_back(self, wire: Connection, id: int) -> None:
        """Release parameters that the server has lent."""
        if wire is self.wire and wire.state == "open":
            self.back.extend(wire.send(messages.Release(id)))

    def _send(self, message: Message) -> None:
        self.out.extend(self.wire.send(message))

    def _handle(self, message: Message, sink: Sink | None) -> None:
        if isinstance(message, Error) and message.fatal:
            raise fatal(message.code, f"{self.server}: {message.text}", message.details)
        if isinstance(message, messages.Challenge):
            self._send(self._handshake.answer(message))
        elif isinstance(message, Welcome):
            self._handle_welcome(message)
        elif isinstance(message, messages.Ping):
            self._send(messages.Pong(message.id))
        elif not isinstance(message, messages.Share):  # the connection has mapped it already
            self._handle_answer(message, sink)

    def _handle_welcome(self, welcome: Welcome) -> None:
        self._handshake.check(welcome)
        self.restarts.welcomed(welcome, self.server)
        if welcome.shards:
            self.shards.open_channels(welcome)
        if not self.shards.channels:
            self._begin()

    def _begin(self) -> None:
        """Be ready, and send what was asked for before."""
        if self.ready:
            return
        self.ready, self.book.every = True, self.info.plan.get("log_every")
        self.log(None)
        # In the order in which they were asked; each gets a new id, a push keeps its number.
        for request in self.pending.take():
            self.ask(request)

    def _handle_answer(self, answer: Message, sink: Sink | None) -> None:
        """Resolve the request that a message answers, once all portions are in place."""
        message = answer
        if self.shards.channels:
            whole = self.shards.complete(answer, sink)
            if whole is None:
                return
            message = whole
        request = self.pending.resolve(message, sink)
        if self.pending.refused is not None and type(message) is Error:
            self.on_refused(self.pending.refused)
        if type(message) is Model:
            self.shards.leave_unused()
        elif type(request) is PushRequest and (self.steady is None or self.steady.failed):
            self._learn_steady(request, message, sink)

    def _learn_steady(self, request: PushRequest, message: Message, sink: Sink | None) -> None:
        """Make the templates of the steady exchange, if this one is of its kind."""
        layout, header = self.info.layout, self.wire.header
        push = None
        if self._learning and not self.wire.checked:
            push = steady_push(request, message, sink, self.info)
        if push is None or layout is None or not header or decode(header) != message:
            return  # the header is a later message's
        lends = self.wire.shared is not None and layout.nbytes > self._outbox.lends_above
        lends = lends and not self.info.increments  # which a server does not lend
        if lends and not self.mailboxes:
            return
        if self.steady is not None and self.steady.still(push, header):
            return
        assert isinstance(message, Ack)
        own = self.info, self.pending, self._ledger
        try:
            found = learnt(push, message, header, *own, self.steady)
        except ValueError:  # the server writes these numbers in varying widths
            self.steady, self._learning = None, False
            return
        if found is not None:
            self.steady, found.lends = found, lends
