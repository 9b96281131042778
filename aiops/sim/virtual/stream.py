"""One direction of a simulated connection: what was written, what has crossed, what has arrived."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from aiops.sim.virtual.sharing import Flow

if TYPE_CHECKING:
    from aiops.sim.virtual.host import Host, Mark
    from aiops.sim.virtual.network import Network

WINDOW = 1 << 20
"""Bytes that a receiver who does not read is sent beyond what was on its way already."""


class Reader(Protocol):
    """Who is at the end of a stream."""

    reading: bool
    unread: int  # bytes

    def arrived(self, views: list[memoryview]) -> None:
        """Take bytes."""

    def ended(self) -> None:
        """Hear that no more will come."""


class Writer(Protocol):
    """Who is at its beginning."""

    def crossed(self) -> None:
        """Hear that less is waiting to be sent."""


class Stream(Flow):
    """Bytes one way. What is written at one moment crosses, and arrives, together.

    Attributes
    ----------
    queued
        Bytes that have not crossed the path yet.
    flying
        Bytes that have, and have not arrived.
    """

    __slots__ = (
        *("_batches", "_begun", "_eof", "_eof_flown", "_held", "_network", "_not_before"),
        *("_bursts", "_reader", "_sink", "_source", "_writer", "flying", "gone", "queued"),
    )

    def __init__(self, network: Network, source: Host, sink: Host) -> None:
        super().__init__(network.path(source, sink))
        self._network, self._source, self._sink = network, source, sink
        self._bursts = all(line.burst for line in self.path)
        self.queued = self.flying = 0
        self.gone = False
        self._batches: deque[tuple[float, int, list[memoryview]]] = deque()
        self._eof = self._eof_flown = False
        self._begun = False  # the first batch is on the path
        self._not_before = 0.0  # what is sent later arrives later
        self._held: list[tuple[list[memoryview], int]] = []  # arrived, but a host is silent
        self._writer: Writer
        self._reader: Reader

    def join(self, writer: Writer, reader: Reader, not_before: float) -> None:
        """Say who is at its two ends; nothing arrives before that time."""
        self._writer, self._reader, self._not_before = writer, reader, not_before

    @property
    def unsent(self) -> int:
        """Bytes that have not arrived."""
        return self.queued + self.flying

    # ------------------------------------------------------------ sending

    def write(self, view: memoryview) -> None:
        """Send bytes, after those before them."""
        count = len(view)
        if not self.path and not self._batches and self._reader.reading:
            self._fly([view], count)
            return
        self.queued += count
        now = self._network.loop.now
        batches = self._batches
        if batches and batches[-1][0] == now and not (self._begun and len(batches) == 1):
            when, nbytes, views = batches[-1]
            if nbytes < WINDOW:
                views.append(view)
                batches[-1] = (when, nbytes + count, views)
                return
        batches.append((now, count, [view]))
        if len(batches) == 1:
            self._network.written.append(self)

    def end(self) -> None:
        """Say that nothing more will be written."""
        self._eof = True
        if not self._batches:
            self._fly_eof()

    def begin(self) -> None:
        """Put what is next on the path, if there is anything and its receiver reads."""
        while not self._begun and self._batches and not self.gone:
            if not self._reader.reading and self._reader.unread + self.flying >= WINDOW:
                return
            if self.path:
                self._enter()
                return
            self._leave()
        if self._eof and not self._batches:
            self._fly_eof()

    def _enter(self) -> None:
        """The first batch begins to cross."""
        network, left = self._network, float(self._batches[0][1])
        now = network.loop.now
        if self._bursts:
            credit = min(min([line.credit(now) for line in self.path]), left)
            left -= credit
            for line in self.path:
                line.spend(credit)
        self._begun = True
        network.traffic.begin(self, left, now)

    def crossed(self) -> None:
        """Hear that the first batch has crossed; go on with the next."""
        self._begun = False
        self._leave()
        self.begin()

    def _leave(self) -> None:
        """The first batch goes off. Who waited writes more, so that the path is not left empty."""
        _when, nbytes, views = self._batches.popleft()
        self.queued -= nbytes
        for line in self.path:
            line.carried += nbytes
        self._fly(views, nbytes)
        self._writer.crossed()

    # ------------------------------------------------------------ arriving

    def _fly(self, views: list[memoryview], nbytes: int) -> None:
        network = self._network
        self.flying += nbytes
        when = network.loop.now + network.delay(self._source, self._sink)
        if when < self._not_before:
            when = self._not_before
        self._not_before = when
        network.loop.post(when, self._arrive, views, nbytes)

    def _fly_eof(self) -> None:
        if not self._eof_flown:
            self._eof_flown = True
            self._fly([], 0)

    def _arrive(self, views: list[memoryview], nbytes: int) -> None:
        if self._held or self._source.silent or self._sink.silent:
            self._held.append((views, nbytes))
        elif not self.gone:
            self._arrived(views, nbytes)

    def _arrived(self, views: list[memoryview], nbytes: int) -> None:
        if nbytes and (self._source.marks or self._sink.marks):
            self._pass_marks(views, nbytes)
        else:
            self._hand_on(views, nbytes)

    def _pass_marks(self, views: list[memoryview], nbytes: int) -> None:
        """Hand them on as far as the first mark among them; then what it stands for happens."""
        marks = [mark for mark in self._source.marks if mark.way == "up"]
        marks += [mark for mark in self._sink.marks if mark.way == "down"]
        while marks:
            mark = min(marks, key=lambda mark: mark.left)
            count = min(mark.left, nbytes)
            ahead, views = _split(views, count)
            nbytes -= count
            for one in marks:
                one.left -= count
            if count:
                self._hand_on(ahead, count)
            if not nbytes or self.gone:
                return  # a mark at the end of them is for the byte after it
            marks.remove(mark)
            (self._source if mark.way == "up" else self._sink).marks.remove(mark)
            if not self._goes_on(mark):
                return
            if self._source.silent or self._sink.silent:
                self._held.insert(0, (views, nbytes))
                return
        self._hand_on(views, nbytes)

    def _goes_on(self, mark: Mark) -> bool:
        """Have happen what a mark stands for; return whether the connection is still there."""
        mark.action()
        return not self.gone

    def _hand_on(self, views: list[memoryview], nbytes: int) -> None:
        self.flying -= nbytes
        if views:
            self._network.messages += 1
            self._reader.arrived(views)
        else:
            self._reader.ended()

    def heard_again(self) -> None:
        """Have arrive what was held back, as TCP's repetitions do, if nobody is silent now."""
        held, self._held = self._held, []
        for place, (views, nbytes) in enumerate(held):
            if self._source.silent or self._sink.silent:
                self._held += held[place:]
                return
            if not self.gone:
                self._arrived(views, nbytes)

    # ------------------------------------------------------------ ending

    def drop(self) -> None:
        """Throw away what has not crossed: nobody will send it."""
        if self._begun:
            self._begun = False
            self._network.traffic.leave(self, self._network.loop.now)
        self._batches.clear()
        self.queued = 0

    def break_off(self) -> None:
        """Throw away everything: nothing arrives any more."""
        self.drop()
        self.gone = True
        self.flying = 0


def _split(views: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first so many bytes, and the others."""
    ahead: list[memoryview] = []
    for place, view in enumerate(views):
        if count < len(view):
            return [*ahead, *([view[:count]] if count else [])], [view[count:], *views[place + 1 :]]
        ahead.append(view)
        count -= len(view)
    return ahead, []
