"""Compare the confinement of the process at the other end of a Unix socket with this one's.

Memory is shared only between processes that may trace each other as well: of one user, and in the
same container, if any. A process in a sandbox may belong to the same user, and still be kept from
what this process may do; it uses TCP. Compared are, in Linux' ``/proc``:

* the namespaces of users, processes and mounts: a container or a sandbox has its own;
* the root directory, which ``chroot`` changes;
* the number of seccomp filters, by which systemd, browsers and others restrict system calls.

A process that cannot be examined is taken for a confined one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SO_PEERPIDFD = 77  # Linux 6.5; `socket` does not have it
_NAMESPACES = {
    "user": "in another user namespace",
    "pid": "in another container",
    "mnt": "in another mount namespace",
}


def peer_process(sock: socket.socket) -> int:
    """Return the id of the process at the other end (0: one that cannot be seen from here)."""
    return _credentials(sock)[0]


def difference(sock: socket.socket) -> str:
    """Return how the process at the other end is set apart from this one; empty: it is not.

    The text goes on where "process 12" ends, such as "runs in another container".
    """
    process, user = _credentials(sock)
    if user != os.geteuid():
        return f"runs as user {user}, not {os.geteuid()}"
    if not process:
        return "runs in another container"
    if process == os.getpid():
        return ""
    try:
        held = _handle(sock, process)
        try:
            found = next(_differences(Path("/proc/self"), Path(f"/proc/{process}")), "")
            end = select.poll()  # unlike `select.select`, it takes descriptors beyond 1023
            end.register(held, select.POLLIN)
            ended = bool(end.poll(0))  # its id may be another's by now
        finally:
            os.close(held)
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    return "has ended" if ended else found


def _credentials(sock: socket.socket) -> tuple[int, int]:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _group = _CREDENTIALS.unpack(credentials)
    return process, user


def _handle(sock: socket.socket, process: int) -> int:
    """Return a descriptor of the process, which can be read from when it has ended."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(process)


def _differences(ours: Path, theirs: Path) -> Iterator[str]:
    for name, where in _NAMESPACES.items():
        if os.readlink(ours / "ns" / name) != os.readlink(theirs / "ns" / name):
            yield f"runs {where}"
    if not os.path.samestat(os.stat(ours / "root"), os.stat(theirs / "root")):
        yield "has another root directory"
    if _filters(ours) != _filters(theirs):
        yield "has other seccomp filters"


def _filters(process: Path) -> list[str]:
    """Return its seccomp mode and, from Linux 5.9 on, the number of its filters."""
    status = (process / "status").read_text(errors="replace")
    return [line.split()[-1] for line in status.splitlines() if line.startswith("Seccomp")]
