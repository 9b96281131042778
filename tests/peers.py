"""Peers that no client would be: raw sockets that say what a test tells them to say."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from aiops.common import urls
from aiops.model.layout import Array, Layout
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.encoding import encode
from aiops.wire.handshake import proof
from aiops.wire.messages import Message, Welcome
from aiops.wire.sinks import Sink
from aiops.wire.token_keys import token_id
from tests.driven import Driven
from tests.support import PATIENCE
from tests.zygote import ForkedPopen


def frame(message: Message, *payloads: bytes) -> bytes:
    """Return the bytes of a message, whether it is legal or not."""
    header = encode(message)
    return enclose(header, *payloads)


def enclose(header: bytes, *payloads: bytes) -> bytes:
    """Return the bytes of any header and payloads."""
    chunks = [b"\xce", len(header).to_bytes(4, "big"), header]
    for payload in payloads:
        chunks += [b"\xc6", len(payload).to_bytes(4, "big"), payload]
    return b"".join(chunks)


def header_of(**fields: Any) -> bytes:
    """Return the MessagePack map of these fields."""
    return bytes(msgpack.packb(fields))


class Taken(Sink):
    """A sink that keeps what came."""

    def __init__(self, message: Message) -> None:
        self.parts: list[bytearray] = [bytearray(part.nbytes) for part in message.parts]  # type: ignore[attr-defined]

    def view(self, part: int, offset: int) -> memoryview:
        return memoryview(self.parts[part])[offset:]

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        pass

    def abandoned(self) -> None:
        pass


class Peer:
    """A connection that a test has in its own hands.

    Parameters
    ----------
    url
        The server's.
    role, client, token, pongs
        As its hello says; with ``greet=False`` it says none.
    """

    def __init__(
        self,
        url: str,
        role: str = "worker",
        *,
        client: str | None = None,
        token: str | None = None,
        pongs: bool = False,
        greet: bool = True,
        receive_buffer: int | None = None,
    ) -> None:
        self.sock = self.reach(url, receive_buffer)
        self.wire = Driven("client", self._place)
        self.wire.state = "open"  # this side may say anything; what it hears is not policed
        self.payloads: list[bytearray] = []
        self._received: list[tuple[Message, Sink | None]] = []
        self.client = client or secrets.token_hex(16)
        self.nonce = secrets.token_bytes(16)
        self.welcome: Welcome | None = None
        if greet:
            self.greet(role, token, pongs)

    def reach(self, url: str, receive_buffer: int | None) -> socket.socket:
        """Return a socket that is connected to the server."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(urls.parse(url))
        return sock

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def greet(self, role: str = "worker", token: str | None = None, pongs: bool = False) -> None:
        """Say hello, prove the token if asked, and take in the welcome."""
        self.wire.state = "start"
        self._say(self.hello(role, pongs))
        answer = self.receive()
        if isinstance(answer, messages.Challenge):
            assert token is not None
            given = proof(token, "client", self.nonce, answer.nonce, self.client)
            self._say(messages.Prove(answer.id, given, token_id(token)))
            answer = self.receive()
        assert isinstance(answer, Welcome), answer
        self.welcome = answer

    def hello(self, role: str = "worker", pongs: bool = False) -> messages.Hello:
        """Return this peer's hello."""
        return messages.Hello(
            id=0,
            protocol=messages.PROTOCOL,
            client=self.client,
            epoch=1,
            name="peer",
            role=role,
            pongs=pongs,
            nonce=self.nonce,
            agent="test",
        )

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.sock.sendall(data)

    def ask(self, message: Message, *payloads: bytes) -> Message:
        """Send a message, and return the next that comes."""
        if isinstance(message, messages.Hello):
            self.wire.state = "greeted"
        elif isinstance(message, messages.Prove):
            self.wire.state = "proved"
        self.send(frame(message, *payloads))
        return self.receive()

    def receive(self) -> Message:
        """Return the next message; its payloads are in `payloads`."""
        while not self._received:
            count = self.sock.recv_into(self.wire.next_buffer())
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self._received.extend(self.wire.take(count))
        message, sink = self._received.pop(0)
        self.payloads = sink.parts if isinstance(sink, Taken) else []
        return message

    def dropped(self) -> bool:
        """Wait until the server ends the connection (a test fails when it does not)."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def _say(self, message: Message) -> None:
        for buffer in self.wire.send(message):
            self.sock.sendall(buffer)

    @staticmethod
    def _place(message: Message) -> Sink:
        return Taken(message)


def define(arrays: Mapping[str, Array], id: int = 1) -> bytes:
    """Return the frame that offers a model."""
    layout = Layout.of(arrays)
    data = b"".join(np.ascontiguousarray(arrays[t.name]).tobytes() for t in layout.tensors)
    rows = tuple((t.name, t.dtype.name, t.shape) for t in layout.tensors)
    return frame(messages.Define(id, rows, (Part(0, len(data), "raw", len(data), 0),)), data)


def push(
    nbytes: int, seq: int, version: int = 0, fetch: bool = False, id: int | None = None
) -> messages.Push:
    """Return a push of a whole model of so many bytes."""
    part = Part(0, nbytes, "raw", nbytes, version)
    return messages.Push(id if id is not None else seq, seq, fetch, -1, (part,))


class Process:
    """``python -m aiops.server`` with its stderr in a file, so that it never waits for a reader."""

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self.popen = ForkedPopen(
            [sys.executable, "-m", "aiops.server", *flags],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **(env or {})},
            cwd=Path(__file__).parent.parent,
        )
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().decode().strip()

    def stderr(self) -> str:
        """Return what it has written to stderr so far."""
        fd = self._stderr.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()

    def rss(self) -> int:
        """Return its resident memory in bytes."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def peak(self) -> int:
        """Return the most resident memory it has had since `forget_peak`, in bytes."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        """Measure the peak from here on."""
        Path(f"/proc/{self.popen.pid}/clear_refs").write_text("5")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Send a signal, and return the exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(timeout)

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()
        self._stderr.close()


@contextlib.contextmanager
def serving(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Run a server as a process, on NumPy kernels unless the flags say otherwise."""
    kernels = () if "--kernels" in flags else ("--kernels", "numpy")
    process = Process("--port", "0", *kernels, *flags, env=env)
    try:
        yield process
    finally:
        process.close()


_PAUSE = 0.003  # seconds


def eventually(check: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Ask until it is so, with pauses that leave the processor to those who make it so."""
    until, pause = time.monotonic() + patience, threading.Event()
    while not check():
        assert time.monotonic() < until, f"not within {patience:g} s: {what}"
        pause.wait(_PAUSE)
