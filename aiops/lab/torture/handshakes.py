"""Strangers at a server that asks for TLS and client certificates: none may get a parameter's byte.

Each stranger connects in one of the `KINDS` of wrong ways, goes as far as the server lets it, and
reads until the server has closed. Meanwhile an honest worker trains. Some have right certificates,
and what follows on the handshake is wrong. The server logs no exception.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiops.client.sync.worker import Worker
from aiops.common import urls
from aiops.common.tls_files import Tls
from aiops.errors import AiopsError
from aiops.lab.processes import ChildProcess, clean_environment, command
from aiops.net.certificates import CLIENT, SERVER, issue, make_ca
from aiops.wire.connection import Connection
from aiops.wire.messages import PROTOCOL, Hello

_PATIENCE = 30.0
_ROOM = 1 << 16
_PATTERN = b"\x5a\xa5\xc3\x3c"
_MODEL = 1 << 18  # elements
_STRANGERS = 4  # at a time
_EXCEPTION = b"Traceback (most recent call last)"
_RECORD, _VERSION = b"\x17", b"\x03\x03"  # how a record of TLS 1.3 begins

HELD_BACK = ("plain", "tls12", "anonymous", "foreign", "self-signed", "expired", "server-name")
CUT = ("cut-hello", "after-hello", "garbage", "damaged")
AFTER = ("changed-record", "cut-record", "plain-record", "long-record", "empty-records")
KINDS = (*HELD_BACK, *CUT, *AFTER)
"""The wire without TLS; TLS 1.2 at most; no certificate; one of another CA; one of no CA; one that
has expired; a wrong name of the server, which this client finds; a hello cut anywhere; an end after
the server's first flight; bytes at random; and a hello with a bit flipped. After a right handshake:
a greeting of which a bit is flipped; one that is cut anywhere; one that is not encrypted; bytes
at random that say they are a record, longer than one may be or not; and a hundred empty ones."""


@dataclass
class HandshakeFindings:
    """The bytes that the strangers got, and how the worker fared.

    Attributes
    ----------
    counts
        The strangers of each kind.
    application
        Decrypted bytes that any of them received from the server: of these there must be none.
    leaked
        Strangers whose raw bytes have the model's pattern in them.
    longest
        The most raw bytes that one received: the server's part of a handshake.
    faults
        What was not as it should be, in words.
    steps, slowest
        The honest worker's steps meanwhile, and the seconds of the longest.
    seconds
        The time that all took.
    """

    counts: Counter[str] = field(default_factory=Counter)
    application: int = 0
    leaked: int = 0
    longest: int = 0
    faults: list[str] = field(default_factory=list)
    steps: int = 0
    slowest: float = 0.0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """True if no stranger got anything, and the worker went on."""
        return not (self.application or self.leaked or self.faults) and self.steps > 0

    def report(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {
            "handshakes": self.counts.total(),
            "kinds": dict(sorted(self.counts.items())),
            "application_bytes": self.application,
            "leaked": self.leaked,
            "longest_answer": self.longest,
            "faults": self.faults,
            "worker_steps": self.steps,
            "slowest_step": self.slowest,
            "seconds": self.seconds,
        }


def run(count: int, seed: int, folder: Path) -> HandshakeFindings:
    """Run a server and a worker, and have ``count`` strangers connect; return what they got.

    Raises
    ------
    AiopsError
        When the server does not start.
    """
    _make_certificates(folder)
    given = {name: str(folder / "ours" / name) for name in ("server.pem", "server.key", "ca.pem")}
    flags = [f"--tls-cert={given['server.pem']}", f"--tls-key={given['server.key']}"]
    words = command("aiops.server", "--port=0", "--policy=asgd", "--no-shm", *flags)
    words += [f"--tls-ca={given['ca.pem']}", "--kernels=numpy", "--log-level=error"]
    began, found = time.perf_counter(), HandshakeFindings()
    log = (folder / "log").open("w+b")
    child = ChildProcess("the server", words, environment=clean_environment(), lines=True, log=log)
    with log, child as server:
        url = server.first_line(_PATIENCE)
        over = threading.Event()
        honest = threading.Thread(target=_train, args=(url, folder / "ours", over, found))
        honest.start()
        try:
            strangers = Strangers(urls.parse(url), folder)
            with ThreadPoolExecutor(_STRANGERS) as pool:
                seeds = range(seed, seed + count)
                for kind, raw, application, fault in pool.map(strangers.one, seeds):
                    found.counts[kind] += 1
                    found.application += application
                    found.leaked += _PATTERN in raw
                    found.longest = max(found.longest, len(raw))
                    if fault:
                        found.faults.append(f"{kind}: {fault}")
        finally:
            over.set()
            honest.join()
        if server.popen.poll() is not None:
            found.faults.append("the server has ended")
        log.seek(0)
        if _EXCEPTION in (said := log.read()):
            found.faults.append(f"the server logged {said[-2000:].decode(errors='replace')}")
    found.seconds = time.perf_counter() - began
    return found


def _make_certificates(folder: Path) -> None:
    for name in ("ours", "other"):
        (folder / name).mkdir()
        make_ca(folder / name)
        issue(folder / name, "client", 2, (CLIENT,))
    issue(folder / "ours", "server", 2, (SERVER, CLIENT), ("127.0.0.1",))
    issue(folder / "ours", "expired", -1, (CLIENT,))


def _train(url: str, folder: Path, over: threading.Event, found: HandshakeFindings) -> None:
    """Train until it is over; all parameters have the pattern, as pushes are 0."""
    tls = Tls(folder / "ca.pem", folder / "client.pem", folder / "client.key")
    values = np.frombuffer(_PATTERN * _MODEL, np.float32)
    try:
        with Worker(url, {"w": values}, tls=tls, timeout=_PATIENCE) as worker:
            zero = {"w": np.zeros(_MODEL, np.float32)}
            while not over.is_set():
                began = time.perf_counter()
                worker.step(zero)
                found.slowest = max(found.slowest, time.perf_counter() - began)
                found.steps += 1
                over.wait(0.01)
            if worker.params["w"].tobytes() != values.tobytes():
                found.faults.append("the parameters have changed")
    except AiopsError as error:
        found.faults.append(f"the honest worker failed: {error}")


class Strangers:
    """Makes the connections of strangers to one server.

    Parameters
    ----------
    where
        Its address.
    folder
        Has the certificates.
    """

    def __init__(self, where: tuple[str, int], folder: Path) -> None:
        self._where, ours, other = where, folder / "ours", folder / "other"
        ca = ours / "ca.pem"
        self._contexts = {
            "tls12": _context(ca, ours / "client", newest=ssl.TLSVersion.TLSv1_2),
            "anonymous": _context(ca),
            "foreign": _context(ca, other / "client"),
            "self-signed": _context(ca, other / "ca"),
            "expired": _context(ca, ours / "expired"),
            "server-name": _context(ca, ours / "client"),
            **{kind: _context(ca, ours / "client") for kind in (*CUT, *AFTER)},
        }

    def one(self, seed: int) -> tuple[str, bytes, int, str]:
        """Connect once; return the kind, raw bytes, number of decrypted bytes, and a fault."""
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        try:
            with socket.create_connection(self._where, _PATIENCE) as sock:
                sock.settimeout(_PATIENCE)
                if kind == "plain":
                    sock.sendall(_greeting())
                    return kind, _rest(sock), 0, ""
                if kind in CUT:
                    return kind, self._cut(kind, sock, chance), 0, ""
                if kind in AFTER:
                    return kind, self._after(kind, sock, chance), 0, ""
                return self._handshake(kind, sock)
        except TimeoutError:
            return kind, b"", 0, f"the server has not closed in {_PATIENCE:g} s"
        except ConnectionRefusedError:
            return kind, b"", 0, "the server does not listen"
        except OSError:
            return kind, b"", 0, ""

    def _handshake(self, kind: str, sock: socket.socket) -> tuple[str, bytes, int, str]:
        """Go through a handshake as far as it goes, and ask for the model."""
        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = "elsewhere.test" if kind == "server-name" else self._where[0]
        tls = self._contexts[kind].wrap_bio(inward, outward, server_hostname=name)
        raw, application, asked = bytearray(), bytearray(), False
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            while True:
                try:
                    if not asked:
                        tls.do_handshake()
                        asked = True
                        tls.write(_greeting())
                    while more := tls.read(_ROOM):
                        application += more
                    break
                except ssl.SSLWantReadError:
                    pass
                sock.sendall(outward.read())
                came = sock.recv(_ROOM)
                if not came:
                    break
                raw += came
                inward.write(came)
        with contextlib.suppress(OSError):
            sock.sendall(outward.read())
        fault = "its handshake was accepted" if application else ""
        return kind, bytes(raw), len(application), fault

    def _cut(self, kind: str, sock: socket.socket, chance: random.Random) -> bytes:
        """Begin a handshake, and end or damage it."""
        hello = bytearray(self._hello(kind))
        if kind == "cut-hello":
            sock.sendall(hello[: chance.randrange(1, len(hello))])
            sock.shutdown(socket.SHUT_WR)
        elif kind == "garbage":
            sock.sendall(b"\x16" + chance.randbytes(chance.randrange(1, 4096)))
            sock.shutdown(socket.SHUT_WR)
        elif kind == "damaged":
            hello[chance.randrange(len(hello))] ^= 1 << chance.randrange(8)
            sock.sendall(hello)
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.sendall(hello)
            return sock.recv(_ROOM)
        return _rest(sock)

    def _after(self, kind: str, sock: socket.socket, chance: random.Random) -> bytes:
        """Go through a right handshake, and say something wrong."""
        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._contexts[kind].wrap_bio(inward, outward, server_hostname=self._where[0])
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(outward.read())
                if not (came := sock.recv(_ROOM)):
                    return b""  # closed amid the handshake
                inward.write(came)
        sock.sendall(outward.read())
        tls.write(_greeting())
        record = bytearray(outward.read())
        if kind == "changed-record":
            record[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
        elif kind == "cut-record":
            del record[chance.randrange(1, len(record)) :]
        elif kind == "plain-record":
            record[:] = _greeting()
        elif kind == "long-record":
            length = chance.choice((17, 1 << 14, (1 << 14) + 257, (1 << 16) - 1))
            record[:] = _RECORD + _VERSION + length.to_bytes(2, "big") + chance.randbytes(length)
        else:
            record[:] = (_RECORD + _VERSION + bytes(2)) * 100
        sock.sendall(record)
        sock.shutdown(socket.SHUT_WR)
        return _rest(sock)

    def _hello(self, kind: str) -> bytes:
        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._contexts[kind].wrap_bio(inward, outward, server_hostname=self._where[0])
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return outward.read()


def _context(
    ca: Path, own: Path | None = None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.maximum_version = newest
    if own is not None:
        context.load_cert_chain(own.with_suffix(".pem"), own.with_suffix(".key"))
    return context


def _greeting() -> bytes:
    """Return the hello of an observer."""
    wire = Connection("client")
    who = os.urandom(8).hex(), 1, "stranger", "observer", False
    parts: Sequence[Any] = wire.send(Hello(0, PROTOCOL, *who, os.urandom(16), "stranger"))
    return b"".join(map(bytes, parts))


def _rest(sock: socket.socket) -> bytes:
    found = bytearray()
    while more := sock.recv(_ROOM):
        found += more
    return bytes(found)
