"""Keep the bytes of a worker's rounds of averaging within a budget: how coded, and how often.

A round's bytes follow from the model's size, and cannot be sent more slowly without holding up the
other workers. So the budget decides two things. `needed_codec`: which codec the chunks of a round
travel in, the one that takes least from the model with which rounds can follow each other as often
as they are wanted. `RoundSpacing`: when the next round may begin, which is when the bytes of all
rounds so far, both ways, have been paid for at its rate. From the first round on, no more than the
budget and the bytes of one round have crossed at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def needed_codec(
    rate: float, interval: float, lengths: Sequence[tuple[str, int]], members: int
) -> str:
    """Return the first codec with which a worker's rounds keep a budget, else the last.

    Parameters
    ----------
    rate
        Bytes per second that a worker may send and receive together; 0: any number.
    interval
        Seconds that are wanted between two rounds; what a round itself takes is left as a reserve.
    lengths
        Codecs, and the bytes of the model in each: what changes values least comes first.
    members
        The number of workers in the ring.

    >>> lengths = [("", 1000), ("bf16", 500), ("int8", 254)]
    >>> [needed_codec(rate, 1.0, lengths, 2) for rate in (0, 2000, 1999, 1000, 999, 1)]
    ['', '', 'bf16', 'bf16', 'int8', 'int8']
    """
    models = 4 * (members - 1) / members  # that a worker sends and receives in a round
    for codec, nbytes in lengths:
        if not rate or models * nbytes <= rate * interval:
            return codec
    return lengths[-1][0]


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
