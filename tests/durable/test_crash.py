"""A crash after any operation of the disk: recovery gives a prefix of the rows, or a refusal.

Seeded runs of every policy are journalled on a simulated disk, which keeps what was done to it. Of
each moment there is the disk as the end of the process leaves it, and several that a loss of power
leaves. What is recovered must be the state after some row, to the last bit, and not before the row
that was promised; and when the rest of the events is fed to it, it must end as the run did.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from aiops import testing
from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import Recovered
from aiops.durable.rows import row_of
from aiops.engine.capture import capture
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, Committed, Effect, Event
from aiops.engine.statistics import decided
from aiops.errors import DamagedState
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import StateFiles
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop
from aiops.state.frames import FRAME, HEAD, frame_bytes
from aiops.state.snapshot_file import SnapshotHeader
from tests.engine.seeded_run import Case, Driver, Script
from tests.engine.test_capture import POLICIES, ROWS, possible

FOLDER = Path("state")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Torn ends and damaged snapshots are logged, here by the thousand."""
    caplog.set_level(logging.CRITICAL, "aiops.server")


class Unsnapped(Script):
    """A script without the turns that test_capture's snapshots take among the updates."""

    def _snapshot_waits(self) -> bool:
        return True


class Journalled:
    """An engine that appends the row of each event before it handles it, and notes its state."""

    def __init__(self, engine: Engine, writer: Any, run: Run) -> None:
        self._engine, self._writer, self._run = engine, writer, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def handle(self, event: Event, leased: bool) -> list[Effect]:
        run, number = self._run, len(self._run.states)
        row = row_of(event, leased)
        if row.payload is not None:  # it may be changed before it is written
            row = replace(row, payload=row.payload.copy())
        assert self._writer.append(AppendRow(number, row, later=True)) is None
        effects = self._engine.handle(event, leased)
        run.states.append(state_of(self._engine))
        return effects


def state_of(engine: Engine) -> tuple[str, dict[str, Any]]:
    return digest(engine), decided(engine.report())


@dataclass
class Run:
    """A run on a simulated disk.

    Attributes
    ----------
    states
        By row, the engine after it; row 0 is a folder without a journal, row 1 its beginning.
    written, committed
        By row, the number of operations after which it was written; that number and the row, for
        each time that rows were said to be synced.
    """

    case: Case
    script: Script
    disk: VirtualDisk
    states: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)

    def written_by(self, count: int) -> int:
        """Return the last row that is in the journal, or whose effects are in a snapshot."""
        named = (each.to.name for each in self.disk.operations[:count] if each.action == "rename")
        snapshots = [int(name[9:]) for name in named if name.startswith("snapshot-")]
        return max(sum(written <= count for written in self.written) - 1, *snapshots, 0)

    def committed_by(self, count: int) -> int:
        return max((row for at, row in self.committed if at <= count), default=0)


@functools.cache
def recorded(case: Case, seed: int, steps: int = 45) -> Run:
    """Journal a run, with a snapshot now and then; only what is synced is committed."""

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        chance, engine = random.Random(seed), case.engine()
        run = Run(case, Unsnapped(case, seed).run(steps), VirtualDisk(loop, 0.1, history=True))
        run.disk.segment = 4096  # so that there are several

        def post(event: Event) -> None:
            assert isinstance(event, Committed), event
            run.committed.append((len(run.disk.operations), event.row))

        files = files_of(run.disk)
        assert files.recover(engine, case.policy) is None
        run.states = [state_of(engine)] * 2
        writer = files.begin(engine, case.policy, None, 1.0, Acks.DURABLE, post)
        driver = Driver(Journalled(engine, writer, run))  # type: ignore[arg-type]
        for row, step in enumerate(run.script.steps, 2):
            driver.take(step, row)
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.06, 0.3)))
            if driver.outstanding is None and engine.training and chance.random() < 0.3:
                snapshot(run, files, engine, row)
        await asyncio.sleep(1.0)
        assert run.committed[-1][1] == len(run.states) - 1
        run.written = [0, *rows_written(run.disk)]
        assert len(run.written) == len(run.states)
        return run

    return testing.run(main(), seed=seed)


