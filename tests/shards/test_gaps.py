"""A follower whose journal ended, and was taken up again behind a snapshot, which is damaged."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiops.client import Client
from aiops.engine.events import JournalEnded, SnapshotDue
from aiops.net.disk import SystemDisk
from aiops.state.directory import StateListing, snapshot_name
from tests.shards.test_kept_shards import MODEL, gradients, undisturbed
from tests.support import PATIENCE, ServerThread, assert_same

SETTINGS: dict[str, Any] = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy"}
STEPS = 12


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 14)


def until(true: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def snapshots(folder: Path) -> tuple[int, ...]:
    return StateListing(path.name for path in folder.iterdir()).snapshots


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def at_rest(server: Any) -> bool:
    """True if a lead knows that all have synced their snapshots: files are there before that."""
    state = server.run_state.kept
    return not (state._writing or state._lead.sets.writing)


def snapshot_of_all(lead: ServerThread, folders: list[Path]) -> None:
    """Have all take a snapshot; while one is being written, none would begin."""
    before = [snapshots(folder) for folder in folders]
    lead.call(
        lambda server: server.post(SnapshotDue(server._now(), server.run_state.kept.newest + 1))
    )
    each = [*zip(folders, before, strict=True)]
    until(lambda: all(snapshots(folder)[:1] != old[:1] for folder, old in each))
    until(lambda: lead.call(at_rest))


@contextmanager
def running(root: Path, port: int = 0, **settings: Any) -> Iterator[list[ServerThread]]:
    """A lead and its follower."""
    given = {**SETTINGS, **settings}
    with ServerThread(**given, shards=1, follower=True, state=root / "follower") as follower:
        urls = [follower.url.removeprefix("aiops://")]
        lead = ServerThread(**given, shards=2, followers=urls, port=port, state=root / "lead")
        with lead:
            yield [lead, follower]


@pytest.mark.parametrize("where", ["", "before", "inside"])
def test_the_rows_before_the_gap_are_the_state(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers go back to them, or to a snapshot that was taken while there was no journal."""
    state, copy, taken = tmp_path / "state", tmp_path / "copy", dict[int, Any]()
    folders = [state / "lead" / "shard-0", state / "follower"]
    with running(state) as [lead, follower]:
        port = int(lead.url.rpartition(":")[2])
        client = Client(lead.url, role="worker", name="w", timeout=PATIENCE)
        params = client.define(MODEL)
        for step in range(STEPS):
            taken[step] = {name: array.copy() for name, array in params.numpy().items()}
            if step == 2 and where == "before":
                snapshot_of_all(lead, folders)
            if step == 5:
                follower.call(lambda server: server.post(JournalEnded(0.0, "the disk is full")))
            if step == 7 and where == "inside":
                with monkeypatch.context() as patch:
                    patch.setattr(SystemDisk, "free", lambda *_given: 0)
                    snapshot_of_all(lead, folders)
                assert client.stats()["state"]["acks"] == "applied"
            if step == 8:
                snapshot_of_all(lead, folders)
                until(lambda: client.stats()["state"]["acks"] == "written")
            client.exchange(params, gradients(step))
        shutil.copytree(state, copy)
    damage(copy / "follower" / snapshot_name(snapshots(copy / "follower")[0]))
    with running(copy, port), client:
        params, last = client.fetch(), 7 if where == "inside" else 5
        assert params.version == last
        assert client.rolled_back == STEPS - last
        assert_same(params.numpy(), taken[last])
        for step in range(last, STEPS):
            client.exchange(params, gradients(step))
        expected, _report = undisturbed(STEPS, shards=2)
        assert_same(params.numpy(), expected)
