"""A server's files when servers are killed and disks fill up: nothing that was kept is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import aiops
from aiops.cli import stats
from aiops.client import Client, Worker
from aiops.errors import UsageError
from aiops.model.layout import Array
from aiops.net.disk import SystemDisk
from aiops.serving.safetensors_io import read_model, read_tables, write_model
from tests.peers import Process, eventually, serving
from tests.recording import replayed, version
from tests.rows import each_row
from tests.support import ServerThread, assert_same

START: Mapping[str, Array] = {
    "zebra": np.arange(6, dtype=np.float32).reshape(2, 3),
    "apple": np.ones(4, np.float32),
    "mango": np.full((3, 2), 2, np.float32),
    "wide.b": np.arange(3, dtype=np.float64),
    "wide.a": np.arange(2, dtype=np.float64),
    "coordinator": np.arange(5).astype(ml_dtypes.bfloat16),
    "half.z": np.arange(4, dtype=np.float16),
    "half.a": np.ones(2, np.float16),
    "none": np.zeros((0, 2), np.float32),
    "last": np.full(7, -1, np.float32),
}
"""Of every dtype, in no order that a file would have by itself."""

TABLES = {"words": aiops.Table(1000, 2), "places": aiops.Table(500, 4, "float64")}


def ones(params: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.ones_like(array) for name, array in params.items()}


def limit(server: Process, nbytes: int) -> None:
    """Let no file of a server grow beyond so many bytes; writing more fails, as on a full disk."""
    _soft, hard = resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (nbytes, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
class TestKilled:
    def test_workers_go_on_with_the_model_that_was_saved(self, tmp_path: Path) -> None:
        """The recovery of docs/guide-running.md, with a worker that was there all the time."""
        path = tmp_path / "model.safetensors"
        flags = ("--policy", "asgd", "--set", "lr=1", "--save", str(path), "--save-every", "0.05")
        with serving(*flags) as server:
            port = server.url.rpartition(":")[2]
            with Worker(server.url, START, tables=TABLES) as worker:
                for _ in range(3):
                    worker.step(ones(worker.params))
                worker.push_rows("words", [3, 999], np.ones((2, 2), np.float32))
                worker.push_rows("places", [7], np.ones((1, 4)))
                words, places = worker.fetch_rows("words", [3]), worker.fetch_rows("places", [7])

                def is_saved() -> bool:
                    worker.stats()
                    if not path.exists() or len(read_tables(path)) < len(TABLES):
                        return False
                    saved = {row[0]: len(ids) for row, ids, _rows in read_tables(path)}
                    same = read_model(path)["last"][0] == worker.params["last"][0]
                    return bool(same) and saved == {"words": 2, "places": 1}

                eventually(is_saved, "the model is saved as it is")
                before = {name: array.copy() for name, array in worker.params.items()}
                server.stop(signal.SIGKILL)
                again = ("--port", port, "--init", str(path), "--log-level", "debug")
                with serving(*flags, *again) as successor:
                    receipt = worker.step(lambda params: ones(params))
                    assert (receipt.used, receipt.version) == (True, 1)
                    expected = {n: a - a.dtype.type(1) for n, a in before.items()}
                    assert_same(worker.params, expected)
                    np.testing.assert_array_equal(worker.fetch_rows("words", [3]), words)
                    np.testing.assert_array_equal(worker.fetch_rows("places", [7]), places)
                    assert successor.stop() == 0

    def test_a_record_has_every_push_that_was_acknowledged(self, tmp_path: Path) -> None:
        """Also small ones, and the next server with the same flags leaves it as it is."""
        path = tmp_path / "run.journal"
        flags = ("--policy", "asgd", "--record", str(path))
        with serving(*flags) as server, Worker(server.url, {"w": np.ones(3, np.float32)}) as worker:
            for _ in range(100):
                worker.step(ones(worker.params))
            server.stop(signal.SIGKILL)
        first = contents(path)
        assert version(replayed(path)) == 100
        for number in (2, 3):
            other = tmp_path / f"run.journal.{number}"
            with serving(*flags) as server:
                with Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker:
                    worker.step(ones(worker.params))
                assert server.stop() == 0
                assert f"recording this run in {other}" in server.stderr()
            assert replayed(other).complete
            assert version(replayed(other)) == 1
        assert contents(path) == first


def refused(*_arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
class TestFullDisk:
    def test_the_recording_ends_and_training_goes_on(self, tmp_path: Path) -> None:
        journal, model = tmp_path / "run.journal", tmp_path / "model.safetensors"
        flags = ("--policy", "asgd", "--set", "lr=1", "--record", str(journal))
        with serving(*flags, "--save", str(model)) as server:
            with Worker(server.url, {"w": np.zeros(32 << 10, np.float32)}) as worker:
                for step in range(40):
                    if step == 12:
                        limit(server, (128 << 10) + 2048)  # the model fits into a file, no row does
                    worker.step(ones(worker.params))
                report = worker.stats()
            assert server.stop() == 0
            stderr = server.stderr()
        assert worker.version == 40
        assert_same(read_model(model), worker.params)
        kept = replayed(journal)
        assert not kept.complete
        assert 10 <= version(kept) < 40
        [sentence] = report["file_errors"]
        console = Console(width=300, record=True, file=io.StringIO())
        console.print(stats.tables("aiops://here", report))
        assert sentence in console.export_text()
        assert sentence in stderr, "it was said at once"
        assert f"the record is over at version {version(kept)}" in sentence
        assert f"the journal in {journal} has ended" in sentence
        assert "File too large" in sentence
        assert f"it ends at version {version(kept)}, the run at version 40" in stderr
        assert "Traceback" not in stderr

    def test_saving_every_so_often_goes_on_when_there_is_room(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with serving("--policy", "asgd", "--save", str(path), "--save-every", "0.02") as server:
            limit(server, 1 << 10)
            with Worker(server.url, {"w": np.zeros(1024, np.float32)}) as worker:
                worker.step(ones(worker.params))
                eventually(lambda: len(worker.stats()["file_errors"]) == 1, "it cannot be saved")
                [said] = worker.stats()["file_errors"]
                assert f"cannot write the model to {path}" in said
                assert not path.exists()
                limit(server, resource.RLIM_INFINITY)
                eventually(lambda: not worker.stats()["file_errors"], "it is saved again")
                assert path.exists()
            assert server.stop() == 0
            assert server.stderr().count("cannot write the model") == 1, "not every 20 ms"

    def test_a_model_that_cannot_be_saved_costs_nothing_else(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        paths = {flag: tmp_path / flag for flag in ("record", "ledger", "profile")}
        flags = [word for flag, path in paths.items() for word in (f"--{flag}", str(path))]
        with serving("--policy", "asgd", *flags, "--save", str(folder / "m")) as server:
            with Worker(server.url, {"w": np.zeros(3, np.float32)}) as worker:
                worker.step(ones(worker.params))
            shutil.rmtree(folder)
            folder.write_text("in the way")
            assert server.stop() == 73
            assert f"cannot write the model to {folder / 'm'}" in server.stderr()
        assert replayed(paths["record"]).complete
        last = json.loads(paths["ledger"].read_text().splitlines()[-1])
        assert last["pushed"]["bytes"] > 0
        assert json.loads(paths["profile"].read_text())["kernel"]["calls"] == 1

    def test_a_recording_that_cannot_begin_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run"
        monkeypatch.setattr(SystemDisk, "create", refused)
        with pytest.raises(UsageError) as caught, ServerThread(record=path):
            pass
        assert str(caught.value) == f"--record {path}: No space left on device"
        assert not path.exists()


class TestNames:
    def test_every_run_has_a_ledger_and_a_profile_of_its_own(self, tmp_path: Path) -> None:
        ledger, profile = tmp_path / "ledger.jsonl", tmp_path / "profile.json"
        for _ in range(3):
            with ServerThread(policy="asgd", ledger=ledger, profile=profile):
                pass
        ledgers = [ledger, *(ledger.with_name(f"{ledger.name}.{number}") for number in (2, 3))]
        profiles = [profile, *(profile.with_name(f"{profile.name}.{number}") for number in (2, 3))]
        assert set(tmp_path.iterdir()) == {*ledgers, *profiles}
        for path in ledgers:
            assert len(path.read_text().splitlines()) >= 2
        for path in profiles:
            assert json.loads(path.read_text())["seconds"] >= 0

    def test_the_next_number_follows_the_highest(self, tmp_path: Path) -> None:
        (tmp_path / "run.journal").mkdir()
        for name in ("run.journal.9", "run.journal.x", "run.journal.10.gz"):
            (tmp_path / name).write_text("another's")
        with ServerThread(policy="asgd", record=tmp_path / "run.journal"):
            pass
        assert replayed(tmp_path / "run.journal.10").complete

    def test_two_servers_at_once_never_share_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        with ServerThread(policy="asgd", record=path), ServerThread(policy="sasgd", record=path):
            pass
        found = {replayed(p).engine.algorithm.name for p in (path, tmp_path / "run.journal.2")}
        assert found == {"asgd", "sasgd"}

    def test_what_is_no_file_is_written_as_it_is(self) -> None:
        null = Path("/dev/null")
        with ServerThread(policy="asgd", ledger=null):
            pass
        assert not null.with_name("null.2").exists()
        assert null.is_char_device()

    def test_a_server_that_does_not_start_leaves_none(self, tmp_path: Path) -> None:
        paths: dict[str, Any] = {flag: tmp_path / flag for flag in ("record", "ledger", "profile")}
        with (
            pytest.raises(UsageError, match="No such file"),
            ServerThread(policy="asgd", init=tmp_path / "none.safetensors", **paths),
        ):
            pass
        assert list(tmp_path.iterdir()) == []


class TestInitial:
    @each_row("value", [np.nan, np.inf, -np.inf])
    @each_row("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16])
    def test_a_model_with_a_value_that_is_no_number(
        self, value: float, dtype: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "model.safetensors"
        weights = np.zeros((3, 4), dtype)
        weights[2, 1] = value
        write_model(path, {"good": np.ones(3, np.float32), "bad": weights}, 1)
        with (
            pytest.raises(UsageError, match=rf"{path}: 'bad' holds -?(nan|inf) at \[2, 1\]"),
            ServerThread(policy="asgd", init=path),
        ):
            pass

    def test_a_table_with_one(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with (
            ServerThread(policy="asgd", save=path) as server,
            Worker(server.url, {}, tables=TABLES) as worker,
        ):
            worker.push_rows("words", [5, 8], np.ones((2, 2), np.float32))
        data = bytearray(path.read_bytes())
        at = data.rindex(read_tables(path)[1][2].tobytes())
        data[at + 12 : at + 16] = np.float32(np.nan).tobytes()
        path.write_bytes(data)
        with (
            pytest.raises(UsageError, match="row 8 of table 'words' holds nan in column 1"),
            ServerThread(policy="asgd", init=path),
        ):
            pass

    def test_a_number_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write_model(path, {"scalar": np.array(np.nan, np.float32)}, 1)
        with (
            pytest.raises(UsageError, match=r"'scalar' holds nan at \[\]"),
            ServerThread(policy="asgd", init=path),
        ):
            pass

    def test_a_client_sees_the_order_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        write_model(path, START, 1)
        with ServerThread(policy="asgd", init=path) as server, Client(server.url) as client:
            same = [name for name in START if START[name].dtype == np.float32]
            assert [name for name in client.fetch() if name in same] == same
