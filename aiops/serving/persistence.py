"""Write a server's files: its model, the record of its events, the ledger.

If a file cannot be written any more (a full disk, say), the server and its other files go on. The
error is logged, and is part of the statistics while it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from aiops.engine.engine import Engine
from aiops.engine.events import Collected, Collection, Copied, CopyDue, Event, Initialised
from aiops.engine.steady import ExchangeRecord
from aiops.errors import UsageError
from aiops.model.arena import aligned
from aiops.model.layout import Array, Ints, Layout
from aiops.model.tables import StoredTable
from aiops.serving.config import Config
from aiops.serving.repeated_error import RepeatedError
from aiops.serving.run_files import EVERY, LedgerFile
from aiops.serving.safetensors_io import (
    Described,
    check_writable,
    read_model,
    read_tables,
    write_model,
)
from aiops.serving.state.record_folder import RecordFolder

_log = logging.getLogger("aiops.server")


class Persistence:
    """One server's files.

    Parameters
    ----------
    config
        The files, and the interval of copies.
    engine
        The engine whose model, events and ledger are written.
    now
        The server's clock.
    post
        Has the engine handle an event.
    collect
        Begins to collect the model, if it is placed on several shards.

    Attributes
    ----------
    note
        Records an event, and returns what the engine takes with it; None: there is no record.
    exchanges
        Records steady exchanges; None: there is no record.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "exchanges")

    def __init__(
        self,
        config: Config,
        engine: Engine,
        now: Callable[[], float],
        post: Callable[[Event], None],
        collect: Callable[[], Collection | None] | None = None,
    ) -> None:
        self._config, self._engine, self._now, self._collect = config, engine, now, collect
        self._post = post
        self.note: Callable[[Event], bool | None] | None = None
        self.exchanges: ExchangeRecord | None = None
        self._record: RecordFolder | None = None
        self._ledger: LedgerFile | None = None
        self._noting: asyncio.TimerHandle | None = None  # the next line of the ledger
        self._began = 0.0
        self._saving: asyncio.Task[None] | None = None
        # The copy that is due, with the rows of tables then.
        self._waiting: asyncio.Future[tuple[Copied | Collected, Sequence[StoredTable]]] | None
        self._waiting = None
        self._unsaved = RepeatedError()

    def errors(self) -> list[str]:
        """Return the errors of the files, a sentence each."""
        files = [file.error for file in (self._record, self._ledger) if file is not None]
        return [text for text in (*files, self._unsaved.reason) if text]

    # ------------------------------------------------------------ life

    def open(self) -> None:
        """Open the files to be written.

        Raises
        ------
        UsageError
            When a file cannot be written; `discard` is then due.
        """
        config = self._config
        if config.save is not None:
            check_writable(config.save)
        if config.record is not None:
            given = config.record, config.policy, self._engine, self._now()
            self._record = RecordFolder(*given)
            self.note, self.exchanges = self._record.note, self._record
        if config.ledger is not None:
            self._ledger = LedgerFile(config.ledger)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to write the files that are written at intervals."""
        self._began = self._now()
        if self._ledger is not None:
            self._write_ledger(loop, self._ledger)
        path, seconds = self._config.save, self._config.save_every
        if path is not None and seconds is not None:
            self._saving = loop.create_task(self._save_at_intervals(path, seconds))

    def stop(self) -> None:
        """Begin no further copy of the model."""
        if self._saving is not None:
            self._saving.cancel()

    async def end(self) -> None:
        """Write the files that are written at the end, and close all.

        Raises
        ------
        UsageError
            When the model cannot be saved, which is tried last.
        """
        if self._noting is not None:
            self._noting.cancel()
        if self._record is not None:
            self._record.end(self._now())
        if self._ledger is not None:
            self._ledger.write(self._now() - self._began, self._engine.membership.ledger())
            self._ledger.close()
        if self._saving is not None:
            await asyncio.wait([self._saving])
        if self._config.save is not None and self._collect is not None:
            await self._save_sharded(self._config.save, self._collect)
        elif self._config.save is not None:
            self.save(self._config.save)

    def discard(self) -> None:
        """Remove the files of a run that did not begin."""
        for file in (self._record, self._ledger):
            if file is not None:
                file.discard()

    def forked(self) -> None:
        """Let go of the files in a fork."""
        for file in (self._record, self._ledger):
            if file is not None:
                file.forked()

    # ------------------------------------------------------------ the model

    def save(self, path: Path) -> None:
        """Write the current version to a file, as it is where the model is evaluated."""
        training, store = self._engine.training, self._engine.store
        if training is None or store is None:
            _log.warning("nothing is saved to %s: no model has been defined", path)
            return
        if store.busy or self._engine.working:
            _log.error("nothing is saved to %s: an update was not finished", path)
            return
        tables = self._engine.saved_tables()
        write_model(path, training.evaluated().views, store.version, tables)
        _log.info("version %d saved to %s", store.version, path)

    async def _save_sharded(self, path: Path, collect: Callable[[], Collection | None]) -> None:
        """Collect the current version from all shards, and write it."""
        if self._engine.store is None:
            _log.warning("nothing is saved to %s: no model has been defined", path)
            return
        collection = None if self._engine.working else collect()
        if collection is None:
            _log.error("nothing is saved to %s: an update was not finished", path)
        elif await self._write_collected(path, collection, self._engine.saved_tables()):
            _log.info("version %d saved to %s", collection.version, path)

    async def _write_collected(
        self, path: Path, collection: Collection, tables: Sequence[StoredTable]
    ) -> bool:
        """Write what is being collected, when it is done; return whether it is written.

        ``tables``: the rows that lie on this server.
        """
        changed = asyncio.Event()
        collection.on_change = changed.set
        while not collection.done:
            try:
                async with asyncio.timeout(self._config.stall_deadline):
                    await changed.wait()
                changed.clear()
            except TimeoutError:
                late = ", ".join(map(str, sorted(collection.late)))
                collection.fail(f"shards {late} did not send their parts in time")
        if collection.failure:
            _log.error("nothing is saved to %s: %s", path, collection.failure)
            return False

        def write() -> None:
            rows = collection.with_rows(tables)
            write_model(path, collection.arena.views, collection.version, rows)

        await asyncio.to_thread(write)
        return True

    # ------------------------------------------------------------ copies at intervals

    def copy(self, effect: Copied | Collected) -> None:
        """Have a copy be written, if it is waited for: an earlier start may have requested it."""
        waiting, error = self._waiting, None
        if waiting is not None and not waiting.done():
            try:
                waiting.set_result((effect, self._engine.saved_tables()))
            except MemoryError as failure:  # the rows' copy, as nothing holds a version of them
                error = failure
            else:
                return
        if isinstance(effect, Copied):
            effect.lease.release()
        if waiting is not None and error is not None:
            waiting.set_exception(error)

    async def _save_at_intervals(self, path: Path, seconds: float) -> None:
        """Write the model at intervals; updates go on meanwhile."""
        while True:
            await asyncio.sleep(seconds)
            if self._engine.training is None:
                continue
            self._waiting = asyncio.get_running_loop().create_future()
            self._post(CopyDue(self._now()))
            writing: asyncio.Future[bool] | None = None
            try:
                writing = asyncio.ensure_future(self._write_copy(path, *await self._waiting))
                if await asyncio.shield(writing):
                    self._is_saved(path)
            except Exception as error:  # whatever it is, the next copy may be written
                self._is_not_saved(error)
            finally:  # also when cancelled: a write that went on could overtake the last one
                if writing is not None:
                    await asyncio.wait([writing])

    async def _write_copy(
        self, path: Path, effect: Copied | Collected, tables: Sequence[StoredTable]
    ) -> bool:
        """Write a copy; return whether it is written. A lease keeps the version unchanged."""
        if isinstance(effect, Collected):
            return await self._write_collected(path, effect.collection, tables)
        version = effect.lease.version
        try:
            await asyncio.to_thread(write_model, path, version.arena.views, version.number, tables)
        finally:
            effect.lease.release()
        return True

    def _is_saved(self, path: Path) -> None:
        if self._unsaved.reason:
            _log.info("the model is saved to %s again", path)
        self._unsaved.over()

    def _is_not_saved(self, error: Exception) -> None:
        """Log that the model is not saved, as `RepeatedError`."""
        text = str(error) if isinstance(error, UsageError) else f"cannot save the model: {error!r}"
        again = f"{text}; it is tried again every {self._config.save_every:g} s"
        self._unsaved.log(self._now(), text, again)

    def initial_model(self, path: Path) -> Initialised:
        """Return the model to begin with that a file holds.

        Raises
        ------
        UsageError
            When it cannot be read, or has values that are not finite.
        """
        arrays, tables = read_model(path), read_tables(path)
        _check_numbers(path, arrays, tables)
        layout = Layout.of(arrays, empty=bool(tables))
        rest = [part for _row, ids, rows in tables for part in (ids, rows)]
        data = aligned(layout.nbytes + sum(part.nbytes for part in rest))
        for tensor in layout.tensors:
            flat = np.ascontiguousarray(arrays[tensor.name]).reshape(-1).view(np.uint8)
            data[tensor.offset : tensor.offset + tensor.nbytes] = flat
        rows = tuple((t.name, t.dtype.name, t.shape) for t in layout.tensors)
        place = layout.nbytes
        for part in rest:
            data[place : place + part.nbytes] = part.reshape(-1).view(np.uint8)
            place += part.nbytes
        given = tuple((row, len(ids)) for row, ids, _rows in tables)
        return Initialised(self._now(), rows, data, given)

    def _write_ledger(self, loop: asyncio.AbstractEventLoop, file: LedgerFile) -> None:
        """Write a line of the ledger now, and again after `EVERY` seconds."""
        file.write(self._now() - self._began, self._engine.membership.ledger())
        self._noting = loop.call_later(EVERY, self._write_ledger, loop, file)


def _check_numbers(
    path: Path, arrays: Mapping[str, Array], tables: Sequence[tuple[Described, Ints, Array]]
) -> None:
    """Refuse an initial model with infinities or NaNs: training would not remove them.

    Raises
    ------
    UsageError
        Naming the file, the tensor and the element.
    """
    advice = "a model to begin with has finite values; take an earlier copy"
    for name, array in arrays.items():
        place = _infinite(array)
        if place is not None:
            value = float(array[place])
            raise UsageError(f"{path}: {name!r} holds {value} at {list(place)}: {advice}")
    for described, ids, rows in tables:
        place = _infinite(rows)
        if place is not None:
            row, column = place
            raise UsageError(
                f"{path}: row {ids[row]} of table {described[0]!r} holds {float(rows[place])} in"
                f" column {column}: {advice}"
            )


def _infinite(array: Array) -> tuple[int, ...] | None:
    """Return the index of the first element that is infinite or not a number."""
    finite = np.isfinite(array)
    if finite.all():
        return None
    return tuple(int(i) for i in np.unravel_index(int(finite.argmin()), array.shape))
