"""The steady turn: a raw gradient of the whole model for the whole model, in one call.

Nearly all turns of a simulation are this one exchange. Without a stream between client and server
there is nothing to encode and nothing to place, so it makes no messages. The server's side is that
of real runs (`aiops.engine.steady.Shortcut`), and both sides change what messages would have
changed: parameters, versions and leases, sequence numbers, accounts, remembered answers, the
record. A turn that differs goes the general way, and nothing has been changed then.
"""

from __future__ import annotations

from typing import Any

from aiops.client.params import Leased, Params
from aiops.client.request_kinds import Means, Receipt
from aiops.client.session import Session
from aiops.engine.membership import Member
from aiops.engine.steady import ExchangeRecord, Shortcut, is_steady
from aiops.model.layout import Layout
from aiops.model.parts import Parts
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, Message, Push
from aiops.wire.traffic import Traffic

_PREFIXES = 10  # bytes: a header's prefix, and its payload's


class SteadyTurn:
    """One client's short way.

    Parameters
    ----------
    shared, member, peer, traffic
        The server's end: what all clients share, the client's member, and its connection.
    session, params
        The client's end, and its parameters, which it reads in the server's memory.
    parts, push, ack
        Of an exchange that went the general way, and for which `are_steady` is True: the parts that
        were pushed, and the bytes of both headers with their prefixes (`header_bytes`). Those to
        come have headers of the same length, for the integers that vary have a fixed width.
    """

    def __init__(
        self,
        shared: Shortcut,
        member: Member,
        peer: int,
        traffic: Traffic,
        session: Session,
        params: Leased,
        parts: Parts,
        push: int,
        ack: int,
    ) -> None:
        self._shared, self._member, self._peer, self._traffic = shared, member, peer, traffic
        self._session, self._params, self._parts = session, params, parts
        self._ledger = session.ledger
        self._fits = params.layout  # the layout of the last gradient
        self._push, self._ack = push, ack

    def state(self) -> list[Any]:
        """Return the exchange's parts and lengths as plain values."""
        return [[list(part) for part in self._parts], self._push, self._ack]

    def exchange(
        self, gradients: object, now: float, record: ExchangeRecord | None
    ) -> Receipt | None:
        """Push a gradient, and read the parameters after it; None: it must go the general way.

        Parameters
        ----------
        gradients
            Computed at the client's parameters.
        now, record
            As of `Shortcut.update`.
        """
        params, session, pending = self._params, self._session, self._session.pending
        have, age = params.level, params.age
        if (
            (have is None or age is None or type(gradients) is not Params)
            or params.connection != session.info.connection
            or not (gradients.layout is self._fits or self._takes(gradients.layout))
        ):
            return None
        id, seq = pending.next_id, pending.seq + 1
        numbers, arena = (id, seq, have, age), gradients.arena
        acknowledged = self._shared.update(self._member, self._peer, numbers, arena, now, record)
        if acknowledged is None:
            return None
        pending.next_id, pending.seq = id + 1, seq
        pending.answered += 1
        self._ledger.exchanged(seq, True, self._parts)
        nbytes = len(arena.data)
        push, ack = ("push", self._push, nbytes), ("ack", self._ack, nbytes)
        session.wire.traffic.exchanged(push, ack)
        self._traffic.exchanged(ack, push)
        lease = self._shared.store.lease()
        params.read(lease.version.room, lease.release)
        number, _used, staleness, mean, vbar, vbars, _why = acknowledged
        params.level, params.age = number, lease.version.level
        means = Means(params.layout, vbars) if vbars else {}
        return Receipt(number, staleness, mean, vbar, means)

    def _takes(self, layout: Layout) -> bool:
        """Return whether gradients of this layout fit the model."""
        if layout.digest != self._params.layout.digest:
            return False
        self._fits = layout
        return True


def header_bytes(message: Message) -> int:
    """Return the bytes of a message's header, and of the prefixes of header and payload."""
    return _PREFIXES + len(encode(message))


def are_steady(push: Push, ack: Ack, nbytes: int) -> bool:
    """Return whether all ``nbytes`` of a model, raw, were pushed in one part, and answered so."""
    parts = [part[:4] for part in ack.parts]
    return is_steady(push, nbytes) and parts == [(0, nbytes, "raw", nbytes)] and not ack.gate
