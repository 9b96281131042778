"""The parts that the blocking and the async model averager share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.client.averaging import Averaging
from aiops.client.backoff import check_timeout
from aiops.client.fair_lock import FairLock
from aiops.client.replica import Arrays, Replica
from aiops.client.rounds import Averages
from aiops.client.server_info import ServerInfo
from aiops.client.variables import server_url
from aiops.common import forks, urls
from aiops.common.tls_files import Tls
from aiops.errors import DeadlineExceeded, UsageError
from aiops.model.layout import Array

LEAVE_TIMEOUT = 1.0
"""Seconds that a round under way gets at the end: Ctrl-C is to work within two."""


class AveragerFacade:
    """Base of `ModelAverager` and `AsyncModelAverager`; parameters as theirs."""

    def __init__(
        self,
        url: str | None,
        params: Mapping[str, Array] | Any,
        *,
        token: str | None,
        name: str | None,
        timeout: float,
        host: str | None,
        tls: Tls | None,
    ) -> None:
        url = server_url(url)
        self.url: str = urls.write_all(urls.parse_all(url))
        check_timeout(timeout)
        self.timeout = timeout
        self.lock: FairLock = FairLock()
        self._core = Averaging(
            _replica_of(params),
            self.lock,
            url=url,
            token=token,
            name=name,
            timeout=timeout,
            host=host,
            tls=tls,
        )
        self._closed = self._forked = False
        forks.note(self)

    def forked(self) -> None:
        """Refuse to work in a fork, where nothing averages."""
        self._closed = self._forked = True
        self.lock.forked()

    def log(self, **values: Any) -> None:
        """Log numbers about the training, such as ``loss=0.3``; all else as `Client.log`.

        It does not wait.
        """
        self._core.log(values)

    @property
    def steps(self) -> int:
        """The steps taken so far."""
        return 0 if self._core.loop is None else self._core.loop.steps

    @property
    def lr(self) -> float:
        """The learning rate that the server was started with (``--lr``), for your own updates."""
        return float(self._core.plan["lr"])

    @property
    def plan(self) -> Mapping[str, Any]:
        """The policy's settings, as the server announced them."""
        return self._core.plan

    @property
    def stats(self) -> Averages:
        """The counts of this worker's averages so far (`Averages`)."""
        return self._core.stats

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received from, and sent to, the server and the other workers so far."""
        return self._core.traffic

    @property
    def info(self) -> ServerInfo:
        """The knowledge of the server, and of the examples in hand."""
        return self._core.info

    @property
    def token(self) -> str | None:
        """The token that it has for the server."""
        return self._core.token

    @property
    def closed(self) -> bool:
        """True once it is closed, has failed, or in a fork."""
        return self._closed or self._core.error is not None

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<{type(self).__name__} at {self.url}: {self.steps} steps, {stats.rounds} averages,"
            f" {stats.workers} workers in the last>"
        )

    def _check(self) -> None:
        if self._forked:
            raise forks.inherited("averager")
        if self._closed:
            raise UsageError("this averager is closed")
        if self._core.error is not None:
            raise self._core.error

    def _late(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{what} was not over in {self.timeout:g} s: {self.url} or another worker does not"
            " answer; timeout=... allows more"
        )


def _replica_of(params: Any) -> Replica:
    if isinstance(params, Mapping):
        return Arrays(params)
    if hasattr(params, "named_parameters"):
        from aiops.client.torch_replica import Module

        return Module(params)
    raise UsageError(
        f"params must be a mapping of NumPy arrays or a torch.nn.Module, not"
        f" {type(params).__name__}"
    )
