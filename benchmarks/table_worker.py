"""A worker of the tables benchmark: exchanges random rows of a table with a server, in rounds."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import numpy as np

import aiops

NAME = "embedding"
"""The table's name."""

_DRAWN = 1024  # batches of ids that a worker goes through again and again


def work(url: str, table: aiops.Table, batch: int, number: int, pipe: Connection) -> None:
    """Carry out rounds until the pipe brings None; then send how many cycles there were.

    Parameters
    ----------
    url, table
        The server, and the table that it has.
    batch
        Rows of a cycle.
    number
        The worker's: its ids and gradients follow from it.
    pipe
        Brings rounds, as a way (``exchange`` or ``separate``) and seconds. Each is answered with
        the number of cycles, when the round began and ended (on the monotonic clock), the seconds
        of each cycle, and the processor time of all.
    """
    rng = np.random.default_rng(number)
    ids = rng.integers(0, table.rows, (_DRAWN, batch))
    grads = rng.standard_normal((batch, table.width)).astype(np.float32)
    rows = np.empty_like(grads)
    total, turn = 0, 0
    with aiops.Worker(url, {}, tables={NAME: table}, name=f"worker-{number}") as worker:
        pipe.send("ready")
        worker.fetch_rows(NAME, ids[0], rows)
        while (order := pipe.recv()) is not None:
            way, seconds = order
            times: list[float] = []
            spent = time.process_time()
            begin = now = time.monotonic()
            while now - begin < seconds:
                this, turn = ids[turn % _DRAWN], turn + 1
                if way == "exchange":
                    following = ids[turn % _DRAWN]
                    worker.exchange_rows(NAME, this, grads, following, out=rows)
                else:
                    worker.fetch_rows(NAME, this, rows)
                    worker.push_rows(NAME, this, grads)
                before, now = now, time.monotonic()
                times.append(now - before)
            total += len(times)
            pipe.send((len(times), begin, now, times, time.process_time() - spent))
        pipe.send(total)
