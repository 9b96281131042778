"""Copies of a state: sent, fetched, damaged, left behind. The store is a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.errors import DamagedState, UsageError
from aiops.serving.state import copying
from aiops.serving.state.copying import CopyStore, fetch, send
from aiops.state.copies import begun_name, copy_name, data_name
from aiops.state.directory import GENERATION_FILE, GenerationFile, StateListing
from tests.support import PATIENCE, ServerThread

pytest.importorskip("pyarrow")

ONES = {"w": -np.ones(3, np.float32)}


class States:
    """A folder with a state, and a store."""

    def __init__(self, root: Path) -> None:
        self.folder, self.there = root / "state", root / "store"
        self.store = CopyStore(f"file://{self.there}")
        self.root = root

    def train(self, steps: int, folder: Path | None = None) -> None:
        """Have a server go on from the folder's state."""
        given = {"policy": "asgd", "lr": 1.0, "kernels": "numpy", "shards": 1}
        with (
            ServerThread(**given, state=folder or self.folder) as server,
            aiops.Worker(server.url, {"w": np.zeros(3, np.float32)}, timeout=PATIENCE) as worker,
        ):
            for _ in range(steps):
                worker.step(ONES)

    def send(self, folder: Path | None = None) -> dict[str, Any]:
        return send(folder or self.folder, self.store, "the store")

    def fetch(self, folder: Path) -> dict[str, Any]:
        return fetch(folder, self.store, "the store")

    def weight(self, folder: Path) -> float:
        """The parameter that a server that goes on from a folder has."""
        given = {"policy": "asgd", "lr": 1.0, "kernels": "numpy", "shards": 1}
        with (
            ServerThread(**given, state=folder) as server,
            aiops.Client(server.url, timeout=PATIENCE) as client,
        ):
            return float(client.fetch()["w"][0])

    def objects(self, kind: str) -> list[Path]:
        return sorted(self.there.glob(f"{kind}-*"))

    @property
    def generation(self) -> int:
        data = (self.folder / GENERATION_FILE).read_bytes()
        return GenerationFile.unpack(data).generation


@pytest.fixture
def states(tmp_path: Path) -> States:
    return States(tmp_path)


def test_a_folder_that_is_empty_gets_the_newest_copy(states: States) -> None:
    states.train(3)
    sent = states.send()
    assert sent["version"] == 3
    assert sent["nbytes"] == states.objects("snapshot")[0].stat().st_size
    found = states.fetch(states.root / "elsewhere")
    assert found["row"] > 0
    assert found["notes"] == []
    assert states.weight(states.root / "elsewhere") == 3


def test_nothing_is_sent_or_fetched_twice(states: States) -> None:
    states.train(1)
    states.send()
    before = {path: path.stat().st_mtime_ns for path in states.there.iterdir()}
    assert states.send() == {"nbytes": 0, "version": 1}
    assert before == {path: path.stat().st_mtime_ns for path in states.there.iterdir()}
    assert states.fetch(states.folder) == {"notes": []}
    states.train(1)  # another generation, of this very folder
    assert states.fetch(states.folder) == {"notes": []}


def test_a_store_that_is_empty_begins_nothing(states: States) -> None:
    assert states.fetch(states.folder) == {"notes": []}
    assert not states.folder.exists()


def test_of_a_run_that_was_lost_before_its_first_copy_the_next_start_knows(states: States) -> None:
    """Its workers are then told that all of their pushes are lost."""
    states.train(1)
    for row in StateListing(path.name for path in states.folder.iterdir()).snapshots:
        (states.folder / f"snapshot-{row:020d}").unlink()
    assert states.send() == {"nbytes": 0}
    assert states.fetch(states.root / "elsewhere")["row"] == 0
    states.train(2, states.root / "elsewhere")
    assert states.weight(states.root / "elsewhere") == 2


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["copy", "snapshot"])
@pytest.mark.parametrize("harm", [damaged, Path.unlink, lambda path: path.write_bytes(b"cut")])
def test_a_copy_that_is_not_whole_is_passed_over(
    states: States, kind: str, harm: Callable[[Path], Any]
) -> None:
    for _ in range(2):
        states.train(1)
        states.send()
    harm(states.objects(kind)[-1])
    states.fetch(states.root / "elsewhere")
    assert states.weight(states.root / "elsewhere") == 1
    harm(states.objects(kind)[0])
    if states.objects("copy"):
        with pytest.raises(DamagedState, match="the store has"):
            states.fetch(states.root / "nowhere")
        assert not (states.root / "nowhere" / GENERATION_FILE).exists()


