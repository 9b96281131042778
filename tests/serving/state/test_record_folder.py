"""Journals that keep all rows: --record, and --state with --keep-journal."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.algorithms.asgd import ASGD
from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import replay_all
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import JournalEnded, Options, Tick
from aiops.errors import ConflictError, UsageError
from aiops.net import disk
from aiops.net.disk import SystemDisk
from aiops.serving.config import Config
from aiops.serving.state import kept_state, segment_files
from aiops.serving.state.record_folder import RecordFolder
from aiops.state.directory import StateIdentity, journal_name
from tests.recording import replayed, version
from tests.support import ServerThread

START = {"w": np.zeros(64, np.float32)}
ONES = {"w": np.ones(64, np.float32)}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 13)
    monkeypatch.setattr(segment_files, "_FIRST", 1 << 10)


def full(*_given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def train(server: ServerThread, steps: int) -> Engine:
    """Take steps; return the server's engine."""
    with aiops.Worker(server.url, START) as worker:
        for _ in range(steps):
            worker.step(ONES)
    engine: Engine = server.call(lambda running: running.engine)
    return engine


class TestKeepJournal:
    def test_it_replays_from_its_first_row_whatever_snapshots_cover(self, tmp_path: Path) -> None:
        for steps in (40, 3, 3, 3):
            with ServerThread(
                policy="fasgd", kernels="numpy", state=tmp_path, keep_journal=True
            ) as server:
                engine = train(server, steps)
        assert len(list(tmp_path.glob("snapshot-*"))) == 2
        segments = sorted(tmp_path.glob("journal-*"))
        assert segments[0].name == journal_name(1)
        assert len(segments) > 4
        sizes = [segment.stat().st_size for segment in segments]
        assert sizes[0] < max(sizes)
        again = replayed(tmp_path)
        assert version(again) == 49
        assert digest(again.engine) == digest(engine)

    def test_first_rows_that_are_gone(self, tmp_path: Path) -> None:
        for _ in range(4):
            with ServerThread(policy="asgd", state=tmp_path) as server:
                train(server, 30)
        assert not (tmp_path / journal_name(1)).exists()
        with (
            pytest.raises(UsageError, match="so no replay could begin with them"),
            ServerThread(policy="asgd", state=tmp_path, keep_journal=True),
        ):
            pass

    def test_after_a_full_disk_it_is_replayed_up_to_the_gap(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(kept_state, "_RETRY", 0.02)
        with ServerThread(policy="asgd", state=tmp_path, keep_journal=True) as server:

            def acknowledged(level: str) -> None:
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    if (
                        server.call(lambda running: running.run_state.kept.report()["acks"])
                        == level
                    ):
                        return
                    time.sleep(0.01)
                pytest.fail(f"acknowledgements do not mean {level}")

            train(server, 5)
            with monkeypatch.context() as patch:
                patch.setattr(disk._SystemFile, "write", full)
                patch.setattr(SystemDisk, "free", lambda *_given: 0)
                train(server, 5)
                acknowledged("applied")
            acknowledged("written")
            train(server, 30)
        assert "`aiops replay` ends there, and the journal is not kept any more" in caplog.text
        ended, damage = replay_all(StateFolder(tmp_path))
        assert damage is not None
        assert (version(ended), ended.complete) == (5, False)
        with ServerThread(policy="asgd", state=tmp_path) as server:
            assert server.call(lambda running: running.engine.version) == 40

    def test_with_settings_that_have_no_such_journal(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--record DIR needs none"):
            Config(keep_journal=True)
        with pytest.raises(ConflictError, match="which a standby may not have"):
            Config(state=tmp_path, keep_journal=True, standby="aiops://a")
        with pytest.raises(ConflictError, match="has no journal to keep"):
            Config(state=tmp_path, keep_journal=True, acks="applied")
        with pytest.raises(ConflictError, match="take --keep-journal"):
            Config(state=tmp_path, record=tmp_path)


class TestRecord:
    def test_its_segments_grow_with_it(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with ServerThread(policy="asgd", record=path) as server:
            engine = train(server, 100)
        assert [name for name in SystemDisk().names(path) if name.startswith("spare")] == []
        sizes = [segment.stat().st_size for segment in sorted(path.glob("journal-*"))]
        assert sizes[0] == 1 << 10 < max(sizes)
        again = replayed(path)
        assert again.complete
        assert digest(again.engine) == digest(engine)

    async def test_that_it_is_over_is_said_again_each_minute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        record = recorded(tmp_path)
        record.note(Tick(1.0))
        with monkeypatch.context() as patch:
            patch.setattr(disk._SystemFile, "write", full)
            record.note(Tick(2.0))
        said = "the record is over at version 0 and incomplete"
        assert said in record.error
        assert "No space left on device" in record.error
        for now, count in ((30.0, 1), (61.9, 1), (62.0, 2), (121.0, 2), (122.5, 3)):
            assert record.note(Tick(now)) is None
            assert caplog.text.count(said) == count
        record.end(123.0)
        assert "it ends at version 0, the run at version 0" in caplog.text
        again = replayed(tmp_path / "run")
        assert (again.rows, again.complete) == (1, False)

    async def test_a_sync_that_fails_on_another_thread(self, tmp_path: Path) -> None:
        record = recorded(tmp_path)
        record._writer._post(JournalEnded(1.0, "the disk is gone"))
        await asyncio.sleep(0)
        assert "the disk is gone" in record.error
        assert record.note(Tick(2.0)) is None
        record.end(3.0)
        assert (replayed(tmp_path / "run").rows, replayed(tmp_path / "run").complete) == (0, False)


def recorded(folder: Path, **options: Any) -> RecordFolder:
    return RecordFolder(folder / "run", "asgd", Engine(ASGD(), Options(**options)), 0.0)


class TestServing:
    """A server does not go on with a record, which it would write into."""

    @pytest.mark.parametrize("by", ["identity", "its last row"])
    def test_a_record_is_refused(self, by: str, tmp_path: Path) -> None:
        folder = tmp_path / "r"
        with ServerThread(policy="asgd", record=folder) as server:
            train(server, 3)
        if by == "its last row":  # an older release did not write what it is
            found = StateIdentity.unpack((folder / "identity").read_bytes())
            assert found.record
            (folder / "identity").write_bytes(dataclasses.replace(found, record=False).pack())
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}
        with (
            pytest.raises(UsageError, match=rf"is the record of a run .*aiops replay {folder} --s"),
            ServerThread(policy="asgd", state=folder),
        ):
            pass
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}
        assert after == before

    def test_a_state_that_can_be_replayed_is_gone_on_with(self, tmp_path: Path) -> None:
        for expected in (3, 6):
            with ServerThread(policy="asgd", state=tmp_path / "s", keep_journal=True) as server:
                assert train(server, 3).version == expected
