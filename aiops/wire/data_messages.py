"""The messages of data sets, whose examples a server hands out: docs/wire-data.md.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from aiops.common.frozen import value
from aiops.wire.fields import Examples, Numbers, Positive, Text, UInt
from aiops.wire.messages import Message

LONGEST_NAME = 256
"""The most characters of a data set's name."""


@value
class TakeTask(Message):
    """Request examples of the data set ``name`` to work on; ``size`` 0: none, just the rest.

    The first request for a data set makes it. Tasks that this client took and does not keep go to
    other workers.
    """

    kind = "take_task"
    name: Text
    examples: Positive  # of the whole data set
    block: UInt  # neighbours that stay together when it is shuffled; 0: it is not
    seed: UInt  # of the shuffling
    epoch: UInt  # the first one, if the server does not know the data set
    epochs: UInt  # tasks are of epochs below this one
    size: UInt  # the most examples that the task may have
    wait: bool  # whether to wait while others may still give back what they took
    holder: Text  # the id of the client that pushes; empty: this one
    keeps: Numbers  # the tasks that this client took and is still at
    seen: Examples  # examples that count without a push


@value
class GivenTask(Message):
    """The positions ``start`` to ``stop`` of the order of an epoch are this worker's now."""

    kind = "task"
    task: UInt  # its number, from 1; 0: there is none at present
    epoch: UInt
    start: UInt
    stop: UInt
    over: bool  # every example of every epoch that was asked for has been seen


@value
class CoverPush(Message):
    """Announce the examples whose gradients the next push, ``seq``, is made of.

    They count as seen if it is used. If they are not this worker's any more, it is not used.
    """

    kind = "cover"
    seq: UInt
    seen: Examples
