"""A worker process of the torture: it pushes, and writes down every acknowledgement that it saw."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import numpy as np

from aiops.client.params import Stamp
from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.common.closing import Closing
from aiops.errors import AiopsError
from aiops.lab.torture.checker import CellRange
from aiops.model.layout import Array

MODEL = "cells"
"""The model's one tensor."""


@dataclass(frozen=True, slots=True)
class PusherPlan:
    """The orders of a worker process.

    Attributes
    ----------
    url, name
        The server, and the worker's name.
    size
        The model's cells.
    cells
        Those that are the worker's.
    scale
        The factor of its gradients: the number of pushes of which the server takes the mean.
    pause
        Seconds between pushes.
    own
        Whether the answer to a push has it applied, so that the worker checks its own cells.
    log
        The file of what it saw.
    timeout
        Seconds that it rides out a server that is gone.
    plain
        Whether it pushes its gradients as they are, whatever the policy has workers do.
    dtype
        The model's.
    """

    url: str
    name: str
    size: int
    cells: CellRange
    scale: float
    pause: float
    own: bool
    log: str
    timeout: float
    plain: bool = False
    dtype: str = "float64"


def push_on(plan: PusherPlan) -> None:
    """Push until there is no place left, or SIGTERM."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    gradient = np.zeros(plan.size, plan.dtype)
    mine = slice(plan.cells.first, plan.cells.first + plan.cells.count)
    sums = np.zeros(plan.cells.count)
    lost = 0
    with Plain(plan) if plan.plain else _worker(plan) as worker:
        for push in range(plan.cells.pushes):
            if stopped:
                break
            cell, amount = plan.cells.place(push)
            gradient[cell] = plan.scale * amount
            receipt = worker.step({MODEL: gradient})
            gradient[cell] = 0.0
            if worker.rolled_back != lost:
                lost = worker.rolled_back
                os.write(log, b"lost %d\n" % lost)
            if not receipt.pushed and receipt.used:
                os.write(log, b"bad push %d was not answered\n" % push)
                return
            seen = (push, receipt.version, receipt.staleness, int(receipt.used))
            os.write(log, b"ack %d %d %d %d\n" % seen)
            sums[cell - plan.cells.first] -= amount * receipt.used
            if plan.own and not lost and not np.array_equal(worker.params[MODEL][mine], sums):
                os.write(log, b"bad after push %d the model lacks pushes of the worker\n" % push)
                return
            if plan.pause:
                time.sleep(plan.pause)
        if worker.rolled_back != lost:
            os.write(log, b"lost %d\n" % worker.rolled_back)
    os.write(log, b"end\n")


class Plain(Closing):
    """A client that pushes one gradient after the other, without local steps.

    Parameters
    ----------
    plan
        The orders.
    """

    def __init__(self, plan: PusherPlan) -> None:
        self._client = Client(plan.url, role="worker", name=plan.name, timeout=plan.timeout)
        try:
            self.params = self._client.define({MODEL: np.zeros(plan.size, plan.dtype)})
        except BaseException:
            self._client.close()
            raise

    @property
    def rolled_back(self) -> int:
        """The pushes of which it was told that they are lost."""
        return self._client.rolled_back

    def step(self, gradients: Mapping[str, Array]) -> Receipt:
        """Push, and fetch."""
        stamp = Stamp.of(self.params)
        receipt = self._client.carry(Transfer(gradients, stamp, self.params))
        if receipt is None:
            raise AiopsError("a push has no receipt")
        return receipt

    def close(self) -> None:
        """Leave the server."""
        self._client.close()


def _worker(plan: PusherPlan) -> Worker:
    zeros = {MODEL: np.zeros(plan.size, plan.dtype)}
    return Worker(plan.url, zeros, name=plan.name, timeout=plan.timeout)
