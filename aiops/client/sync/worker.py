"""The training loop's friend: parameters that are up to date, and one line per step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aiops.client.facade import WorkerFacade
from aiops.client.params import Params
from aiops.client.program import Program, T, drive
from aiops.client.request_kinds import Receipt
from aiops.client.sync.client import Client
from aiops.client.training_loop import (
    Gradients,
    Join,
    Offer,
    Op,
    Send,
    SendInBackground,
    TrainingLoop,
)
from aiops.client.transfer import Transfer
from aiops.common import forks
from aiops.common.closing import Closing
from aiops.errors import AiopsError, DeadlineExceeded
from aiops.model.layout import Array
from aiops.model.tables import Table

__all__ = ["Compute", "Gradients", "Worker"]

Compute: TypeAlias = Callable[[Params], Gradients]

_BEAT = 2.0  # seconds between looks at a connection that nobody is using, at most


class _BackgroundTransfer:
    """A transfer that the worker's own thread sees to, while gradients are computed."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.done = threading.Event()
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.done.is_set()


class Worker(WorkerFacade, Closing):
    """One worker of a training run.

    ::

        with aiops.Worker("aiops://host:7171", params) as worker:
            for batch in data:
                worker.step(gradients(worker.params, batch))

    The server says what the worker has to do (its policy, its settings, its client plan); nothing
    of that stands in the loop. The first worker's ``params`` define the model; the others get the
    server's.

    One thread of its own keeps the connection answered while gradients are computed, and does what
    the plan wants done in the background. A worker belongs to the process that made it: a fork may
    hold it (as a DataLoader's processes do), but every call there raises `UsageError`, and `close`
    does nothing.

    Parameters
    ----------
    url
        ``aiops://host:port``.
    params
        The initial parameters: float64, float32, float16 or bfloat16 arrays by name (or tensors,
        as in `step`).
    tables
        The sparse parameters (`aiops.Table`) by name; ``params`` may then be empty. Their rows are
        fetched and pushed by `fetch_rows`, `push_rows` and `exchange_rows`; `step` has no part in
        them.
    views
        Have `params` be the server's own arrays where it is on this machine, instead of copies of
        them: read-only, whole, and others after each step (look them up anew). Elsewhere they are
        this worker's, and read-only too.
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
    UsageError
        When the policy has workers change their parameters themselves, and ``views`` are wanted.
    ConnectionLost, DeadlineExceeded, Unauthorised
        As `Client`.
    """

    _client: Client
    _begun: TrainingLoop

    def __init__(
        self,
        url: str,
        params: Mapping[str, Array],
        *,
        tables: Mapping[str, Table] | None = None,
        views: bool = False,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._client = Client(
            url, role="worker", token=token, name=name, timeout=timeout, pongs=True
        )
        try:
            begun = self._client.define(params, tables, views=views)
            self._begun = self._client.begin(begun, time.perf_counter)
        except BaseException:
            self._client.close()
            raise
        self._tables = tables  # to be offered again to a server that has lost its model
        self._lock = threading.Lock()
        self._errands: queue.SimpleQueue[_BackgroundTransfer | None] = queue.SimpleQueue()
        self._errand: _BackgroundTransfer | None = None  # the last one
        forks.note(self)
        self._thread = threading.Thread(target=self._keep, name="aiops-worker", daemon=True)
        self._thread.start()

    def step(self, gradients: Gradients | Compute) -> Receipt:
        """Hand in the gradients of one mini-batch, and have `params` brought up to date.

        Parameters
        ----------
        gradients
            Arrays by name, computed at `params`, or tensors of any framework that exports DLPack
            (PyTorch, JAX, CuPy), also on a GPU; or a function params → gradients, which some
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
            self._check()
        steps, again = self._begun, callable(gradients)
        if not steps.direct:
            steps.check(again=again)
        receipt = None
        while receipt is None:
            given = gradients(self.params) if callable(gradients) else gradients
            if steps.direct:
                receipt = self._exchange(given, again)
            else:
                receipt = self._play(steps.step(given, again=again))
        return receipt

    def _exchange(self, gradients: Gradients, again: bool) -> Receipt | None:
        """Take a step in which the gradient travels as it is."""
        steps = self._begun
        steps.begin(again=again)
        try:
            with self._lock:
                receipt = self._client.exchange(steps.params, gradients)
        except BaseException as error:
            return self._play(steps.failed(error, again=again))
        return steps.took(receipt)

    def refresh(self) -> int:
        """Bring `params` up to date without pushing; return their version.

        Local steps that the server does not know of yet stay on top of it. Under Downpour and SSP
        they are only on their way to the server then; under EASGD the worker goes to the centre.
        """
        self._check()
        return self._play(self._steps.refresh())

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
                self._play(self._steps.flush())
        finally:
            if self._errand is not None and not self._errand.done.is_set():
                self._client.interrupt()
            self._errands.put(None)
            self._thread.join(1.0)
            if not self._thread.is_alive():  # else it connects to a host that does not answer
                self._client.close()

    def abandon(self) -> None:
        """Close it, without pushing the rest."""
        self.close(flush=False)

    def forked(self) -> None:
        """Refuse to work in a fork, where its thread is not, and its lock is never let go of."""
        super().forked()
        self._lock = threading.Lock()
        self._errands = queue.SimpleQueue()

    def _play(self, script: Program[Op, T]) -> T:
        return drive(script, self._carry_out)

    def _carry_out(self, order: Op) -> Any:
        if self._forked:  # in the midst of a step: its thread does no errands here
            self._check()
        match order:
            case Send(transfer):
                with self._lock:
                    return self._client.carry(transfer)
            case Offer(params):
                with self._lock:
                    return self._client.offer(params, self._tables)
            case SendInBackground(transfer):
                self._errand = _BackgroundTransfer(transfer)
                self._errands.put(self._errand)
                return self._errand
            case Join(errand):
                limit = self._client.patience + _BEAT
                assert isinstance(errand, _BackgroundTransfer)
                if not errand.done.wait(limit):
                    raise DeadlineExceeded(
                        f"{self.url} did not answer a push in the background within {limit:g} s"
                    )
                return None

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
