"""A network in memory: hosts, lines of a stated rate, delays, and connections that can be cut.

It stands under asyncio's transports, so the very programs that use sockets run over it. Rates are
shared max-min fairly between whatever is on its way (`aiops.sim.virtual.sharing`), and bytes arrive
one write at a time, when the last of it has crossed: a thousand bytes or a million cost the same.
Congestion control and loss of packets are not modelled; TCP's overhead can be taken off a rate.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, TypeVar, get_args

from aiops.errors import UsageError, nearest
from aiops.sim.virtual.host import Host, Mark, Way
from aiops.sim.virtual.listener import Listener
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.sharing import Line
from aiops.sim.virtual.stream import Stream
from aiops.sim.virtual.traffic import Traffic
from aiops.sim.virtual.transport import connect_ends

P = TypeVar("P", bound=asyncio.BaseProtocol)

_FIRST_PORT = 49152

HERE: ContextVar[str] = ContextVar("HERE", default="localhost")
"""The name of the host on which the current task runs."""


class Network:
    """All the hosts, and every connection between them.

    Parameters
    ----------
    loop
        The virtual event loop; its connections are this network's from now on.
    seed
        Of jitter, and of the pieces.
    pieces
        At most so many bytes are handed over at once, a random number of them each time (as TCP
        may); None: whatever has come. What a program does should not depend on it.

    Attributes
    ----------
    pieces
        As given.
    messages
        Writes that have arrived so far.
    traffic
        What crosses the lines.
    written
        Streams that have something to put on their path before time goes on.
    """

    def __init__(self, loop: VirtualLoop, *, seed: int = 0, pieces: int | None = None) -> None:
        self.loop = loop
        self.hosts: dict[str, Host] = {}
        self.messages = 0
        self.traffic = Traffic()
        self.written: list[Stream] = []
        self._random = random.Random(seed)
        self.pieces = pieces
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._ports = _FIRST_PORT
        loop.network = self

    # ------------------------------------------------------------ hosts

    def add(self, host: Host) -> Host:
        """Add a host."""
        if host.name in self.hosts:
            raise UsageError(f"there is a host {host.name!r} already: names are unique")
        self.hosts[host.name] = host
        return host

    def host(self, name: str) -> Host:
        """Return a host; one that nobody has described has no limits and no delay."""
        return self.hosts.get(name) or self.add(Host(name))

    @contextmanager
    def at(self, name: str) -> Iterator[Host]:
        """Be on a host: connections made, and tasks begun, in the ``with`` block are there."""
        token = HERE.set(name)
        try:
            yield self.host(name)
        finally:
            HERE.reset(token)

    # ------------------------------------------------------------ connecting

    def listen(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int = 0,
        *,
        start_serving: bool = True,
        ssl: Any = None,
        **_options: Any,
    ) -> Listener:
        """Listen on the current host; port 0 takes a free one."""
        _no_tls(ssl)
        here = self.host(HERE.get())
        if not port:
            self._ports += 1
            port = self._ports
        if (here.name, port) in self._listeners:
            raise OSError(98, f"Address already in use: port {port} of {here.name!r}")
        listener = Listener(self, here, factory, host or here.name, port)
        self._listeners[here.name, port] = listener
        listener.serving = start_serving
        return listener

    def forget(self, listener: Listener) -> None:
        """Listen there no more."""
        self._listeners.pop((listener.host.name, listener.port), None)

    async def connect(
        self,
        factory: Callable[[], P],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: Any = None,
        **_options: Any,
    ) -> tuple[asyncio.Transport, P]:
        """Connect from the current host: it takes a round trip.

        ``host`` is a host's name; the name of this machine (``127.0.0.1`` or ``localhost``) finds
        whoever listens on that port, wherever it is.
        """
        _no_tls(ssl)
        if host is None or port is None:
            raise UsageError("in virtual time a connection is made to a host and a port")
        here = self.host(HERE.get())
        _alive(here)
        listener = self._find(here, host, port)
        there = listener.host if listener is not None else self.hosts.get(host, here)
        away = here.latency + there.latency
        await asyncio.sleep(2 * away)
        while here.silent or there.silent:
            await (here if here.silent else there).heard.wait()
        _alive(here)
        listener = self._find(here, host, port)  # as it is by now
        if listener is None or not listener.serving or not there.alive:
            raise ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})")
        self._ports += 1
        return connect_ends(self, here, listener, factory, self._ports, away)

    def _find(self, here: Host, name: str, port: int) -> Listener | None:
        found = self._listeners.get((name, port))
        if found is None and name in ("127.0.0.1", "localhost", "::1"):
            found = self._listeners.get((here.name, port))
            those = [one for (_host, number), one in self._listeners.items() if number == port]
            if found is None and len(those) == 1:
                found = those[0]
        return found

    # ------------------------------------------------------------ faults (of hosts there are)

    def cut(self, name: str) -> int:
        """Reset every connection of a host, as a lost network does; return how many there were.

        Both ends see ``connection_lost(ConnectionResetError)``, and what was on its way is gone.
        """
        ends = list(self._known(name).ends)
        for end in ends:
            end.reset()
        return len(ends)

    def kill(self, name: str) -> int:
        """Have the program on a host cease to be: its connections are reset, it makes no others.

        Its tasks are their owner's to cancel; whatever they still say is heard by nobody.
        """
        self._known(name).alive = False
        return self.cut(name)

    def revive(self, name: str) -> None:
        """Have a killed host run again."""
        self._known(name).alive = True

    def silence(self, name: str) -> None:
        """Have nothing come from a host, and nothing reach it, as when a cable is out.

        Nobody is told. What is sent meanwhile arrives when it is restored.
        """
        host = self._known(name)
        host.silent = True
        host.heard.clear()

    def restore(self, name: str) -> None:
        """Put the cable in again."""
        host = self._known(name)
        host.silent = False
        host.heard.set()
        for end in list(host.ends):
            self.loop.call_soon(end.heard_again)

    def after(self, name: str, way: Way, nbytes: int, action: Callable[[], object]) -> None:
        """Have something happen between two bytes: a fault in the midst of a message.

        Parameters
        ----------
        name
            A host's.
        way
            ``"up"``: of what comes from it; ``"down"``: of what goes to it.
        nbytes
            So many more bytes arrive, on all its connections, before it happens. The byte after
            them brings it on, and comes after it, if it comes at all.
        action
            What is called then, once; a fault, such as ``lambda: network.cut("alice")``.

        Raises
        ------
        UsageError
            When there is no such host, way or number of bytes.
        """
        if way not in get_args(Way):
            raise UsageError(f"bytes go 'up' from a host or 'down' to it, not {way!r}")
        if nbytes < 0:
            raise UsageError(f"{nbytes} bytes have passed already: give 0 or more")
        self._known(name).marks.append(Mark(way, nbytes, action))

    def _known(self, name: str) -> Host:
        """Return a host that there is."""
        if name not in self.hosts:
            raise UsageError(f"no host is called {name!r}; {nearest(name, self.hosts)}")
        return self.hosts[name]

    # ------------------------------------------------------------ what streams ask for

    def path(self, source: Host, sink: Host) -> tuple[Line, ...]:
        """Return the lines that limit what goes from one host to another."""
        if source is sink:
            return ()
        lines = dict.fromkeys((*source.up, *sink.down))
        return tuple([line for line in lines if line.rate != inf])

    def delay(self, source: Host, sink: Host) -> float:
        """Return for how long something now sent travels."""
        jitter = source.jitter + sink.jitter
        delay = source.latency + sink.latency
        return delay + jitter * self._random.random() if jitter else delay

    def piece(self, nbytes: int) -> int:
        """Return how many of so many bytes are handed over at once."""
        pieces = self.pieces
        return nbytes if pieces is None else min(nbytes, self._random.randint(1, pieces))

    def settle(self) -> float:
        """Hear that time is about to go on; return when the next of the streams has crossed."""
        while self.written:  # who now begins may have others write
            written, self.written = self.written, []
            for stream in written:
                stream.begin()
        return self.traffic.settle(self.loop.now)

    def advance(self) -> None:
        """Have those go on whose bytes have crossed by now."""
        now, crossed = self.loop.now, self.traffic.crossed
        while (flow := crossed(now)) is not None:
            assert isinstance(flow, Stream)
            flow.crossed()


def _alive(host: Host) -> None:
    if not host.alive:
        raise OSError(100, f"Network is down: host {host.name!r} was killed")


def _no_tls(ssl: Any) -> None:
    if ssl:
        raise UsageError("connections in virtual time carry no TLS: leave ssl out")
