"""``--state-copy``: a server whose machine is lost goes on from a copy, in S3 (moto's server)."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import aiops
from aiops.cli.state import app
from aiops.cli.stats import tables
from aiops.errors import AiopsError, UsageError
from aiops.serving.config import Config
from aiops.serving.safetensors_io import read_model
from aiops.serving.state import state_copies
from tests.object_store import KEYS, ObjectStore, object_store
from tests.peers import eventually
from tests.support import PATIENCE, Process, ServerThread, server_process
from tests.zygote import IMPORTED, NESTED, ForkingModule

ZEROS = {"w": np.zeros(64, np.float32)}
ONES = {"w": -np.ones(64, np.float32)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    pytest.importorskip("moto")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        with object_store() as running:
            yield running


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each copy made by a fork of a process that has imported pyarrow."""
    monkeypatch.setenv(NESTED, "1")
    monkeypatch.setenv(IMPORTED, "pyarrow.fs,aiops.serving.state.copying")
    monkeypatch.setattr(asyncio.unix_events, "subprocess", ForkingModule())


def serving(folder: Path, url: str, *flags: str) -> Any:
    given = ["--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--snapshot-every", "0.2"]
    return server_process(*given, f"--state={folder}", f"--state-copy={url}", *flags)


def copied(server: Process, version: int) -> None:
    """Wait until there is a copy of a state that is this new."""
    with aiops.Client(server.url, timeout=PATIENCE) as client:
        eventually(
            lambda: client.stats()["state"]["copy"]["version"] >= version,
            f"there is a copy of version {version}",
        )


def shown(report: Any) -> str:
    """What `aiops stats` prints."""
    out = io.StringIO()
    Console(file=out, width=200).print(tables("a URL", report))
    return out.getvalue()


@pytest.mark.parametrize("acks", ["applied", "written"])
def test_a_server_whose_machine_is_lost_goes_on_from_the_newest_copy(
    store: ObjectStore, tmp_path: Path, acks: str
) -> None:
    url, flags = store.url(f"lost/{acks}"), [f"--acks={acks}"]
    with serving(tmp_path / "here", url, *flags) as first:
        port = first.url.rpartition(":")[2]
        with aiops.Worker(first.url, ZEROS, timeout=PATIENCE) as worker:
            for _ in range(5):
                worker.step(ONES)
            copied(first, 5)
            for _ in range(3):  # lost, unless a copy is made of them in this moment
                worker.step(ONES)
            first.signal(signal.SIGKILL)
            first.popen.wait(PATIENCE)
            shutil.rmtree(tmp_path / "here")
            with serving(tmp_path / "elsewhere", url, *flags, "--port", port):
                worker.step(ONES)  # its gradient is of lost parameters, if any are
                assert 0 <= worker.rolled_back <= 3
                assert worker.params["w"][0] == 8 - worker.rolled_back + (not worker.rolled_back)
                worker.step(ONES)
                assert worker.params["w"][0] == worker.version


def test_an_older_state_in_the_folder_is_set_aside(store: ObjectStore, tmp_path: Path) -> None:
    """A node that comes back has the state of a server that was started on another since."""
    url = store.url("older")
    with serving(tmp_path / "a", url) as first:
        with aiops.Worker(first.url, ZEROS, timeout=PATIENCE) as worker:
            worker.step(ONES)
        copied(first, 1)
        first.signal(signal.SIGKILL)
        first.popen.wait(PATIENCE)
    with serving(tmp_path / "b", url) as second:
        with aiops.Worker(second.url, ZEROS, timeout=PATIENCE) as worker:
            worker.step(ONES)
        second.signal(signal.SIGTERM)  # then all of it is copied
        assert second.end()[0] == 0
    with serving(tmp_path / "a", url) as third:
        with aiops.Client(third.url, timeout=PATIENCE) as client:
            assert client.fetch()["w"][0] == 2
        third.signal(signal.SIGTERM)
        assert f"is in {tmp_path / 'a.aside-1'}" in third.end()[2]
    assert (tmp_path / "a.aside-1" / "identity").exists()


