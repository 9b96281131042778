"""Two networks of namespaces with a router between them, which can be cut in several ways.

Linux alone has them, and making them takes root. ``server`` and ``workers`` are hosts with one
address each; their packets to each other pass ``router``. What runs on one side has to `enter` it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from typing import Any

from aiops.common.closing import Closing
from aiops.errors import AiopsError

CUTS = ("down", "blackhole", "to-server", "to-workers")
"""The workers' link goes down; the router drops all packets, those to the server, or those to the
workers."""

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class RoutedNetwork(Closing):
    """The two sides and their router.

    Parameters
    ----------
    name
        Begins the names of the namespaces: unique on this machine, at most 8 characters.

    Attributes
    ----------
    server, workers
        The names of the sides.

    Raises
    ------
    AiopsError
        When this process may not make them.
    """

    SERVER, WORKERS = "10.77.1.2", "10.77.2.2"
    """The addresses of the sides."""

    def __init__(self, name: str) -> None:
        self.server, self.workers, self._router = f"{name}-s", f"{name}-w", f"{name}-r"
        try:
            for each in (self.server, self.workers, self._router):
                _ip("netns", "add", each)
                _ip("-n", each, "link", "set", "lo", "up")
            self._join(self.server, "to-s", self.SERVER)
            self._join(self.workers, "to-w", self.WORKERS)
            _ip("netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        except BaseException:
            self.close()
            raise

    def _join(self, side: str, port: str, address: str) -> None:
        """Join a side to the router by a pair of virtual devices."""
        gateway = address.rpartition(".")[0] + ".1"
        names = ("netns", side, "type", "veth", "peer", "name", port, "netns", self._router)
        _ip("link", "add", "eth0", *names)
        for where, device, own in ((side, "eth0", address), (self._router, port, gateway)):
            _ip("-n", where, "address", "add", f"{own}/24", "dev", device)
            _ip("-n", where, "link", "set", device, "up")
        _ip("-n", side, "route", "add", "default", "via", gateway)

    def cut(self, kind: str) -> None:
        """Cut the network in one of the ways of `CUTS`."""
        self._switch(kind, cut=True)

    def heal(self, kind: str) -> None:
        """Undo a cut."""
        self._switch(kind, cut=False)

    def _switch(self, kind: str, *, cut: bool) -> None:
        if kind == "down":
            _ip("-n", self._router, "link", "set", "to-w", "down" if cut else "up")
            return
        dropped = {"to-server": [self.SERVER], "to-workers": [self.WORKERS]}
        for address in dropped.get(kind, [self.SERVER, self.WORKERS]):
            what = "add" if cut else "del"
            _ip("-n", self._router, "route", what, "blackhole", f"{address}/32")

    def close(self) -> None:
        """Remove them; processes that still run there keep theirs."""
        for each in (self.server, self.workers, self._router):
            subprocess.run(["ip", "netns", "del", each], check=False, capture_output=True)


def inside(side: str, target: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process that has moved to one side.

    Raises
    ------
    OSError
        When it may not move.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{side}", os.O_RDONLY)
    try:
        if libc.setns(namespace, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into {side}")
    finally:
        os.close(namespace)
    target(*arguments)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    except OSError as error:
        raise AiopsError(f"network namespaces need the command ip: {error.strerror}") from None
    if done.returncode:
        raise AiopsError(
            f"ip {' '.join(words)}: {done.stderr.strip()}: namespaces of the network need Linux and"
            " root"
        )