def test_what_another_server_went_on_from_is_set_aside(states: States) -> None:
    """The folder has more rows than the copy, of an earlier generation: they were given up."""
    states.train(1)
    states.send()
    elsewhere = states.root / "elsewhere"
    states.fetch(elsewhere)
    states.train(5)  # here, which no copy has
    states.train(1, elsewhere)
    states.train(1, elsewhere)
    states.send(elsewhere)
    with pytest.raises(UsageError, match=r"a later server of run .* has begun"):
        states.send()
    notes = states.fetch(states.folder)["notes"]
    assert notes == [
        f"what was in {states.folder}, of an earlier generation, is in {states.folder}.aside-1"
    ]
    assert states.weight(states.folder) == 3
    assert states.weight(states.root / "state.aside-1") == 6


def test_a_fetch_that_was_cut_off_is_begun_again(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.train(2)
    states.send()
    elsewhere, write = states.root / "elsewhere", copying._write

    def dies(path: Path, pieces: Any) -> None:
        if path.name == GENERATION_FILE:
            raise OSError("no more")
        write(path, pieces)

    monkeypatch.setattr(copying, "_write", dies)
    with pytest.raises(OSError, match="no more"):
        states.fetch(elsewhere)
    monkeypatch.setattr(copying, "_write", write)
    states.fetch(elsewhere)
    assert states.weight(elsewhere) == 2


def test_a_server_that_went_back_is_gone_on_with(states: States) -> None:
    states.train(1)
    states.send()
    shutil.copytree(states.folder, states.root / "before")
    states.train(4)
    states.send()
    shutil.rmtree(states.folder)
    shutil.copytree(states.root / "before", states.folder)
    for _ in range(2):  # generations after that of the copy of version 5
        states.train(0)
    states.send()
    states.fetch(states.root / "elsewhere")
    assert states.weight(states.root / "elsewhere") == 1


def test_a_snapshot_that_is_written_over_meanwhile_is_no_copy(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.train(1)
    put, done = states.store.put, []

    def renamed(name: str, pieces: Any) -> None:
        """As a server does that has two later snapshots, in the midst of the first copy."""
        put(name, pieces)
        if name.startswith("snapshot") and not done:
            done.append(name)
            (old,) = states.folder.glob("snapshot-*")
            newer = old.with_name("snapshot-" + "99".zfill(20))
            shutil.copy(old, newer)
            old.rename(states.folder / "snapshot.part")

    monkeypatch.setattr(states.store, "put", renamed)
    states.send()
    assert [path.name for path in states.objects("copy")] == [copy_name(states.generation, 99)]
    assert [path.name for path in states.objects("snapshot")] == [data_name(states.generation, 99)]


def test_the_mark_of_each_generation_replaces_the_last(states: States) -> None:
    for _ in range(3):
        states.train(1)
        states.send()
    assert [path.name for path in states.objects("begun")] == [begun_name(states.generation)]
    assert len(states.objects("copy")) == len(states.objects("snapshot")) == 2


def test_errors_are_printed(
    states: States, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the process does it whose output a server reads."""

    def ended(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(copying.os, "_exit", ended)
    monkeypatch.setattr(copying.os, "nice", lambda by: 0)
    given = [str(states.folder), f"file://{states.there}", "the store"]
    monkeypatch.setattr(copying.sys, "argv", ["copying", "send", *given])
    with pytest.raises(SystemExit, match="1"):
        copying.main()
    assert json.loads(capfd.readouterr().out.strip()) == {
        "error": f"{states.folder} holds no state"
    }
    states.train(1)
    with pytest.raises(SystemExit, match="0"):
        copying.main()
    dots, _, line = capfd.readouterr().out.strip().rpartition("\n")
    assert json.loads(line)["version"] == 1
    assert dots == "...", "a piece of each of three objects"
