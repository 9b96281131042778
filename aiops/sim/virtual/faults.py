"""Fault scripts: faults of hosts at stated times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from aiops.errors import UsageError, nearest
from aiops.sim.virtual.network import Network

FAULTS = ("cut", "kill", "revive", "silence", "restore")
"""The faults of a script; each is a method of `aiops.sim.virtual.network.Network`."""


def play(network: Network, script: str) -> None:
    """Schedule the faults of a script.

    Parameters
    ----------
    network
        Of the hosts.
    script
        One fault a line: seconds from now, the fault (`FAULTS`), and the host's name; ``#`` begins
        a comment, and empty lines are skipped::

            0.5  cut      alice      # her connections are reset
            2    silence  server     # nothing comes from it, and nothing reaches it
            4.5  restore  server

    Raises
    ------
    UsageError
        When a line cannot be read; no fault is scheduled then.
    """
    for seconds, what, name in list(_read(script.splitlines())):
        call: Callable[[str], object] = getattr(network, what)
        network.loop.call_later(seconds, call, name)


def _read(lines: Iterable[str]) -> Iterable[tuple[float, str, str]]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the script, {line.strip()!r}"
        try:
            seconds, what, name = float(words[0]), *words[1:]
        except ValueError:
            raise UsageError(f"{where}: write seconds, a fault and a host's name") from None
        if not 0 <= seconds < math.inf:
            raise UsageError(f"{where}: the time is 0 or more seconds from now")
        if what not in FAULTS:
            raise UsageError(f"{where}: no fault is called {what!r}; {nearest(what, FAULTS)}")
        yield seconds, what, name
