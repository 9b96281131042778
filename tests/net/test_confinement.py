"""Confinement: real processes in namespaces, a chroot and seccomp, at the other end of a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiops.net import confinement
from aiops.net.confinement import difference, peer_process
from aiops.net.unix_socket import listen
from tests.support import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux' abstract sockets")

CONFINE = {
    "nothing": "pass",
    "user": "check(libc.unshare(0x10000000))",
    "mount": "check(libc.unshare(0x00020000))",
    "process": "check(libc.unshare(0x20000000)); os.fork() and (os.wait(), os._exit(0))",
    "root": "os.chroot('/usr')",
    # Two filters of one instruction, which allows every call.
    "seccomp": """
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
check(libc.prctl(38, 1, 0, 0, 0))
check(libc.prctl(22, 2, ctypes.c_char_p(program)))
""",
    "other user": "os.setuid(12345)",
}

CLIENT = """
import ctypes, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result:
        print("cannot", os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
try:
    {confine}
except OSError as error:
    print("cannot", error.strerror, flush=True)
    sys.exit()
sock = socket.socket(socket.AF_UNIX)
sock.connect({name!r})
sock.recv(1)
"""


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Listen at a Unix socket's name, as a server does."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        sock = listen("127.0.0.1", port.getsockname()[1])
        assert sock is not None
        with sock:
            sock.settimeout(PATIENCE)
            yield sock


@pytest.mark.parametrize(
    ("confined", "why"),
    [
        ("nothing", ""),
        ("user", "runs in another user namespace"),
        ("mount", "runs in another mount namespace"),
        ("process", "runs in another container"),
        ("root", "has another root directory"),
        ("seccomp", "has other seccomp filters"),
        ("other user", f"runs as user 12345, not {os.geteuid()}"),
    ],
)
def test_a_process_is_set_apart_by(listening: socket.socket, confined: str, why: str) -> None:
    confine = CONFINE[confined].strip().replace("\n", "\n    ")
    code = CLIENT.format(confine=confine, name=listening.getsockname())
    with subprocess.Popen([sys.executable, "-IS", "-c", code], stdout=subprocess.PIPE) as child:
        accepted = None
        try:
            accepted = accept(listening, child)
            if accepted is None:
                pytest.skip("this process may not confine another like that")
            assert difference(accepted) == why
        finally:
            if accepted is not None:
                accepted.close()
            child.wait(PATIENCE)


def accept(listening: socket.socket, child: subprocess.Popen[bytes]) -> socket.socket | None:
    """Accept the child's connection; None if it could not be confined."""
    listening.settimeout(0.02)
    while child.poll() is None:
        try:
            return listening.accept()[0]
        except TimeoutError:
            continue
    return None


def test_a_process_that_has_ended_is_not_trusted(listening: socket.socket) -> None:
    code = CLIENT.format(confine="pass", name=listening.getsockname())
    with subprocess.Popen([sys.executable, "-IS", "-c", code], stdout=subprocess.PIPE) as child:
        accepted, _address = listening.accept()
        with accepted:
            assert peer_process(accepted) == child.pid
            child.kill()
            child.wait(PATIENCE)
            assert difference(accepted) == "cannot be examined: No such file or directory"


def test_its_number_may_have_become_another_process(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended, and one that would be trusted has its number by now."""
    code = CLIENT.format(confine="pass", name=listening.getsockname())
    with subprocess.Popen([sys.executable, "-IS", "-c", code], stdout=subprocess.PIPE) as child:
        accepted, _address = listening.accept()
        with accepted:
            held = confinement._handle(accepted, child.pid)
            child.kill()
            child.wait(PATIENCE)
            monkeypatch.setattr(confinement, "_handle", lambda sock, process: held)
            monkeypatch.setattr(confinement, "_credentials", lambda sock: (1, os.geteuid()))
            monkeypatch.setattr(confinement, "_differences", lambda ours, theirs: iter(()))
            assert difference(accepted) == "has ended"


def test_a_process_is_not_set_apart_from_itself() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert difference(ours) == ""
        assert peer_process(ours) == os.getpid()
