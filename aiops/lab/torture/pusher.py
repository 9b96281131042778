"""A worker process of the torture: it pushes, and writes down every acknowledgement that it saw."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType

import numpy as np

from aiops.client.sync.worker import Worker
from aiops.lab.torture.checker import CellRange

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


def push_on(plan: PusherPlan) -> None:
    """Push until there is no place left, or SIGTERM."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    gradient = np.zeros(plan.size)
    mine = slice(plan.cells.first, plan.cells.first + plan.cells.count)
    sums = np.zeros(plan.cells.count)
    with Worker(
        plan.url, {MODEL: np.zeros(plan.size)}, name=plan.name, timeout=plan.timeout
    ) as worker:
        for push in range(plan.cells.pushes):
            if stopped:
                break
            cell, amount = plan.cells.place(push)
            gradient[cell] = plan.scale * amount
            receipt = worker.step({MODEL: gradient})
            gradient[cell] = 0.0
            seen = (push, receipt.version, receipt.staleness, int(receipt.used))
            os.write(log, b"ack %d %d %d %d\n" % seen)
            sums[cell - plan.cells.first] -= amount
            if plan.own and not np.array_equal(worker.params[MODEL][mine], sums):
                os.write(log, b"bad after push %d the model lacks pushes of the worker\n" % push)
                return
            if plan.pause:
                time.sleep(plan.pause)
    os.write(log, b"end\n")
