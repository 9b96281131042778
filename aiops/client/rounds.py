"""The rounds in which a worker averages its model with others: meeting, ring, taking over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiops.averaging.ring_allreduce import LIMIT, Flat, Ring, fit
from aiops.client.backoff import reason
from aiops.client.fair_lock import FairLock
from aiops.client.meeting import MeetingClient
from aiops.client.replica import Replica
from aiops.client.ring_transport import Listener, take_part
from aiops.errors import (
    AiopsError,
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    NotReady,
    RemoteProtocolError,
    Unauthorised,
    Unavailable,
    UsageError,
)
from aiops.model.arena import Arena
from aiops.net.dns import addresses
from aiops.net.environment import SURROUNDINGS
from aiops.wire import messages
from aiops.wire.traffic import Traffic

_log = logging.getLogger("aiops.client")

_PASSING = (ConnectionLost, RemoteProtocolError, Unavailable, NotReady)
"""What costs one round, and not the run."""

_SLOWEST = 64 * 1024
"""Bytes per second that a round must manage in all, beyond the time-out."""


@dataclass(slots=True)
class Averages:
    """The counts of one worker's averages.

    Attributes
    ----------
    rounds
        Averages taken over, with at least one other worker.
    alone
        Rounds in which no other worker was ready.
    failed
        Rounds given up, because a worker died in the midst of one, say.
    workers
        How many were in the last round, this one included.
    seconds
        Time spent in rounds (not in waiting for them).
    traffic
        Bytes to and from other workers.
    last_error
        The error of the last failed round.
    """

    rounds: int = 0
    alone: int = 0
    failed: int = 0
    workers: int = 0
    seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    last_error: AiopsError | None = None


class Rounds:
    """One worker's rounds.

    Parameters
    ----------
    client
        The client with which it meets others at the server; connected before `begin`.
    replica, lock
        The model, and the lock that guards it.
    timeout
        Seconds that a round may take, beyond what the model's size may need.
    host
        Where other workers reach this one; None: at this side's address of the connection.

    Attributes
    ----------
    stats
        Their counts.
    plan
        The policy's settings, once the server has announced them.
    taken
        Averages taken over, alone ones included: 0 is new.
    """

    def __init__(
        self,
        client: MeetingClient,
        replica: Replica,
        lock: FairLock,
        timeout: float,
        host: str | None,
    ) -> None:
        self._client, self._replica, self._lock = client, replica, lock
        self._timeout, self._host = timeout, host
        self.stats = Averages()
        self.plan: Mapping[str, Any] = {}
        self.taken = 0

    async def begin(self) -> None:
        """Learn what the server wants, and get ready; `close` is due when it has succeeded.

        Raises
        ------
        UsageError
            When the server averages no models, or other workers cannot be listened for.
        BadPush
            When the server's model has other tensors.
        """
        client, replica = self._client, self._replica
        plan = client.plan.get("average")
        if not isinstance(plan, dict):
            raise UsageError(
                f"{client.url} runs {client.policy!r}, which averages no models: start it with"
                " --policy average, or use aiops.Worker"
            )
        self.plan = plan
        layout = await client.agree(replica.arrays())
        self._copy, self._flat = Arena(layout), Flat(layout)
        self._host = await self._address(client.local_host)
        try:
            self._listener = Listener(self._host, plan["stall"])
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._host} for other workers ({error.strerror or error}): pass"
                " host=... an address of this machine that they can reach"
            ) from None

    async def _address(self, local: str) -> str:
        """Return the address at which to listen: as was asked for, or where the server is met."""
        here = SURROUNDINGS.get()
        host = self._host or here.reached_at or local
        try:
            return (here.known(host) or await addresses(host, self._timeout))[0]
        except OSError as error:
            raise UsageError(f"host={host!r}: {reason(error)}: pass an IP address") from None

    async def close(self) -> None:
        """Listen for other workers no longer."""
        await self._listener.close()

    async def withdraw(self) -> None:
        """Withdraw, so that the other workers do not wait for this one.

        A request to meet that is under way is answered too: with an empty round, or a last one.
        """
        await self._client.meet("", 0, self.taken)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received from, and sent to, the server and the other workers."""
        others = self.stats.traffic
        received, sent = self._client.traffic
        return received + others.bytes_in, sent + others.bytes_out

    async def take(self, wanted: Callable[[], bool], until: float | None = None) -> int:
        """Take part in one round; return how many were in it, 0 when it came to nothing.

        ``wanted``: whether there is to be one after all, once the model has been copied.

        Raises
        ------
        TimeoutError
            When no round has begun by the loop's time ``until``.
        BadPush
            When the model holds a value that cannot be shared: training has diverged.
        """
        try:
            await self._copy_out()
            if not wanted():
                return 0
            async with asyncio.timeout_at(until):
                told = await self._meet()
            if not told.members:
                return 0
            if len(told.members) == 1:
                self.stats.alone += 1
                self.taken += 1
            else:
                await self._round(told)
            self.stats.workers = len(told.members)
            return len(told.members)
        except _PASSING as error:
            self._failed(error)
            return 0
        except Unauthorised as error:
            if error.details.get("worker") is None:
                raise
            self._failed(error)
            return 0

    async def _copy_out(self) -> None:
        """Copy the model, and see that it may be shared."""
        async with self._lock.awaited():
            self._replica.copy_out(self._copy)
        self._flat.load(self._copy)
        for name, values in self._flat.views:
            if not fit(values):
                raise BadPush(
                    f"{name!r} holds a value that is not finite or not below {LIMIT:g}, and is not"
                    " averaged: training has diverged; lower the learning rate",
                    tensor=name,
                )

    async def _meet(self) -> messages.Round:
        """Wait for others."""
        assert self._host is not None
        try:
            return await self._client.meet(self._host, self._listener.port, self.taken)
        except NotReady:  # the server was started anew
            await self._client.define_again(self._copy.views)
            raise

    async def _round(self, told: messages.Round) -> None:
        """Average with the others, and take the mean over."""
        counts = [counts for _host, _port, counts in told.members]
        if not (told.rank < len(counts) and any(counts)):
            raise RemoteProtocolError(f"{self._client.url} told of a round that cannot be")
        loop = asyncio.get_running_loop()
        ring = Ring(told.rank, counts, self._flat)
        allowed = self._timeout + self._flat.data.nbytes / _SLOWEST
        began = loop.time()
        try:
            async with asyncio.timeout(allowed):
                stall = self.plan["stall"]
                await take_part(told, ring, self._listener, stall, self.stats.traffic)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"round {told.number} took longer than {allowed:.0f} s: a worker is too slow"
            ) from None
        finally:
            self.stats.seconds += loop.time() - began
        prepared = self._replica.prepare(self._flat, self._copy)
        async with self._lock.awaited():
            self._replica.add(prepared)
        self.taken += 1
        self.stats.rounds += 1

    def _failed(self, error: AiopsError) -> None:
        self.stats.failed += 1
        if type(error) is not type(self.stats.last_error):  # once per kind of trouble
            _log.warning("an average was given up: %s", error)
        self.stats.last_error = error
