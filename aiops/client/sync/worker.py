"""The blocking worker: keeps parameters up to date, with one call per training step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aiops.client import variables
from aiops.client.facade import WorkerFacade, initial
from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params
from aiops.client.program import Program, T, drive
from aiops.client.request_kinds import Receipt
from aiops.client.server_info import ServerInfo
from aiops.client.sync.client import Client
from aiops.client.sync.transfers import ThreadTransfer, TransferQueue
from aiops.client.training_loop import (
    Gradients,
    JoinBackground,
    Offer,
    Op,
    Send,
    SendInBackground,
    TrainingLoop,
)
from aiops.common import forks
from aiops.common.closing import Closing
from aiops.common.tls_files import Tls
from aiops.errors import AiopsError, DeadlineExceeded, NotReady
from aiops.model.layout import Array
from aiops.model.tables import Table
from aiops.wire.data_messages import GivenTask, TakeTask

__all__ = ["Compute", "Gradients", "Worker"]

Compute: TypeAlias = Callable[[Params], Gradients]

_BEAT = 0.5  # seconds between looks at an idle connection, at most
_LOG_WAIT = 0.2  # seconds that the thread waits between two steps for its turn to send a log
_GOODBYE = 2.0  # seconds that `close` waits for the thread, which may wait for a silent host


class Worker(WorkerFacade, Closing):
    """One worker of a training run.

    ::

        with aiops.Worker("aiops://host:7171", params) as worker:
            for batch in data:
                worker.step(gradients(worker.params, batch))

    The server's policy, settings and client plan determine the worker's part; none of that is in
    the loop. The first worker's ``params`` define the model; the others receive the server's.

    A background thread answers the server while gradients are computed, and carries the transfers
    that the plan has in the background. A worker belongs to the process that made it: a fork may
    hold it (as a DataLoader's processes do), but every call there raises `UsageError`, and `close`
    does nothing.

    Parameters
    ----------
    url
        As `Client`'s: by default that of the environment, which ``aiops run`` sets.
    params
        The initial parameters: float64, float32, float16 or bfloat16 arrays of any shape, by name
        (or tensors, as in `step`). Only with tables may there be none.
    tables
        The sparse parameters (`aiops.Table`) by name; default: none. With tables, ``params`` may
        be empty. Their rows are fetched and pushed by `fetch_rows`, `push_rows` and
        `exchange_rows`; `step` does not touch them.
    views
        True: `params` are read-only, and lie in the server's memory if it is on this machine. They
        are other arrays after each step, so look them up again. Default False: copies.
    overlap
        True, or 1: an exchange with the server goes on while the next gradient is computed, which
        hides the time of a slow link. `step` then returns when the exchange *before* has been
        answered, and gradients are computed at parameters that lack one of the worker's own steps.
        2: two exchanges, so that a gradient is sent while the last answer still comes, at the cost
        of another such step; up to 8. Their staleness is counted as it is. Default: the variable
        ``AIOPS_OVERLAP``; without it False.
    token, name, timeout, tls, checksums
        As `Client`'s; the default name is that of a worker.

    Attributes
    ----------
    params
        The parameters to compute the next gradients at (`Params`, arrays by name); the same arrays
        at all times, unless ``views`` is set. A policy with local steps changes them here.
    last
        The `Receipt` of the last push that was answered, or None.
    steps, recomputed
        Mini-batches handed in, and gradients that the policy had computed again.
    compute_seconds, idle_seconds
        Seconds spent outside `step` and on local steps, and seconds spent waiting for the server.

    Raises
    ------
    BadPush
        When the server's model has other tensors; the text names the first difference.
    UsageError
        When an argument is invalid, ``views`` is set under a policy with local steps, or
        ``overlap`` under a policy that it does not work with (the text says why).
    ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised, Unavailable
        As `Client`.
    """

    _client: Client
    _begun: TrainingLoop
    _suits: Callable[[ServerInfo], object] | None = None  # `ServerInfo.suits`

    def __init__(
        self,
        url: str | None = None,
        params: Mapping[str, Array] | None = None,
        *,
        tables: Mapping[str, Table] | None = None,
        views: bool = False,
        overlap: bool | int | None = None,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        tls: Tls | None = None,
        checksums: bool | None = None,
    ) -> None:
        params, self._overlap = initial(params, tables), variables.overlap(overlap)
        self._client = Client(
            url,
            role="worker",
            token=token,
            name=name,
            timeout=timeout,
            pongs=True,
            tls=tls,
            checksums=checksums,
        )
        self._session = self._client._session
        self._session.info.suits = self._suits
        try:
            begun = self._client.define(params, tables, views=views)
            self._begun = self._begin_loop(begun, time.perf_counter)
        except BaseException:
            self._client.close()
            raise
        self._session.book.seconds = self._begun.seconds
        self._tables = tables  # to be offered again to a server that has lost its model
        self._lock = threading.Lock()
        self._transfers = TransferQueue(self._client, several=self._overlap > 1)
        self._background: ThreadTransfer | None = None  # the last one
        forks.note(self)
        self._thread = threading.Thread(target=self._keep, name="aiops-worker", daemon=True)
        self._thread.start()

    def step(self, gradients: Gradients | Compute, lr_factor: LrFactors = None) -> Receipt:
        """Push the gradients of one mini-batch as the policy has it, and update `params`.

        Parameters
        ----------
        gradients
            Arrays by name, computed at `params`, of all tensors or some, with the shapes and dtypes
            of theirs; or tensors of a framework that exports DLPack (PyTorch, JAX, CuPy), also on a
            GPU. Or a function params → gradients: some policies need one, as they refuse a stale
            gradient and have it computed again.
        lr_factor
            What the learning rate of this step is multiplied by, from 0 to 100: a schedule of the
            worker's own, beside the server's. One number for all tensors, or numbers by name; of
            the tensors that are left out it is 1. Default: 1. A push of several mini-batches has
            that of the last. Under local steps it is the worker's own rate that is multiplied.

        Returns
        -------
        The push's `Receipt`. Under a policy with local steps or pushes in the background, that of
        the last push that was answered, with ``pushed`` False, and so with ``overlap``. If the
        server was restarted in the
        meantime, ``used`` is False: the gradient belonged to other parameters.

        Raises
        ------
        UsageError
            When a gradient does not fit its tensor, the policy needs a function and got arrays, or
            ``lr_factor`` may be no factor.
        BadPush
            When a value is not finite, or the server refuses it; nothing was applied, and `params`
            are as before. (A push in the background, or with ``overlap``: the next call raises it,
            names the step that failed, and does nothing with its own gradient.)
        StaleGradient
            When the policy refuses a gradient that cannot be computed again.
        ConnectionLost, DeadlineExceeded, Unavailable
            When the server cannot be reached, does not answer, or takes no pushes until the time is
            up.
        """
        if self._closed:
            self._check()
        steps, again = self._begun, callable(gradients)
        if not steps.direct:
            steps.check(again=again)
        factors = None if lr_factor is None else steps.lr_factors(lr_factor)
        receipt = None
        while receipt is None:
            given = gradients(self.params) if callable(gradients) else gradients
            if steps.directed:
                given = steps.directions(given, self.room)
            if steps.direct and factors is None:
                receipt = self._exchange(given, again)
            else:
                receipt = self._play(steps.step(given, factors, again=again))
        return receipt

    def _exchange(self, gradients: Gradients, again: bool) -> Receipt | None:
        """Take a step in which the gradient travels by itself."""
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

        Local steps that have not been pushed stay on top of the server's parameters. Under Downpour
        and SSP they do not, but travel with the next push; under EASGD `params` become the centre.
        """
        self._check()
        return self._play(self._steps.refresh())

    def evaluation(self) -> Params:
        """Return the server's parameters, in new arrays, as they are where the model is evaluated.

        Under some policies, ``schedule-free`` for one, that is not where gradients are computed:
        validate with these, and not with `params`. All else as ``Client.fetch(evaluation=True)``.
        """
        self._check()
        with self._lock:
            return self._client.fetch(evaluation=True)

    def fetch_rows(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return rows of a table; parameters, result and errors as `Client.fetch_rows`'s.

        A server that has come back without its model is offered it again, and the table is empty.
        """
        connection = None  # the newest before the last offer, which may have outlasted it
        while True:
            try:
                with self._lock:
                    return self._client.fetch_rows(name, ids, out)
            except NotReady:
                if self._session.info.connection == connection:  # it took the offer, and has none
                    raise
            connection = self._session.info.connection
            self._play(self._steps.offer())

    def push_rows(
        self,
        name: str,
        ids: Any,
        grads: Any,
        version: int | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Receipt:
        """Push gradients of rows of a table; all else as `Client.push_rows`."""
        with self._lock:
            return self._client.push_rows(name, ids, grads, version, lr_factor=lr_factor)

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
        """Push and fetch rows of a table in one round trip; all else as `Client.exchange_rows`."""
        with self._lock:
            return self._client.exchange_rows(name, ids, grads, next_ids, out=out, version=version)

    def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set (`aiops.data` does); all else as `Client.take_task`.

        A server that has come back without its model is offered it again.
        """
        connection = None  # as in `fetch_rows`
        while True:
            self._check()
            try:
                with self._lock:
                    return self._client.take_task(asked)
            except NotReady:
                if self._session.info.connection == connection:
                    raise
            connection = self._session.info.connection
            self._play(self._steps.offer())

    def push_rest(self) -> None:
        """Wait for pushes in the background, and push what the policy has not pushed yet.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When that failed.
        """
        self._check()
        self._play(self._steps.flush())

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``; all else as `Client.log`.

        It does not wait: the background thread sends them.
        """
        self._client.note_log(values)

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics: a dict of JSON's types."""
        with self._lock:
            return self._client.stats()

    def close(self, *, flush: bool = True) -> None:
        """Push what has not been pushed yet, and leave the server; may be called twice.

        Under a policy with a barrier this may take as long as a step. To leave at once, as after
        Ctrl-C, pass ``flush=False``; leaving a ``with`` block by an exception does so.

        Parameters
        ----------
        flush
            False: leave at once, without a push and without waiting for one. Default True.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push failed; the connection is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if flush:
                self._play(self._steps.flush())
        finally:
            if self._tracing is not None:
                self._tracing.end()
            if self._background is not None and not self._background.over:
                self._client.interrupt()
            self._transfers.put(None)  # after which the thread closes the client
            try:
                self._thread.join(_GOODBYE)
            finally:  # Ctrl-C
                if self._tracing is not None:
                    self._tracing.close()

    def abandon(self) -> None:
        """Leave the server without pushing the rest."""
        self.close(flush=False)

    def forked(self) -> None:
        """Refuse to work in a fork: its thread is missing there, and its lock may stay held."""
        super().forked()
        self._lock = threading.Lock()
        self._transfers.close()

    def _play(self, script: Program[Op, T]) -> T:
        return drive(script, self._carry_out)

    def _carry_out(self, order: Op) -> Any:
        if self._forked:  # in the midst of a step: the background thread is not there
            self._check()
        match order:
            case Send(transfer):
                with self._lock:
                    return self._client.carry(transfer)
            case Offer(params):
                with self._lock:
                    return self._client.offer(params, self._tables)
            case SendInBackground(transfer):
                clock = None if self._tracing is None else self._tracing.now
                self._background = ThreadTransfer(transfer, clock)
                self._transfers.put(self._background)
                return self._background
            case JoinBackground(ThreadTransfer() as background):
                limit = self._client.patience + _BEAT
                if not background.done.wait(limit):
                    raise DeadlineExceeded(
                        f"{self.url} did not answer a push in the background within {limit:g} s"
                    )
                return None

    def _keep(self) -> None:
        """Carry background transfers, and answer pings while gradients are computed.

        At the end it closes the client, however late that is: `close` waits only for a while.
        """
        beat = min(_BEAT, self.plan.get("heartbeat") or _BEAT)
        try:
            while True:
                try:
                    background = self._transfers.next(beat)
                except queue.Empty:
                    self._attend()
                    continue
                if background is None:
                    return
                with self._lock:
                    self._transfers.carry(background)
                if self._log_due:
                    self._attend()
        finally:
            self._client.close()
            self._transfers.close()

    @property
    def _log_due(self) -> bool:
        return self._session.book.wait(time.monotonic()) == 0.0

    def _attend(self) -> None:
        if self._lock.acquire(timeout=_LOG_WAIT if self._log_due else 0.0):
            try:
                self._client.attend()
            except AiopsError:
                pass  # the next step connects again, or raises why it cannot
            finally:
                self._lock.release()
