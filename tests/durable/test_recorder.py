"""An engine with a journal and captures comes back from any of its rows, from any snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from aiops.durable.commit_gate import Acks, CommitGate
from aiops.durable.recorder import AT_ONCE, AppendRow, Recorder, SnapshotFailed, WriteSnapshot
from aiops.durable.recovery import Replayer
from aiops.engine.buffer_pool import BufferPool
from aiops.engine.capture import Capture, capture, needed_rows
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Committed,
    Effect,
    Event,
    Joined,
    JournalEnded,
    Received,
    Reply,
    Resumed,
    SnapshotDue,
    Stopping,
    Tick,
)
from aiops.engine.receive import RawIncoming
from aiops.engine.statistics import decided
from aiops.errors import UsageError
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.state.frames import JournalFrame
from aiops.state.plain import pack, unpack
from aiops.store.capture_job import CaptureJob
from aiops.store.parameters import UpdateJob
from aiops.wire.messages import Message, Push
from aiops.wire.traffic import sizes
from tests.engine.seeded_run import Case, Client, Driver, Script, Step, event_of
from tests.seeds import seeds


@dataclass
class Kept:
    """Everything that a recorded engine has kept: its rows, and its snapshots by their rows."""

    rows: list[JournalFrame] = field(default_factory=list)
    snapshots: dict[int, Capture] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def recovered(self, case: Case, until: int, snapshot: int = 0) -> tuple[Engine, list[Effect]]:
        """A fresh engine at a row, and what is to be done there: from a snapshot, or the start."""
        engine = case.engine()
        replayer = Replayer(engine)
        if snapshot:
            found = replace(self.snapshots[snapshot])
            found.owners = unpack(pack(found.owners), "owners")  # they become parts of the engine
            queued = {row: self.rows[row - 1] for row in needed_rows(found.owners)}
            replayer.restore(snapshot, found, found.array, queued)
        for frame in self.rows[snapshot:until]:
            replayer.feed(frame)
        return engine, [*replayer.finish().outstanding]


class Recorded(Script):
    """A seeded run of an engine with a journal."""

    def __init__(self, case: Case, seed: int, *, recording: bool = True) -> None:
        super().__init__(case, seed)
        self.kept = Kept()
        gate = CommitGate(Acks.WRITTEN)
        self.recorder = Recorder(self.engine, gate, 1, recording=recording)

    def take(self, step: Step, row: int) -> list[Any]:
        """Handle a step's event; keep its row, and the snapshot that is complete."""
        if step.kind == "applied":
            assert self.outstanding is not None
            apply, self.outstanding = self.outstanding, None
            event: Any = Applied(step.time, apply.ticket, apply.run())
        else:
            event = event_of(self.engine, step, 0)
        if isinstance(event, Joined):
            event.traffic.received(event.hello.kind, *sizes(event.hello))
        elif isinstance(event, Received):
            self._count(event.peer, event.message)
        told = []
        for effect in self.recorder.handle(event):
            if isinstance(effect, Reply):
                self._count(effect.peer, effect.message, sent=True)
            if isinstance(effect, AppendRow):
                made = effect.row
                payload = memoryview(b"" if made.payload is None else bytes(made.payload))
                fixed = effect.number, int(made.kind), made.time, made.flags, made.row
                self.kept.rows.append(JournalFrame(*fixed, payload, 0, 0, 0))
            elif isinstance(effect, WriteSnapshot):
                effect.capture.read_rows()  # of tables: they can be read until it is released
                found = replace(effect.capture)
                found.arrays = {name: array.copy() for name, array in found.arrays.items()}
                found.owners = unpack(pack(found.owners), "owners")
                effect.capture.release()
                self.kept.snapshots[effect.row] = found
            elif isinstance(effect, SnapshotFailed):
                self.kept.failed.append(effect.why)
            else:
                told.append(self._told(effect))  # type: ignore[arg-type]
        return told

    def _count(self, peer: int, message: Message, *, sent: bool = False) -> None:
        """Count the bytes of a message, as the connection does."""
        traffic = self.engine.membership.traffic(peer)
        count = traffic.sent if sent else traffic.received
        count(message.kind, *sizes(message))


def all_of(recovered: tuple[Engine, list[Effect]]) -> tuple[Any, ...]:
    """Return all that decides the future of a recovered engine, to be compared."""
    engine, effects = recovered
    issued = [(e.ticket, type(e.job).__name__) for e in effects if isinstance(e, Apply)]
    found = issued, digest(engine), decided(engine.report())
    engine.handle(Resumed(engine.now + 1.0, 2))
    training = engine.training
    if training is not None and training.updates.maker.job is None:
        return *found, pack(capture(engine).owners)
    return found


