"""The server's record of a connection: what it has lent, and its deadlines."""

from __future__ import annotations

import weakref

from aiops.access.quotas import Meter
from aiops.engine.steady import Steady
from aiops.engine.steady_rows import SteadyRows
from aiops.errors import AiopsError, DeadlineExceeded
from aiops.model.layout import Bytes
from aiops.model.parts import Parts
from aiops.model.shared_memory import Segment
from aiops.net.transport import MessageTransport
from aiops.serving.config import Config
from aiops.store.snapshots import Lease
from aiops.wire.handshake import ServerHandshake
from aiops.wire.messages import Message, Ping

_LENT = 4
"""Lent answers that a client may hold at a time: each may keep a version alive."""

_CROWDED_RATE, _CROWDED_WINDOW = 64 * 1024, 5.0
"""Bytes per second, over seconds, required of a peer while others wait for its buffer."""


_PINGED = ("open", "shard open", "lead open", "standby open")
"""The states in which a peer may be pinged."""


class Peer:
    """The server's record of one connection, beside its transport."""

    __slots__ = (
        *("_lent", "handshake", "last_in", "link", "meter", "pinged", "rows", "since", "slow_in"),
        *("slow_out", "steady", "steady_rows"),
    )

    def __init__(self, link: MessageTransport, handshake: ServerHandshake, now: float) -> None:
        self.link, self.handshake = link, handshake
        self.steady: Steady | None = None  # answers its steady exchanges
        self.meter: Meter | None = None  # counts what crosses, if its token has a quota
        self.steady_rows: SteadyRows | None = None  # answers its messages about rows
        self.since = now
        self.last_in = (now, 0)  # when bytes last came, and how many had come by then
        self.pinged = False
        self._lent: dict[int, Lease] = {}  # by the id of the answer that lent it
        self.rows: weakref.ref[Bytes] | None = None  # sent last; alive while not all of it has gone
        self.slow_in = self.slow_out = (now, 0)  # the start of the current measurement

    @property
    def short_ways(self) -> list[Steady | SteadyRows]:
        """The short ways that its requests may take."""
        return [way for way in (self.steady, self.steady_rows) if way is not None]

    def lend(self, message: Message, lease: Lease) -> bool:
        """Answer with a place in shared memory instead of a payload; return whether it did.

        That takes a connection within this machine, parameters in shared memory, and a client that
        holds fewer than 4 lent answers.
        """
        link, segment = self.link, lease.version.arena.segment
        shared = link.wire.shared
        if shared is None or not self._may_hold(message.id):
            return False
        if not isinstance(segment, Segment) or not lease.lendable:
            return False
        number, share = shared.show(segment)
        if not number:
            return False
        if share is not None:
            link.send(link.wire.send(share))
        lease.lend()
        parts: Parts = message.parts  # type: ignore[attr-defined]
        begin = lease.version.arena.layout.begin
        # Parts without bytes lie on another shard.
        places = [(number, part.start - begin) if part.nbytes else None for part in parts]
        self._lent[message.id] = lease
        link.send(link.wire.send(message, [()] * len(parts), places))
        return True

    def lend_current(self, id: int) -> tuple[int, int] | bool | None:
        """Lend the newest parameters for the answer of this id, which lies in a mailbox.

        Returns
        -------
        The number of the segment that the client is to read, and where in it. False: the client has
        been shown that segment just now, and the answer is to follow on the connection. None: they
        cannot be lent, as in `lend`.
        """
        link, steady = self.link, self.steady
        shared = link.wire.shared
        if shared is None or steady is None or not self._may_hold(id):
            return None
        segment = steady.store.current.room.segment
        if not isinstance(segment, Segment):
            return None
        lease = steady.store.lease()
        number, share = shared.show(segment) if lease.lendable else (0, None)
        if not number or share is not None:
            lease.release()
            if share is None:
                return None
            link.send(link.wire.send(share))
            return False
        lease.lend()
        self._lent[id] = lease
        return number, 0

    def _may_hold(self, id: int) -> bool:
        """Return whether one more answer may be lent: each is given back by an id of its own."""
        return len(self._lent) < _LENT and id not in self._lent

    def given_back(self, id: int) -> None:
        """Release the lease of a lent answer: the client has given it back."""
        lease = self._lent.pop(id, None)
        if lease is not None:
            lease.release()

    def lost(self) -> None:
        """Abandon the leases of lent answers: the client may read on, and cannot be asked."""
        for lease in self._lent.values():
            lease.abandon()
        self._lent.clear()
        for way in self.short_ways:
            way.lost()

    def fault(
        self, config: Config, now: float, crowded: bool = False, crowded_rows: bool = False
    ) -> AiopsError | None:
        """Return why a peer is to be dropped, or None.

        ``crowded``: others wait for a receive buffer, so a peer that fills one must be quicker;
        ``crowded_rows``: others wait for a buffer of rows, so a peer that uses one must be.
        """
        link = self.link
        now -= link.held(now)  # without the time that the server's own budget held it up
        if self.meter is not None:
            now -= self.meter.held(now)  # nor that for which its quota did
        if self.handshake.admitted is None and now - self.since > config.hello_deadline:
            return DeadlineExceeded(f"it did not introduce itself in {config.hello_deadline:g} s")
        came = link.wire.traffic.bytes_in
        receiving = link.wire.midway and link.reading and not link.answering
        window, rate = config.stall_deadline, float(config.min_rate)
        if (crowded or crowded_rows) and link.wire.missing:
            window, rate = min(window, _CROWDED_WINDOW), max(rate, _CROWDED_RATE)
        self.slow_in, stalled = _stalled(window, rate, receiving, self.slow_in, came, now)
        if stalled and rate > config.min_rate:
            return DeadlineExceeded(
                f"it sent less than {_CROWDED_RATE // 1024} KiB/s of a push while others waited"
            )
        if stalled:
            return DeadlineExceeded(f"it stopped in mid-message for {config.stall_deadline:g} s")
        window, rate = config.stall_deadline, float(config.min_rate)
        if crowded_rows and self.rows is not None and self.rows() is not None:
            window, rate = min(window, _CROWDED_WINDOW), max(rate, _CROWDED_RATE)
        self.slow_out, stalled = _stalled(
            window, rate, link.unsent > 0, self.slow_out, link.sent, now
        )
        if stalled:
            return DeadlineExceeded(
                f"it read less than {rate / 1024:g} KiB/s of its answer for {window:g} s"
                f" ({link.unsent} bytes are unsent)"
            )
        return self._silent(config, came, now)

    def _silent(self, config: Config, came: int, now: float) -> AiopsError | None:
        """Ping a silent client that has announced to answer pings; drop it if it does not."""
        # A client that still reads an answer may not send.
        if came != self.last_in[1] or self.link.unsent:
            self.last_in, self.pinged = (now, came), False
        quiet = now - self.last_in[0]
        admitted = self.handshake.admitted
        if admitted is None or not admitted.hello.pongs or quiet < config.waits.heartbeat:
            return None
        if not self.pinged:
            self.pinged = True
            if self.link.wire.state in _PINGED:
                self.link.send(self.link.wire.send(Ping(0)))
        elif quiet > config.waits.unanswered:
            return DeadlineExceeded(f"it has not answered a ping for {quiet:.0f} s")
        return None


def _stalled(
    window: float, rate: float, busy: bool, since: tuple[float, int], count: int, now: float
) -> tuple[tuple[float, int], bool]:
    """Measure a transfer over windows of ``window`` seconds; return whether it is too slow."""
    began, had = since
    if not busy:
        return (now, count), False
    if now - began < window:
        return since, False
    return (now, count), count - had < rate * (now - began)
