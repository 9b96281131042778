"""The training loop's friend: parameters that are up to date, and one line per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

from aiops.client.blocking import Client
from aiops.client.conversation import Receipt
from aiops.client.params import Params
from aiops.errors import AiopsError, StaleGradient, UsageError
from aiops.layout import Array
from aiops.tables import Table

Gradients: TypeAlias = Mapping[str, Array]
Compute: TypeAlias = Callable[[Params], Gradients]

_BEAT = 2.0  # seconds between looks at a connection that nobody is using, at most


class Worker:
    """One worker of a training run.

    ::

        with aiops.Worker("aiops://host:7171", params) as worker:
            for batch in data:
                worker.step(gradients(worker.params, batch))

    The server says what the worker has to do (its policy, its settings, its client plan); nothing
    of that stands in the loop. The first worker's ``params`` define the model; the others get the
    server's.

    One thread of its own keeps the connection answered while gradients are computed.

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
        The parameters to compute the next gradients at; the same arrays all the time.
    compute_seconds, idle_seconds
        Time spent outside `step`, and in it waiting for the server.

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
        except BaseException:
            self._client.close()
            raise
        self.last: Receipt | None = None
        self.steps = 0
        self.recomputed = 0
        self.idle_seconds = self.compute_seconds = 0.0
        self._since = time.perf_counter()
        self._lock = threading.Lock()
        self._ending = threading.Event()
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

    def step(self, gradients: Gradients | Compute) -> Receipt:
        """Hand in the gradients of one mini-batch, and have `params` brought up to date.

        Parameters
        ----------
        gradients
            Arrays by name, computed at `params`; or a function params → gradients, which some
            policies need, because they refuse a gradient and want it computed again.

        Raises
        ------
        UsageError
            When a gradient does not fit, or the policy needs a function and got arrays.
        BadPush
            When the server refuses a value; nothing was applied, and `params` are as before.
        """
        if self._ending.is_set():
            raise UsageError("this worker is closed")
        compute = gradients if callable(gradients) else None
        if compute is None and self._client.plan.get("recompute"):
            raise UsageError(
                f"{self.policy} may ask for a gradient again: call step(function) with a function"
                " params → gradients"
            )
        while True:
            given = gradients if compute is None else compute(self.params)
            assert not callable(given)
            began = time.perf_counter()
            self.compute_seconds += began - self._since
            try:
                with self._lock:
                    receipt = self._client.exchange(self.params, given)
                break
            except StaleGradient:
                if compute is None:
                    raise
                self.recomputed += 1
            finally:
                self._since = time.perf_counter()
                self.idle_seconds += self._since - began
        self.last = receipt
        self.steps += 1
        return receipt

    def refresh(self) -> int:
        """Bring `params` up to date without pushing; return their version."""
        with self._lock:
            self._client.fetch(self.params)
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

    def close(self) -> None:
        """Say goodbye, so that nobody waits for this worker; may be called twice."""
        self._ending.set()
        self._thread.join()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self) -> None:
        """Answer the server now and then while the loop computes."""
        beat = min(_BEAT, self.plan.get("heartbeat", _BEAT))
        while not self._ending.wait(beat):
            if self._lock.acquire(blocking=False):
                try:
                    self._client.attend()
                except AiopsError:
                    pass  # the next step connects again, or says why it cannot
                finally:
                    self._lock.release()
