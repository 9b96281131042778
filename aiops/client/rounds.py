"""The rounds in which a worker averages its model with others: meeting, ring, taking over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiops.averaging.ring_allreduce import LIMIT, Flat, Ring, fit
from aiops.averaging.routes import Routes
from aiops.bandwidth.round_spacing import RoundSpacing
from aiops.client import variables
from aiops.client.asyncio.client import AsyncClient
from aiops.client.backoff import reason
from aiops.client.fair_lock import FairLock
from aiops.client.replica import Replica
from aiops.client.ring_listener import Listener
from aiops.client.ring_transport import take_part
from aiops.codecs import codec_named
from aiops.codecs.block_codec import BlockCodec
from aiops.common import urls
from aiops.common.tls_files import Tls
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
from aiops.model.layout import Array, Layout
from aiops.net.dns import addresses
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.tls import TlsPeers
from aiops.wire import ring_messages
from aiops.wire.fields import Examples
from aiops.wire.ring_proofs import mean_name
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
    relayed
        Rounds of these in which a connection of this worker led through the relay.
    codec
        The codec of the last of these; empty: values travelled as they are.
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
    relayed: int = 0
    codec: str = ""
    seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    last_error: AiopsError | None = None


class RoundsClient(AsyncClient):
    """An `AsyncClient` that also joins rounds of averaging."""

    _last_spans = 0.5  # a round under way has had a second before (LEAVE_TIMEOUT)

    def __init__(self, url: str, *, tls: Tls | None, **settings: Any) -> None:
        """Take an `AsyncClient`'s parameters."""
        super().__init__(url, role="worker", tls=tls, **settings)
        self._peers = TlsPeers(variables.tls_files(tls)) if urls.is_tls(url) else None

    def peers(self, encrypted: bool) -> TlsPeers | None:
        """Return the certificates for connections to other workers; None: these are not encrypted.

        ``encrypted``: the server's plan has them encrypted. It decides, and not the URL: a server's
        Unix socket takes clients of both schemes.

        Raises
        ------
        UsageError
            When there are no certificates, or the URL asks for TLS and the server has none.
        """
        if self._peers is not None and not encrypted:
            raise UsageError(
                f"{self.url} asks for TLS, and this server has none, so its workers would send"
                " their models to each other in the open: start it with --tls-cert and --tls-ca,"
                " or write aiops://"
            )
        if self._peers is None and encrypted:
            self._peers = TlsPeers(variables.tls_files(None))
        return self._peers

    async def join_round(
        self, host: str, port: int, taken: int, have: bytes = b"", settles: bool = False
    ) -> ring_messages.Round:
        """Wait for a round, reachable at ``host`` and ``port``; with port 0, withdraw.

        ``taken``: the rounds that this worker has taken part in. ``have``: the name of the mean
        that it took over last, if it keeps that. ``settles``: the round is to be settled.
        """
        found: ring_messages.Round = await self._run(
            partial(self._requests.join_round, host, port, taken, have, settles)
        )
        return found

    async def settle_round(
        self, number: int, whole: bool, seen: Examples
    ) -> ring_messages.RoundSettled:
        """Report that a round has ended here, and wait for the others' reports."""
        found: ring_messages.RoundSettled = await self._run(
            partial(self._requests.settle_round, number, whole, seen)
        )
        return found

    async def agree(self, arrays: Mapping[str, Array]) -> Layout:
        """Check that this model is the server's, or define it; return its layout.

        Raises
        ------
        BadPush
            When the server's has other tensors; the text names the first difference.
        """
        if self._session.info.layout is not None:
            difference = self._session.info.layout.difference(Layout.of(arrays))
            if difference:
                raise BadPush(f"{self.url}: the server's model is another one: {difference}")
        else:
            await self.define_again(arrays)
        return self._session.info.known_layout

    async def define_again(self, arrays: Mapping[str, Array]) -> None:
        """Offer the model, without fetching any."""
        await self._run(lambda: self._requests.define(arrays))

    @property
    def local_host(self) -> str:
        """This side's address of the connection to the server."""
        connection = self._connection
        if connection is None or connection.transport is None:
            raise ConnectionLost(f"{self.url}: there is no connection")
        if self.near:  # this side is where the server is
            return connection.host
        return str(connection.transport.get_extra_info("sockname")[0])