CASES = {
    "fasgd": Case("fasgd", (("gamma", 0.9),), push="topk:0.1", tables=True),
    "adam": Case("ssp", (("optimizer", "adam"),), fetch="int8", float32=True, tables=True),
    "held": Case("hardsync", (("admission", "wait"),)),
    "sum": Case("softsync", (("n", 3),), push="int8"),
    "reads": Case("dcasgd", fetch="lowrank:rank=2"),
    "again": Case("asgd", gate="constant:p_push=0.5,p_fetch=1,skipped=reapply"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_any_row_around_a_capture(name: str) -> None:
    """Recovery from a snapshot gives what a replay of all rows gives."""
    queued = 0
    case = CASES[name]
    for seed in seeds(3):
        kept = (run := Recorded(case, seed + 3)).run(64).kept
        assert kept.snapshots

        @cache
        def replayed(until: int, kept: Kept = kept) -> tuple[Any, ...]:
            return all_of(kept.recovered(case, until))

        assert len(kept.rows) == len(run.steps)
        for row, found in kept.snapshots.items():
            queued += len(needed_rows(found.owners))
            for until in (*range(row, min(row + 6, len(kept.rows))), len(kept.rows)):
                assert all_of(kept.recovered(case, until, row)) == replayed(until)
    assert queued, "no push was queued at any capture"


class Reconnecting(Recorded):
    """Clients come back before the ends of their connections are noticed, too."""

    def _leave(self, client: Client) -> None:
        if self.rng.random() < 0.5:
            self._join(client)
        else:
            super()._leave(client)


AVERAGING = Case("average")
PACED = Case("fasgd", gate="bfasgd:c_push=0.1,c_fetch=0.02", budget=True, tables=True)


@pytest.mark.parametrize("name", [*CASES, "rounds", "paced"])
def test_a_recovered_engine_answers_no_connection_of_an_earlier_start(name: str) -> None:
    """Their numbers are those of other connections now."""
    case = {**CASES, "rounds": AVERAGING, "paced": PACED}[name]
    owed = 0
    for seed in seeds(2):
        kept = Reconnecting(case, seed + 20).run(90).kept
        for until in range(8, len(kept.rows), 3):
            snapshot = max((row for row in kept.snapshots if row <= until), default=0)
            for base in {0, snapshot}:
                engine, waiting = kept.recovered(case, until, base)
                owed += len(engine.membership.peers())
                now = engine.now + 1.0
                effects = [*waiting, *engine.handle(Resumed(now, 2))]
                applies = [effect for effect in effects if isinstance(effect, Apply)]
                later = [Tick(now + 30.0), Tick(now + 60.0), Stopping(now + 61.0, kept=False)]
                while applies or later:
                    event: Event = later[0]
                    if applies:
                        apply = applies.pop()
                        event = Applied(now, apply.ticket, apply.run())
                    else:
                        del later[0]
                    found = engine.handle(event)
                    applies += [effect for effect in found if isinstance(effect, Apply)]
                    effects += found
                assert [effect for effect in effects if isinstance(effect, Reply)] == []
                assert engine.idle
                if engine.budget is not None:
                    assert engine.budget.state()["seen"] == []
    assert owed, "no client was connected at any crash"


def go_on(run: Script, until: Callable[[], bool]) -> None:
    """Make steps until something is so."""
    while not until():
        run.time += 0.01
        run._any()


def test_a_capture_waits_for_the_update_that_is_outstanding() -> None:
    run = Recorded(Case("fasgd"), 5).run(20)
    go_on(
        run,
        lambda: (
            not run._snapshot_waits()
            and run.outstanding is not None
            and isinstance(run.outstanding.job, UpdateJob)
        ),
    )
    before = run.engine.version
    run._post("snapshot", 7)
    assert run.recorder.capturing
    assert not run.kept.snapshots.keys() - set(range(len(run.steps) - 1))
    due = len(run.steps)
    run._post("applied")
    assert run.outstanding is not None
    assert isinstance(run.outstanding.job, CaptureJob)
    assert run.outstanding.job.cost > 0
    run._post("applied")
    assert not run.recorder.capturing
    found = run.kept.snapshots[due + 1]
    assert found.versions == [before + 1]
    assert found.nbytes > run.engine.defined_store.layout.nbytes


def test_the_memory_of_copies_is_used_again() -> None:
    run = Recorded(Case("fasgd"), 6)
    rooms = list[dict[str, int]]()
    while len(rooms) < 3:
        before = len(run.kept.snapshots)
        if not run.steps:
            run.run(10)
        go_on(run, lambda seen=before: len(run.kept.snapshots) > seen)  # type: ignore[misc]
        rooms.append({name: each.ctypes.data for name, each in run.recorder.room.items()})
    assert rooms[0]
    assert rooms[0] == rooms[1] == rooms[2]


def test_a_replay_does_not_copy() -> None:
    """It gives the job its turn; only a recorder has it copy."""
    case = Case("fasgd")
    driver, script = Driver(case.engine()), Script(case, 3).run(60)
    for row, step in enumerate(script.steps, 1):
        if driver.outstanding is not None and isinstance(driver.outstanding.job, CaptureJob):
            assert driver.outstanding.job.cost == 0
            return
        driver.take(step, row)
    pytest.fail("no capture was issued")


def test_memory_that_is_short_costs_a_snapshot_and_no_more(monkeypatch: Any) -> None:
    def short(*_given: Any) -> None:
        raise MemoryError

    run = Recorded(Case("fasgd"), 5)
    with monkeypatch.context() as patch:
        patch.setattr(Capture, "copy", short)
        run.run(60)
    assert run.kept.failed
    assert not run.kept.snapshots
    assert set(run.kept.failed) == {"there is no memory for a copy of the state"}
    while run.leases:
        run.leases.pop().release()
    store = run.engine.defined_store
    assert store.alive <= 1 + len([*run.engine.membership])  # no capture holds a version
    go_on(run, lambda: bool(run.kept.snapshots))


def test_a_policy_that_cannot_be_kept_any_more() -> None:
    run = Recorded(Case("softsync", (("n", 2),)), 5).run(20)
    run.engine.policy.opaque = object()  # type: ignore[attr-defined]
    go_on(run, lambda: bool(run.kept.failed))
    assert ".opaque" in run.kept.failed[0]


def test_without_a_journal_snapshots_have_numbers_that_rise() -> None:
    run = Recorded(Case("fasgd"), 4, recording=False).run(120)
    assert not run.kept.rows
    rows = list(run.kept.snapshots)
    assert len(rows) > 1
    assert rows == sorted(rows)
    for found in run.kept.snapshots.values():
        assert not needed_rows(found.owners)
        Replayer(Case("fasgd").engine()).restore(1, found, found.array, {})


def test_without_a_model_there_is_nothing_to_capture() -> None:
    engine = Case().engine()
    recorder = Recorder(engine, CommitGate(Acks.WRITTEN), 1)
    row, failed = recorder.handle(SnapshotDue(1.0, 1))
    assert isinstance(row, AppendRow)
    assert failed == SnapshotFailed("there is no model yet")
    assert not recorder.capturing


def test_settings_that_differ_are_refused() -> None:
    run = Recorded(Case("fasgd"), 4).run(60)
    found = next(iter(run.kept.snapshots.values()))
    with pytest.raises(UsageError, match="policy="):
        Replayer(Case("asgd").engine()).restore(1, found, found.array, {})


def pushes(recorder: Recorder, nbytes: int) -> tuple[AppendRow, RawIncoming, BufferPool]:
    """Handle a push of a stranger, with a payload of some bytes from a pool."""
    pool, layout = BufferPool(1 << 30), Layout.of({"w": np.zeros(nbytes // 4, np.float32)})
    buffer, parts = pool.take(nbytes), (Part(0, nbytes, "raw", nbytes, 0),)
    assert buffer is not None
    sink = RawIncoming(buffer, [nbytes], layout, layout.covered(parts), pool, [])
    message = Push(1, 1, False, -1, parts)
    append = recorder.handle(Received(1.0, 7, message, sink))[0]
    assert isinstance(append, AppendRow)
    return append, sink, pool


def test_a_buffer_stays_until_its_row_is_written() -> None:
    recorder = Recorder(Case("asgd").engine(), CommitGate(Acks.WRITTEN), 1)
    small, _sink, pool = pushes(recorder, 100)
    assert not small.later
    assert pool.out == 100, "the push is refused, and the row not written"
    assert small.pinned is not None
    small.pinned.unpin()
    assert pool.out == 0
    large, _sink, pool = pushes(recorder, AT_ONCE + 4)
    next_one, _sink, next_pool = pushes(recorder, 100)
    assert (large.later, next_one.later, recorder.pending) == (True, True, True), "in order"
    assert (recorder.lacks(small.number), recorder.lacks(large.number)) == (True, True)
    recorder.handle(Committed(2.0, large.number))
    assert (recorder.lacks(large.number), recorder.lacks(next_one.number)) == (False, True)
    assert (pool.out, next_pool.out, recorder.pending) == (0, 100, True)
    recorder.handle(Committed(2.0, next_one.number))
    assert (next_pool.out, recorder.pending) == (0, False)


def test_a_journal_that_ends_gives_all_buffers_back() -> None:
    recorder = Recorder(Case("asgd").engine(), CommitGate(Acks.DURABLE), 1)
    _append, _sink, pool = pushes(recorder, 100)
    recorder.handle(JournalEnded(2.0, "the disk is full"))
    assert pool.out == 0
