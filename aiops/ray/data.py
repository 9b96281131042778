"""Ray Data as input: an actor deals the blocks of a dataset, workers cut them into mini-batches.

Ray Train's own way (``streaming_split``) has all consumers begin an epoch together, so that one
that is lost stops the others. Here there are two ways:

* `DatasetShard.iter_batches` deals an epoch block by block (`aiops.ray.dealing`), as Ray Data makes
  them. The rows of a lost worker's block are seen again as far as it had come.
* `aiops.data.batches` takes the shard as its data: then the server hands out ranges of rows, which
  pushes cover, and each row counts once an epoch. For that a row needs a number that stays: the
  actor executes the dataset once, and all blocks stay in Ray's object store (which writes to the
  disks what has no room in memory).

A block itself travels through the object store, from the node that made it to the worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from aiops.data.source import RowRanges
from aiops.errors import UsageError
from aiops.model.layout import Array, Ints
from aiops.ray.dealing import Dealing, DealtBlock, EpochOver

_ANSWER = 600.0  # seconds that Ray Data may take to make the next block
_ALL = 24 * 3600.0  # seconds that it may take to make all of them


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
        self._numbered: list[tuple[Any, int, int]] | None = None

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

    def numbered(self) -> list[tuple[Any, int, int]]:
        """Execute the dataset, once; return its blocks in an order that stays.

        Each is a reference, the first of its rows that belong to the dataset, and the one after the
        last of these. Blocks without rows are left out.
        """
        if self._numbered is None:
            found, self._dataset = [], self._dataset.materialize()
            for bundle in self._dataset.iter_internal_ref_bundles():
                for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
                    rows = (0, entry.metadata.num_rows)
                    if part is not None:
                        rows = (part.start_offset, part.end_offset)
                    found.append((entry.ref, *rows))
            self._numbered = [block for block in found if block[1] < block[2]]
        return self._numbered

    def _references(self) -> Iterator[Any]:
        for bundle in self._dataset.iter_internal_ref_bundles():
            yield from bundle.block_refs


class DatasetShard:
    """A worker's part of a dataset: the blocks that it is dealt, in mini-batches.

    It may be the data of `aiops.data.batches`, too, which then shares out the rows of the whole
    dataset, each once an epoch; a mini-batch is a dict of arrays by column.

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
        self._whole: RowRanges | None = None
        self._process = os.getpid()

    # ------------------------------------------------------------ as data of `aiops.data.batches`

    def __len__(self) -> int:
        """Return the number of rows of the whole dataset; the first call executes it."""
        return len(self._rows())

    def rows(self, indices: Ints) -> dict[str, Array]:
        """Return rows of the whole dataset by their numbers (int64), as arrays by column.

        Raises
        ------
        UsageError
            In another process than the worker's, which is not connected to Ray.
        """
        found: dict[str, Array] = self._rows().rows(indices)
        return found

    def _rows(self) -> RowRanges:
        if os.getpid() != self._process:
            raise UsageError(
                f"dataset {self._name!r} is read in the worker's own process, not in a fork of it:"
                " leave num_workers at 0"
            )
        if self._whole is None:
            blocks = ray.get(self._dealer.numbered.remote(), timeout=_ALL)
            if not blocks:
                raise UsageError(f"dataset {self._name!r} is empty")
            ends = np.cumsum([stop - start for _reference, start, stop in blocks])
            firsts = [0, *ends[:-1].tolist()]
            numbers = {first: number for number, first in enumerate(firsts)}

            def read(start: int, stop: int) -> Any:
                reference, first, last = blocks[numbers[start]]
                accessor = ray.data.block.BlockAccessor.for_block(
                    ray.get(reference, timeout=_ANSWER)
                )
                if accessor.num_rows() < last:
                    raise UsageError(
                        f"dataset {self._name!r}: Ray Data has made a block again, and it has"
                        f" {accessor.num_rows()} rows in place of {last}: what makes the dataset"
                        " must give the same rows each time"
                    )
                return _arrays(accessor.slice(first, last))

            self._whole = RowRanges(int(ends[-1]), read, unit=firsts)
        return self._whole

    # ------------------------------------------------------------ as dealt

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
