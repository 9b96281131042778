"""The training loop's friend: parameters that are up to date, and one line per step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from aiops.client.blocking import Client
from aiops.client.params import Params
from aiops.client.requests import Receipt
from aiops.client.routines import Routine, Transfer, routine_for
from aiops.errors import (
    AiopsError,
    DeadlineExceeded,
    NotReady,
    Refused,
    Restarted,
    StaleGradient,
    UsageError,
)
from aiops.layout import Array
from aiops.ledger import Ledger
from aiops.tables import Table

Gradients: TypeAlias = Mapping[str, Array]
Compute: TypeAlias = Callable[[Params], Gradients]

_log = logging.getLogger("aiops.client")

_BEAT = 2.0  # seconds between looks at a connection that nobody is using, at most


class _Errand:
    """A transfer that the worker's own thread sees to, while gradients are computed."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.done = threading.Event()
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None


class Worker:
    """One worker of a training run.

    ::

        with aiops.Worker("aiops://host:7171", params) as worker:
            for batch in data:
                worker.step(gradients(worker.params, batch))

    The server says what the worker has to do (its policy, its settings, its client plan); nothing
    of that stands in the loop. The first worker's ``params`` define the model; the others get the
    server's.

    One thread of its own keeps the connection answered while gradients are computed, and does what
    the plan wants done in the background.

    Parameters
    ----------
    url
        ``aiops://host:port``.
    params
        The initial parameters: float64, float32, float16 or bfloat16 arrays by name.
    tables
        The sparse parameters (`aiops.Table`) by name; ``params`` may then be empty. Their rows are
        fetched and pushed by `fetch_rows`, `push_rows` and `exchange_rows`; `step` has no part in
        them.
    token, name, timeout
        As `Client`'s.

    Attributes
    ----------
    params
        The parameters to compute the next gradients at; the same arrays all the time. Where the
        policy has local steps they are this worker's own.
    last
        The `Receipt` of the last push that was answered, or None.
    steps, recomputed
        Mini-batches handed in, and gradients that the policy had computed again.
    compute_seconds, idle_seconds
        Time spent outside `step` and on local steps, and in it waiting for the server.

    Raises
    ------
    BadPush
        When the server's model has other tensors; the text names the first difference.
    ConnectionLost, DeadlineExceeded, Unauthorised
        As `Client`.
    """

    def __init__(
        self,
        url: str,
        params: Mapping[str, Array],
        *,
        tables: Mapping[str, Table] | None = None,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._client = Client(
            url, role="worker", token=token, name=name, timeout=timeout, pongs=True
        )
        try:
            self.params = self._client.define(params, tables)
            self._routine: Routine = routine_for(self._client.plan, self.params)
        except BaseException:
            self._client.close()
            raise
        self._tables = tables  # to be offered again to a server that has lost its model
        self.last: Receipt | None = None
        self.steps = 0
        self.recomputed = 0
        self.idle_seconds = self.compute_seconds = 0.0
        self._since = time.perf_counter()
        self._lock = threading.Lock()
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._errand: _Errand | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="aiops-worker", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> str:
        """The server's algorithm."""
        return self._client.policy

    @property
    def plan(self) -> Mapping[str, Any]:
        """The workers' part of the algorithm, as the server announced it."""
        return self._client.plan

    @property
    def lr(self) -> float:
        """The learning rate of a gradient, as the server announced it (1 where there is none)."""
        inner = self.plan.get("inner", {})
        return float(inner.get("lr", self._client.settings.get("lr", 1.0)))

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._client.url

    @property
    def version(self) -> int:
        """The model version of `params`."""
        return self.params.version

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self._client.traffic

    @property
    def ledger(self) -> Ledger:
        """What became of every byte so far, by tensor and reason; `Ledger.report` has it all.

        Whoever holds gradients or fetches back says so here (`Ledger.skipped_push`,
        `Ledger.skipped_fetch`).
        """
        return self._client.ledger

    def step(self, gradients: Gradients | Compute) -> Receipt:
        """Hand in the gradients of one mini-batch, and have `params` brought up to date.

        Parameters
        ----------
        gradients
            Arrays by name, computed at `params`; or a function params → gradients, which some
            policies need, because they refuse a gradient and want it computed again.

        Returns
        -------
        What became of it. Where the policy has local steps or pushes in the background, that of the
        last push that was answered, with ``pushed`` False. If the server was restarted meanwhile,
        ``used`` is False: the gradient belonged to other parameters.

        Raises
        ------
        UsageError
            When a gradient does not fit, or the policy needs a function and got arrays.
        BadPush
            When a value is not finite, or the server refuses it; nothing was applied, and `params`
            are as before. (Of a push in the background a later step says so.)
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer.
        """
        if self._closed:
            raise UsageError("this worker is closed")
        compute = gradients if callable(gradients) else None
        if compute is None and self.plan.get("recompute"):
            raise UsageError(
                f"{self.policy} may ask for a gradient again: call step(function) with a function"
                " params → gradients"
            )
        try:
            while True:
                given = gradients if compute is None else compute(self.params)
                assert not callable(given)
                try:
                    receipt = self._step(given)
                    break
                except Restarted:
                    self._begin_anew()
                    if compute is None or self._routine.local:
                        receipt = replace(self._nothing(), used=False)
                        break
                except StaleGradient:
                    if compute is None:
                        raise
                self.recomputed += 1
        finally:
            self._clock()
        self.steps += 1
        return receipt

    def _step(self, gradients: Gradients) -> Receipt:
        routine = self._routine
        if self._errand is not None and self._errand.error is not None:
            self._settle(wait=True)  # tell what failed before anything of this step is done
        routine.apply(gradients)
        self._settle(wait=routine.due)
        transfer = routine.transfer()
        if "gate" in self.plan:
            self._note_held(transfer)
        if transfer is not None and routine.waits:
            return self._carry(transfer)
        if transfer is not None:
            self._errand = _Errand(transfer)
            self._errands.put(self._errand)
        self._settle(wait=routine.waits)
        return self._nothing() if self.last is None else replace(self.last, pushed=False)

    def _note_held(self, transfer: Transfer | None) -> None:
        """Tell the ledger what the gates kept from travelling after a mini-batch."""
        tensors = self.params.layout.tensors
        pushed = transfer.arrays if transfer is not None else None
        if pushed is not None and len(pushed) < len(tensors):
            held = [index for index, tensor in enumerate(tensors) if tensor.name not in pushed]
            self.ledger.skipped_push(np.array(held, np.int64))
        elif pushed is None and not (transfer is not None and transfer.again):
            self.ledger.skipped_push()
        if transfer is None or transfer.into is None:
            self.ledger.skipped_fetch()

    def _begin_anew(self) -> None:
        """Go on with a server that was restarted.

        Steps that were only taken here stay on top of its parameters. If it has come back without
        any, it is offered these: what is then lost is the optimiser's state and the tables' rows.
        """
        _log.warning("%s was restarted: going on with its parameters", self.url)
        self._routine.restarted()
        try:
            self._carry(self._routine.refresh())
        except NotReady:
            _log.warning("%s has no model any more: it is offered this worker's", self.url)
            with self._lock:
                taken = self._client.offer(self._routine.offer(), self._tables)
            if taken:
                self._routine.offered()
            self._carry(self._routine.refresh())

    def _carry(self, transfer: Transfer) -> Receipt:
        """See to a transfer on this thread, and wait for it."""
        self._clock()
        try:
            with self._lock:
                receipt = self._client.carry(transfer)
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._clock(idle=True)
        self._routine.arrived(receipt)
        return self._note(receipt)

    def _failed(self, error: BaseException) -> None:
        """Have the routine take back what is known not to have been applied.

        What may have been applied stays under way, and is carried again: the server knows its
        number. (A gradient that travels as it is is its owner's again in any case.)
        """
        if isinstance(error, Refused | UsageError) or not self._routine.local:
            self._routine.failed()

    def _settle(self, *, wait: bool) -> None:
        """Merge what has arrived in the background; wait for it if need be."""
        errand = self._errand
        if errand is None:
            if self._routine.under_way is not None:  # the wait for it was broken off
                self._carry(self._routine.under_way)
            return
        if not (wait or errand.done.is_set()):
            return
        self._clock()
        limit = self._client.patience + _BEAT
        try:
            if not errand.done.wait(limit):
                raise DeadlineExceeded(
                    f"{self.url} did not answer a push in the background within {limit:g} s"
                )
        finally:
            self._clock(idle=True)
        self._errand = None
        if errand.error is not None:
            self._failed(errand.error)
            raise errand.error
        self._routine.arrived(errand.receipt)
        if errand.receipt is not None:
            self._note(errand.receipt)

    def _note(self, receipt: Receipt | None) -> Receipt:
        if receipt is not None:
            self.last = receipt
            return receipt
        return self._nothing()

    def _nothing(self) -> Receipt:
        """Return the receipt of a step of which nothing travelled."""
        return Receipt(self.params.version, 0, 0.0, None, {}, pushed=False)

    def _clock(self, *, idle: bool = False) -> None:
        """Count the time since the last look as spent waiting, or computing."""
        now = time.perf_counter()
        if idle:
            self.idle_seconds += now - self._since
        else:
            self.compute_seconds += now - self._since
        self._since = now

    def refresh(self) -> int:
        """Bring `params` up to date without pushing; return their version.

        Local steps that the server does not know of yet stay on top of it. Under Downpour and SSP
        they are only on their way to the server then; under EASGD the worker goes to the centre.
        """
        self._settle(wait=True)
        self._carry(self._routine.refresh())
        return self.params.version

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table. See `Client.fetch_rows`."""
        with self._lock:
            return self._client.fetch_rows(name, ids, out)

    def push_rows(self, name: str, ids: Any, grads: Any, version: int | None = None) -> Receipt:
        """Push gradients of rows of a table. See `Client.push_rows`."""
        with self._lock:
            return self._client.push_rows(name, ids, grads, version)

    def exchange_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        next_ids: Any,
        *,
        out: Array | None = None,
        version: int | None = None,
    ) -> tuple[Receipt, Array]:
        """Push and fetch rows of a table in one round trip. See `Client.exchange_rows`."""
        with self._lock:
            return self._client.exchange_rows(name, ids, grads, next_ids, out=out, version=version)

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        with self._lock:
            return self._client.stats()

    def close(self, *, flush: bool = True) -> None:
        """Push what has not been pushed yet, and say goodbye; may be called twice.

        Under a policy with a barrier that may take as long as any step. Where that must not be, as
        after Ctrl-C, say ``flush=False``; leaving a ``with`` block by an exception does it.

        Parameters
        ----------
        flush
            False: say goodbye at once, whatever is still on its way.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push could not be made; the connection is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if flush:
                self._flush()
        finally:
            if self._errand is not None and not self._errand.done.is_set():
                self._client.interrupt()
            self._errands.put(None)
            self._thread.join(1.0)
            if not self._thread.is_alive():  # else it connects to a host that does not answer
                self._client.close()

    def _flush(self) -> None:
        """Wait for what is on its way, and push the rest."""
        self._settle(wait=True)
        rest = self._routine.rest()
        if rest is not None:
            self._carry(rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(flush=error is None)

    def _keep(self) -> None:
        """Run errands, and answer the server now and then while the loop computes."""
        beat = min(_BEAT, self.plan.get("heartbeat") or _BEAT)
        while True:
            try:
                errand = self._errands.get(timeout=beat)
            except queue.Empty:
                self._attend()
                continue
            if errand is None:
                return
            try:
                with self._lock:
                    errand.receipt = self._client.carry(errand.transfer)
            except BaseException as error:
                errand.error = error
            errand.done.set()

    def _attend(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._client.attend()
            except AiopsError:
                pass  # the next step connects again, or says why it cannot
            finally:
                self._lock.release()
