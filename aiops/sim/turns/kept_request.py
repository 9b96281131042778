"""A push whose answer is held back, as plain values: it was sent, and is not sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiops.client.coding import Coding
from aiops.client.params import Params
from aiops.client.request_kinds import PushRequest, ReapplyRequest, Request
from aiops.model.layout import Array
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Push


def request_state(id: int, request: Request, coding: Coding | None) -> list[Any]:
    """Return a request that waits for its answer as plain values, for `request_of`.

    Parameters
    ----------
    id
        Its id.
    request
        The request.
    coding
        The client's: it has the rests from before the push.
    """
    assert isinstance(request, PushRequest), "only pushes are answered later"
    sent = None if request.sent is None else encode(request.sent)
    asked = [request.have, list(request.wants), list(request.connection), request.base]
    rests = [] if coding is None else list(coding.rests(request.encoded))
    return [id, isinstance(request, ReapplyRequest), request.seq, *asked, sent, rests]


def request_of(
    state: Sequence[Any],
    into: Params | None,
    coding: Coding | None,
    read: Callable[[str], Array],
) -> tuple[int, Request]:
    """Return the id and the request of which `request_state` returned this.

    Parameters
    ----------
    state
        Of `request_state`.
    into
        Where its answer's parameters are received.
    coding
        The client's, restored.
    read
        Reads the rests: ``rest/`` and the place.
    """
    id, again, seq, have, wants, (client, epoch), base, sent, rests = state
    kind = ReapplyRequest if again else PushRequest
    request = kind((), (), into, None, (client, epoch), base, 1)
    request.seq, request.have, request.wants = seq, have, tuple(wants)
    request.attempted = True
    if sent is not None:
        message = decode(sent)
        if not isinstance(message, Push):
            raise ValueError(f"a {message.kind!r} is no push")
        request.sent = message
    if coding is not None:
        request.encoded = coding.with_rests({place: read(f"rest/{place}") for place in rests})
    return id, request
