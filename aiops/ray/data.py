"""Ray Data as input: an actor deals the blocks of a dataset, workers cut them into mini-batches.

Ray Train's own way (``streaming_split``) has all consumers begin an epoch together, so that one
that is lost stops the others. Here an epoch is dealt block by block (`aiops.ray.dealing`). A block
itself travels through Ray's object store, from the node that made it to the worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from aiops.errors import UsageError
from aiops.model.layout import Array
from aiops.ray.dealing import Dealing, DealtBlock, EpochOver

_ANSWER = 600.0  # seconds that Ray Data may take to make the next block


class DealerActor:
    """Deals the blocks of one dataset.

    Parameters
    ----------
    dataset
        A `ray.data.Dataset`; it is executed again for each epoch, unless it is materialized.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._dealing = dataset, Dealing()
        self._blocks: dict[DealtBlock, Any] = {}  # references to those that are not finished
        self._source: Iterator[Any] = iter(())
        self._source_epoch = -1

    def begin(self, rank: int, start: int) -> int:
        """Return the epoch with which a worker begins."""
        return self._dealing.begin(rank, start)

    def lost(self, rank: int) -> None:
        """Deal the block of a lost worker to another."""
        self._dealing.lost(rank)

    def ask(self, rank: int, start: int, epoch: int) -> tuple[Any] | None:
        """Return a reference to the next block, in a tuple; None: the epoch is over."""
        found = self._dealing.ask(rank, start, epoch)
        if isinstance(found, DealtBlock) and found not in self._blocks:
            if self._source_epoch != found.epoch:
                self._source, self._source_epoch = self._references(), found.epoch
            reference = next(self._source, None)
            if reference is None:
                found = self._dealing.exhausted(found)
            else:
                self._blocks[found] = reference
        unfinished = self._dealing.unfinished
        self._blocks = {k: v for k, v in self._blocks.items() if k in unfinished}
        return None if isinstance(found, EpochOver) else (self._blocks[found],)

    def _references(self) -> Iterator[Any]:
        for bundle in self._dataset.iter_internal_ref_bundles():
            yield from bundle.block_refs


class DatasetShard:
    """A worker's part of a dataset: the blocks that it is dealt, in mini-batches.

    Parameters
    ----------
    name
        The dataset's.
    dealer
        The actor that deals it.
    rank, start
        The worker's, and how often it has been begun before.
    """

    def __init__(self, name: str, dealer: Any, rank: int, start: int) -> None:
        self._name, self._dealer, self._rank, self._start = name, dealer, rank, start
        self._epoch: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in, from 0; a worker begins in the present one."""
        if self._epoch is None:
            asked = self._dealer.begin.remote(self._rank, self._start)
            self._epoch = int(ray.get(asked, timeout=_ANSWER))
        return self._epoch

    def iter_batches(
        self, *, batch_size: int = 256, batch_format: str = "numpy", drop_last: bool = False
    ) -> Iterator[Any]:
        """Yield the mini-batches of this worker's blocks, to the end of the epoch.

        Parameters
        ----------
        batch_size
            Rows; those that a block leaves over are joined with the next block's.
        batch_format
            ``"numpy"``: dicts of arrays by column. ``"pandas"``: data frames. ``"pyarrow"``: its
            tables.
        drop_last
            Leave out the last mini-batch, if it is smaller.

        Raises
        ------
        UsageError
            When the size or the format makes no sense.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size must be 1 or more, not {batch_size}")
        if batch_format not in _FORMATS:
            raise UsageError(
                f"batch_format must be one of {sorted(_FORMATS)}, not {batch_format!r}"
            )
        return map(_FORMATS[batch_format], self._tables(batch_size, drop_last))

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts by column."""
        for table in self._tables(1024, False):
            yield from table.to_pylist()

    def iter_torch_batches(
        self, *, batch_size: int = 256, drop_last: bool = False, device: Any = "cpu"
    ) -> Iterator[dict[str, Any]]:
        """Yield dicts of tensors by column; parameters as `iter_batches`'s."""
        import torch

        for batch in self.iter_batches(batch_size=batch_size, drop_last=drop_last):
            # A copy, since Arrow's memory is read-only.
            yield {name: torch.tensor(column, device=device) for name, column in batch.items()}

    def _tables(self, rows: int, drop_last: bool) -> Iterator[Any]:
        """Yield tables of ``rows`` rows, and what is left at the end."""
        import pyarrow

        left: Any = None
        for table in self._blocks():
            whole = table if left is None else pyarrow.concat_tables([left, table])
            full = len(whole) - len(whole) % rows
            for begin in range(0, full, rows):
                yield whole.slice(begin, rows)
            left = whole.slice(full) if full < len(whole) else None
        if left is not None and not drop_last:
            yield left

    def _blocks(self) -> Iterator[Any]:
        """Yield the blocks that this worker is dealt in an epoch, as Arrow tables."""
        epoch = self.epoch
        while True:
            asked = self._dealer.ask.remote(self._rank, self._start, epoch)
            found = ray.get(asked, timeout=_ANSWER)
            if found is None:
                self._epoch = epoch + 1
                return
            yield ray.data.block.BlockAccessor.for_block(
                ray.get(found[0], timeout=_ANSWER)
            ).to_arrow()


def _arrays(table: Any) -> dict[str, Array]:
    batch = ray.data.block.BlockAccessor.for_block(table).to_numpy()
    return {name: np.asarray(column) for name, column in batch.items()}


_FORMATS = {
    "numpy": _arrays,
    "pandas": lambda table: table.to_pandas(),
    "pyarrow": lambda table: table,
}
