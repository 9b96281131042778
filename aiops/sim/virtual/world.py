"""One simulated world: virtual time, a network in memory, and entropy from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from math import inf
from socket import socket
from typing import Any, TypeVar, cast

from aiops.errors import UsageError
from aiops.kernels.parallel import serial_map
from aiops.net.busy_poll import Spin
from aiops.net.environment import CURRENT_ENVIRONMENT, Environment
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop, run_on
from aiops.sim.virtual.network import HERE, Network
from aiops.sim.virtual.sockets import ListeningSocket, MemorySocket

T = TypeVar("T")


class VirtualKernelRunner:
    """Runs a server's updates at once, and reports each when its virtual time has passed.

    Parameters
    ----------
    loop
        The event loop.
    failed
        Called with the exception of an update.
    seconds
        From the bytes that an update touches to the seconds that it takes. None: no time, so that
        it runs on the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
        seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.at_once = inf if seconds is None else -1.0
        self._loop, self._failed, self._seconds = loop, failed, seconds
        self._free = 0.0  # the time at which all that was submitted is done

    def submit(self, run: Callable[[], T], nbytes: int, done: Callable[[T], None]) -> None:
        """Run an update; ``done`` is called with its result when its virtual time has passed."""
        try:
            result = run()
        except BaseException as error:
            self._loop.call_soon(self._failed, error)
            return
        seconds = self._seconds(nbytes) if self._seconds is not None and nbytes else 0.0
        self._free = max(self._free, self._loop.time()) + seconds
        self._loop.call_at(self._free, done, result)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class World:
    """A virtual event loop, a network on it, and seeded entropy: simulated programs run in it.

    Parameters
    ----------
    seed
        Of everything that is random: ids, nonces, pauses before connecting again, jitter.
    limit
        Virtual seconds that a run may take.
    pieces
        The most bytes that a protocol is given at once (`Network`); None: all there are.
    apply_seconds
        From the bytes that an update touches to the seconds that a server takes for it; None: no
        time.

    Attributes
    ----------
    loop, network, disk
        Those of everything in it. The disk's folders have nothing to do with those of the machine.
    environment
        What servers and clients in it are given.

    Raises
    ------
    UsageError
        When the limit or the pieces are not positive.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        limit: float = inf,
        pieces: int | None = None,
        apply_seconds: Callable[[int], float] | None = None,
    ) -> None:
        if not limit > 0:
            raise UsageError(f"a limit of {limit:g} virtual seconds cannot be: give more than 0")
        if pieces is not None and pieces < 1:
            raise UsageError(f"pieces of at most {pieces} bytes cannot be: give 1 or more")
        self.loop = VirtualLoop(limit)
        self.network = Network(self.loop, seed=seed, pieces=pieces)
        self.disk = VirtualDisk(self.loop)
        entropy = random.Random(f"aiops {seed}")
        self.environment = Environment(
            now=self.loop.time,
            wall_clock=self.loop.time,
            trace_clock=None,  # threads and sockets of a collector's know no virtual time
            token_bytes=entropy.randbytes,
            randbelow=entropy.randrange,
            kernel_runner=lambda loop, failed: VirtualKernelRunner(loop, failed, apply_seconds),
            parallel_map=serial_map,
            parallel_map_of=lambda threads: serial_map,
            spin=lambda: Spin(self.loop.time, None),
            identity=HERE.get,
            listening_socket=lambda host: cast(socket, ListeningSocket(self.network, host)),
            unconnected_socket=lambda host: cast(socket, MemorySocket(self.network)),
            free_port=lambda host, port: True,
            dial=self.network.connect,
            known_addresses=lambda host: (host,),
            listen_unix=None,
            connect_unix=lambda host, port: None,
            disk=self.disk,
            advertised_address="127.0.0.1",  # any host that listens on the port
        )

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, in virtual time; the world ends with it."""
        context = copy_context()
        context.run(CURRENT_ENVIRONMENT.set, self.environment)
        return context.run(run_on, self.loop, main)
