"""Say in words what a row of a journal holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from aiops.bandwidth.byte_accounting import RAW
from aiops.common import formatting
from aiops.common.generations import generation_text
from aiops.errors import RemoteProtocolError
from aiops.model.parts import Part
from aiops.wire.decoding import decode
from aiops.wire.messages import Hello, Message

_MESSAGES = ("hello", "message", "order")  # the fields that hold one as it was on the wire

_RANGES = ("parts", "wants", "ranges", "increments")  # lists of the model's pieces

_PLAIN = (bool, int, float, str)


def with_messages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields with its messages in place of their bytes.

    Bytes that are no message of this release stay what they are.
    """
    found = dict(fields)
    for name in _MESSAGES:
        data = found.get(name)
        if type(data) is bytes:
            try:
                found[name] = decode(data)
            except RemoteProtocolError:  # a newer release's
                continue
    return found


def plain(message: Message) -> dict[str, Any]:
    """Return a message's fields by name, its kind first; secrets are left out."""
    return {"kind": message.kind, **dict(_shown(message))}


def _shown(message: Message) -> Iterable[tuple[str, Any]]:
    for field in dataclasses.fields(message):
        if not field.repr:
            continue
        value = getattr(message, field.name)
        if field.name == "parts":
            value = [part._asdict() for part in value]
        yield field.name, value


class RowText:
    """Says what rows hold, one after the other: of a connection it says whose it is.

    A connection whose client joined in an earlier row than the first is named by its number.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of clients, by connection

    def of(self, kind: str, fields: Mapping[str, Any], payload: int) -> str:
        """Return what a row holds, but for its kind and its time.

        Parameters
        ----------
        kind
            The kind's name.
        fields
            As `with_messages` returns them.
        payload
            Bytes of the payload.
        """
        peer, hello = fields.get("peer"), fields.get("hello")
        if kind == "resumed":
            self._names.clear()  # connections are numbered from 1 again
            return f"generation {generation_text(fields['generation'])}"
        if kind == "joined" and isinstance(hello, Hello):
            self._names[fields["peer"]] = hello.name or hello.client
            return (
                f"{hello.role} {hello.name!r} (client {hello.client}, connection {peer}, its"
                f" {hello.epoch}.)"
            )
        if kind in ("steady", "coded"):
            have = f"has version {fields['have']}" if fields["have"] >= 0 else "has none"
            coded = ", ".join(sorted({part[2] for part in fields["parts"]} - {RAW}))
            size = _size(payload) + (f" ({coded})" if coded else "")
            text = f"push {fields['seq']} at version {fields['base']}, {size}; {have}"
            text += ", and fetches coded" if kind == "coded" else ""
            return f"{self._client(peer)}: {text}"
        if kind == "left":
            return self._client(peer)
        if kind == "begin":
            settings = _pairs({"policy": fields["policy"], **fields["settings"]})
            return f"run {fields['run']}, {settings}, aiops {fields['aiops']}"
        if kind == "initialised":
            tensors, tables = len(fields["tensors"]), len(fields["tables"])
            return f"tensors {tensors}, tables {tables}, {_size(payload)}"
        said = [self._client(peer)] if type(peer) is int else []
        if "number" in fields:
            said.append(f"number {fields['number']}")
        message = next((fields[n] for n in _MESSAGES if isinstance(fields.get(n), Message)), None)
        if message is not None:
            said.append(in_words(message))
        if fault := fields.get("fault"):
            said.append(f"refused ({fault[0]}): {fault[1]}")
        known = ("peer", "number", "fault", "faulted_sink", *(() if message is None else _MESSAGES))
        rest = {name: value for name, value in fields.items() if name not in known}
        return ": ".join([*said, *([_pairs(rest)] if rest else [])])

    def _client(self, peer: object) -> str:
        name = self._names.get(peer) if isinstance(peer, int) else None
        return f"connection {peer}" if name is None else f"{name} (connection {peer})"


def in_words(message: Message) -> str:
    """Return a message's kind, and its fields but for those that have their defaults."""
    said = dict[str, Any]()
    defaults = {field.name: field.default for field in dataclasses.fields(message)}
    for name, value in _shown(message):
        if name not in _RANGES and value != defaults[name] and not (name == "id" and not value):
            said[name] = value
    rest = [_pairs(said)] if said else []
    parts: tuple[Part, ...] = getattr(message, "parts", ())
    if parts:
        rest.append(_parts(parts))
    ranges = {name: len(getattr(message, name, ())) for name in _RANGES[1:]}
    rest += [f"{name} {count}" for name, count in ranges.items() if count]
    return " ".join([message.kind, *([", ".join(rest)] if rest else [])])


def _parts(parts: tuple[Part, ...]) -> str:
    """Say how many payloads there are, how long, in which codecs, and of which versions."""
    codecs = ", ".join(sorted({part.codec or "raw" for part in parts}))
    versions = sorted({part.version for part in parts})
    of = f"version {versions[0]}" + (f" to {versions[-1]}" if versions[1:] else "")
    return f"{_size(sum(part.nbytes for part in parts))} in {len(parts)} parts ({codecs}), {of}"


def _size(nbytes: int) -> str:
    return formatting.nbytes(nbytes)


def _pairs(fields: Mapping[str, Any]) -> str:
    """Return names and values; of what is neither a number nor a text, how much there is."""
    return ", ".join(chain.from_iterable(_pair(name, value) for name, value in fields.items()))


def _pair(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, bytes):
        yield f"{name} of {len(value)} bytes"
    elif value is None or isinstance(value, _PLAIN):
        yield f"{name} {value}"
    elif isinstance(value, Mapping):
        yield f"{name} of {len(value)} entries"
    else:
        yield f"{name} of {len(value)}"