class Rounds:
    """One worker's rounds; made by `begun`.

    Parameters
    ----------
    client
        The client with which it meets others at the server.
    replica, lock
        The model, and the lock that guards it.
    layout
        The model's tensors.
    timeout
        Seconds that a round may take, beyond what the model's size may need.
    listener
        The socket at which other workers reach this one.
    stats
        Their counts.
    plan
        The policy's settings.

    Attributes
    ----------
    taken
        Averages taken over, alone ones included: 0 is new.
    spacing
        The budget of their bytes.
    """

    taken: int
    plan: Mapping[str, Any]

    def __init__(
        self,
        client: RoundsClient,
        replica: Replica,
        lock: FairLock,
        layout: Layout,
        timeout: float,
        listener: Listener,
        stats: Averages,
        plan: Mapping[str, Any],
    ) -> None:
        self._client, self._replica, self._lock = client, replica, lock
        self._copy, self._flat = Arena(layout), Flat(layout)
        self._timeout, self._listener = timeout, listener
        self._stats, self.plan = stats, plan
        self._routes = Routes()
        self.spacing: RoundSpacing = RoundSpacing(plan["budget"])
        self._mean = Flat(layout) if plan["codec"] else None  # the last one taken over
        self._mean_name = b""  # of that
        self._unsettled = client.info.unsettled
        self._seen: Examples = ()  # of those: in the copy
        self.taken = 0

    @classmethod
    async def begun(
        cls,
        client: RoundsClient,
        replica: Replica,
        lock: FairLock,
        patience: float,
        host: str | None,
        stats: Averages,
    ) -> Rounds:
        """Learn what the server wants, and listen for other workers; `close` is due in the end.

        ``client`` is connected. ``host``: where other workers reach this one; None: at this side's
        address of the connection. ``patience``: seconds that a round may take, as ``timeout``.

        Raises
        ------
        UsageError
            When the server averages no models, or other workers cannot be listened for.
        BadPush
            When the server's model has other tensors.
        """
        plan = client.plan.get("average")
        if not isinstance(plan, dict):
            raise UsageError(
                f"{client.url} runs {client.policy!r}, which averages no models: start it with"
                " --policy average, or use aiops.Worker"
            )
        peers = client.peers(plan["tls"])
        layout = await client.agree(replica.arrays())
        env = CURRENT_ENVIRONMENT.get()
        host = host or env.advertised_address or client.local_host
        try:
            address = (env.known_addresses(host) or await addresses(host, patience))[0]
        except OSError as error:
            raise UsageError(f"host={host!r}: {reason(error)}: pass an IP address") from None
        try:
            listener = Listener(address, plan["stall"], peers)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {address} for other workers ({error.strerror or error}): pass"
                " host=... an address of this machine that they can reach"
            ) from None
        return cls(client, replica, lock, layout, patience, listener, stats, plan)

    async def close(self) -> None:
        """Listen for other workers no longer."""
        await self._listener.close()

    async def withdraw(self) -> None:
        """Withdraw, so that the other workers do not wait for this one.

        A request to meet that is under way is answered too: with an empty round, or a last one.
        """
        await self._client.join_round("", 0, self.taken)

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
                found = await self._join()
            if not found.members:
                return 0
            if len(found.members) == 1:
                if found.settles:
                    await self._settle(found)
                self._stats.alone += 1
                self.taken += 1
            else:
                await self._average(found)
            self._stats.workers = len(found.members)
            return len(found.members)
        except _PASSING as error:
            self._failed(error)
            return 0
        except Unauthorised as error:
            if error.details.get("worker") is None:
                raise
            self._failed(error)
            return 0
        finally:
            self._unsettled.restore()

    async def _copy_out(self) -> None:
        """Copy the model, and see that it may be shared."""
        async with self._lock.awaited():
            self._replica.copy_out(self._copy)
            self._seen = self._unsettled.copy(self._client.info.run.name)
        self._flat.load(self._copy)
        for name, values in self._flat.views:
            if not fit(values):
                raise BadPush(
                    f"{name!r} holds a value that is not finite or not below {LIMIT:g}, and is not"
                    " averaged: training has diverged; lower the learning rate",
                    tensor=name,
                )

    async def _join(self) -> ring_messages.Round:
        """Wait for others."""
        listener = self._listener
        try:
            where = listener.host, listener.port
            settles = bool(self._seen)
            return await self._client.join_round(*where, self.taken, self._mean_name, settles)
        except NotReady:  # the server was started again
            await self._client.define_again(self._copy.views)
            raise

    async def _average(self, found: ring_messages.Round) -> None:
        """Average with the others, and take the mean over."""
        counts = [counts for _host, _port, counts in found.members]
        if not (found.rank < len(counts) and any(counts)):
            raise RemoteProtocolError(f"{self._client.url} told of a round that cannot be")
        if not counts[found.rank]:  # what this model was trained on is lost in that of the others
            self._unsettled.settle()
            self._seen = ()
        mean = self._base(found)
        if mean is not None:
            self._flat.subtract(mean)
        codec = None if mean is None else self._codec_of(found)
        ring = Ring(found.rank, counts, self._flat, codec=codec)
        try:
            relayed = await self._pass_on(found, ring)
        except AiopsError:
            if found.settles:
                with contextlib.suppress(AiopsError):
                    await self._client.settle_round(found.number, False, ())
            raise
        if mean is not None:
            self._flat.add(mean)
        if found.settles:
            await self._settle(found)
        if self._mean is not None:
            self._mean.data[:] = self._flat.data
            self._mean_name = mean_name(found.secret, found.number)
        if ring.left_out is not None:
            self._flat.runs[-1][:] += ring.left_out
        prepared = self._replica.prepare(self._flat, self._copy)
        async with self._lock.awaited():
            self._replica.add(prepared)
        self.taken += 1
        self._stats.rounds += 1
        self._stats.relayed += relayed > 0
        self._stats.codec = found.codec

    async def _pass_on(self, found: ring_messages.Round, ring: Ring) -> int:
        """Carry out the ring; return how many of its connections led through the relay."""
        loop = asyncio.get_running_loop()
        allowed = self._timeout + self._flat.data.nbytes / _SLOWEST
        began, traffic = loop.time(), self._stats.traffic
        before = traffic.bytes_in + traffic.bytes_out
        try:
            async with asyncio.timeout(allowed):
                stall = self.plan["stall"]
                return await take_part(
                    *(found, ring, self._listener, stall, self._stats.traffic, self._routes)
                )
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"round {found.number} took longer than {allowed:.0f} s: a worker is too slow"
            ) from None
        finally:
            self._stats.seconds += loop.time() - began
            self.spacing.note(began, traffic.bytes_in + traffic.bytes_out - before)

    async def _settle(self, found: ring_messages.Round) -> None:
        """Wait until all members have the mean; raise if the round is not taken.

        Raises
        ------
        ConnectionLost
            When another member has given the round up, or an example of this one is not its own
            any more. Then this worker's next round is that of a newcomer.
        """
        answer = await self._client.settle_round(found.number, True, self._seen)
        if answer.counted or answer.reset:
            self._unsettled.settle()
        if answer.reset:
            self.taken = 0
            raise ConnectionLost(
                "this worker was away, and others were given its examples: it starts over with"
                " their model"
            )
        if not answer.taken:
            raise ConnectionLost(f"another worker gave up round {found.number}")

    def _base(self, found: ring_messages.Round) -> Flat | None:
        """Return the mean to which chunks of a round hold differences; None: they hold values."""
        if not found.base:
            return None
        if found.base != self._mean_name:
            raise RemoteProtocolError(
                f"{self._client.url} told of a round of differences to a mean that this worker"
                " does not have"
            )
        return self._mean

    def _codec_of(self, found: ring_messages.Round) -> BlockCodec:
        """Return the codec of a round of differences."""
        codec = codec_named(found.codec)
        if codec is None or not issubclass(codec, BlockCodec):
            raise RemoteProtocolError(
                f"{self._client.url} told of a round in the codec {found.codec!r}, which no ring"
                " can use"
            )
        return codec.make()

    def _failed(self, error: AiopsError) -> None:
        self._stats.failed += 1
        if type(error) is not type(self._stats.last_error):  # once per kind of trouble
            _log.warning("an average was given up: %s", error)
        self._stats.last_error = error
