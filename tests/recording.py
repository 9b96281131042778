"""Records in memory and in folders, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import replay_all
from aiops.durable.recorder import AppendRow
from aiops.durable.recovery import begin_row
from aiops.durable.rows import exchange_fields
from aiops.durable.run_record import Replayed, RunRecord, replay
from aiops.engine.engine import Engine
from aiops.engine.steady import Recorded
from aiops.model.layout import Ints
from aiops.state.frames import JournalFrame


class Recording(RunRecord):
    """A record in memory: ``frames`` are its rows as a reader finds them."""

    def __init__(self, policy: str, engine: Engine) -> None:
        super().__init__(engine, self.append)
        self.frames: list[JournalFrame] = []
        self.append(AppendRow(1, begin_row(0.0, policy, engine, engine.options.run, "")))

    def append(self, effect: AppendRow) -> None:
        row = effect.row
        payload = memoryview(b"" if row.payload is None else bytes(row.payload))
        fixed = effect.number, int(row.kind), row.time, row.flags, row.row
        self.frames.append(JournalFrame(*fixed, payload, 0, 0, 0))

    def exchanged(
        self,
        time: float,
        leased: bool,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Recorded,
        ticket: int,
        sums: Ints,
        followed: Ints | None,
    ) -> None:
        given = leased, peer, numbers, gradient.coded, ticket, sums, followed
        steady = self.exchange_row(time, *exchange_fields(*given), gradient)
        self.append(AppendRow(self.next - 1, steady))

    def end(self, time: float) -> None:
        self.append(self.last(time))

    def replay(self, kernels: str = "numpy") -> Replayed:
        return replay(self.frames, kernels)


def rows_of(frames: Sequence[JournalFrame]) -> list[tuple[object, ...]]:
    """What two records of one run have in common: all but the addresses of the rows."""
    return [(f.number, f.kind, f.time, f.flags, f.row, bytes(f.payload)) for f in frames]


def replayed(folder: Path, kernels: str = "auto") -> Replayed:
    """Replay a folder of --record, all of whose rows have to be whole."""
    ended, damage = replay_all(StateFolder(folder), kernels)
    assert damage is None, damage
    return ended


def version(ended: Replayed) -> int:
    """The version of the model that a replay has ended with."""
    return ended.engine.store.version if ended.engine.store else 0
