"""Pauses before connecting again, and limits of time-outs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiops.errors import ConnectionLost, DeadlineExceeded, UsageError

FIRST, LONGEST = 0.05, 5.0
"""Seconds: the first pause, and the longest."""

LONGEST_TIMEOUT = 1e9
"""Seconds (30 years): what every clock and timer can still count."""


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that nothing can wait for.

    Raises
    ------
    UsageError
        When it is not more than 0, or endless.
    """
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"timeout must be more than 0 seconds and at most {LONGEST_TIMEOUT:g}, not {seconds}"
        )


def delays(randbelow: Callable[[int], int]) -> Iterator[float]:
    """Yield pauses in seconds, each about twice the last, each a random half of its length.

    The randomness (``randbelow(n)`` is uniform in 0..n−1) keeps a hundred workers of a restarted
    server from connecting at the same moment.
    """
    pause = FIRST
    while True:
        yield pause * (0.5 + randbelow(1000) / 2000)
        pause = min(2 * pause, LONGEST)


class Attempts:
    """The attempts to connect again: the pause before each, and when the last has failed.

    Parameters
    ----------
    server
        Its URL.
    randbelow
        As `delays`'s.
    until
        When to stop trying, in seconds by the caller's clock (`pause`'s ``now``); may be changed.
    """

    def __init__(self, server: str, randbelow: Callable[[int], int], until: float) -> None:
        self._server, self._randbelow = server, randbelow
        self.restart(until)

    def restart(self, until: float) -> None:
        """Try until then, with the shortest pause first."""
        self.until = until
        self._delays = delays(self._randbelow)
        self._made = (0.0, 0)

    def made(self, now: float, answered: int) -> None:
        """Note that there is a connection, and how many answers came before it."""
        self._made = now, answered

    def lost(self, now: float, answered: int, until: float) -> None:
        """Note that it is gone, and try until then for another.

        Pauses begin with the shortest if the connection brought an answer or lasted `LONGEST`.
        Otherwise they go on growing, to spare a server that ends each connection at once.
        """
        since, before = self._made
        if answered > before or now - since >= LONGEST:
            self.restart(until)
        self.until = until

    def pause(self, now: float, error: Exception) -> float:
        """Return the seconds to wait before the next attempt, after this one failed.

        Raises
        ------
        ConnectionLost
            When there is no time left for another.
        """
        pause = next(self._delays)
        if now + pause >= self.until:
            raise ConnectionLost(
                f"{self._server} cannot be reached ({reason(error)}): is the server running?"
            ) from error
        return pause


def reason(error: Exception) -> str:
    """Return the shortest text of an error."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def overdue(server: str, what: str, within: str) -> DeadlineExceeded:
    """Return the error for an answer that has not come ``within`` its time."""
    return DeadlineExceeded(
        f"{server} did not send {what} {within}: it may be overloaded or waiting for other workers;"
        " `aiops stats` tells, and timeout=... allows more"
    )
