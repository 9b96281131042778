"""What a server keeps in files: its model, the record of its events, the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from aiops.arena import aligned
from aiops.config import Config
from aiops.engine import Engine
from aiops.errors import UsageError
from aiops.events import Initialised
from aiops.files import check_writable, read_model, read_tables, write_model
from aiops.journal import Journal
from aiops.layout import Layout
from aiops.ledgerfile import EVERY, LedgerFile
from aiops.shards.collecting import Collecting

_log = logging.getLogger("aiops.server")


class Keeping:
    """One server's files.

    Parameters
    ----------
    config
        Which files, and how often.
    engine
        Whose model, events and ledger.
    now
        The server's clock.
    collect
        Begins to bring the model together, if it lies on several shards.

    Attributes
    ----------
    journal
        To be told every event, if there is a record.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        now: Callable[[], float],
        collect: Callable[[], Collecting | None] | None = None,
    ) -> None:
        self._config, self._engine, self._now, self._collect = config, engine, now, collect
        self.journal: Journal | None = None
        self._record: BinaryIO | None = None
        self._ledger: LedgerFile | None = None
        self._noting: asyncio.TimerHandle | None = None  # the next line of the ledger
        self._began = 0.0
        self._saving: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    def open(self) -> Initialised | None:
        """Open what is to be written; return the model to begin with, if there is one.

        Raises
        ------
        UsageError
            When a file cannot be written, or the model not be read; `abandon` is then due.
        """
        config = self._config
        if config.save is not None:
            check_writable(config.save)
        if config.record is not None:
            self._open_journal(config.record)
        if config.ledger is not None:
            self._ledger = LedgerFile(config.ledger)
        return None if config.init is None else self._initialised(config.init)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write what is written every so often from now on."""
        self._began = self._now()
        if self._ledger is not None:
            self._write_ledger(loop, self._ledger)
        if self._config.save_every is not None:
            self._saving = loop.create_task(self._save_now_and_then(self._config.save_every))

    def stop(self) -> None:
        """Begin no further copy of the model."""
        if self._saving is not None:
            self._saving.cancel()

    async def end(self) -> None:
        """Write what is to be written at the end, and close everything."""
        if self._noting is not None:
            self._noting.cancel()
        if self.journal is not None:
            self.journal.end(self._now(), self._engine)
        if self._ledger is not None:
            self._ledger.write(self._now() - self._began, self._engine.crew.ledger())
        self.abandon()
        if self._saving is not None:
            await asyncio.wait([self._saving])
        if self._config.save is not None and self._collect is not None:
            await self._save_sharded(self._config.save, self._collect)
        elif self._config.save is not None:
            self.save(self._config.save)

    def abandon(self) -> None:
        """Close the files."""
        if self._record is not None:
            self._record.close()
        if self._ledger is not None:
            self._ledger.close()

    # ------------------------------------------------------------ the model

    def save(self, path: Path) -> None:
        """Write the current version of the parameters to a file."""
        store = self._engine.store
        if store is None:
            _log.warning("nothing is saved to %s: no model has been defined", path)
            return
        if store.busy or self._engine.updates.working:
            _log.error("nothing is saved to %s: an update was not finished", path)
            return
        tables = self._engine.saved_tables()
        write_model(path, store.current.arena.views, store.version, tables)
        _log.info("version %d saved to %s", store.version, path)

    async def _save_sharded(
        self, path: Path, collect: Callable[[], Collecting | None], patient: bool = False
    ) -> None:
        """Bring the current version together from all shards, and write it.

        ``patient``: if it cannot be read now, there will be another time.
        """
        if self._engine.store is None and not patient:
            _log.warning("nothing is saved to %s: no model has been defined", path)
        if self._engine.store is None:
            return
        collecting = None if self._engine.updates.working else collect()
        if collecting is None:
            if not patient:
                _log.error("nothing is saved to %s: an update was not finished", path)
            return
        tables = self._engine.saved_tables()
        ended = asyncio.Event()
        collecting.on_done = ended.set
        try:
            async with asyncio.timeout(self._config.stall_deadline):
                while not collecting.done:
                    await ended.wait()
        except TimeoutError:
            late = ", ".join(map(str, sorted(collecting.missing)))
            collecting.fail(f"shards {late} did not send their parts in time")
        if collecting.failure:
            _log.error("nothing is saved to %s: %s", path, collecting.failure)
            return
        views, version = collecting.arena.views, collecting.version
        await asyncio.to_thread(write_model, path, views, version, tables)
        _log.info("version %d saved to %s", version, path)

    async def _save_now_and_then(self, seconds: float) -> None:
        """Write the parameters every so often; a lease keeps the version whole meanwhile."""
        path = self._config.save
        assert path is not None
        while True:
            await asyncio.sleep(seconds)
            if self._collect is not None:
                saving = asyncio.ensure_future(self._save_sharded(path, self._collect, True))
                try:
                    await asyncio.shield(saving)
                except UsageError as error:
                    _log.error("%s", error)
                finally:  # as below
                    await asyncio.wait([saving])
                continue
            store = self._engine.store
            if store is None or not store.readable or self._engine.updates.working:
                continue
            lease = store.lease()
            version, views = lease.version.number, lease.version.arena.views
            tables = self._engine.saved_tables()  # a copy, for nothing holds a version of them
            writing = asyncio.ensure_future(
                asyncio.to_thread(write_model, path, views, version, tables)
            )
            del tables
            try:
                await asyncio.shield(writing)
                _log.debug("version %d saved to %s", version, path)
            except UsageError as error:
                _log.error("%s", error)
            finally:  # also when cancelled: a write that went on could overtake the last one
                await asyncio.wait([writing])
                lease.release()

    def _initialised(self, path: Path) -> Initialised:
        arrays, tables = read_model(path), read_tables(path)
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

    # ------------------------------------------------------------ the record, the ledger

    def _open_journal(self, path: Path) -> None:
        try:
            self._record = path.open("wb")
        except OSError as error:
            raise UsageError(f"--record {path}: {error.strerror}") from None
        config, algorithm = self._config, self._engine.algorithm
        settings, options = algorithm.settings(), config.options()
        self.journal = Journal(self._record, config.policy, settings, options)

    def _write_ledger(self, loop: asyncio.AbstractEventLoop, file: LedgerFile) -> None:
        """Write a line now, and again before long."""
        file.write(self._now() - self._began, self._engine.crew.ledger())
        self._noting = loop.call_later(EVERY, self._write_ledger, loop, file)
