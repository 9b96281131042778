"""``aiops state export`` of the folder with those of all shards: whole, at any row, with tables."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aiops.cli.state import app
from aiops.client import Client
from aiops.errors import DamagedState, UsageError
from aiops.model.tables import Table
from aiops.serving.safetensors_io import read_model, read_tables
from aiops.state.directory import (
    GENERATION_FILE,
    GenerationFile,
    StateListing,
    journal_name,
    snapshot_name,
)
from aiops.state.frames import SegmentScan
from aiops.state.row_kinds import RowKind
from tests.support import ServerThread, assert_same

MODEL = {
    "w": np.linspace(-1, 1, 60).astype(np.float32).reshape(20, 3),
    "b": np.linspace(0, 1, 7),
}
FASGD = {"policy": "fasgd", "lr": 0.01}


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=a.shape).astype(a.dtype) for name, a in MODEL.items()}


class Exported:
    """What the command has written, and said."""

    def __init__(self, state: Path, *flags: object) -> None:
        out = state.parent / "exported.safetensors"
        given = ["export", state, "--out", out, "--json", *flags]
        result = CliRunner().invoke(app, [*map(str, given)])
        if result.exception is not None:
            raise result.exception
        found = json.loads(result.stdout)
        self.version, self.row = found["version"], found["row"]
        self.arrays = dict(read_model(out))
        self.tables = {row[0]: dict(zip(ids.tolist(), rows.tolist(), strict=True))
                       for row, ids, rows in read_tables(out)}  # fmt: skip


class Training:
    """A model on three shards, and what a client fetched at each version and each row."""

    def __init__(self, state: Path, **settings: Any) -> None:
        self.state, self.settings = state, {**FASGD, **settings}
        self.fetched: dict[int, Any] = {}
        self.rows: dict[int, int] = {}  # of the lead's journal, by version: the last one
        self.steps = 0

    @contextmanager
    def client(self, **tables: Table) -> Iterator[Client]:
        given = {"kernels": "numpy", "shards": 3, **self.settings}
        running = ServerThread(**given, state=self.state)
        with running as server, Client(server.url, role="worker", name="w") as client:
            params = client.define(MODEL, tables)
            self.note(client, params)
            yield client

    def note(self, client: Client, params: Any) -> None:
        self.fetched[params.version] = {name: a.copy() for name, a in params.numpy().items()}
        self.rows[params.version] = client.stats()["state"]["row"]

    def train(self, client: Client, steps: int, seed: int = 0) -> None:
        params = client.fetch()
        for _ in range(steps):
            client.exchange(params, gradients(seed + self.steps))
            self.steps += 1
            self.note(client, params)

    def check(self, *flags: object) -> int:
        """Export, and compare with what was fetched; return the version."""
        found = Exported(self.state, *flags)
        assert_same(found.arrays, self.fetched[found.version])
        version: int = found.version
        return version

    def listing(self, shard: int) -> StateListing:
        return StateListing(path.name for path in self.folder(shard).iterdir())

    def folder(self, shard: int) -> Path:
        return self.state / f"shard-{shard}"

    def generations(self, shard: int) -> GenerationFile:
        return GenerationFile.unpack((self.folder(shard) / GENERATION_FILE).read_bytes())

    def put(self, shard: int, generations: GenerationFile) -> None:
        (self.folder(shard) / GENERATION_FILE).write_bytes(generations.pack())


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "state")


@pytest.mark.parametrize(
    "settings",
    [
        {"set": {"clip": 1}},  # each update takes two rounds
        {"policy": "softsync", "set": {"n": 1}, "workers": 2},  # every other push makes no version
        {"policy": "dcasgd"},  # followers hold versions
    ],
    ids=["clipped", "accumulated", "held"],
)
def test_each_row_is_what_a_client_fetched(settings: dict[str, Any], tmp_path: Path) -> None:
    training = Training(tmp_path / "state", **settings)
    for _start in range(2):
        with training.client() as client:
            training.train(client, 4)
    newest = max(training.rows.values())
    versions = [training.check("--at", row) for row in range(training.rows[0], newest + 1)]
    assert versions == sorted(versions)
    assert {*versions} == {*training.fetched}
    assert training.check() == versions[-1]
    assert [training.check("--at", row) for row in training.rows.values()] == [*training.rows]


@pytest.mark.parametrize("settings", [{}, {"fetch_codec": ["int8"]}], ids=["raw", "coded"])
def test_a_replay_is_what_the_snapshots_are(settings: dict[str, Any], tmp_path: Path) -> None:
    """With coded parameters a client has an approximation of them only."""
    training = Training(tmp_path / "state", **settings)
    for _start in range(2):
        with training.client() as client:
            training.train(client, 3)
    expected = Exported(training.state)
    for shard in range(3):
        newest = training.listing(shard).snapshots[0]
        (training.folder(shard) / snapshot_name(newest)).unlink()
    assert Exported(training.state).version == 3
    found = Exported(training.state, "--at", expected.row)
    assert found.version == expected.version == 6
    assert_same(found.arrays, expected.arrays)


def test_the_rows_of_tables_are_those_of_the_moment(training: Training) -> None:
    """The lead has all of them."""
    seen = dict[int, Any]()
    for start in range(2):
        with training.client(words=Table(50, 3), more=Table(9, 2)) as client:
            for step in range(3):
                training.train(client, 1)
                client.push_rows("words", [step, 7 + start], np.full((2, 3), step + 1, np.float32))
                rows = {each: client.fetch_rows("words", [each])[0].tolist() for each in range(10)}
                seen[client.stats()["state"]["row"]] = rows
    assert len({str(rows) for rows in seen.values()}) == 6
    newest = max(seen)
    for row, rows in [*seen.items(), (None, seen[newest])]:
        found = Exported(training.state, *(() if row is None else ("--at", row)))
        assert_same(found.arrays, training.fetched[found.version])
        assert {*found.tables} == {"words", "more"}
        words = found.tables["words"]
        assert {0, 7} <= {*words} <= {0, 1, 2, 7, 8}
        assert words == {each: rows[each] for each in words}
        assert found.tables["more"] == {}


def test_a_model_of_tables_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    running = ServerThread(**FASGD, kernels="numpy", shards=2, state=state)
    with running as server, Client(server.url, role="worker") as client:
        client.define({}, {"words": Table(50, 3)})
        client.push_rows("words", [4], np.ones((1, 3), np.float32))
        rows = client.fetch_rows("words", [4]).tolist()
        row = client.stats()["state"]["row"]
    for flags in ((), ("--at", row)):
        found = Exported(state, *flags)
        assert (found.arrays, found.tables) == ({}, {"words": {4: rows[0]}})


def test_the_end_of_one_followers_journal_bounds_the_rows(
    training: Training, tmp_path: Path
) -> None:
    """As after a loss of power, of which a start goes back to the row that is named here, too."""
    with training.client() as client:
        training.train(client, 2)
        shutil.copytree(training.folder(2), tmp_path / "earlier")
        training.train(client, 2)
        shutil.copytree(training.state, tmp_path / "killed")
    training.state = tmp_path / "killed"
    shutil.rmtree(training.folder(2))
    shutil.copytree(tmp_path / "earlier", training.folder(2))
    text = r"row \d+ is of version 4, .* shard 2 at version 2; .* give --at (\d+)"
    with pytest.raises(UsageError, match=text) as refused:
        training.check("--at", training.rows[4])
    named = re.search(text, str(refused.value))
    assert named is not None
    assert training.check("--at", named[1]) == 2
    with training.client() as client:
        assert client.fetch().version == 2


def test_rows_of_a_lead_that_went_back_are_not_taken(training: Training, tmp_path: Path) -> None:
    with training.client() as client:
        training.train(client, 2)
        shutil.copytree(training.state, tmp_path / "earlier")
        training.train(client, 2)
        shutil.copytree(training.folder(2), tmp_path / "other")
    training.state = tmp_path / "earlier"
    with training.client() as client:
        training.train(client, 3, seed=100)
    assert training.check("--at", training.rows[5]) == 5
    shutil.rmtree(training.folder(2))
    shutil.copytree(tmp_path / "other", training.folder(2))
    assert training.check("--at", training.rows[1]) == 1, "it is of both"
    for version in (3, 4, 5):
        with pytest.raises(UsageError, match="shard-2 has orders of rows that its lead went back"):
            training.check("--at", training.rows[version])


def test_generations_of_long_ago_are_not_asked_for(training: Training) -> None:
    """The lead's file has the latest 64."""
    for _start in range(2):
        with training.client() as client:
            training.train(client, 1)
    mine = training.generations(0)
    training.put(0, replace(mine, starts=mine.starts[1:]))
    assert training.check("--at", training.rows[0]) == 0
    training.put(0, replace(mine, starts=[replace(each, generation=1) for each in mine.starts]))
    with pytest.raises(UsageError, match="shard-1 has orders of rows that its lead went back"):
        training.check("--at", training.rows[1])


