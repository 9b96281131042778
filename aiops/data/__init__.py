"""Data: mini-batches of a data set that the server shares out among the workers of a run.

::

    for x, y in aiops.data.batches(worker, (x_train, y_train), batch_size=32, epochs=3):
        worker.step(gradients(worker.params, x, y))

Each example is seen once an epoch by all workers together, though workers come, die and go.
``aiops.data.torch`` is imported by those who use it.
"""

from __future__ import annotations

from aiops.data.batches import SharedBatches, batches
from aiops.data.order import EpochOrder
from aiops.data.source import RowRanges, Source

__all__ = ["EpochOrder", "RowRanges", "SharedBatches", "Source", "batches"]
