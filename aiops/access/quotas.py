"""Measure what the holders of a token use against its quotas, and how long they are to wait.

A message is counted when it has come, whatever its size, and an answer with the next message. So
the buckets may fall below zero, by one message of each connection; nothing more is read from the
connections of the token until the time has paid that back. `aiops.bandwidth.token_bucket` is for
what must not be exceeded in any second: it grants bytes before they cross.
"""

from __future__ import annotations

from aiops.access.tokens import AccessToken
from aiops.wire.traffic import Traffic

_SAVED = 1.0
"""Seconds of a quota that may be saved up, and used at once."""


class DebtBucket:
    """A token bucket that may fall below zero.

    Parameters
    ----------
    rate
        What it earns per second.
    now
        The time, in seconds; it is full then.
    """

    __slots__ = ("_at", "_balance", "_rate")

    def __init__(self, rate: int, now: float) -> None:
        self._rate, self._balance, self._at = rate, _SAVED * rate, now

    def spend(self, amount: int, now: float) -> None:
        """Take an amount out, whether it is there or not."""
        earned = self._rate * max(0.0, now - self._at)
        self._balance = min(_SAVED * self._rate, self._balance + earned) - amount
        self._at = max(now, self._at)

    def debt(self, now: float) -> float:
        """Return the seconds after which it is not below zero any more; 0: it is not now."""
        self.spend(0, now)
        return max(0.0, -self._balance / self._rate)


class Quota:
    """The use of one token by all of its connections.

    Attributes
    ----------
    waiting
        The number of connections that wait at present.
    waited
        Seconds for which connections have waited; of those that wait now, not yet.
    """

    def __init__(self) -> None:
        self._buckets: tuple[DebtBucket | None, DebtBucket | None] = None, None
        self._rates: tuple[int | None, int | None] = None, None
        self.waiting, self.waited = 0, 0.0

    def limit(self, token: AccessToken, now: float) -> None:
        """Keep to the quotas of a token from here on."""
        rates = token.bytes_per_second, token.requests_per_second
        if rates != self._rates:
            self._rates = rates
            nbytes, requests = (None if rate is None else DebtBucket(rate, now) for rate in rates)
            self._buckets = nbytes, requests

    @property
    def bounded(self) -> bool:
        """True if there is a quota."""
        return self._rates != (None, None)

    def spend(self, nbytes: int, requests: int, now: float) -> None:
        """Count bytes and requests."""
        for bucket, amount in zip(self._buckets, (nbytes, requests), strict=True):
            if bucket is not None:
                bucket.spend(amount, now)

    def debt(self, now: float) -> float:
        """Return the seconds for which nothing more may be read; 0: it may be now."""
        return max(0.0 if bucket is None else bucket.debt(now) for bucket in self._buckets)


class Meter:
    """Counts what crosses one connection, for the quota of its token.

    Parameters
    ----------
    quota
        The token's.
    traffic
        The connection's; what has crossed before is not counted.
    """

    __slots__ = ("_counted", "_held", "_quota", "_since", "_traffic")

    def __init__(self, quota: Quota, traffic: Traffic) -> None:
        self._quota, self._traffic = quota, traffic
        self._counted = traffic.bytes_in + traffic.bytes_out
        self._held, self._since = 0.0, -1.0

    def read(self, requests: int, now: float) -> float:
        """Count requests, and the bytes that have crossed since the last time; as `Quota.debt`."""
        before, traffic = self._counted, self._traffic
        self._counted = traffic.bytes_in + traffic.bytes_out
        self._quota.spend(self._counted - before, requests, now)
        return self._quota.debt(now)

    @property
    def holds(self) -> bool:
        """True while the connection waits."""
        return self._since >= 0

    def hold(self, now: float) -> None:
        """Note that the connection waits from here on."""
        self._since = now
        self._quota.waiting += 1

    def release(self, now: float) -> None:
        """Note that it waits no more."""
        if self.holds:
            self._held += now - self._since
            self._quota.waited += now - self._since
            self._since = -1.0
            self._quota.waiting -= 1

    def held(self, now: float) -> float:
        """Return the seconds for which the connection has waited so far."""
        return self._held + (now - self._since if self.holds else 0.0)
