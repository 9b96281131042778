"""Where workers that average their models meet: who is in a round, and how long it is waited for.

A worker that is ready says so (`join_round`) and is answered (`round`) with everybody who was:

* as soon as all who average are ready; or
* a grace period after two were ready: who is not there misses the round, and is not waited for
  again until it is ready once more; or
* a worker that is ready alone, an interval and a grace period later: nobody else is there.

So nobody waits for ever, and a straggler costs the others a grace period, once. The models
themselves never come here.

A worker that has taken no average yet is *new*. When there is somebody who is not, its model does
not count: it receives the average of the others, and begins with that. While all who are not new
are away it has nothing to begin with; it is told so (a round of nobody), and asks again.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiops.common import urls
from aiops.engine.events import Effect, Reply, WakeAt
from aiops.errors import BadPush, Refused, Unavailable
from aiops.model.layout import Layout
from aiops.wire.messages import WIRE_NAME, Error, JoinRound, Round


@dataclass(slots=True)
class _Seat:
    """A worker that averages: its request while it is ready, and what is known of it."""

    request: JoinRound | None = None
    host: str = ""
    since: float = 0.0
    new: bool = True
    awaited: bool = True


class Rendezvous:
    """One server's rounds.

    Parameters
    ----------
    plan
        The ``average`` part of the algorithm's plan, or None when it has none.
    effects
        The engine's list of effects, appended to.
    """

    def __init__(self, plan: Mapping[str, Any] | None, effects: list[Effect]) -> None:
        self._plan, self._effects = plan, effects
        self._seats: dict[int, _Seat] = {}  # by connection
        self._stopping = False
        self.rounds = 0

    def meet(self, peer: int, message: JoinRound, layout: Layout, now: float) -> None:
        """Hear that a worker is ready, or (port 0) that it is no longer.

        Raises
        ------
        Refused
            When it cannot be, whatever the others do.
        """
        seat = self._seats.get(peer)
        if message.port == 0:
            self._withdraw(peer, seat, message)
            self._form(now)
            return
        if self._plan is None:
            raise Refused("this server's policy averages no models: start it with --policy average")
        if self._stopping:
            raise _ending()
        self._check_address(peer, message)
        if message.digest != layout.digest:
            raise BadPush(
                "this worker's model is not the one that the others average: give all workers"
                " tensors of the same names, shapes and dtypes"
            )
        if seat is not None and seat.request is not None:  # it has given up waiting for that
            self._dismiss(peer, seat.request)
        self._seats[peer] = _Seat(message, message.host, now, message.rounds == 0)
        self._form(now)

    def left(self, peer: int, now: float) -> None:
        """Hear that a connection ended."""
        if self._seats.pop(peer, None) is not None:
            self._form(now)

    def tick(self, now: float) -> None:
        """See whether those who are ready have waited long enough."""
        self._form(now)

    def stop(self) -> None:
        """Form no more rounds, and tell those who wait for one."""
        self._stopping = True
        fault = _ending()
        for peer, request in self._ready().values():
            text = str(fault)
            self._effects.append(Reply(peer, Error(request.id, fault.code, text, {}, False)))
        self._seats.clear()

    def report(self) -> dict[str, int]:
        """Return the statistics."""
        return {"rounds": self.rounds, "averaging": len(self._seats), "ready": len(self._ready())}

    # ------------------------------------------------------------ inside

    def _check_address(self, peer: int, message: JoinRound) -> None:
        """Refuse an address that the others cannot reach: it would cost all of them every round."""
        host = message.host
        if message.port >= 1 << 16 or not _is_literal(host):
            raise Refused(
                f"{host!r}:{message.port} is no address to be reached at: it must be an IP address"
                " without a zone, and not that of all interfaces; pass host=..."
            )
        for other, seat in self._seats.items():
            if other != peer and urls.is_loopback(seat.host) != urls.is_loopback(host):
                raise Refused(
                    f"this worker is to be reached at {host} and another one at {seat.host}, but a"
                    " loopback address is reached from its own machine only: pass host=... an"
                    " address that all others can reach to the worker on loopback"
                )

    def _ready(self) -> dict[int, tuple[int, JoinRound]]:
        """Return who is ready: connection and request, in the order of the connections."""
        return {
            peer: (peer, seat.request)
            for peer, seat in sorted(self._seats.items())
            if seat.request is not None
        }

    def _withdraw(self, peer: int, seat: _Seat | None, message: JoinRound) -> None:
        if seat is not None:
            seat.awaited = False
            if seat.request is not None:
                self._dismiss(peer, seat.request)
                seat.request = None
        self._dismiss(peer, message)

    def _dismiss(self, peer: int, request: JoinRound) -> None:
        self._effects.append(Reply(peer, Round(request.id, 0, 0, (), b"")))

    def _form(self, now: float) -> None:
        """Answer those who are ready, if it is time."""
        ready = self._ready()
        if not ready or self._stopping:
            return
        settled = any(not self._seats[peer].new for peer in ready)
        baseless = not settled and any(not seat.new for seat in self._seats.values())
        late = [s for s in self._seats.values() if s.request is None and s.awaited]
        if late or baseless:
            due = self._due([self._seats[peer].since for peer in ready], baseless)
            if now < due:
                self._effects.append(WakeAt(due))
                return
        for seat in late:
            seat.awaited = False
        if baseless:
            for peer, request in ready.values():
                self._dismiss(peer, request)
        else:
            self._answer(ready, settled)
        for peer in ready:
            self._seats[peer].request = None

    def _due(self, since: list[float], baseless: bool) -> float:
        """Return until when those who are not ready are waited for."""
        assert self._plan is not None
        interval, grace = float(self._plan["interval"]), float(self._plan["grace"])
        first, *others = sorted(since)
        return first + interval + grace if baseless or not others else others[0] + grace

    def _answer(self, ready: dict[int, tuple[int, JoinRound]], settled: bool) -> None:
        """Tell everybody who is ready of the others."""
        self.rounds += 1
        members = tuple(
            (request.host, request.port, not settled or not self._seats[peer].new)
            for peer, request in ready.values()
        )
        secret = _secret(self.rounds, [request.nonce for _peer, request in ready.values()])
        for rank, (peer, request) in enumerate(ready.values()):
            told = Round(request.id, self.rounds, rank, members, secret)
            self._effects.append(Reply(peer, told))
            self._seats[peer].new = False  # unless the round fails: its next request tells


def _is_literal(host: str) -> bool:
    """Return whether this is an IP address that says the same on every machine."""
    try:
        return "%" not in host and not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _secret(number: int, nonces: list[bytes]) -> bytes:
    """Return what only the members of a round can know, since each of them has drawn a nonce."""
    said = b"".join(len(nonce).to_bytes(4, "big") + nonce for nonce in nonces)
    return hashlib.sha256(WIRE_NAME + b" round" + number.to_bytes(8, "big") + said).digest()


def _ending() -> Unavailable:
    return Unavailable("the server is shutting down: there are no more rounds")