def command(*words: object) -> str:
    """Run `aiops state` with these words; return what it prints."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, AiopsError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_last_two_copies_are_kept_and_a_model_is_made_of_the_newest(
    store: ObjectStore, tmp_path: Path
) -> None:
    url, state, out = store.url("kept"), tmp_path / "state", tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match="s3://bucket/kept has no copy of a state"):
        command("fetch", url, tmp_path / "fetched")
    with serving(state, url) as server:
        with aiops.Worker(server.url, ZEROS, timeout=PATIENCE) as worker:
            for count in range(1, 5):
                worker.step(ONES)
                copied(server, count)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    kinds = [name.partition("-")[0] for name in store.names("kept")]
    assert kinds == ["begun", "copy", "copy", "snapshot", "snapshot"]
    assert "the state of row" in command("fetch", url, tmp_path / "fetched")
    command("export", tmp_path / "fetched", "--out", out)
    np.testing.assert_array_equal(read_model(out)["w"], 4.0)
    with pytest.raises(UsageError, match="is not empty"):
        command("fetch", url, tmp_path / "fetched")


class TestAStoreThatFails:
    def test_training_goes_on_and_copies_are_made_when_it_is_back(
        self,
        store: ObjectStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(state_copies, "_RETRY", 0.1)
        folder = tmp_path / "store"
        given = {"policy": "asgd", "lr": 1.0, "kernels": "numpy", "snapshot_every": 0.1}
        given |= {"state": tmp_path / "state", "state_copy": f"file://{folder}", "shards": 1}
        with (
            ServerThread(**given) as server,
            aiops.Worker(server.url, ZEROS, timeout=PATIENCE) as worker,
            aiops.Client(server.url, timeout=PATIENCE) as client,
        ):

            def copy() -> dict[str, Any]:
                found: dict[str, Any] = client.stats()["state"]["copy"]
                return found

            worker.step(ONES)
            eventually(lambda: copy()["version"] > 0, "there is a copy")
            folder.rename(tmp_path / "away")
            folder.write_text("a file")
            worker.step(ONES)
            eventually(lambda: copy()["failed"] > 1, "copies fail")
            assert copy()["error"]
            assert "no copy: " in shown(client.stats())
            worker.step(ONES)
            folder.unlink()
            (tmp_path / "away").rename(folder)
            eventually(lambda: copy()["version"] == 3, "copies are made again")
            assert not copy()["error"]
            assert f"copies  file://{folder}  version 3, " in shown(client.stats())
        said = [record for record in caplog.records if "no copy of the state" in record.message]
        assert len(said) == 1, "once a minute"
        assert said[0].levelno == logging.ERROR
        assert f"file://{folder}" in said[0].message

    def test_one_that_does_not_answer_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(state_copies, "PATIENCE", 3.0)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            where = f"127.0.0.1:{silent.getsockname()[1]}"
            url = f"s3://key:secret@bucket/run?scheme=http&endpoint_override={where}"
            with pytest.raises(UsageError, match=r"s3://bucket/run: it has not answered in 3 s"):
                state_copies.fetch(tmp_path, url)
        assert not os.listdir(tmp_path)

    @pytest.mark.parametrize(
        ("url", "text"),
        [
            ("zz://bucket", "it is no store"),
            ("s3://nowhere/run?scheme=http&endpoint_override={}", "there is no bucket 'nowhere'"),
        ],
    )
    def test_one_that_is_none(
        self, store: ObjectStore, tmp_path: Path, url: str, text: str
    ) -> None:
        with pytest.raises(UsageError, match=text):
            state_copies.fetch(tmp_path, url.format(store.host_and_port))


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    for settings, text in (
        ({"state": None}, "give that, too"),
        ({"state_copy": "bucket/run"}, "write s3://"),
        ({"shards": 2}, "of a model on one server"),
        ({"standby": "aiops://a"}, "the primary's"),
        ({"keep_journal": True}, "drop one of them"),
    ):
        given: dict[str, Any] = {"state": tmp_path, "state_copy": "s3://bucket/run", **settings}
        with pytest.raises(UsageError, match=text):
            Config(**given)
