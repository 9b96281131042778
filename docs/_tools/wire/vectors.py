"""docs/wire-vectors.json: vectors for the tests of a client in another language."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgpack

from aiops.model.layout import Layout
from aiops.wire import messages
from aiops.wire.connection import Limits
from aiops.wire.encoding import encode
from aiops.wire.fields import Offered
from aiops.wire.handshake import proof
from aiops.wire.messages import Message
from aiops.wire.state_machine import Side
from aiops.wire.token_keys import token_id
from docs._tools.wire.examples import NONCES, TOKEN, Example, conversations, hello, one_of_each

NAME = "wire-vectors.json"
"""The file's name, beside the page."""


def plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as ``{"bytes": hex}``."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def fields(message: Message) -> dict[str, Any]:
    """Return a message's header as JSON has it."""
    named = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return {"kind": message.kind, **plain(named)}


def proofs() -> list[dict[str, str]]:
    """Return proofs of the token by both sides."""
    sides: tuple[Side, Side] = ("client", "server")
    client_nonce, server_nonce = NONCES
    return [
        {
            "token": token,
            "id": token_id(token).hex(),
            "side": side,
            "client_nonce": client_nonce.hex(),
            "server_nonce": server_nonce.hex(),
            "client": name,
            "proof": proof(token, side, *NONCES, name).hex(),
        }
        for token, name in ((TOKEN, hello().client), ("schlüssel", "кот"))
        for side in sides
    ]


def content() -> dict[str, Any]:
    """Return all vectors."""
    return {
        "protocol": messages.PROTOCOL,
        "messages": [_vector(example) for example in one_of_each()],
        "conversations": [
            {"title": each.title, "messages": [_vector(step) for step in each.steps]}
            for each in conversations()
        ],
        "proofs": proofs(),
        "layouts": [
            {"offered": plain(rows), "arena": plain(Layout(rows).rows)} for rows in _MODELS
        ],
        "broken": _broken(),
    }


_MODELS: tuple[Offered, ...] = (
    (("b", "float16", (1,)), ("w", "float32", (2, 1))),
    (
        ("z", "float32", ()),
        ("half", "float16", (3,)),
        ("double", "float64", (1, 2)),
        ("a", "float32", (2, 2)),
        ("empty", "float64", (0, 5)),
        ("half2", "float16", (1,)),
    ),
)


def _vector(example: Example) -> dict[str, Any]:
    return {
        "name": example.name,
        "sender": example.sender,
        "header": fields(example.message),
        "header_hex": example.header.hex(),
        "payloads_hex": [payload.hex() for payload in example.payloads],
        **({"places": example.places} if example.places else {}),
        "frame_hex": example.frame.hex(),
    }


def _broken() -> list[dict[str, str]]:
    """Return first messages for which a server closes the connection."""
    good = hello()
    header, good_fields = encode(good), fields(good) | {"nonce": good.nonce}
    short = bytes([0xCD]) + len(header).to_bytes(2, "big") + header
    changed: dict[str, dict[str, Any]] = {
        "a field is missing": {k: v for k, v in good_fields.items() if k != "agent"},
        "a field is unknown": good_fields | {"colour": "red"},
        "a number is text": good_fields | {"protocol": "1"},
        "a number is a float": good_fields | {"protocol": 1.0},
        "a number is negative": good_fields | {"epoch": -1},
        "bytes are text": good_fields | {"nonce": "0123456789abcdef"},
        "a nonce is too short": good_fields | {"nonce": b"0123456789abcde"},
        "an extension type": good_fields | {"name": msgpack.ExtType(1, b"w0")},
        "no such kind": {"kind": "helo", "id": 0},
        "no request before the welcome": {"kind": "fetch", "id": 1, "have": -1},
        "a message that only follows others": {"kind": "pong", "id": 0},
    }
    frames = {why: _framed(msgpack.packb(map_)) for why, map_ in changed.items()}
    frames |= {
        "the length is not in five bytes": short,
        "the header is no map": _framed(b"\x90"),
        "the header ends early": _framed(header[:-1]),
        "something follows the map": _framed(header + b"\xc0"),
        "the header is too long": bytes([0xCE]) + (Limits().greeting + 1).to_bytes(4, "big"),
        "not this wire at all": b"GET / HTTP/1.1\r\n\r\n",
    }
    return [{"why": why, "frame_hex": frame.hex()} for why, frame in frames.items()]


def _framed(header: bytes) -> bytes:
    return bytes([0xCE]) + len(header).to_bytes(4, "big") + header


def text() -> str:
    """Return the file of vectors."""
    return json.dumps(content(), indent=1, ensure_ascii=False) + "\n"
