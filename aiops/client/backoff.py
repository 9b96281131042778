"""Attempts to connect: their order, their caps and the pauses between; limits of time-outs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final, TypeVar

from aiops.common import urls
from aiops.common.failure_waits import FailureWaits
from aiops.common.urls import ServerAddress
from aiops.errors import (
    AiopsError,
    ConnectionLost,
    DeadlineExceeded,
    Superseded,
    Unavailable,
    Untrusted,
    UsageError,
)

_WAITS: Final = FailureWaits()  # before a welcome a client knows no other

FIRST, LONGEST = _WAITS.first_pause, _WAITS.longest_pause
"""Seconds: the first pause between attempts, and the longest."""

ATTEMPT: Final = _WAITS.attempt
"""Seconds that an attempt to connect to one address may take, and a look-up of a host's."""

LONGEST_WELCOME: Final = _WAITS.welcome
"""Seconds that a server which takes connections may leave a client waiting for its welcome."""

_SILENT = 1.5
"""Seconds of failed attempts without a word about them."""

_log = logging.getLogger("aiops.client")

Said = TypeVar("Said", bound=AiopsError)

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
    """The attempts to connect: to which server, how long one waits, and when the last has failed.

    The servers are tried in turn, and there is a pause after each round. The server that welcomed
    this client last is the first of the next round.

    Parameters
    ----------
    servers
        The servers, of which any will do.
    randbelow
        As `delays`'s.
    until
        When to stop trying, in seconds by the caller's clock (`pause`'s ``now``); may be changed.

    Attributes
    ----------
    said
        The reason that a server gave for not taking this client or a request of it, if that was
        the last that was heard; else None. Set it for requests.
    """

    until: float

    def __init__(
        self, servers: Sequence[ServerAddress], randbelow: Callable[[int], int], until: float
    ) -> None:
        self._servers, self._randbelow = servers, randbelow
        self._patience = [ATTEMPT] * len(servers)  # seconds to wait for each one's welcome
        self._at = 0  # the server to try
        self.said: Superseded | Unavailable | None = None
        self._welcomed = False  # by any server, at any time
        self._told: Exception | None = None  # the end of the last attempt that had its full time
        self._begins = 0.0  # the next attempt
        self.restart(until)

    def restart(self, until: float) -> None:
        """Try until then, with the shortest pause first."""
        self.until = until
        self._delays = delays(self._randbelow)
        self._made = (0.0, 0)
        self._useful = False  # whether the last attempt made a connection that was of use
        self._useless = 0  # connections that brought no answer
        self._since: float | None = None  # when the first of them failed
        self._is_told = False
        self._tried = 0  # servers, in this round

    @property
    def server(self) -> ServerAddress:
        """The server to try now."""
        return self._servers[self._at]

    @property
    def several(self) -> bool:
        """True if there are alternatives."""
        return len(self._servers) > 1

    @property
    def patience(self) -> float:
        """Seconds to wait for the next bytes from the server before its welcome is complete.

        `ATTEMPT` at first, since a connection may be cut off just after it was made. It doubles
        after each wait in vain, up to `LONGEST_WELCOME`: a busy server would otherwise be left by
        all of its clients each time just before it welcomes them.
        """
        return self._patience[self._at]

    def made(self, now: float, answered: int) -> None:
        """Note that the server has welcomed this client, and how many answers came before it."""
        self._made, self._useful = (now, answered), True
        self._welcomed, self._told = True, None
        self._patience[self._at], self.said = ATTEMPT, None

    def lost(
        self, now: float, answered: int, until: float, error: Exception, trying: float = inf
    ) -> float:
        """Note that it is gone, and why; return until when to try for another.

        That is ``until``, but ``trying`` if it is earlier and this connection was of no use: a
        request because of which a server ends each connection must not be sent for ever.

        Pauses begin with the shortest if the connection brought an answer or lasted `LONGEST`.
        Otherwise they go on growing, to spare a server that ends each connection at once. An answer
        does not count if the server then sends the client away: of two servers that each take the
        other for the primary, each answers what a standby may before it does.
        """
        since, before = self._made
        sent_away = isinstance(error, Superseded | Unavailable)
        answers = answered > before and not sent_away
        self._useful = answers or now - since >= LONGEST
        if self._useful:
            self.restart(until)
            self._useful = True
        else:
            self._useless += 1
            until = min(until, trying)
        self.until = until
        return self.until

    def pause(self, now: float, error: Exception) -> float:
        """Return the seconds to wait before the next attempt, after this one failed.

        Raises
        ------
        Untrusted
            When TLS fails with the one server that there is, and never was any other way: a setting
            is wrong. Of several, or once welcomed, it is tried again: a certificate may be renewed.
        Unavailable, Superseded
            When there is no time left for another, and a server has said why.
        DeadlineExceeded
            When there is none, and the server does not send its welcome.
        ConnectionLost
            When there is none, for any other reason.
        """
        if isinstance(error, Superseded | Unavailable):
            self.said = error
        if isinstance(error, Untrusted) and not (self._welcomed or self.several):
            raise error
        if not isinstance(error, DeadlineExceeded) or now - self._begins >= self.patience:
            self._told = error
        pause = self._next(error)
        self._begins = now + pause
        self._tell(now, error)
        if now + pause >= self.until:
            error = self._told or error  # one that was cut short tells less than the one before
            final = self._final(error)
            raise final from (None if final is error else error)
        return pause

    def _tell(self, now: float, error: Exception) -> None:
        """Log once in a series of attempts why it goes on: a program that waits says so."""
        if self._since is None:
            self._since = now
        elif now - self._since >= _SILENT and not self._is_told:
            self._is_told = True
            _log.warning(
                "%s cannot be reached (%s): trying again for up to %.0f s",
                urls.write_all(self._servers),
                reason(error),
                max(0.0, self.until - now),
            )

    def _next(self, error: Exception) -> float:
        """Turn to the next server, if it is its turn; return the seconds before the attempt."""
        late = isinstance(error, DeadlineExceeded)
        self._patience[self._at] = min(2 * self.patience, LONGEST_WELCOME) if late else ATTEMPT
        if self._useful and not isinstance(error, Superseded | Unavailable):
            self._useful = False  # it may be a short interruption: the same server again
            return next(self._delays)
        self._useful = False
        self._at = (self._at + 1) % len(self._servers)
        self._tried = (self._tried + 1) % len(self._servers)
        return 0.0 if self._tried else next(self._delays)

    def _final(self, error: Exception) -> Exception:
        if isinstance(error, Unavailable):
            return error
        if self.said is not None:
            return unreachable_since(self.said, error)
        if isinstance(error, DeadlineExceeded | Superseded | Untrusted):
            return error
        servers = urls.write_all(self._servers)
        if self._useless > 1:
            return ConnectionLost(
                f"{servers} took {self._useless} connections, and none brought an answer"
                f" ({reason(error)}): the server's log says why it ended them"
            )
        return ConnectionLost(
            f"{servers} cannot be reached ({reason(error)}): is the server running?"
        )


