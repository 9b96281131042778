"""Pace connections under a bandwidth budget: no byte is written or read without a grant.

Bytes to send wait in the transport's queue, bytes to receive in the kernel's buffer (kept small, so
that the peer's sending slows down), until `aiops.bandwidth.token_bucket.Budget` grants them. A
connection with nothing to read holds a grant of one byte, with which the event loop notices the
next message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiops.bandwidth.token_bucket import IN, OUT, Budget, Way
from aiops.net.socket_options import narrow, readable
from aiops.net.transport import MessageTransport, TransportOwner
from aiops.wire.connection import Connection, SinkFor

PACED = "paced"
"""The reason for which a peer is not read from until bytes are granted."""

_SOONEST = 0.001  # seconds: what event loops' timers can tell apart
_UNKNOWN = 16 * 1024  # bytes requested if the system cannot tell how many are to be read


class Pacer:
    """Grants bytes to one server's connections, and sets a timer for the next grant.

    Parameters
    ----------
    budget
        Decides.
    clock
        The server's clock, in seconds.
    narrowed
        Bytes per second, by which sockets' buffers are sized.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float], narrowed: int) -> None:
        self.budget, self.now = budget, clock
        self.narrowed = narrowed
        self._links: dict[int, PacedTransport] = {}
        self._by_number: dict[int, PacedTransport] = {}
        self._flows = 0
        self._serving = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer rings
        self._waited = False  # a connection has waited since the last `limited`

    def open(self, link: PacedTransport) -> int:
        """Add a connection; return its number here."""
        self._flows += 1
        self._links[self._flows] = link
        self.budget.open(self._flows, self.now())
        return self._flows

    def close(self, flow: int) -> None:
        """Forget a connection; its grants go to the others."""
        if self._links.pop(flow, None) is not None:
            self.budget.close(flow, self.now())
            self.serve()

    def ask(self, flow: int, way: Way, nbytes: int) -> None:
        """Have `PacedTransport.granted` called, in portions, until ``nbytes`` have been granted."""
        if flow in self._links:
            self.budget.ask(flow, way, nbytes)
            self.serve()

    def serve(self) -> None:
        """Grant what can be granted now."""
        if self._serving:  # requests made meanwhile are granted by the same loop
            return
        self._serving = True
        try:
            while grants := self.budget.grants(self.now()):
                for flow, way, nbytes in grants:
                    link = self._links.get(flow)
                    if link is not None:
                        link.granted(way, nbytes)
        finally:
            self._serving = False
        self._set_timer()

    def _set_timer(self) -> None:
        now = self.now()
        due = self.budget.next(now)
        if due is None:
            self.stop()
            return
        self._waited = True
        if self._timer is None or due < self._due - _SOONEST:
            self.stop()
            self._due = max(due, now + _SOONEST)
            self._timer = asyncio.get_running_loop().call_later(self._due - now, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.serve()

    def stop(self) -> None:
        """Cancel the timer; the next request sets one again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def limited(self) -> bool:
        """Return whether a connection has waited at any time since the last call."""
        waited, self._waited = self._waited, self.budget.wanted > 0
        return waited

    def busy(self) -> int:
        """Return the number of connections with a message on its way."""
        return sum(link.busy for link in self._links.values())


class PacedTransport(MessageTransport):
    """A `MessageTransport` that moves what a `Pacer` grants it.

    Parameters
    ----------
    wire, owner, number, sink_for
        As for every `MessageTransport`.
    pacer
        The server's pacer.
    """

    paced = True
    _at_once = -1  # everything is queued

    def __init__(
        self,
        wire: Connection,
        owner: TransportOwner,
        number: int,
        sink_for: SinkFor,
        pacer: Pacer,
    ) -> None:
        super().__init__(wire, owner, number, sink_for)
        self._pacer = pacer
        self._allowed = 0  # bytes granted that may be read
        self._offered = 0  # bytes that the last buffer had room for
        self._guessed = False  # more was asked for than is known to be there
        self._held = 0.0  # seconds of waiting for grants so far
        self._since: float | None = None  # waiting since then
        self.flow = 0

    # ------------------------------------------------------------ asyncio's side

    def _set_up(self, transport: asyncio.Transport) -> None:
        super()._set_up(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            narrow(sock, self._pacer.narrowed)
        transport.set_write_buffer_limits(high=self._pacer.budget.quantum)
        self.flow = self._pacer.open(self)
        self._ask_to_read(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Offer as much of the connection's buffer as may be read."""
        buffer = self._room()
        lacking = len(buffer) - self._allowed
        if lacking > 0:
            budget, now = self._pacer.budget, self._pacer.now()
            self._allowed += budget.at_once(self.flow, lacking, now)
            if not self._allowed:  # uvloop reads once although reading was paused
                if not budget.borrow(self.flow, now):
                    raise BlockingIOError("more connections at once than the budget has bytes for")
                self._allowed = 1
        self._offered = min(len(buffer), self._allowed)
        return buffer[: self._allowed]

    def buffer_updated(self, nbytes: int, short: bool = True) -> None:
        """Take what was received."""
        self._allowed -= nbytes
        self._pacer.budget.crossed(self.flow, nbytes, self._pacer.now())
        drained = nbytes < self._offered
        self._take(nbytes)
        if self._unread or self.transport is None or self.transport.is_closing():
            return
        over = drained or (self._guessed and not self._midway)
        if over and self._guessed and self._allowed:
            # A connection with nothing to say holds one byte, and waits for no more: many of them
            # would hold the whole budget.
            self._guessed = False
            self._pacer.ask(self.flow, IN, 0)
        if over and self._allowed > 1:
            self._leave_allowed(1)
            self._pacer.serve()
        elif not self._allowed:
            self._ask_to_read(self.transport, more=not drained)

    def _room(self) -> memoryview:
        """Return the buffer for received bytes."""
        return self.wire.next_buffer()

    def _take(self, nbytes: int) -> None:
        """Take bytes that are in it."""
        super().buffer_updated(nbytes)

    @property
    def _midway(self) -> bool:
        """True if more bytes are expected soon."""
        return self.wire.midway

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._allowed = 0
        self._pacer.close(self.flow)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Request no bytes to send while the transport is full."""
        super().pause_writing()
        self._pacer.ask(self.flow, OUT, 0)
        self._note()

    def joined(self, client: str) -> None:
        """Note the client of this connection: its connections share one budget."""
        self._pacer.budget.join(self.flow, client, self._pacer.now())

    def exempt(self) -> None:
        """Neither pace nor count it any more: another server of the model is at the other end."""
        self._pacer.budget.exempt(self.flow)
        self._pacer.serve()

    # ------------------------------------------------------------ what is granted

    def granted(self, way: Way, nbytes: int) -> None:
        """Read or write ``nbytes``."""
        if way == IN:
            self._allowed += nbytes
            super()._go_on_reading(PACED)
        else:
            self._write(nbytes)
        self._note()

    def _write(self, allowed: int) -> None:
        transport, pacer = self.transport, self._pacer
        while allowed and not self._full and transport is not None:
            if transport.is_closing():
                break
            view = self._next_piece(allowed)
            if view is None:
                break
            count = len(view)
            allowed -= count
            self.pumped += count
            pacer.budget.crossed(self.flow, count, pacer.now())
            transport.write(view)
        if allowed:
            pacer.budget.put_back(self.flow, allowed)
        self._pumped()

    def _next_piece(self, most: int) -> memoryview | None:
        """Return bytes that are to be sent next, at most ``most``; None: there are none."""
        if not self._out:
            return None
        view, lease = self._out.popleft()
        if len(view) > most:
            self._out.appendleft((view[most:], lease))
            view = view[:most]
        self._unsent -= len(view)
        return view

    @property
    def _waiting(self) -> int:
        """Bytes that wait to be sent, counted as they cross."""
        return self._unsent

    def _pump(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            self._pacer.ask(self.flow, OUT, 0 if self._full else self._waiting)
            self._note()
        self._pumped()

    def _ask_to_read(self, transport: asyncio.Transport, *, more: bool = False) -> None:
        """Request the bytes that wait to be read, or one byte to notice the next by."""
        sock = transport.get_extra_info("socket")
        there = readable(sock) if sock is not None else None
        self._guessed = there is None and more and self._midway
        if self._guessed:
            there = _UNKNOWN
        self._pacer.ask(self.flow, IN, there or 1)
        if not self._allowed and not self._unread:
            super()._stop_reading(PACED)
        self._note()

    def _leave_allowed(self, nbytes: int) -> None:
        self._pacer.budget.put_back(self.flow, self._allowed - nbytes)
        self._allowed = nbytes

    def _stop_reading(self, why: str) -> None:
        """Stop for a reason that is not the budget's: grants go back to the other connections."""
        super()._stop_reading(why)
        self._unread.discard(PACED)
        self._pacer.ask(self.flow, IN, 0)
        if self._allowed:
            self._leave_allowed(0)
            self._pacer.serve()

    def _go_on_reading(self, why: str) -> None:
        if self._unread != {why}:
            super()._go_on_reading(why)
        elif self.transport is not None and not self.transport.is_closing():
            self._unread = {PACED}
            self._ask_to_read(self.transport)

    # ------------------------------------------------------------ time held up by the budget

    @property
    def reading(self) -> bool:
        """True if this peer is read from, at the pace of the budget."""
        return not self._unread - {PACED}

    @property
    def busy(self) -> bool:
        """True if a message is on its way, in either direction."""
        return self.wire.midway or self._waiting > 0

    def held(self, now: float) -> float:
        """Return the seconds that it has waited for grants so far."""
        return self._held + (now - self._since if self._since is not None else 0.0)

    def _note(self) -> None:
        """Note the time when it begins or ceases to wait for grants."""
        waits = PACED in self._unread or (self._waiting > 0 and not self._full)
        if waits and self._since is None:
            self._since = self._pacer.now()
        elif not waits and self._since is not None:
            self._held += self._pacer.now() - self._since
            self._since = None
