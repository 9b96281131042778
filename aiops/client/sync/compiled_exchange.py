"""The steady exchange of a blocking client, by compiled code."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import numpy as np

from aiops.client.steady import CompiledExchange, Forms
from aiops.compiled import exchange_type
from aiops.net.busy_poll import Spin
from aiops.net.tls_socket import StreamSocket

_KINDS: Mapping[str, str] = {"B": "u", "H": "u", "I": "u", "Q": "u", "f": "f", "d": "f"}
"""The kinds of values that compiled code knows, by their `struct` codes; and bytes, ``"12s"``."""

LARGEST = 1 << 20
"""The largest model in bytes: as large as a server exchanges steadily."""


def compiled_exchange(forms: Forms, sock: StreamSocket) -> CompiledExchange | None:
    """Return what makes exchanges of a form on a socket; None: Python is to make them.

    That is so without compiled code, with a model over `LARGEST`, on a connection by TLS or one
    whose times are noted, and where a number of an answer has a form that our servers do not use.
    """
    exchange = exchange_type() if forms.nbytes <= LARGEST else None
    if exchange is None or type(sock) is not socket.socket:
        return None
    ack, slots = forms.ack, []
    varies = bytearray(ack.size)
    for slot in ack.slots:
        kind = "s" if slot.code.endswith("s") else _KINDS.get(slot.code)
        if kind is None:
            return None
        varies[slot.begin : slot.end] = b"\xff" * (slot.end - slot.begin)
        slots.append((slot.begin, slot.end - slot.begin, kind))
    id, seq, have, age = (slot.begin for slot in forms.push.slots)
    try:
        return exchange(
            sock.fileno(),
            bytearray(forms.push.data),
            (id, seq, have, age),
            ack.data,
            bytes(varies),
            tuple(slots),
            forms.room,
            forms.nbytes,
            forms.tensors,
            np.ndarray,
            Spin.CROWDED,
        )
    except ValueError:  # a mean of another kind, say
        return None
