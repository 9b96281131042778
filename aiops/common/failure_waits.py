"""The waits that follow from one setting, ``--failure-timeout``: the time to notice a dead network.

A peer's **machine** is known by TCP itself: every packet from it is acknowledged, and answers a
probe, while its processes compute, wait or are stopped. Nothing heard of it for most of the
time-out means that the network between is cut, and the connection is ended. A peer's **process** is
known by its messages. A silent one is pinged, and is given twelve times as long, as it may be busy:
so a worker that computes for long is not taken for dead.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = 5.0
"""Seconds."""

_SHORTEST = 3.2
"""Seconds: with a probe each second, three of them are lost by then."""

_SLOWEST = 32 << 20
"""Bytes per second, read and written, of the slowest work that is waited for."""


@dataclass(frozen=True, slots=True)
class FailureWaits:
    """The waits, in seconds.

    Attributes
    ----------
    timeout
        The setting: a partition is noticed within this time, but not before 4 s.
    """

    timeout: float = DEFAULT

    @property
    def unheard(self) -> float:
        """The time for which a peer's machine may be unheard before the connection is ended."""
        return max(0.8 * self.timeout, _SHORTEST)

    @property
    def probe(self) -> int:
        """Whole seconds of silence before TCP probes a peer's machine, and between probes.

        Lost packets are repeated at least as often, where the system lets one say so.
        """
        return max(1, round(self.timeout / 5))

    @property
    def heartbeat(self) -> float:
        """The silence of a peer's process before it is pinged."""
        return self.timeout

    @property
    def unanswered(self) -> float:
        """The silence of a peer's process, which was pinged, before the connection is ended."""
        return 12 * self.timeout

    @property
    def count(self) -> float:
        """The time that another server has to count its traffic, for statistics."""
        return self.unanswered / 3

    def work(self, nbytes: int) -> float:
        """Return the time that another server has for work on this many bytes.

        It may be stopped for as long as it may be silent. After that it is at the slowest that is
        waited for.
        """
        return self.unanswered + nbytes / _SLOWEST

    @property
    def attempt(self) -> float:
        """The time of an attempt to connect to one address, and of a look-up of a host's.

        The kernel repeats an unanswered request to connect after 1 s. So a network that is restored
        is noticed within this time: by the repetition, or by the attempt after the pause.
        """
        return _between(1.0, 0.3 * self.timeout, 1.5)

    @property
    def first_pause(self) -> float:
        """The first pause between attempts; each next one is twice as long."""
        return 0.05

    @property
    def longest_pause(self) -> float:
        """The longest pause; with an attempt's time it bounds how soon a healed network is used."""
        return _between(0.5, 0.2 * self.timeout, 1.0)

    @property
    def welcome(self) -> float:
        """The longest that a server which takes connections may let a client wait for a welcome."""
        return _between(2.0, 1.2 * self.timeout, 6.0)

    @property
    def hello(self) -> float:
        """The time that a new connection has to introduce itself (``--hello-deadline``)."""
        return max(2.0, 2 * self.timeout)

    @property
    def stall(self) -> float:
        """The time for which a peer in mid-message may be too slow (``--stall-deadline``)."""
        return max(5.0, 6 * self.timeout)

    @property
    def drain(self) -> float:
        """The time that unsent answers have when a server ends (``--drain-deadline``)."""
        return max(1.0, 2 * self.timeout)

    @property
    def standby(self) -> float:
        """The time for which ``replicated`` waits for a standby (``--standby-deadline``)."""
        return max(2.0, 2 * self.timeout)

    def table(self) -> dict[str, float]:
        """Return all of them by name, in seconds."""
        return {
            "machine unheard": self.unheard,
            "probe": float(self.probe),
            "ping": self.heartbeat,
            "process silent": self.unanswered,
            "a shard's statistics": self.count,
            "a shard's update and 1 s per 32 MiB": self.work(0),
            "attempt to connect": self.attempt,
            "pause between attempts": self.longest_pause,
            "welcome": self.welcome,
            "hello": self.hello,
            "stall": self.stall,
            "drain": self.drain,
            "standby": self.standby,
        }

    def __str__(self) -> str:
        """Return all of them in one line."""
        return ", ".join(f"{name} {seconds:g} s" for name, seconds in self.table().items())


def _between(least: float, value: float, most: float) -> float:
    return min(max(value, least), most)
