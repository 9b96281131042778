"""Connections under a bandwidth budget: nothing is written or read that was not granted.

What is to be sent waits in the link's queue, what is to be received in the kernel's buffer (kept
small, so that the peer notices), until `aiops.bandwidth.token_bucket.Budget` grants it. A
connection that has nothing to read holds a grant of one byte, so that the event loop can tell when
something comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiops.bandwidth.token_bucket import IN, OUT, Budget, Way
from aiops.net.socket_options import narrow, readable
from aiops.net.transport import MessageTransport, TransportOwner
from aiops.wire.connection import Connection

_PACED = "paced"  # why a peer is not read from
_SOONEST = 0.001  # seconds: what event loops' timers can tell apart
_UNTOLD = 16 * 1024  # bytes asked for where nobody can tell how much more there is to read


class Pacer:
    """Grants one server's connections their turns, and sets the timer to the next.

    Parameters
    ----------
    budget
        What decides.
    clock
        The server's clock, in seconds.
    narrowed
        Bytes per second that sockets' buffers are made for.
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
        self._waited = False  # somebody has stood in line since the last look

    def open(self, link: PacedTransport) -> int:
        """Let a connection take part; return its number here."""
        self._flows += 1
        self._links[self._flows] = link
        self.budget.open(self._flows, self.now())
        return self._flows

    def close(self, flow: int) -> None:
        """Forget a connection; what it leaves is the others'."""
        if self._links.pop(flow, None) is not None:
            self.budget.close(flow, self.now())
            self.serve()

    def ask(self, flow: int, way: Way, nbytes: int) -> None:
        """Have `PacedTransport.granted` called when so many bytes may move, some at a time."""
        if flow in self._links:
            self.budget.ask(flow, way, nbytes)
            self.serve()

    def serve(self) -> None:
        """Grant what can be granted now."""
        if self._serving:  # what is asked for meanwhile is granted in the same round
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
        """Set no more timers, until somebody asks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pressed(self) -> bool:
        """Return whether somebody has waited at any time since this was last called."""
        waited, self._waited = self._waited, self.budget.wanted > 0
        return waited

    def busy(self) -> int:
        """Return how many connections have a message on its way."""
        return sum(link.busy for link in self._links.values())


class PacedTransport(MessageTransport):
    """A `MessageTransport` that moves what a `Pacer` grants it.

    Parameters
    ----------
    wire, owner
        As of every link.
    pacer
        The server's.
    """

    _at_once = -1  # everything is queued

    def __init__(self, wire: Connection, owner: TransportOwner, pacer: Pacer) -> None:
        super().__init__(wire, owner)
        self._pacer = pacer
        self._allowed = 0  # bytes granted that may be read
        self._offered = 0  # bytes that the last buffer had room for
        self._held = 0.0  # seconds spent in line so far
        self._since: float | None = None  # in line since then
        self.flow = 0

    # ------------------------------------------------------------ asyncio's side

    def _set_up(self, transport: asyncio.Transport) -> None:
        super()._set_up(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            narrow(sock, self._pacer.narrowed)
        transport.set_write_buffer_limits(high=self._pacer.budget.quantum)
        self.flow = self._pacer.open(self)
        self._ask_to_read()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Offer as much of the wire's buffer as may be read."""
        buffer = self.wire.next_buffer()
        lacking = len(buffer) - self._allowed
        if lacking > 0:
            budget, now = self._pacer.budget, self._pacer.now()
            self._allowed += budget.at_once(self.flow, lacking, now)
            if not self._allowed:  # uvloop reads from who was paused as the connection was made
                if not budget.borrow(self.flow, now):
                    raise BlockingIOError("more connections at once than the budget has bytes for")
                self._allowed = 1
        self._offered = min(len(buffer), self._allowed)
        return buffer[: self._allowed]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was received."""
        self._allowed -= nbytes
        self._pacer.budget.crossed(self.flow, nbytes, self._pacer.now())
        drained = nbytes < self._offered
        super().buffer_updated(nbytes)
        if self._unread or self.transport is None or self.transport.is_closing():
            return
        if drained and self._allowed > 1:
            self._leave_allowed(1)
            self._pacer.serve()
        elif not self._allowed:
            self._ask_to_read(more=not drained)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._allowed = 0
        self._pacer.close(self.flow)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The transport is full: nothing is asked for until it is not."""
        super().pause_writing()
        self._pacer.ask(self.flow, OUT, 0)
        self._note()

    def joined(self, client: str) -> None:
        """Hear whose connection this is."""
        self._pacer.budget.join(self.flow, client, self._pacer.now())

    # ------------------------------------------------------------ what is granted

    def granted(self, way: Way, nbytes: int) -> None:
        """Move so many bytes."""
        if way == IN:
            self._allowed += nbytes
            super()._go_on_reading(_PACED)
        else:
            self._write(nbytes)
        self._note()

    def _write(self, allowed: int) -> None:
        transport, pacer = self.transport, self._pacer
        while allowed and self._out and not self._full and transport is not None:
            if transport.is_closing():
                break
            view, lease = self._out.popleft()
            if len(view) > allowed:
                self._out.appendleft((view[allowed:], lease))
                view = view[:allowed]
            count = len(view)
            allowed -= count
            self._unsent -= count
            self.pumped += count
            pacer.budget.crossed(self.flow, count, pacer.now())
            transport.write(view)
        if allowed:
            pacer.budget.put_back(self.flow, allowed)
        self._pumped()

    def _pump(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            self._pacer.ask(self.flow, OUT, 0 if self._full else self._unsent)
            self._note()
        self._pumped()

    def _ask_to_read(self, *, more: bool = False) -> None:
        """Ask for what there is to read, or for the byte by which it will be noticed."""
        assert self.transport is not None
        sock = self.transport.get_extra_info("socket")
        there = readable(sock) if sock is not None else None
        if there is None and more:
            there = _UNTOLD
        self._pacer.ask(self.flow, IN, there or 1)
        if not self._allowed and not self._unread:
            super()._stop_reading(_PACED)
        self._note()

    def _leave_allowed(self, nbytes: int) -> None:
        self._pacer.budget.put_back(self.flow, self._allowed - nbytes)
        self._allowed = nbytes

    def _stop_reading(self, why: str) -> None:
        """Stop for a reason that is not the budget's: what was granted is the others'."""
        super()._stop_reading(why)
        self._unread.discard(_PACED)
        self._pacer.ask(self.flow, IN, 0)
        if self._allowed:
            self._leave_allowed(0)
            self._pacer.serve()

    def _go_on_reading(self, why: str) -> None:
        if self._unread != {why}:
            super()._go_on_reading(why)
        elif self.transport is not None and not self.transport.is_closing():
            self._unread = {_PACED}
            self._ask_to_read()

    # ------------------------------------------------------------ whose fault slowness is

    @property
    def reading(self) -> bool:
        """Whether this peer is being read from, as fast as the budget lets it."""
        return not self._unread - {_PACED}

    @property
    def busy(self) -> bool:
        """Whether a message is on its way."""
        return self.wire.midway or self._unsent > 0

    def held(self, now: float) -> float:
        """Return for how many seconds so far it stood in line."""
        return self._held + (now - self._since if self._since is not None else 0.0)

    def _note(self) -> None:
        """Note the time when it begins or ceases to stand in line."""
        waits = _PACED in self._unread or (self._unsent > 0 and not self._full)
        if waits and self._since is None:
            self._since = self._pacer.now()
        elif not waits and self._since is not None:
            self._held += self._pacer.now() - self._since
            self._since = None