class Repetitions:
    """The pauses before requests are sent again to a connected server that could not take them.

    Parameters
    ----------
    randbelow
        As `delays`'s.
    """

    def __init__(self, randbelow: Callable[[int], int]) -> None:
        self._randbelow = randbelow
        self._delays, self._until = delays(randbelow), 0.0
        self._fresh = 0.0  # a refusal after this time has nothing to do with the last one

    def pause(self, now: float, refusal: Unavailable, timeout: float) -> float:
        """Return the seconds to wait before the requests are sent again.

        Parameters
        ----------
        now
            Seconds by the caller's clock.
        refusal
            The last one.
        timeout
            Seconds after the first refusal in which they are sent again.

        Raises
        ------
        Unavailable
            The refusal, when the time is up.
        """
        if now >= self._fresh:
            self._delays, self._until = delays(self._randbelow), now + timeout
        pause = next(self._delays)
        if now + pause >= self._until:
            self._fresh = now
            raise refusal
        self._fresh = now + pause + 2 * LONGEST
        return pause


def unreachable_since(said: Said, error: Exception) -> Said:
    """Return the error for a server that said why it ends, and cannot be reached since."""
    text = f"{said}; since then it cannot be reached ({reason(error)})"
    return type(said)(text, **said.details)


def reason(error: Exception) -> str:
    """Return the shortest text of an error."""
    known = getattr(error, "strerror", None) or str(error)
    if not known and isinstance(error, TimeoutError):
        return "no answer in time"
    return known or type(error).__name__


def overdue(server: str, what: str, within: str) -> DeadlineExceeded:
    """Return the error for an answer that has not come ``within`` its time."""
    return DeadlineExceeded(
        f"{server} did not send {what} {within}: it may be overloaded or waiting for other workers;"
        " `aiops stats` tells, and timeout=... allows more"
    )
