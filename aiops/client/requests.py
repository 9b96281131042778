"""The requests that a client can make of a server, and the transfers that become one.

Requests are numbered; a push also has a sequence number that stays the same when it is sent again
after a lost connection, so that the server applies it once. What may have to be sent again is
referred to by its request until it is answered: leave a gradient alone until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from aiops.client.coding import Encoded
from aiops.client.dlpack import on_host
from aiops.client.encode_push import little_endian, parts_of
from aiops.client.lr_factors import LrFactors, checked_factor, in_order
from aiops.client.params import Params, Stamped
from aiops.client.request_kinds import (
    DefineRequest,
    DescribeRequest,
    FetchRequest,
    FetchRowsRequest,
    JoinRoundRequest,
    PingRequest,
    PushRequest,
    PushRowsRequest,
    ReapplyRequest,
    Request,
    SettleRoundRequest,
    StatsRequest,
    TakeTaskRequest,
)
from aiops.client.session import Session
from aiops.model.layout import Array, Ints, Layout
from aiops.model.parts import Parts
from aiops.model.tables import Table, Tables
from aiops.wire.data_messages import TakeTask
from aiops.wire.fields import Examples

CoveredExamples: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ranges of examples: task, start, stop."""


class Requests:
    """Makes the requests of one client, and has them sent.

    Parameters
    ----------
    session
        Sends them, and receives the answers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def define(
        self, arrays: Mapping[str, Array], tables: Mapping[str, Table] | None = None
    ) -> Request:
        """Offer a model; the result is (whether it was taken, the version).

        Raises
        ------
        UsageError
            When the model is none, or the server does not suit it (`ServerInfo.suits`).
        """
        info = self._session.info
        if info.suits is not None:
            info.suits(info)
        sparse = Tables(tables or {}, arrays).described
        arrays = {
            name: little_endian(np.asarray(on_host(name, array), order="C"))
            for name, array in arrays.items()
        }
        layout = Layout.of(arrays, empty=bool(sparse))
        parts: Parts = ()
        payloads: list[list[memoryview]] = []
        if arrays:
            parts, payloads = parts_of(layout, arrays, 0)
        tensors = [(name, a.dtype.name, a.shape) for name, a in arrays.items()]
        return self._session.ask(DefineRequest(tensors, parts, payloads, sparse))

    def describe(self) -> Request:
        """Ask for the model's tensors; the result is None, the layout is known then."""
        return self._session.ask(DescribeRequest())

    def push(
        self,
        gradients: Mapping[str, Array],
        at: Stamped,
        into: Params | None,
        wanted: Ints | None = None,
        count: int = 1,
        examples: CoveredExamples | None = None,
        lr_factors: LrFactors = None,
    ) -> Request:
        """Push gradients computed at ``at``; the result is a `Receipt`.

        With ``into`` (which may be ``at``) the parameters after the push are received there: those
        of the ``wanted`` tensors (None: all). ``count``: of how many mini-batches. ``examples``:
        what they were computed on; None: all that was noted since the last push. ``lr_factors``:
        as of `Transfer`.
        """
        session = self._session
        encoded: Encoded = []
        age = level = None
        if isinstance(at, Params):
            age, level = at.age, at.level
        versions = at.versions if age is None else age
        base = at.newest if level is None else level
        parts, payloads = parts_of(at.layout, gradients, versions, session.info.coding, encoded)
        factors = () if lr_factors is None else in_order(lr_factors, at.layout, gradients)
        push = PushRequest(parts, payloads, into, wanted, at.connection, base, count, factors)
        push.encoded = encoded
        if examples or session.info.examples:
            push.examples = session.info.take_examples() if examples is None else examples
        return session.ask(push)

    def reapply(
        self,
        at: Stamped,
        into: Params | None,
        wanted: Ints | None = None,
        examples: CoveredExamples | None = None,
        lr_factors: LrFactors = None,
    ) -> Request:
        """Have the server apply this client's last gradient again; the result is a `Receipt`.

        Its ``used`` is False if the server does not keep that gradient any more.
        """
        session = self._session
        names = lr_factors if isinstance(lr_factors, Mapping) else ()
        factors = in_order(lr_factors, at.layout, names)
        push = ReapplyRequest((), (), into, wanted, at.connection, at.newest, 1, factors)
        push.examples = session.info.take_examples() if examples is None else examples
        return session.ask(push)

    def again(self, request: Request) -> Request:
        """Ask again for what was abandoned before its answer; a push keeps its number."""
        return self._session.again(request)

    def fetch(
        self, into: Params, wanted: Ints | None = None, *, evaluation: bool = False
    ) -> Request:
        """Ask for the parameters (of some tensors); the result is whether they changed.

        ``evaluation``: as they are where the model is evaluated, of all tensors.
        """
        return self._session.ask(FetchRequest(into, wanted, evaluation))

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Request:
        """Ask for rows of a table; the result is an array, ``[len(ids), width]``."""
        request = self.rows_to_fetch(name, ids, out)
        return request if request.done else self._session.ask(request)

    def rows_to_fetch(self, name: str, ids: Any, out: Array | None) -> FetchRowsRequest:
        """Return the same request, which is not asked yet; done: there is nothing to ask."""
        asked = self._session.info.rows.fetch(name, ids, out)
        request = FetchRowsRequest(asked)
        if asked.into is not None and not len(asked.wanted):
            request.resolve(asked.into.out)
        return request

    def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        *,
        version: int | None = None,
        wanted: Any = None,
        out: Array | None = None,
        lr_factor: float = 1.0,
    ) -> Request:
        """Push gradients of rows; the result is a `Receipt`, with ``wanted`` (it, the rows)."""
        asked = self.rows_to_push(name, ids, grads, version, wanted, out, lr_factor)
        return self._session.ask(asked)

    def rows_to_push(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None,
        wanted: Any = None,
        out: Array | None = None,
        lr_factor: float = 1.0,
    ) -> PushRowsRequest:
        """Return the same request, which is not asked yet."""
        session = self._session
        asked = session.info.rows.push(name, ids, grads, version=version, wanted=wanted, out=out)
        connection = session.info.rows.connections.get(
            name, (session.info.client, max(session.info.connection[1], 1))
        )
        factors = () if lr_factor == 1 else (checked_factor(lr_factor),)
        request = PushRowsRequest(asked, connection, factors)
        layout = session.info.layout
        if layout is not None and not layout.tensors:  # else the step covers them
            request.examples = session.info.take_examples()
        return request

    def join_round(self, host: str, port: int, rounds: int, have: bytes, settles: bool) -> Request:
        """Be ready to average (or, with port 0, no longer); the result is a `Round`."""
        session = self._session
        digest = session.info.known_layout.digest
        nonce = session.identity.nonce()
        return session.ask(JoinRoundRequest(host, port, rounds, digest, nonce, have, settles))

    def settle_round(self, number: int, whole: bool, seen: Examples) -> Request:
        """Report the end of a round that is to be settled; the result is a `RoundSettled`."""
        return self._session.ask(SettleRoundRequest(number, whole, seen))

    def take_task(self, asked: TakeTask) -> Request:
        """Ask for a task of a data set; the result is a `GivenTask`."""
        return self._session.ask(TakeTaskRequest(asked))

    def stats(self) -> Request:
        """Ask for the server's statistics; the result is a dict."""
        return self._session.ask(StatsRequest())

    def ping(self) -> Request:
        """Ask whether the server is alive; the result is None."""
        return self._session.ask(PingRequest())


