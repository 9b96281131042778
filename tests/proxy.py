"""A TCP proxy between a client and a server, which can cut, stall or slow what passes through."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

from aiops.common import urls

Direction = Literal["up", "down"]
"""Up: from the client to the server."""

_CHUNK = 64 * 1024
_BUFFER = 128 * 1024


@dataclass
class Fault:
    """What is to happen once ``after`` more bytes have passed in a direction."""

    kind: Literal["cut", "stall"]
    after: int
    happened: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until it has happened."""
        assert self.happened.wait(timeout), f"no {self.kind}: {self.after} bytes have not passed"

    def release(self) -> None:
        """Let a stalled direction go on."""
        self.over.set()


class Proxy:
    """Forwards every connection to a server; use it as ``with Proxy(server_url) as proxy``.

    Faults are armed one per direction, and strike whichever connection carries the byte that
    brings them on. A cut ends both halves of that connection; the next connection is served again.
    """

    def __init__(self, server: str) -> None:
        self._server = urls.parse(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = urls.write(*self._listener.getsockname()[:2])
        self.connections = 0
        self.carried: dict[Direction, int] = {"up": 0, "down": 0}  # bytes, of all connections
        self._lock = threading.Lock()
        self._armed: dict[Direction, Fault] = {}
        self._rates: dict[Direction, float] = {}
        self._pairs: list[list[socket.socket]] = []  # the open sockets of each connection
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._refusing = False

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for fault in self._armed.values():
            fault.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut_all()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    # ------------------------------------------------------------ what may happen

    def cut(self, direction: Direction, after: int) -> Fault:
        """End the connection that carries the byte after ``after`` more bytes."""
        return self._arm(direction, Fault("cut", after))

    def stall(self, direction: Direction, after: int) -> Fault:
        """Pass ``after`` more bytes, then nothing until `Fault.release`."""
        return self._arm(direction, Fault("stall", after))

    def throttle(self, direction: Direction, bytes_per_second: float) -> None:
        """Let no more pass in that direction."""
        self._rates[direction] = bytes_per_second

    def cut_all(self) -> None:
        """End all connections there are."""
        with self._lock:
            for pair in self._pairs:
                for sock in pair:
                    _shut(sock)

    def refuse(self) -> None:
        """End all connections, and every new one at once."""
        self._refusing = True
        self.cut_all()

    def accept(self) -> None:
        """Serve new connections again."""
        self._refusing = False

    def _arm(self, direction: Direction, fault: Fault) -> Fault:
        with self._lock:
            self._armed[direction] = fault
        return fault

    # ------------------------------------------------------------ threads

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            if self._ended.is_set():
                client.close()
                return
            if self._refusing:
                client.close()
                continue
            self.connections += 1
            server = socket.socket()
            for sock in (client, server):  # what is stalled must not disappear into buffers
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                server.close()
                continue
            pair = [client, server]
            with self._lock:
                self._pairs.append(pair)
            self._start(self._pump, client, server, "up", pair)
            self._start(self._pump, server, client, "down", pair)

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
        pair: list[socket.socket],
    ) -> None:
        """Move bytes one way until either side ends, then end both."""
        with contextlib.suppress(OSError):  # either side is gone
            while data := source.recv(self._chunk(direction)):
                self._pace(direction, len(data))
                while data:
                    count, fault = self._allowed(direction, len(data))
                    sink.sendall(data[:count])
                    with self._lock:
                        self.carried[direction] += count
                    data = data[count:]
                    if fault is not None:
                        fault.happened.set()
                        if fault.kind == "cut":
                            data = b""
                            _shut(sink)
                        else:
                            _sit(source, fault)
        _shut(sink)
        _shut(source)
        with self._lock:  # the socket that this thread read from is its own to close
            pair.remove(source)
            if not pair:
                self._pairs.remove(pair)
            source.close()

    def _chunk(self, direction: Direction) -> int:
        rate = self._rates.get(direction)
        return _CHUNK if rate is None else max(1, min(_CHUNK, int(rate / 100)))

    def _pace(self, direction: Direction, nbytes: int) -> None:
        rate = self._rates.get(direction)
        if rate is not None:
            self._ended.wait(nbytes / rate)

    def _allowed(self, direction: Direction, nbytes: int) -> tuple[int, Fault | None]:
        """Return how many bytes may pass, and the fault that strikes after them."""
        with self._lock:
            fault = self._armed.get(direction)
            if fault is None:
                return nbytes, None
            count = min(nbytes, fault.after)
            fault.after -= count
            if fault.after:
                return count, None
            del self._armed[direction]
            return count, fault


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _sit(source: socket.socket, fault: Fault) -> None:
    """Pass nothing until the fault is over, or the sender is gone."""
    poll = select.poll()
    poll.register(source, select.POLLRDHUP)
    while not fault.over.is_set() and not poll.poll(10):
        pass