def rows_written(disk: VirtualDisk) -> list[int]:
    """Return by row the number of operations after which it was written."""
    found = []
    for count, operation in enumerate(disk.operations, 1):
        of_journal = operation.path.name.startswith(("journal-", "spare-"))
        if operation.action == "write" and of_journal and operation.at >= HEAD:
            at = 0
            while at + FRAME <= len(operation.data):
                row, payload, number = struct.unpack_from("<IQQ", operation.data, at + 4)
                assert number == len(found) + 1
                found.append(count)
                at += frame_bytes(row, payload)
    return found


def snapshot(run: Run, files: StateFiles, engine: Engine, row: int) -> None:
    found = capture(engine, row)
    found.copy()
    versions = [engine.version, *(table.version for table in engine.tables)]
    header = SnapshotHeader(row, 1, "a run", versions, found.settings, {}, found.owners)
    SnapshotWriter(run.disk, FOLDER, files.segments).write(found, header)
    found.release()


def files_of(disk: VirtualDisk) -> StateFiles:
    return StateFiles(FOLDER, disk, "a test", "a run", lambda: 7)


def recovered(run: Run, disk: VirtualDisk) -> tuple[Engine, Recovered | None]:
    """Return the engine that a disk has, which must be one that was."""
    engine = run.case.engine()
    found = files_of(disk).recover(engine, run.case.policy)
    row = 0 if found is None else found.row
    assert state_of(engine) == run.states[row], row
    return engine, found


def go_on(run: Run, engine: Engine, found: Recovered | None) -> None:
    """Feed the rest of the events; the end must be that of the run."""
    driver = Driver(engine)
    for effect in found.outstanding if found is not None else ():
        if isinstance(effect, Apply):
            driver.outstanding = effect
    first = max(found.row if found is not None else 0, 1)
    for row, step in enumerate(run.script.steps[first - 1 :], first + 1):
        assert driver.take(step, row) == run.script.effects[row - 2], row
    assert state_of(engine) == run.states[-1]


def check(run: Run, count: int, seed: int, powers: int) -> None:
    """Crash after some operations, once by the process's end and then by losses of power."""
    engine, found = recovered(run, run.disk.after(count))
    row = 0 if found is None else found.row
    assert row in (run.written_by(count), run.written_by(count - 1)), "it is in the system's memory"
    if seed % 3 == 0:
        go_on(run, engine, found)
    for power in range(powers):
        rng = random.Random(f"{count} {seed} {power}")
        engine, found = recovered(run, run.disk.after_power_cut(rng, count))
        row = 0 if found is None else found.row
        assert run.committed_by(count) <= row <= run.written_by(count)
        if (seed + power) % 5 == 0:
            go_on(run, engine, found)


ALL = [(name, possible(*POLICIES[name], ROWS[at % len(ROWS)])) for at, name in enumerate(POLICIES)]
FEW = [("fasgd", Case("fasgd")), ("tables", Case(tables=True, fetch="int8"))]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("name", "case"), FEW, ids=[name for name, _case in FEW])
def test_after_every_operation(name: str, case: Case, part: int) -> None:
    run = recorded(case, zlib.crc32(name.encode()))
    assert len(run.disk.operations) > 80
    for count in range(part, len(run.disk.operations) + 1, 4):
        check(run, count, count // 4, 2)


@pytest.mark.parametrize(("name", "case"), ALL, ids=[name for name, _case in ALL])
def test_every_policy(name: str, case: Case) -> None:
    seed = zlib.crc32(name.encode())
    run = recorded(case, seed)
    chance = random.Random(seed)
    for number in range(3):
        check(run, chance.randrange(len(run.disk.operations) + 1), number, 2)


def flipped(run: Run, part: int) -> Iterator[tuple[int, Any]]:
    """Yield what a disk of each moment with flipped bits has: a row, or the error."""
    for count in range(part, len(run.disk.operations) + 1, 4):
        for flips in (1, 3):
            rng = random.Random(f"{count} {flips}")
            disk = run.disk.after_power_cut(rng, count, flips=flips)
            try:
                _engine, found = recovered(run, disk)
            except DamagedState as error:
                yield count, error
            else:
                yield count, 0 if found is None else found.row


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("name", "case"), FEW, ids=[name for name, _case in FEW])
def test_a_flipped_bit_gives_an_earlier_state_or_a_refusal(
    name: str, case: Case, part: int
) -> None:
    run = recorded(case, zlib.crc32(name.encode()))
    found = [what for _count, what in flipped(run, part)]
    refused = [what for what in found if isinstance(what, DamagedState)]
    assert 5 < len(refused) < len(found)
