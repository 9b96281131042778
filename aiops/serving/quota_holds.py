"""Keep the connections of a server to the quotas of their tokens: they are read later, not refused.

A peer whose token has used up a quota is not read from for a while. What it has sent waits in the
system's buffers, and so it comes to wait itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from aiops.access.control import AccessControl
from aiops.serving.peer import Peer


class QuotaHolds:
    """The connections of one server that are held up, and those that may come to be.

    Parameters
    ----------
    access
        Has the meters of connections.
    now
        The server's clock.
    """

    def __init__(self, access: AccessControl, now: Callable[[], float]) -> None:
        self._access, self._now = access, now

    def measure(self, peers: Iterable[Peer]) -> None:
        """Measure these connections by the quotas that their tokens have now."""
        for peer in peers:
            self._release(peer)
            link = peer.link
            peer.meter = self._access.meter(link.number, link.wire.traffic, self._now())
            if peer.steady is not None:
                peer.steady.lost()
            link.shortcut, peer.steady = None, None  # it is made again, with what it is to count

    def read(self, peer: Peer, requests: int) -> None:
        """Count requests of a peer, and the bytes since the last time; hold it up if it is time.

        That is when its token has used up a quota.
        """
        meter = peer.meter
        if meter is None:
            return
        now = self._now()
        seconds = meter.read(requests, now)
        if seconds and not meter.holds:
            meter.hold(now)
            peer.link.hold()
            self._wait(peer, seconds)

    def counted(
        self, peer: Peer, exchange: Callable[[int], bytes | memoryview | None]
    ) -> Callable[[int], bytes | memoryview | None]:
        """Return a connection's way for steady exchanges, with which they are counted, too."""
        if peer.meter is None:
            return exchange

        traffic = peer.link.wire.traffic

        def counted(nbytes: int) -> bytes | memoryview | None:
            before = traffic.messages_in
            answer = exchange(nbytes)
            self.read(peer, traffic.messages_in - before)
            return answer

        return counted

    def lost(self, peer: Peer) -> None:
        """Note that a connection is gone."""
        if peer.meter is not None:
            peer.meter.release(self._now())
            peer.meter = None

    def _wait(self, peer: Peer, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._again, peer)

    def _again(self, peer: Peer) -> None:
        """Read from a connection again, unless others have used up what there was."""
        if peer.meter is None or not peer.meter.holds:
            return
        seconds = peer.meter.read(0, self._now())
        if seconds:
            self._wait(peer, seconds)
        else:
            self._release(peer)

    def _release(self, peer: Peer) -> None:
        if peer.meter is not None and peer.meter.holds:
            peer.meter.release(self._now())
            peer.link.release()
