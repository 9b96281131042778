"""One direction of a simulated connection: bytes that are queued, cross the links, and arrive.

Theory of operation. A write joins the last batch that is not on the path yet, or begins a new one;
batches of one moment thus cross as one. One batch at a time crosses the links, as a flow
(`aiops.sim.virtual.fair_sharing`). When its last byte has crossed it flies for the hosts' delay,
and arrives whole. While a host is silent, arrivals are held. `ByteTrigger` cuts an arrival in two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from aiops.sim.virtual.fair_sharing import FlowScheduler
from aiops.sim.virtual.host import ByteTrigger, Host
from aiops.sim.virtual.links import LinkFlow
from aiops.sim.virtual.loop import VirtualLoop

WINDOW = 1 << 20
"""Bytes that are sent to a receiver that does not read, beyond those already on their way."""


@dataclass
class Medium:
    """The state that all streams of a network share.

    Attributes
    ----------
    loop
        The event loop.
    random
        Draws jitter and pieces.
    pieces
        The most bytes that are delivered at once, a random number each time; None: all there are.
    scheduler
        Decides at which rates bytes cross the links.
    messages
        Writes that have arrived.
    """

    loop: VirtualLoop
    random: Random
    pieces: int | None
    scheduler: FlowScheduler = field(default_factory=FlowScheduler)
    messages: int = 0


class StreamReader(Protocol):
    """The receiving end of a stream."""

    reading: bool
    unread: int  # bytes

    def arrived(self, views: list[memoryview]) -> None:
        """Take bytes."""

    def ended(self) -> None:
        """Note that no more will come."""


class StreamWriter(Protocol):
    """The sending end of a stream."""

    pausing: bool  # it waits until less is queued
    closing: bool

    def crossed(self) -> None:
        """Note that fewer bytes are queued."""


class ByteStream(LinkFlow):
    """The bytes of one direction of a connection. Those written at one moment arrive together.

    Attributes
    ----------
    queued
        Bytes that have not crossed the path yet.
    in_flight
        Bytes that have, and have not arrived.
    gone
        Whether the connection broke: nothing arrives any more.
    """

    __slots__ = (
        *("_batches", "_begun", "_eof", "_eof_sent", "_held", "_medium", "_not_before"),
        *(
            "_bursts",
            "_jitter",
            "_latency",
            "_reader",
            "_sink",
            "_source",
            "_writer",
            "gone",
            "in_flight",
            "queued",
        ),
    )

    def __init__(self, medium: Medium, source: Host, sink: Host) -> None:
        super().__init__(source.path(sink))
        self._medium, self._source, self._sink = medium, source, sink
        self._latency, self._jitter = source.latency + sink.latency, source.jitter + sink.jitter
        self._bursts = all(link.burst for link in self.path)
        self.queued = self.in_flight = 0
        self.gone = False
        self._batches: deque[tuple[float, int, list[memoryview]]] = deque()
        self._eof = self._eof_sent = False
        self._begun = False  # the first batch is on the path
        self._not_before = 0.0  # what is sent later arrives later
        self._held: list[tuple[list[memoryview], int]] = []  # arrived, but a host is silent
        self._writer: StreamWriter
        self._reader: StreamReader

    def join(self, writer: StreamWriter, reader: StreamReader, not_before: float) -> None:
        """Set its two ends; nothing arrives before the time ``not_before``."""
        self._writer, self._reader, self._not_before = writer, reader, not_before

    @property
    def unsent(self) -> int:
        """Bytes that have not arrived."""
        return self.queued + self.in_flight

    # ------------------------------------------------------------ sending

    def write(self, view: memoryview) -> None:
        """Send bytes, after those before them."""
        count = len(view)
        if not self.path and not self._batches and self._reader.reading:
            self._propagate([view], count)
            return
        self.queued += count
        now = self._medium.loop.now
        batches = self._batches
        if batches and batches[-1][0] == now and not (self._begun and len(batches) == 1):
            when, nbytes, views = batches[-1]
            if nbytes < WINDOW:
                views.append(view)
                batches[-1] = (when, nbytes + count, views)
                return
        batches.append((now, count, [view]))
        if len(batches) == 1:
            scheduler = self._medium.scheduler
            scheduler.waiting.append(self)
            scheduler.unsettled = True

    def end(self) -> None:
        """Deliver the end of the stream after the last byte."""
        self._eof = True
        if not self._batches:
            self._propagate_eof()

    def ready(self) -> None:
        """Put the next batch on the path, if there is one and its receiver reads."""
        while not self._begun and self._batches and not self.gone:
            if not self._reader.reading and self._reader.unread + self.in_flight >= WINDOW:
                return
            if not self.path:
                self._leave()
                continue
            medium, left = self._medium, float(self._batches[0][1])
            now = medium.loop.now
            if self._bursts:
                credit = min(min([link.credit(now) for link in self.path]), left)
                left -= credit
                for link in self.path:
                    link.spend(credit)
            self._begun = True
            medium.scheduler.begin(self, left, now)
        if self._eof and not self._batches:
            self._propagate_eof()

    def crossed(self) -> None:
        """Let the first batch fly: it has crossed the links. Begin with the next."""
        self._begun = False
        self._leave()
        if self._batches or self._eof:
            self.ready()

    def _leave(self) -> None:
        """Let the first batch fly, and tell the writer before the path is left empty."""
        _when, nbytes, views = self._batches.popleft()
        self.queued -= nbytes
        for link in self.path:
            link.carried += nbytes
        self._propagate(views, nbytes)
        writer = self._writer
        if writer.pausing or writer.closing:
            writer.crossed()

    # ------------------------------------------------------------ arriving

    def _propagate(self, views: list[memoryview], nbytes: int) -> None:
        medium = self._medium
        self.in_flight += nbytes
        fixed = self._latency + self._source.delay + self._sink.delay  # a call would cost a tenth
        when = medium.loop.now + (self.delay() if self._jitter else fixed)
        if when < self._not_before:
            when = self._not_before
        self._not_before = when
        medium.loop.post(when, self._arrive, views, nbytes)

    def delay(self) -> float:
        """Return the seconds that bytes travel which are sent now."""
        seconds = self._latency + self._source.delay + self._sink.delay
        return seconds + self._jitter * self._medium.random.random() if self._jitter else seconds

    def _propagate_eof(self) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            self._propagate([], 0)

    def _arrive(self, views: list[memoryview], nbytes: int) -> None:
        source, sink = self._source, self._sink
        if self._held or source.silent or sink.silent:
            self._held.append((views, nbytes))
            self._wait()
        elif self.gone:
            return
        elif nbytes and (source.triggers or sink.triggers):
            self._pass_triggers(views, nbytes)
        else:
            self._deliver(views, nbytes)

    def _pass_triggers(self, views: list[memoryview], nbytes: int) -> None:
        """Deliver the bytes before the first trigger, run its action, and go on with the rest."""
        triggers = [one for one in self._source.triggers if one.way == "up"]
        triggers += [one for one in self._sink.triggers if one.way == "down"]
        while triggers:
            first = min(triggers, key=lambda trigger: trigger.left)
            count = min(first.left, nbytes)
            ahead, views = _split(views, count)
            nbytes -= count
            for one in triggers:
                one.left -= count
            if count:
                self._deliver(ahead, count)
            if not nbytes or self.gone:
                return  # a trigger at the end of them waits for the byte after it
            triggers.remove(first)
            (self._source if first.way == "up" else self._sink).triggers.remove(first)
            if not self._survives(first):
                return
            if self._source.silent or self._sink.silent:
                self._held.insert(0, (views, nbytes))
                self._wait()
                return
        self._deliver(views, nbytes)

    def _survives(self, trigger: ByteTrigger) -> bool:
        """Run a trigger's action; return whether the connection is still there."""
        trigger.action()
        return not self.gone

    def _deliver(self, views: list[memoryview], nbytes: int) -> None:
        self.in_flight -= nbytes
        if views:
            self._medium.messages += 1
            self._reader.arrived(views)
        else:
            self._reader.ended()

    def restore(self) -> None:
        """Deliver what was held back, as TCP's retransmissions do, unless a host is silent."""
        held, self._held = self._held, []
        for place, (views, nbytes) in enumerate(held):
            if self._source.silent or self._sink.silent:
                self._held += held[place:]
                self._wait()
                return
            self._arrive(views, nbytes)

    def _wait(self) -> None:
        """Be restored with the silent hosts, whether or not the ends are open then."""
        for host in (self._source, self._sink):
            if host.silent:
                host.held[self] = None

    # ------------------------------------------------------------ ending

    def drop(self) -> None:
        """Discard the bytes that have not crossed."""
        if self._begun:
            self._begun = False
            self._medium.scheduler.leave(self, self._medium.loop.now)
        self._batches.clear()
        self.queued = 0

    def break_off(self) -> None:
        """Discard everything: nothing arrives any more."""
        self.drop()
        self.gone = True
        self.in_flight = 0


def _split(views: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first ``count`` bytes, and the others."""
    ahead: list[memoryview] = []
    for place, view in enumerate(views):
        if count < len(view):
            return [*ahead, *([view[:count]] if count else [])], [view[count:], *views[place + 1 :]]
        ahead.append(view)
        count -= len(view)
    return ahead, []
