"""Data sets for PyTorch whose examples the server shares out among the workers of a run.

::

    from aiops.client.torch import RemoteOptimizer
    from aiops.data.torch import ShardedDataset, ShardedLoader

    opt = RemoteOptimizer(model, "aiops://host:7171")
    dataset = ShardedDataset(opt, (x_train, y_train), batch_size=32, epochs=3)
    for x, y in ShardedLoader(dataset, num_workers=2):
        ...
        opt.step()

In this process a `ShardedDataset` is an iterable data set like any other. With ``num_workers`` the
examples are read in other processes. Each has a connection of its own, by which it takes tasks for
the worker here. With each mini-batch it sends along which examples these are; `ShardedLoader` tells
that to the worker, whose next push covers them, and yields the mini-batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

try:
    import torch as _torch
except ImportError as missing:
    raise ImportError(
        "aiops.data.torch needs PyTorch, which is not here: pip install 'aiops-ps[torch]'",
        name="torch",
    ) from missing

from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from aiops.client.program import drive
from aiops.client.remote import Remote
from aiops.client.sync.client import Client
from aiops.data.batches import Blocking, SharedBatches, batches
from aiops.data.feed import AskTask, Minibatch, Op
from aiops.errors import UsageError

__all__ = ["ShardedDataset", "ShardedLoader"]


class ShardedDataset(IterableDataset[Any]):  # type: ignore[misc]
    """An iterable data set of mini-batches, which the server shares out among all workers.

    A ``DataLoader`` gets it with ``batch_size=None``, as its items are mini-batches; one with
    ``num_workers`` must be a `ShardedLoader`.

    Parameters
    ----------
    worker
        The optimizer, worker or averager of this process.
    data, batch_size, epochs, shuffle, seed, task_size, name
        As of `aiops.data.batches`. ``data`` may be tensors, or a data set in the map style: then a
        mini-batch is what ``collate`` makes of a list of its items.
    collate
        Called with what a mini-batch is read as; default: arrays become tensors, and a list of
        items is put together as a ``DataLoader`` does it.

    Raises
    ------
    UsageError
        As `aiops.data.batches`.
    """

    def __init__(
        self,
        worker: Blocking | Remote,
        data: Any,
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool | int = True,
        seed: int = 0,
        task_size: int | None = None,
        name: str = "data",
        collate: Any = None,
    ) -> None:
        super().__init__()
        self.batches: SharedBatches = batches(
            worker,
            data,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            task_size=task_size,
            name=name,
        )
        self._collate = collate or _collated
        self._sharded = False  # in a process that reads, whether a `ShardedLoader` started it

    @property
    def epoch(self) -> int:
        """The epoch of the last mini-batch, from 0."""
        return self.batches.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield mini-batches; in a DataLoader's process each with its numbers before it."""
        if get_worker_info() is None:
            for rows in self.batches:
                yield self._collate(rows)
        elif self._sharded:
            yield from self._read()
        else:
            raise UsageError(
                "a DataLoader with num_workers does not tell the worker which examples its"
                " mini-batches are, so they would never count as seen: use"
                " aiops.data.torch.ShardedLoader(dataset, num_workers=...), or num_workers=0"
            )

    @contextlib.contextmanager
    def sharding(self) -> Iterator[None]:
        """Have processes that are started meanwhile read for a `ShardedLoader`."""
        self._sharded = True
        try:
            yield
        finally:
            self._sharded = False

    def _read(self) -> Iterator[tuple[tuple[int, int, int, int], Any]]:
        """Take tasks for the worker of the process that this is a fork of, while some are free."""
        url, token, holder = self.batches.whose
        with Client(url, token=token) as client:
            feed = self.batches.feed_for(client.info, holder)

            def carry_out(order: Op) -> Any:
                assert isinstance(order, AskTask), "it pushes nothing"
                return client.take_task(order.message)

            while (piece := drive(feed.next(wait=False), carry_out)) is not None:
                numbers = piece.task, piece.epoch, piece.start, piece.stop
                yield numbers, self._collate(self.batches.rows(piece))

    def rest(self) -> Iterator[Any]:
        """Yield the mini-batches of one task, read here, once any is free; none: all is seen."""
        for rows in self.batches.one_task():
            yield self._collate(rows)


class ShardedLoader(DataLoader[Any]):  # type: ignore[misc]
    """A ``DataLoader`` of a `ShardedDataset`, with or without processes that read.

    Parameters
    ----------
    dataset
        The data set.
    settings
        As of ``DataLoader``: ``num_workers``, ``prefetch_factor``, ``pin_memory`` and others.

    Raises
    ------
    UsageError
        When a setting is the data set's to choose.
    """

    def __init__(self, dataset: ShardedDataset, **settings: Any) -> None:
        own = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"}
        wrong = sorted(own & set(settings))
        if wrong or settings.get("in_order") is False:
            raise UsageError(f"{(wrong or ['in_order'])[0]} is the data set's to choose, not here")
        super().__init__(dataset, batch_size=None, collate_fn=_as_it_is, **settings)

    def __iter__(self) -> Iterator[Any]:
        """Yield mini-batches until every epoch is complete."""
        dataset = self.dataset
        assert isinstance(dataset, ShardedDataset), "it was made with one"
        if not self.num_workers:
            yield from super().__iter__()
            return
        shared = dataset.batches
        with shared.ending():
            while not shared.over:
                with dataset.sharding():
                    read = super().__iter__()  # starts the processes
                for numbers, batch in read:
                    shared.note(Minibatch(*numbers))
                    yield batch
                # Nothing was free. What the others give back is read here, and then again there.
                yield from dataset.rest()


def _as_it_is(item: Any) -> Any:
    """Return an item of the data set, whose arrays are tensors already."""
    return item


def _collated(rows: Any) -> Any:
    """Return what a mini-batch was read as with tensors in place of arrays."""
    if isinstance(rows, list) and not any(isinstance(row, _torch.Tensor) for row in rows[:1]):
        return _torch.utils.data.default_collate(rows)
    if isinstance(rows, list):
        return _torch.stack(rows)
    converted = default_convert(rows)
    return tuple(converted) if isinstance(rows, tuple) else converted
