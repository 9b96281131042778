"""Check pushes before they are queued, and before the policy decides about them."""

from __future__ import annotations

import numpy as np

from aiops.engine.membership import Member
from aiops.engine.receive import PushSink, RawIncoming
from aiops.errors import BadPush, Refused, Unavailable
from aiops.store.parameters import Store
from aiops.store.wanted import Wanted
from aiops.wire.fields import MOST_FACTOR
from aiops.wire.messages import Push, PushRows, Reapply
from aiops.wire.sinks import Discard, Sink


def fault(
    member: Member, store: Store, message: Push | PushRows, sink: Sink | None, closed: str
) -> Refused | None:
    """Return why a push cannot be taken, or None; ``closed``: as `PushClosure.why`."""
    if member.worker and not closed and type(sink) is RawIncoming:
        cover, level = sink.cover, store.current.level
        known = cover.level is not None and level is not None and cover.level <= level
        usual = type(message) is Push and not (message.wants or message.lr_factors)
        if known and sink.fault is None and usual:
            return None  # the usual case, for which every check below passes
    return unready(member, closed) or unfit(store, message, sink)


def unready(member: Member, closed: str) -> Refused | None:
    """Return why this client may not push now, or None."""
    if not member.worker:
        return BadPush("an observer may not push; connect with role='worker'")
    if closed:
        return Unavailable(closed)
    return None


def unfit(store: Store, message: Push | PushRows, sink: Sink | None) -> Refused | None:
    """Return the refusal of a push that does not fit the model, or None."""
    if isinstance(sink, Discard) and isinstance(sink.fault, Refused):
        return sink.fault
    if not isinstance(sink, PushSink):
        return BadPush("the push holds no tensor: push at least one")
    if sink.fault is not None or isinstance(message, PushRows):
        return sink.fault
    return _ahead(store, sink) or beyond(store, message)


def misfactored(
    message: Push | Reapply | PushRows, tensors: int, most: float = MOST_FACTOR
) -> BadPush | None:
    """Return the refusal of factors of learning rates, or None.

    Parameters
    ----------
    message
        Has the factors.
    tensors
        Those of the gradient: there is a factor for each, or one, or none.
    most
        The largest factor that is taken. Where gradients are screened or trimmed it is 1: a large
        factor would do what a large gradient may not.
    """
    count = len(message.lr_factors)
    if count in (0, 1, tensors):
        largest = max(message.lr_factors, default=0.0)
        if largest <= most:
            return None
        return BadPush(
            f"a factor of {largest:g} for the learning rate: here it may be {most:g} at most, as"
            " gradients are filtered or trimmed; set a larger rate on the server"
        )
    has = f"{tensors} tensors" if tensors > 1 else "one tensor"
    return BadPush(f"the push has {count} factors of learning rates, and its gradient has {has}")


def beyond(store: Store, message: Push | Reapply) -> Refused | None:
    """Return the refusal of a request for tensors that the model does not have, or None."""
    if not message.wants:
        return None
    try:
        Wanted(message.have, message.wants).known(0, len(store.layout.tensors))
    except Refused as fault:
        return fault
    return None


def _ahead(store: Store, sink: PushSink) -> BadPush | None:
    """Return the refusal of a gradient of a version that does not exist yet, or None."""
    cover, current = sink.cover, store.current
    if cover.level is not None and current.level is not None and cover.level <= current.level:
        return None
    versions = current.tensor_versions[cover.tensors]
    ahead = np.flatnonzero(cover.bases > versions)
    if not len(ahead):
        return None
    row = int(ahead[0])
    name = store.layout.tensors[int(cover.tensors[row])].name
    return BadPush(
        f"{name!r} was computed at version {cover.bases[row]}, but the server is at"
        f" {versions[row]}: fetch the parameters again (was the server restarted?)",
        tensor=name,
    )
