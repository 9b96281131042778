"""Every error that aiops raises, by the side that caused it.

::

    AiopsError
    ├── UsageError (ValueError)     yours: an argument, a setting or a file that cannot work
    │   ├── ConflictError           yours: two settings that cannot work together
    │   └── DamagedState            a file of a kept state is not what was written
    ├── ProtocolError               a peer broke the rules of docs/wire.md
    │   ├── LocalProtocolError      ... and it was this side
    │   └── RemoteProtocolError     ... and it was the other side
    │       └── Corrupted           ... or bytes were changed on the way (also a ConnectionLost)
    ├── ConnectionLost              the network's: the peer or the connection went away
    │   ├── DeadlineExceeded        ... or did not answer in time (also a TimeoutError)
    │   ├── RolledBack              ... and the servers of a model go back to an earlier moment
    │   ├── Superseded              ... or a successor has taken its place
    │   └── Untrusted               ... or TLS: a certificate that the other side does not accept
    └── Refused                     the server understood and refused; nothing was changed
        ├── BadPush                 wrong tensor, shape, dtype or value in what was sent
        ├── StaleGradient           the policy wants this gradient recomputed on newer parameters
        │   └── Restarted           ... or the server was restarted since it was computed
        ├── NotReady                no worker has defined the model yet
        ├── Unauthorised            the token is missing or wrong
        ├── Kicked                  an administrator has sent this client away
        └── Unavailable             the server stayed full, paused or shut down for the time-out
            └── Standby             ... or it was a standby, which serves no workers

An error carries one sentence (what happened, why, what to do next) as its text and its facts in
``details``, a plain dict. Errors of the last branch travel over the wire as a ``code`` and come
out on the other side as the same class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

__all__ = [
    "AiopsError",
    "BadPush",
    "ConflictError",
    "ConnectionLost",
    "Corrupted",
    "DamagedState",
    "DeadlineExceeded",
    "Kicked",
    "LocalProtocolError",
    "NotReady",
    "ProtocolError",
    "Refused",
    "RemoteProtocolError",
    "Restarted",
    "RolledBack",
    "StaleGradient",
    "Standby",
    "Superseded",
    "Unauthorised",
    "Unavailable",
    "Untrusted",
    "UsageError",
]


class AiopsError(Exception):
    """The root: catch this to catch everything aiops raises on purpose."""

    def __init__(self, text: str, /, **details: Any) -> None:
        super().__init__(text)
        self.details = details


class UsageError(AiopsError, ValueError):
    """An argument, a setting or a file of yours cannot work."""


class ConflictError(UsageError):
    """Two settings that are fine alone cannot work together."""


class DamagedState(UsageError):
    """A file of a server's kept state is not what was written: put back a copy of it."""


class ProtocolError(AiopsError):
    """A peer broke the rules of the wire protocol."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the wire does not allow at this point."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the wire does not allow; the connection is over."""


class ConnectionLost(AiopsError, ConnectionError):
    """The connection to a peer ended; the text names the peer."""


class DeadlineExceeded(ConnectionLost, TimeoutError):
    """A peer did not answer within the stated time; the text names the peer."""


class RolledBack(ConnectionLost):
    """A server of a sharded model ended, to begin again at an earlier moment that all of them have.

    One of them has lost its newest rows, as with the power, or was a standby that had not got them
    yet. ``aiops serve`` begins again by itself.
    """


class Corrupted(RemoteProtocolError, ConnectionLost):
    """Bytes were changed on the way, as a checksum shows; the connection is over.

    A client makes another one, and asks again, so it is raised only if that goes on until the
    time-out.
    """


class Superseded(ConnectionLost):
    """Another server goes on with the run of this one, which must not change it any more.

    ``details`` has the ``generation`` that is known to be higher. A client that holds the address
    of the successor goes there.
    """

    code: ClassVar[str] = "superseded"


class Untrusted(ConnectionLost):
    """One side of a TLS connection does not accept the other's certificate, name or protocol.

    The text says which, and what to do. Before a first connection it is raised at once; later it is
    one of the reasons for which a server cannot be reached, and is tried again until the time-out.
    """


class Refused(AiopsError):
    """The server understood the request and refused it; its parameters are unchanged."""

    code: ClassVar[str] = "refused"


class BadPush(Refused):
    """A push does not fit the model, or holds a value that would ruin the parameters."""

    code = "bad-push"


class StaleGradient(Refused):
    """The policy did not take this gradient: compute it again on the current parameters."""

    code = "stale"


class Restarted(StaleGradient):
    """The server was restarted, and its versions differ: fetch, and compute the gradient again.

    The client finds this out when it connects again, and does not push to the present run. The text
    says whether the push was sent before: the earlier run may then have applied it.
    """

    code = "restarted"


class NotReady(Refused):
    """The model is not defined yet."""

    code = "not-ready"


class Unauthorised(Refused):
    """The token is missing or wrong."""

    code = "unauthorised"


class Kicked(Refused):
    """An administrator has ended this client's connections (``aiops kick``).

    The server does not welcome this client again; another one is welcome.
    """

    code = "kicked"


class Unavailable(Refused):
    """The server cannot take this: it is full, paused or shutting down. Clients try again first."""

    code = "unavailable"


class Standby(Unavailable):
    """The server is a standby, and serves no workers unless it is promoted.

    ``details`` has the URL of its ``primary``.
    """

    code = "standby"


_BY_CODE: Mapping[str, type[Refused]] = {
    kind.code: kind
    for kind in (
        *(Refused, BadPush, StaleGradient, Restarted, NotReady, Unauthorised),
        *(Kicked, Unavailable, Standby),
    )
}


def refusal(code: str, text: str, details: Mapping[str, Any] | None = None) -> Refused:
    """Return the error of a peer's ``error`` message; an unknown code gives a plain refusal."""
    return _BY_CODE.get(code, Refused)(
        text, **{str(key): value for key, value in (details or {}).items()}
    )


def fatal(code: str, text: str, details: Mapping[str, Any] | None = None) -> AiopsError:
    """Return the error of a peer's ``error`` message that ends the connection."""
    if code == Superseded.code:
        return Superseded(text, **{str(key): value for key, value in (details or {}).items()})
    return refusal(code, text, details)


_LISTED = 20  # known names that an error lists: it must stay a sentence for a model of thousands


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt word, as half a sentence: ``did you mean 'fasgd'?``."""
    names = sorted(known)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known: {', '.join(names[:_LISTED])}{more}"
