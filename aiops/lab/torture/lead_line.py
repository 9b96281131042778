"""The line between a lead and its follower: a TCP proxy that can cut the lead off, and no client.

Clients reach the follower through it, too, since the lead gives them the address that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from aiops.common.closing import Closing

_HEAD = 24  # bytes of a connection, which have the kind of its first message
_CHUNK = 64 << 10
_LAST = 10.0  # seconds that its thread has to end


class LeadLine(Closing):
    """The line, on a thread of its own until it is closed.

    Parameters
    ----------
    port
        The follower's, on 127.0.0.1.

    Attributes
    ----------
    port
        Where the lead and clients connect.
    """

    def __init__(self, port: int) -> None:
        self._follower = port
        started: Future[int] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        self.port = started.result()

    def cut(self, *, silent: bool) -> None:
        """Cut the lead off, until `heal`.

        ``silent``: nothing arrives, and no connection ends, as when a cable is pulled; else its
        connections are reset, and those that it opens.
        """
        self._call(lambda: self._cut(silent))

    def heal(self) -> None:
        """Have everything arrive again, what was sent meanwhile too."""
        self._call(self._heal)

    def close(self) -> None:
        """End the line, and all connections over it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_LAST)

    def _call(self, what: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def call() -> None:
            what()
            done.set_result(None)

        self._loop.call_soon_threadsafe(call)
        done.result(_LAST)

    # ------------------------------------------------------------ on its thread

    async def _serve(self, started: Future[int]) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._whole = asyncio.Event()  # unset: the lead is cut off
        self._whole.set()
        self._resets = False  # what the lead opens while it is cut off
        self._of_lead = set[asyncio.StreamWriter]()
        self._all = set[asyncio.StreamWriter]()
        self._carrying = set[asyncio.Task[None]]()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        started.set_result(server.sockets[0].getsockname()[1])
        await self._ended.wait()
        server.close()
        self._heal()
        for writer in self._all:
            writer.transport.abort()
        await asyncio.gather(*self._carrying)

    def _cut(self, silent: bool) -> None:
        self._whole.clear()
        self._resets = not silent
        if not silent:
            for writer in self._of_lead:
                writer.transport.abort()

    def _heal(self) -> None:
        self._resets = False
        self._whole.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one of its sides ends."""
        pair = [writer]
        self._all.add(writer)
        try:
            head = await reader.readexactly(_HEAD)
            of_lead = b"lead_hello" in head
            if of_lead:
                self._of_lead.add(writer)
            if not of_lead or not self._resets:
                back, to = await asyncio.open_connection("127.0.0.1", self._follower)
                pair.append(to)
                self._all.add(to)
                if of_lead:
                    self._of_lead.add(to)
                ways = self._pass(reader, to, head, of_lead), self._pass(back, writer, b"", of_lead)
                await asyncio.gather(*ways)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other side learns it as these are closed
        finally:
            for each in pair:
                each.transport.abort()
                self._all.discard(each)
                self._of_lead.discard(each)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, data: bytes, of_lead: bool
    ) -> None:
        """Pass one direction's bytes on, ``data`` first, until it ends."""
        try:
            while data or (data := await source.read(_CHUNK)):
                if of_lead:
                    await self._whole.wait()
                sink.write(data)
                await sink.drain()
                data = b""
        except OSError:
            pass  # a reset
        finally:
            sink.close()  # when all is sent
