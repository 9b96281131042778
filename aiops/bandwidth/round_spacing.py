"""Space a worker's rounds of averaging so that their bytes keep a budget.

A round's bytes follow from the model's size, and cannot be sent more slowly without holding up the
other workers. So the budget decides when the next round may begin: when the bytes of all rounds so
far, both ways, have been paid for at its rate. From the first round on, no more than the budget and
the bytes of one round have crossed at any time.
"""

from __future__ import annotations

from aiops.bandwidth.units import format_rate
from aiops.errors import ConflictError


class RoundSpacing:
    """The budget of one worker.

    Parameters
    ----------
    rate
        Bytes per second, sent and received together; 0: there is no budget.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._paid = 0.0  # the time at which all bytes so far have been paid for

    def note(self, began: float, nbytes: int) -> None:
        """Note the bytes of a round that began at a time, in seconds."""
        if self._rate:
            self._paid = max(self._paid, began) + nbytes / self._rate

    def wait(self, now: float) -> float:
        """Return the seconds from ``now`` until the next round may begin."""
        return max(0.0, self._paid - now)


def worker_rate(total: int | None, each: int | None, workers: int | None) -> float:
    """Return the bytes per second that each worker may use in its rounds; 0: any number.

    Parameters
    ----------
    total, each
        Bytes per second of all workers together, and of each.
    workers
        The number of workers that take part, None if it is not known.

    Raises
    ------
    ConflictError
        When ``total`` is to be divided, and it is not known by what.
    """
    rates = [] if each is None else [float(each)]
    if total is not None:
        if workers is None:
            raise ConflictError(
                "workers that average send to each other, so each keeps a share of the budget, and"
                " the server has to know how many there are: give --workers N as well, or"
                f" --worker-budget instead of --bandwidth-budget {format_rate(total)}"
            )
        rates.append(total / workers)
    return min(rates, default=0.0)