@dataclass(slots=True, eq=False)
class Transfer:
    """A push, a fetch, or both in one round trip.

    Attributes
    ----------
    arrays
        The arrays to push, by name; None: none. They do not change before the answer.
    at
        The versions of the tensors at which they were computed.
    into
        The parameters to receive the values after it; None: they are not wanted.
    wanted
        The tensors that are wanted, in arena order; None: all.
    count
        The mini-batches whose gradients are pushed.
    again
        Nothing new is pushed: the server is to apply the last gradient once more.
    lr_factors
        What the learning rate is multiplied by: for all tensors, or by tensor; None: by 1.
    examples
        The examples that the gradients were computed on, (task, start, stop) each.
    request
        The request that it became when it was first carried.
    """

    arrays: Mapping[str, Array] | None
    at: Stamped
    into: Params | None
    wanted: Ints | None = None
    count: int = 1
    again: bool = False
    lr_factors: LrFactors = None
    examples: CoveredExamples | None = None
    request: Request | None = None

    @property
    def pushes(self) -> bool:
        """True if it is no mere fetch."""
        return self.arrays is not None or self.again

    def ask(self, requests: Requests) -> Request:
        """Make the request. Made again, as after a lost connection, it is the same push."""
        if self.request is not None:
            self.request = requests.again(self.request)
        elif self.arrays is not None:
            carried = self.arrays, self.at, self.into, self.wanted, self.count
            self.request = requests.push(*carried, self.examples, self.lr_factors)
        elif self.again:
            given = self.at, self.into, self.wanted, self.examples
            self.request = requests.reapply(*given, self.lr_factors)
        elif self.into is not None:
            self.request = requests.fetch(self.into, self.wanted)
        else:
            raise ValueError("a transfer that neither pushes nor fetches")
        return self.request
