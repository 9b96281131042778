"""A client written from docs/wire.md and docs/wire-shared-memory.md alone.

It imports neither aiops nor msgpack (a test checks that), only Python's own library: what it
understands is what the pages say. `ForeignClient` is docs/wire.md, with the gates of
"The plan and gates"; `ForeignNeighbour` adds docs/wire-shared-memory.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# ---------------------------------------------------------------- MessagePack


class Wide(int):
    """An integer that is written in MessagePack's longest form."""


def pack(value: Any) -> bytes:
    """Write a value in MessagePack's shortest form (but `Wide` integers)."""
    if value is None:
        return b"\xc0"
    if value is True or value is False:
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, Wide):
        return struct.pack(">Bq", 0xD3, value) if value < 0 else struct.pack(">BQ", 0xCF, value)
    if isinstance(value, int):
        return _pack_int(value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        data = value.encode()
        return _size(len(data), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + data
    if isinstance(value, bytes):
        return _size(len(value), None, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, list):
        return _size(len(value), (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(map(pack, value))
    items = b"".join(pack(k) + pack(v) for k, v in value.items())
    return _size(len(value), (0x80, 16), (None, 0xDE, 0xDF)) + items


def _pack_int(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b" if value < 0 else "B", value)
    for mark, form in ((0xCC, ">BB"), (0xCD, ">BH"), (0xCE, ">BI"), (0xCF, ">BQ")):
        if 0 <= value < 1 << 8 * (struct.calcsize(form) - 1):
            return struct.pack(form, mark, value)
    for mark, form in ((0xD0, ">Bb"), (0xD1, ">Bh"), (0xD2, ">Bi"), (0xD3, ">Bq")):
        half = 1 << (8 * (struct.calcsize(form) - 1) - 1)
        if -half <= value < half:
            return struct.pack(form, mark, value)
    raise OverflowError(value)


def _size(count: int, short: tuple[int, int] | None, marks: tuple[int | None, ...]) -> bytes:
    if short is not None and count < short[1]:
        return bytes([short[0] + count])
    for mark, form in zip(marks, (">BB", ">BH", ">BI"), strict=True):
        if mark is not None and count < 1 << 8 * (struct.calcsize(form) - 1):
            return struct.pack(form, mark, count)
    raise OverflowError(count)


_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_COUNTS = {
    0xC4: ">B",
    0xC5: ">H",
    0xC6: ">I",
    0xD9: ">B",
    0xDA: ">H",
    0xDB: ">I",
    0xDC: ">H",
    0xDD: ">I",
    0xDE: ">H",
    0xDF: ">I",
}


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Read the value at a position; return it, and where the next one begins."""
    mark, at = data[at], at + 1
    if mark < 0x80 or mark >= 0xE0:
        return mark if mark < 0x80 else mark - 256, at
    if mark in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[mark], at
    if mark in _NUMBERS:
        return struct.unpack_from(_NUMBERS[mark], data, at)[0], at + struct.calcsize(_NUMBERS[mark])
    if mark in _COUNTS:
        count = struct.unpack_from(_COUNTS[mark], data, at)[0]
        at += struct.calcsize(_COUNTS[mark])
    else:
        count = mark & (31 if mark >= 0xA0 else 15)
    if mark in (0xC4, 0xC5, 0xC6):
        return data[at : at + count], at + count
    if 0xA0 <= mark < 0xC0 or mark in (0xD9, 0xDA, 0xDB):
        return data[at : at + count].decode(), at + count
    items = []
    is_map = 0x80 <= mark < 0x90 or mark in (0xDE, 0xDF)
    for _ in range(2 * count if is_map else count):
        item, at = unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at


# ---------------------------------------------------------------- the wire


Payload = bytes | tuple[int, int]
"""Bytes, or where they lie: segment and offset."""


def frame(header: dict[str, Any], payloads: Sequence[Payload]) -> bytes:
    """Write a message."""
    head = pack(header)
    out = b"\xce" + struct.pack(">I", len(head)) + head
    for payload in payloads:
        if isinstance(payload, tuple):
            out += b"\xdd" + struct.pack(">IBQBQ", 2, 0xCF, payload[0], 0xCF, payload[1])
        else:
            out += b"\xc6" + struct.pack(">I", len(payload)) + payload
    return out


def proof(token: str, side: str, client_nonce: bytes, server_nonce: bytes, client: str) -> bytes:
    """Show knowledge of the token."""
    facts = client_nonce, server_nonce, client.encode()
    if side == "server":
        return _mac(_mac(token.encode(), b"server key"), *facts)
    key = _mac(token.encode(), b"client key")
    signature = _mac(hashlib.sha256(key).digest(), *facts)
    return bytes(a ^ b for a, b in zip(key, signature, strict=True))


def token_id(token: str) -> bytes:
    """The id of a token."""
    return _mac(token.encode(), b"id")[:8]


def _mac(key: bytes, *items: bytes) -> bytes:
    said = b""
    for item in (b"aiops/4", b"token", *items):
        said += struct.pack(">I", len(item)) + item
    return hmac.new(key, said, hashlib.sha256).digest()


def level(gate: dict[str, Any], before: float | None, vbar: float) -> float:
    """Return the level of v̄ after its next value; ``before``: that of before, if any."""
    deviation = max(vbar - gate["floor"], 0.0)
    if before is None:
        return deviation
    return min(max(before + (deviation - before) / 10, deviation / 2), deviation * 2)


def chances(
    gate: dict[str, Any],
    step: int,
    vbar: float | None,
    constants: list[float],
    level: float = 0.0,
) -> tuple[float, float]:
    """Return the probabilities of a push and of a fetch after a mini-batch (1, 2, ...).

    ``constants``: the last `gate` field that was not empty. ``level``: that of v̄, if the gate is
    relative to it.
    """
    if gate["kind"] == "periodic":
        return float(step % gate["k_push"] == 0), float(step % gate["k_fetch"] == 0)
    if gate["kind"] == "constant":
        return gate["p_push"], gate["p_fetch"]
    assert gate["kind"] == "bfasgd"
    if vbar is None:
        return 1.0, 1.0
    deviation = max(vbar - gate["floor"], 0.0) + gate["eps"]
    if gate["relative"]:
        deviation = (deviation - gate["eps"]) / level if level else 1.0
    push, fetch = constants or (gate["c_push"], gate["c_fetch"])
    return 1 / (1 + push / deviation), 1 / (1 + fetch / deviation)


class ForeignClient:
    """A client over any stream.

    Parameters
    ----------
    send
        Sends bytes.
    receive
        Returns exactly as many bytes as it is asked for.

    Attributes
    ----------
    model
        The tensors in arena order, as the server announced them.
    versions
        The version of each tensor held, by name.
    version
        The model version that is held, -1 for none.
    arena
        The parameters' bytes.
    """

    def __init__(self, send: Callable[[bytes], None], receive: Callable[[int], bytes]) -> None:
        self._send, self._receive = send, receive
        self._id = self._seq = 0
        self.model: list[list[Any]] = []
        self.versions: dict[str, int] = {}
        self.version = -1
        self.arena = b""

    def say(self, kind: str, payloads: Sequence[Payload] = (), **fields: Any) -> None:
        """Send a message."""
        self._send(frame({"kind": kind, **fields}, payloads))

    def receive(self) -> tuple[dict[str, Any], list[Payload]]:
        """Return the next message."""
        mark, length = struct.unpack(">BI", self._receive(5))
        assert mark == 0xCE
        head = self._receive(length)
        header, end = unpack(head)
        assert end == length
        payloads: list[Payload] = []
        for _start, _stop, codec, nbytes, _version in header.get("parts", []):
            assert codec in ("raw", "shard"), "the latter's bytes travel elsewhere"
            mark, size = struct.unpack(">BI", self._receive(5))
            if (mark, size) == (0xDD, 2):
                one, segment, other, offset = struct.unpack(">BQBQ", self._receive(18))
                assert (one, other) == (0xCF, 0xCF)
                payloads.append((segment, offset))
            else:
                assert (mark, size) == (0xC6, nbytes)
                payloads.append(self._receive(nbytes))
        return header, payloads

    def greet(
        self,
        client: str,
        nonce: bytes,
        token: str | None = None,
        epoch: int = 1,
        role: str = "worker",
    ) -> Any:
        """Go through the handshake; return the welcome (or the error)."""
        self.say(
            "hello",
            id=0,
            protocol=4,
            client=client,
            epoch=epoch,
            name=client,
            role=role,
            pongs=False,
            nonce=nonce,
            agent="foreign/1",
            run="",
            generation=0,
            acked=0,
            generation_proof=b"",
        )
        header, _ = self.receive()
        if header["kind"] == "challenge":
            theirs = header["nonce"]
            given = proof(token or "", "client", nonce, theirs, client)
            self.say("prove", id=0, proof=given, key=token_id(token or ""))
            header, _ = self.receive()
            if header["kind"] == "welcome":
                wanted = proof(token or "", "server", nonce, theirs, client)
                assert hmac.compare_digest(header["proof"], wanted)
        if header["kind"] == "welcome":
            self.model, self._seq = header["model"], header["last_seq"]
        return header

    def ask(self, kind: str, payloads: Sequence[Payload] = (), **fields: Any) -> dict[str, Any]:
        """Send a request, and take in the answer."""
        self._id += 1
        self.say(kind, payloads, id=self._id, **fields)
        header, answered = self.receive()
        assert header["id"] == self._id
        if "model" in header:
            self.model = header["model"]
        if answered or header["kind"] == "params" or (header["kind"] == "ack" and fields["fetch"]):
            self.version = header.get("current", header["version"])
        if answered:
            for (start, stop, _codec, _nbytes, version), data in zip(
                header["parts"], answered, strict=True
            ):
                assert isinstance(data, bytes)
                self.arena = self.arena[:start].ljust(start, b"\0") + data + self.arena[stop:]
                for name, dtype, shape, offset in self.model:
                    if start <= offset < stop or _nbytes_of(dtype, shape) == 0:
                        self.versions[name] = version
        return header

    def define(self, tensors: dict[str, tuple[str, list[int], bytes]]) -> dict[str, Any]:
        """Offer a model."""
        order = sorted(tensors, key=lambda name: (-ITEM[tensors[name][0]], tensors[name][0]))
        data = b"".join(tensors[name][2] for name in order)
        rows = [[name, dtype, shape] for name, (dtype, shape, _data) in tensors.items()]
        parts = [[0, len(data), "raw", len(data), 0]]
        return self.ask("define", [data], tensors=rows, parts=parts, tables=[])

    def fetch(self) -> dict[str, Any]:
        """Bring the parameters up to date."""
        return self.ask("fetch", have=self.version, wants=[], coded=False, evaluation=False)

    def exchange(self, gradients: dict[str, bytes], seq: int | None = None) -> dict[str, Any]:
        """Push gradients computed at the parameters held, one part each, and bring these up."""
        parts, payloads = [], []
        for name, _dtype, _shape, offset in self.model:
            if name in gradients:
                data = gradients[name]
                stop = offset + len(data)
                parts.append([offset, stop, "raw", len(data), self.versions[name]])
                payloads.append(data)
        return self.push(parts, payloads, seq, fetch=True, have=self.version)

    def push(
        self,
        parts: list[list[Any]],
        payloads: Sequence[Payload],
        seq: int | None = None,
        **changed: Any,
    ) -> dict[str, Any]:
        """Push these parts, by default without a fetch."""
        self._seq = self._seq + 1 if seq is None else seq
        asked = {
            "fetch": False,
            "have": -1,
            "wants": [],
            "coded": False,
            "count": 1,
            "lr_factors": [],
            **changed,
        }
        return self.ask("push", payloads, seq=self._seq, parts=parts, **asked)

    def reapply(self) -> dict[str, Any]:
        """Have the last gradient applied again, without a fetch."""
        self._seq += 1
        return self.ask(
            "reapply", seq=self._seq, fetch=False, have=-1, wants=[], coded=False, lr_factors=[]
        )

    def tensor(self, name: str) -> bytes:
        """Return a tensor's bytes."""
        dtype, shape, offset = next(row[1:] for row in self.model if row[0] == name)
        return self.arena[offset : offset + _nbytes_of(dtype, shape)]


class ForeignNeighbour:
    """A client on the server's machine, with shared memory.

    Parameters
    ----------
    host, port
        Where the server listens for TCP.
    """

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(f"\0aiops/{os.getuid()}/{host}/{port}")
        said = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        assert struct.unpack("3i", said)[1] == os.getuid()
        _zero, [side], _flags, _address = socket.recv_fds(self.sock, 1, 1)
        self.side = socket.socket(fileno=side)
        self.theirs: dict[int, mmap.mmap] = {}
        self.stream = self.sock.makefile("rb")
        self.client = ForeignClient(self.sock.sendall, self._receive)

    def _receive(self, count: int) -> bytes:
        data = self.stream.read(count)
        assert len(data) == count, "there is no more"
        return data

    def share(self, number: int, nbytes: int) -> mmap.mmap:
        """Share a segment with the server."""
        fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(fd, nbytes)
        socket.send_fds(self.side, [b"!"], [fd])
        os.close(fd)
        self.client.say("share", id=0, segment=number, nbytes=nbytes)
        return memory

    def receive_raw(self) -> tuple[dict[str, Any], list[Payload]]:
        """Return the next message with its payloads, bytes or places; map segments before it."""
        header, payloads = self.client.receive()
        while header["kind"] == "share":
            _byte, [fd], _flags, _address = socket.recv_fds(self.side, 1, 1)
            nbytes = header["nbytes"]
            self.theirs[header["segment"]] = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
            os.close(fd)
            header, payloads = self.client.receive()
        return header, payloads

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the next message with its payloads' bytes, wherever they lie."""
        header, payloads = self.receive_raw()
        found = []
        for payload, part in zip(payloads, header.get("parts", []), strict=True):
            if isinstance(payload, tuple):
                segment, offset = payload
                payload = self.theirs[segment][offset : offset + part[3]]
            found.append(payload)
        return header, found


def _nbytes_of(dtype: str, shape: list[int]) -> int:
    count = ITEM[dtype]
    for size in shape:
        count *= size
    return count
