"""A network in memory: hosts, links of a stated rate, delays, and connections that can be cut.

It implements asyncio's transports, so programs that use sockets run over it unchanged. Links are
shared max-min fairly (`aiops.sim.virtual.fair_sharing`), and the bytes of a write arrive together,
when the last of them has crossed: a thousand bytes or a million cost the same. Congestion control
and loss of packets are not modelled; TCP's overhead can be taken off a rate.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, TypeVar, get_args

from aiops.errors import UsageError, nearest
from aiops.sim.virtual.host import ByteTrigger, Host, Way
from aiops.sim.virtual.listener import VirtualListener
from aiops.sim.virtual.loop import VirtualLoop
from aiops.sim.virtual.stream import Medium
from aiops.sim.virtual.transport import connect_ends

P = TypeVar("P", bound=asyncio.BaseProtocol)

FAULTS = ("cut", "kill", "revive", "silence", "restore")
"""The faults of a script (`Network.play`); each is a method of `Network`."""

_FIRST_PORT = 49152

HERE: ContextVar[str] = ContextVar("HERE", default="localhost")
"""The name of the host on which the current task runs."""


class Network:
    """All the hosts, and every connection between them.

    Parameters
    ----------
    loop
        The virtual event loop; its connections cross this network from now on.
    seed
        Of jitter and pieces.
    pieces
        The most bytes that a protocol is given at once, a random number each time (as with TCP);
        None: all that have come. A program's result should not depend on it.

    Attributes
    ----------
    loop
        As given.
    hosts
        By name.
    medium
        The state that all connections share.
    """

    def __init__(self, loop: VirtualLoop, *, seed: int = 0, pieces: int | None = None) -> None:
        self.loop = loop
        self.hosts: dict[str, Host] = {}
        self.medium = Medium(loop, Random(seed), pieces)
        self._listeners: dict[tuple[str, int], VirtualListener] = {}
        self._ports = _FIRST_PORT
        loop.network, loop.flow_scheduler = self, self.medium.scheduler

    @property
    def messages(self) -> int:
        """Writes that have arrived so far."""
        return self.medium.messages

    # ------------------------------------------------------------ hosts

    def add(self, host: Host) -> Host:
        """Add a host."""
        if host.name in self.hosts:
            raise UsageError(f"there is a host {host.name!r} already: names are unique")
        self.hosts[host.name] = host
        return host

    def host(self, name: str) -> Host:
        """Return a host; one that was not added has no limits and no delay."""
        return self.hosts.get(name) or self.add(Host(name))

    @contextmanager
    def at(self, name: str) -> Iterator[Host]:
        """Place the connections made, and the tasks begun, in the ``with`` block on a host."""
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
    ) -> VirtualListener:
        """Listen on the current host; port 0 takes a free one."""
        _no_tls(ssl)
        here = self.host(HERE.get())
        if not port:
            self._ports += 1
            port = self._ports
        if (here.name, port) in self._listeners:
            raise OSError(98, f"Address already in use: port {port} of {here.name!r}")
        listener = VirtualListener(self.loop, here, port, factory, host or here.name, self._forget)
        self._listeners[here.name, port] = listener
        listener.serving = start_serving
        return listener

    def _forget(self, listener: VirtualListener) -> None:
        key = listener.host.name, listener.port
        if self._listeners.get(key) is listener:  # else it was closed before, and another listens
            del self._listeners[key]

    async def connect(
        self,
        factory: Callable[[], P],
        host: str | None = None,
        port: int | None = None,
        tls: Any = None,
        *,
        ssl: Any = None,
        **_options: Any,
    ) -> tuple[asyncio.Transport, P]:
        """Connect from the current host, which takes a round trip.

        ``host`` is a host's name. ``127.0.0.1``, ``::1`` and ``localhost`` find the one host that
        listens on the port, if the current host does not.
        """
        _no_tls(ssl or tls)
        if host is None or port is None:
            raise UsageError("in virtual time a connection is made to a host and a port")
        here = self.host(HERE.get())
        _alive(here)
        listener = self._find(here, host, port)
        there = listener.host if listener is not None else self.hosts.get(host, here)
        latency = here.latency + there.latency
        await asyncio.sleep(2 * latency)
        while here.silent or there.silent:
            await (here if here.silent else there).restored.wait()
        _alive(here)
        listener = self._find(here, host, port)  # as it is by now
        if listener is None or not listener.serving or not there.alive:
            raise ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})")
        self._ports += 1
        return connect_ends(self.medium, here, listener, factory, self._ports, latency)

    def _find(self, here: Host, name: str, port: int) -> VirtualListener | None:
        found = self._listeners.get((name, port))
        if found is None and name in ("127.0.0.1", "localhost", "::1"):
            found = self._listeners.get((here.name, port))
            those = [one for (_host, number), one in self._listeners.items() if number == port]
            if found is None and len(those) == 1:
                found = those[0]
        return found

    # ------------------------------------------------------------ faults

    def cut(self, name: str) -> int:
        """Reset every connection of a host, as a lost network does; return how many there were.

        Both ends see ``connection_lost(ConnectionResetError)``, and what was on its way is gone.
        """
        ends = list(self._host(name).ends)
        for end in ends:
            end.reset()
        return len(ends)

    def kill(self, name: str) -> int:
        """End the program on a host: its connections are reset, and it can make no others.

        Its tasks go on until their owner cancels them; nothing that they send arrives.
        """
        self._host(name).alive = False
        return self.cut(name)

    def close_ports(self, name: str) -> None:
        """Close the ports that a host listens on."""
        for listener in [*self._listeners.values()]:
            if listener.host.name == name:
                listener.close()

    def revive(self, name: str) -> None:
        """Let a killed host connect again."""
        self._host(name).alive = True

    def silence(self, name: str) -> None:
        """Let nothing come from a host, and nothing reach it, as when a cable is out.

        No peer is told. Bytes that are sent meanwhile arrive when it is restored.
        """
        host = self._host(name)
        if not host.silent:
            host.silent, host.silent_since = True, self.loop.time()
        host.restored.clear()

    def restore(self, name: str) -> None:
        """End the silence of a host."""
        host = self._host(name)
        host.silent = False
        host.restored.set()
        held = list(host.held)
        host.held.clear()
        for stream in held:
            self.loop.call_soon(stream.restore)

    def after(self, name: str, way: Way, nbytes: int, action: Callable[[], object]) -> None:
        """Call an action between two bytes: a fault in the midst of a message.

        Parameters
        ----------
        name
            A host's.
        way
            ``"up"``: of the bytes that come from it; ``"down"``: of those that go to it.
        nbytes
            The number of bytes, on all its connections, that arrive before the action. The byte
            after them starts it, and arrives after it, unless the action prevents that.
        action
            Called once; a fault, such as ``lambda: network.cut("alice")``.

        Raises
        ------
        UsageError
            When there is no such host, way or number of bytes.
        """
        if way not in get_args(Way):
            raise UsageError(f"bytes go 'up' from a host or 'down' to it, not {way!r}")
        if nbytes < 0:
            raise UsageError(f"{nbytes} bytes have passed already: give 0 or more")
        self._host(name).triggers.append(ByteTrigger(way, nbytes, action))

    def play(self, script: str) -> None:
        """Schedule the faults of a script.

        Parameters
        ----------
        script
            One fault a line: seconds from now, the fault (`FAULTS`), and the host's name; ``#``
            begins a comment, and empty lines are skipped::

                0.5  cut      alice      # her connections are reset
                2    silence  server     # nothing comes from it, and nothing reaches it
                4.5  restore  server

        Raises
        ------
        UsageError
            When a line cannot be read; no fault is scheduled then.
        """
        for seconds, what, name in list(_faults(script.splitlines())):
            call: Callable[[str], object] = getattr(self, what)
            self.loop.call_later(seconds, call, name)

    def _host(self, name: str) -> Host:
        """Return a host that was added or used."""
        if name not in self.hosts:
            raise UsageError(f"no host is called {name!r}; {nearest(name, self.hosts)}")
        return self.hosts[name]


def _alive(host: Host) -> None:
    if not host.alive:
        raise OSError(100, f"Network is down: host {host.name!r} was killed")


def _no_tls(ssl: Any) -> None:
    if ssl:
        raise UsageError("connections in virtual time carry no TLS: leave ssl out")


def _faults(lines: Iterable[str]) -> Iterable[tuple[float, str, str]]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the script, {line.strip()!r}"
        try:
            seconds, what, name = float(words[0]), *words[1:]
        except ValueError:
            raise UsageError(f"{where}: write seconds, a fault and a host's name") from None
        if not 0 <= seconds < math.inf:
            raise UsageError(f"{where}: the time is 0 or more seconds from now")
        if what not in FAULTS:
            raise UsageError(f"{where}: no fault is called {what!r}; {nearest(what, FAULTS)}")
        yield seconds, what, name
