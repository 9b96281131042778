"""The steady exchange of a blocking client, by compiled code."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from aiops.client.coded_answer import CodedAnswer
from aiops.client.compiled_forms import CompiledExchange, Forms
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.steady import SteadyExchange
from aiops.compiled import exchange_type
from aiops.compiled.loading import core
from aiops.model import mailbox
from aiops.model.arena import Arena
from aiops.model.mailbox import Mailbox
from aiops.net.busy_poll import Spin
from aiops.net.tls_socket import StreamSocket
from aiops.net.unix_socket import UnixSide
from aiops.wire.template import Template

_KINDS: Mapping[str, str] = {"B": "u", "H": "u", "I": "u", "Q": "u", "f": "f", "d": "f"}
"""The kinds of values that compiled code knows, by their `struct` codes; and bytes, ``"12s"``."""

LARGEST = 1 << 20
"""The largest model in bytes: as large as a server exchanges steadily."""


LEARNT = Arena, Params, Receipt, SteadyExchange
"""The classes whose fields compiled code reads and writes."""


@cache
def _learn(library: Any) -> None:
    """Have compiled code find the fields that it reads and writes."""
    library.learn_fields({each.__name__: each for each in LEARNT})


def compiled_exchange(forms: Forms, sock: StreamSocket) -> CompiledExchange | None:
    """Return what makes exchanges of a form on a socket; None: Python is to make them.

    That is so on a connection by TLS or one whose times are noted, and where `made` returns None.
    """
    return made(forms, sock.fileno()) if type(sock) is socket.socket else None


def made(forms: Forms, fd: int) -> CompiledExchange | None:
    """Return what makes exchanges of a form on a socket's descriptor; None: Python is to make them.

    That is so without compiled code, with a model over `LARGEST`, and where a number of an answer
    has a form that our servers do not use.
    """
    exchange = exchange_type() if forms.nbytes <= LARGEST else None
    if exchange is None:
        return None
    _learn(core())
    acks = [_ack(answer) for answer in forms.answers] or [_raw_ack(forms)]
    if None in acks:
        return None
    id, seq, have, *ages = (slot.begin for slot in forms.push.slots)
    coded = None
    if forms.coded is not None:
        pieces = forms.coded.compiled()
        if pieces is None:
            return None
        coded = forms.coded.region, tuple(map(tuple, pieces))
    try:
        return exchange(
            fd,
            bytearray(forms.push.data),
            (id, seq, have, *ages),
            tuple(acks),
            forms.room,
            forms.nbytes,
            forms.tensors,
            np.ndarray,
            Spin.CROWDED,
            coded,
        )
    except ValueError:  # a mean of another kind, say
        return None


def _header(ack: Template) -> tuple[bytes, bytes, list[tuple[int, int, str]]] | None:
    """Return a header, a mask of what varies in it, and where that lies; None: in no known form."""
    varies, slots = bytearray(ack.size), []
    for slot in ack.slots:
        kind = "s" if slot.code.endswith("s") else _KINDS.get(slot.code)
        if kind is None:
            return None
        varies[slot.begin : slot.end] = b"\xff" * (slot.end - slot.begin)
        slots.append((slot.begin, slot.end - slot.begin, kind))
    return ack.data, bytes(varies), slots


def _raw_ack(forms: Forms) -> Any:
    """Return the form of raw answers for compiled code, or None."""
    found = _header(forms.ack)
    if found is None:
        return None
    ack, varies, slots = found
    return ack, varies, tuple(slots), (), forms.nbytes, None


def _ack(answer: CodedAnswer) -> Any:
    """Return a form of coded answers for compiled code, or None."""
    found, pieces = _header(answer.template), answer.compiled()
    if found is None or pieces is None:
        return None
    ack, varies, slots = found
    count = len(slots) - answer.further_ages
    slots, ages = slots[:count], slots[count:]
    if any(age[1:] != (8, "u") for age in ages):
        return None
    if not answer.has_age:
        slots.insert(3, (0, 0, "n"))
    places = tuple(begin for begin, _width, _kind in ages)
    return ack, varies, tuple(slots), places, answer.whole.nbytes, tuple(map(tuple, pieces))


def takes_mailboxes() -> bool:
    """Return whether a client on its server's machine can exchange by a mailbox."""
    return exchange_type() is not None and mailbox.supported()


def pass_mailbox(
    compiled: CompiledExchange, side: UnixSide, nbytes: int, alone: bool
) -> Mailbox | None:
    """Have exchanges go by a mailbox once the server opens it, and pass that to the server.

    Returns the mailbox, which is then to be announced; None: there is none.

    Parameters
    ----------
    compiled
        The exchanges.
    side
        The side channel of their connection.
    nbytes
        The bytes of the model.
    alone
        Whether no exchange is to go by the socket.
    """
    if not mailbox.supported():
        return None
    try:
        made, memory = Mailbox.make(nbytes)
    except OSError:  # no more memory, or no more descriptors
        return None
    try:
        compiled.use_mailbox(made.data, made.bell, alone)
        return made if side.pass_mailbox(made, memory) else None
    except (ValueError, NotImplementedError):  # a header too long for it, or another machine
        return None
    finally:
        os.close(memory)
