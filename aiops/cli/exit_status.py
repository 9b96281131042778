"""The exit statuses of ``aiops``: those of sysexits(3), so that a script can tell errors apart.

docs/guide-running.md has the table. Two are of aiops alone: 1, for a command that answers a
question with no (``aiops state verify``, ``aiops doctor``), and `SUPERSEDED`.
"""

from __future__ import annotations

import errno
from socket import EAI_AGAIN, gaierror
from typing import Final

from aiops.errors import (
    AiopsError,
    BadPush,
    ConnectionLost,
    DamagedState,
    Kicked,
    ProtocolError,
    Refused,
    RolledBack,
    Superseded,
    Unauthorised,
    Untrusted,
    UsageError,
)

__all__ = ["MEANINGS", "UNAVAILABLE", "USAGE", "status_of"]

SUPERSEDED: Final = 3
USAGE: Final = 64
UNAVAILABLE: Final = 69
_DATA, _NO_INPUT, _NO_HOST, _SOFTWARE = 65, 66, 68, 70
_CANNOT_CREATE, _IO, _TEMPORARY, _PROTOCOL, _NO_PERMISSION, _CONFIG = 73, 74, 75, 76, 77, 78

MEANINGS: Final = {
    0: "done, or ended by SIGTERM or Ctrl-C as it should",
    1: "the answer is no: a check, a comparison or a worker has failed",
    SUPERSEDED: "another server has taken the place of this one",
    USAGE: "the command line: a flag, a setting or a combination that cannot work",
    _DATA: "what was read or sent is damaged, of another model, or not a file of that kind",
    _NO_INPUT: "a file or a folder to read is not there",
    _NO_HOST: "a host's name cannot be looked up",
    UNAVAILABLE: "a server, a port or a package is not to be had",
    _SOFTWARE: "a result is not what it must be, or a process of a run has failed",
    _CANNOT_CREATE: "a file or a folder cannot be made",
    _IO: "the disk or the network has failed in the middle",
    _TEMPORARY: "the server cannot take this now; try again later",
    _PROTOCOL: "the other side does not speak this protocol, or this version of it",
    _NO_PERMISSION: "a token, a certificate or a file's mode does not allow it",
    _CONFIG: "a file of settings (`--config`) cannot be used",
    130: "Ctrl-C, before the end",
}
"""Each status, in words."""

_BY_KIND: tuple[tuple[tuple[type[AiopsError], ...], int], ...] = (
    ((Superseded,), SUPERSEDED),
    ((DamagedState, BadPush), _DATA),
    ((Unauthorised, Kicked, Untrusted), _NO_PERMISSION),
    ((Refused, RolledBack), _TEMPORARY),
    ((ConnectionLost,), UNAVAILABLE),
    ((ProtocolError,), _PROTOCOL),
)
"""The kinds of errors, the most special first."""

_BY_NUMBER = {
    errno.EADDRINUSE: UNAVAILABLE,
    errno.EADDRNOTAVAIL: UNAVAILABLE,
    errno.ECONNREFUSED: UNAVAILABLE,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_PERMISSION),
    **dict.fromkeys((errno.ENOENT, errno.EISDIR, errno.ENOTDIR), _NO_INPUT),
    errno.EEXIST: _CANNOT_CREATE,
}


_BY_FACT = {
    "config": _CONFIG,
    "damaged": _DATA,
    "exposed": _NO_PERMISSION,
    "missing": _NO_INPUT,
    "unwritten": _IO,
}
"""By what the ``details`` of a `UsageError` name: the file that is so."""


def status_of(error: BaseException) -> int:
    """Return the exit status for an error that ends a command.

    That of a `UsageError` is the status of the system's error that it came from, where there is
    one; ``output`` in its ``details`` is the file that was to be written.
    """
    cause = error.__cause__ or error.__context__
    for kinds, status in _BY_KIND:
        if isinstance(error, kinds):
            unknown = status == UNAVAILABLE and _is_of_a_name(cause)
            return _NO_HOST if unknown and getattr(cause, "errno", 0) != EAI_AGAIN else status
    if isinstance(error, OSError):
        if _is_of_a_name(error):
            return _NO_HOST
        return _BY_NUMBER.get(error.errno or 0, _IO)
    if isinstance(error, ImportError):
        return UNAVAILABLE
    if not isinstance(error, UsageError):
        return _SOFTWARE
    for fact, status in _BY_FACT.items():
        if fact in error.details:
            return status
    status = status_of(cause) if isinstance(cause, OSError | ImportError) else USAGE
    cannot = "output" in error.details and status in (USAGE, _NO_INPUT)
    return _CANNOT_CREATE if cannot else status


def _is_of_a_name(error: BaseException | None) -> bool:
    """Return True if an error says that a host's name cannot be looked up."""
    return isinstance(error, gaierror) or (isinstance(error, OSError) and (error.errno or 0) < 0)