def test_a_follower_that_is_to_go_back_bounds_the_rows(training: Training) -> None:
    with training.client() as client:
        training.train(client, 3)
    back_to = training.rows[2]
    training.put(1, replace(training.generations(1), back_to=back_to))
    assert training.check("--at", back_to) == 2
    with pytest.raises(UsageError, match=rf"goes back to row {back_to} .*: give --at {back_to}"):
        training.check("--at", back_to + 1)


def test_damage_is_told_with_its_shard(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", acks="durable")  # else it is as if torn
    with training.client() as client:
        training.train(client, 3)
        row = training.rows[1]
    segment = training.folder(2) / journal_name(1)
    data = bytearray(segment.read_bytes())
    scan = SegmentScan(bytes(data), segment.name)
    [portion, *_] = [frame for frame in scan if frame.kind == RowKind.PORTION]
    data[portion.at + 48] ^= 1  # of the row, which follows its frame
    segment.write_bytes(data)
    with pytest.raises(DamagedState, match=r"shard-2: journal-0+1 is damaged"):
        training.check("--at", row)
    shutil.copy(training.folder(1) / segment.name, segment)
    with pytest.raises(DamagedState, match=r"is of shard 1 of 3 .* and not of shard 2 of 3 of run"):
        training.check("--at", row)


def test_snapshots_without_journals_are_the_rows_that_there_are(tmp_path: Path) -> None:
    training = Training(tmp_path / "state", acks="applied")
    for _start in range(2):
        with training.client() as client:
            training.train(client, 2)
    newest = Exported(training.state).row
    assert training.check("--at", newest) == 4
    with pytest.raises(UsageError, match=rf"shard-0 ends at row {newest}"):
        training.check("--at", newest + 1)


def test_what_is_not_there(training: Training, tmp_path: Path) -> None:
    with training.client() as client:
        training.train(client, 1)
    row = training.rows[1]
    for flags, text in (
        (("--at", 1_000), r"shard-0 ends at row \d+"),
        (("--at", 1), "no model was defined at row 1"),
        (("--at", row, "--snapshot", row), "without --snapshot"),
    ):
        with pytest.raises(UsageError, match=text):
            training.check(*flags)
    training.folder(2).rename(tmp_path / "shard-2")
    shutil.copytree(training.folder(1), training.folder(2))
    with pytest.raises(DamagedState, match="put back the folder that was there"):
        training.check("--at", row)
    shutil.rmtree(training.folder(2))
    with pytest.raises(UsageError, match="lacks the folder of shard 2 of 3: copy it"):
        training.check("--at", row)
