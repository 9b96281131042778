"""What administrators ask of a real server: over a socket, by role, and with a name in the log."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.cli.main import command
from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.errors import (
    AiopsError,
    Kicked,
    NotReady,
    Refused,
    Unauthorised,
    Unavailable,
    UsageError,
)
from aiops.model.layout import Array
from aiops.serving.standby.feeds import StandbyFeeds
from aiops.serving.state import state_files
from aiops.wire.messages import Error
from tests.peers import Peer, eventually
from tests.recording import replayed
from tests.serving.standby.test_standby import StandbyThread
from tests.serving.test_tokens import made
from tests.support import ServerThread

ZEROS: Mapping[str, Array] = {"w": np.zeros(3, np.float32)}
ONES: Mapping[str, Array] = {"w": np.ones(3, np.float32)}
PLAIN: Mapping[str, Any] = {"policy": "asgd", "set": {"lr": 1}, "kernels": "numpy"}


def aiops(name: str, *given: object) -> str:
    """Run a command as on the command line, and return its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(name)([*map(str, given)], standalone_mode=False)
    return out.getvalue()


def refusals(url: str) -> int:
    with Client(url) as client:
        return int(client.stats()["refused"].get("unavailable", 0))


def applied(url: str) -> int:
    with Client(url) as client:
        return int(client.stats()["version"])


def no_room(*given: object, **settings: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


REQUESTS = ("kick", "w0"), ("pause",), ("resume",), ("snapshot",), ("rollback", 1), ("drain",)


@pytest.mark.parametrize("request_", REQUESTS)
def test_directing_a_server_takes_the_role_admin(
    request_: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file, name = tmp_path / "tokens.toml", request_[0]
    trainer, admin = (made(file, role, role, capsys) for role in ("train", "admin"))
    with (
        ServerThread(**PLAIN, tokens=file, state=tmp_path / "state") as server,
        caplog.at_level(logging.INFO, "aiops.server"),
    ):
        given = name, server.url, *request_[1:]
        with pytest.raises(Unauthorised, match="'train' has the role 'train'"):
            aiops(*given, "--token", trainer)
        assert "token 'train' at 127.0.0.1" in caplog.text
        with Worker(server.url, ZEROS, token=trainer, name="w0") as worker:
            worker.step(ONES)
            if name == "rollback":
                aiops("snapshot", server.url, "--token", admin)
            aiops(*given, "--token", admin)
            assert "token 'admin' at 127.0.0.1" in caplog.text


class TestKick:
    @pytest.mark.parametrize("named", ["slow", "#1"])
    def test_a_client_is_told_and_stays_away(self, named: str) -> None:
        with ServerThread(**PLAIN) as server:
            worker = Worker(server.url, ZEROS, name="slow")
            with worker, Worker(server.url, ZEROS, name="quick") as other:
                for each in (worker, other):
                    each.step(ONES)
                said = aiops("kick", server.url, named, "--why", "it holds up the others")
                assert said == f"{named} was sent away: 1 connection ended\n"
                for _ in range(2):  # it makes no other connection, which would be refused alike
                    with pytest.raises(Kicked, match="without a token: it holds up the others"):
                        worker.step(ONES)
                other.step(ONES)
            with Worker(server.url, ZEROS, name="slow") as another:
                another.step(ONES)

    def test_a_client_that_missed_the_reason_is_not_welcomed_again(self) -> None:
        with ServerThread(**PLAIN) as server, Peer(server.url) as peer:
            aiops("kick", server.url, "peer")
            with Peer(server.url, greet=False) as again:
                again.client = peer.client
                answer = again.ask(again.hello())
                assert isinstance(answer, Error)
                assert (answer.code, answer.fatal) == ("kicked", True)

    def test_a_client_that_is_not_there(self) -> None:
        with (
            ServerThread(**PLAIN) as server,
            Client(server.url, name="worker-1"),
            pytest.raises(Refused, match="no client 'worker1' is connected; did you mean"),
        ):
            aiops("kick", server.url, "worker1")


class TestPause:
    def test_pushes_wait_and_all_else_goes_on(self) -> None:
        with ServerThread(**PLAIN) as server, Worker(server.url, ZEROS) as worker:
            worker.step(ONES)
            aiops("pause", server.url, "--why", "the disk is full")
            step = threading.Thread(target=worker.step, args=(ONES,))
            step.start()
            eventually(lambda: refusals(server.url) > 0, "the push was refused")
            with Client(server.url) as client:
                assert client.fetch().version == 1
                assert client.stats()["paused"] == (
                    "paused by a client without a token: the disk is full"
                )
            assert step.is_alive()
            aiops("resume", server.url)
            step.join(10)
            assert worker.version == 2
            with Client(server.url) as client:
                assert client.stats()["paused"] == ""

    def test_the_reason_is_told_when_the_time_is_over(self) -> None:
        with ServerThread(**PLAIN) as server, Worker(server.url, ZEROS, timeout=0.3) as worker:
            worker.step(ONES)
            aiops("pause", server.url, "--why", "maintenance until noon")
            with pytest.raises(Unavailable, match="maintenance until noon"):
                worker.step(ONES)

    def test_a_restart_and_a_replay_keep_it(self, tmp_path: Path) -> None:
        state = {**PLAIN, "state": tmp_path, "keep_journal": True, "acks": "written"}
        with ServerThread(**state) as server:
            with Worker(server.url, ZEROS) as worker:
                worker.step(ONES)
            aiops("pause", server.url)
        with ServerThread(**state) as server:
            with Worker(server.url, ZEROS, timeout=0.3) as worker:
                with pytest.raises(Unavailable, match="paused by"):
                    worker.step(ONES)
                aiops("resume", server.url)
                worker.step(ONES)
            final = server.call(lambda s: s.engine.defined_store.current.arena.data.copy())
        assert (replayed(tmp_path, "numpy").engine.defined_store.current.arena.data == final).all()

    def test_workers_that_average_push_nothing(self) -> None:
        with (
            ServerThread(policy="average") as server,
            pytest.raises(Refused, match="drain the server instead"),
        ):
            aiops("pause", server.url)


class TestSnapshot:
    def test_it_is_on_the_disk_when_it_is_answered(self, tmp_path: Path) -> None:
        state = {**PLAIN, "state": tmp_path, "snapshot_every": 1000.0}
        with ServerThread(**state) as server:
            with pytest.raises(NotReady, match="no worker has defined a model"):
                aiops("snapshot", server.url)
            with Worker(server.url, ZEROS) as worker:
                for version in (1, 2):
                    worker.step(ONES)
                    said = aiops("snapshot", server.url)
                    assert said == f"{version}\n"
                    headers = server.call(lambda s: [*s.run_state.files.headers()])
                    assert headers[0][1].versions[0] == version

    def test_a_server_without_a_state_says_so(self) -> None:
        with ServerThread(**PLAIN) as server, Worker(server.url, ZEROS) as worker:
            worker.step(ONES)
            with pytest.raises(Refused, match="keeps no state"):
                aiops("snapshot", server.url)
            with pytest.raises(Refused, match="begin another run with --init"):
                aiops("rollback", server.url, 1)


class TestRollback:
    def test_what_followed_is_lost_and_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {**PLAIN, "state": tmp_path, "keep_journal": True, "acks": "written"}
        with ServerThread(**state) as server, Worker(server.url, ZEROS) as worker:
            for _ in range(3):
                worker.step(ONES)
            aiops("snapshot", server.url)
            for _ in range(4):
                worker.step(ONES)
            said = aiops("rollback", server.url, 3)
            assert said == (
                f"{server.url} goes back to version 3\n"
                f"{server.url} is back: generation 2, version 3\n"
            )
            [undone] = re.findall(r"last (\d+) rows are undone: an administrator", caplog.text)
            assert 4 <= int(undone) < 20  # pushes, and who came and went
            assert "as they were not written" not in caplog.text
            while not worker.step(ONES).used:  # the gradient that was computed at version 7
                pass
            assert worker.rolled_back == 4
            assert worker.version == 4
            np.testing.assert_array_equal(worker.params["w"], -4 * ONES["w"])
            with pytest.raises(Refused, match="no snapshot of version 7 is kept; there are: 3"):
                aiops("rollback", server.url, 7)
        replay = replayed(tmp_path, "numpy")
        np.testing.assert_array_equal(
            replay.engine.defined_store.current.arena.views["w"], -4 * ONES["w"]
        )
        with ServerThread(**state) as server, Client(server.url) as client:
            assert client.fetch().version == 4

    def test_a_start_that_ends_before_its_journal_begins_goes_back_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = {**PLAIN, "state": tmp_path, "acks": "written"}
        with ServerThread(**state) as server, Worker(server.url, ZEROS) as worker:
            worker.step(ONES)
            aiops("snapshot", server.url)
            worker.step(ONES)
            assert server.call(lambda s: s.run_state.note_rollback(1))
            server.call(lambda s: setattr(s, "_broken", True))  # as if it was killed here
        with monkeypatch.context() as patch:
            patch.setattr(state_files, "JournalWriter", no_room)
            with pytest.raises(UsageError, match="No space left"), ServerThread(**state):
                pass
        for _ in range(2):
            with ServerThread(**state) as server, Client(server.url) as client:
                assert client.fetch().version == 1

    def test_its_standby_goes_back_too(self, tmp_path: Path) -> None:
        settings = {**PLAIN, "acks": "written"}
        with (
            ServerThread(**settings, state=tmp_path / "a") as server,
            Worker(server.url, ZEROS) as worker,
            StandbyThread(**settings, state=tmp_path / "b", standby=server.url) as standby,
        ):
            worker.step(ONES)
            aiops("snapshot", server.url)
            for _ in range(3):
                worker.step(ONES)
            eventually(lambda: applied(standby.url) == 4, "the standby has all versions")
            with pytest.raises(AiopsError, match="is a standby of"):
                aiops("pause", standby.url)
            aiops("rollback", server.url, 1)
            while not worker.step(ONES).used:
                pass
            eventually(lambda: applied(standby.url) == 2, "the standby went back")
            values = standby.call(lambda s: s._engine().defined_store.current.arena.views["w"])
            np.testing.assert_array_equal(values, -2 * ONES["w"])

    def test_on_shards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = {name: np.zeros(64, np.float32) for name in "ab"}
        ones = {name: np.ones(64, np.float32) for name in "ab"}
        state = {**PLAIN, "state": tmp_path, "shards": 2, "acks": "written"}
        with ServerThread(**state) as server, Worker(server.url, model) as worker:
            for _ in range(2):
                worker.step(ones)
            aiops("snapshot", server.url)
            for _ in range(3):
                worker.step(ones)
            with monkeypatch.context() as patch:
                patch.setattr(StandbyFeeds, "any", True)
                with pytest.raises(Refused, match="end the standbys, ask again, and start them"):
                    aiops("rollback", server.url, 2)
            aiops("rollback", server.url, 2)
            while not worker.step(ones).used:
                pass
            assert worker.version == 3
            for name in "ab":
                np.testing.assert_array_equal(worker.params[name], -3 * ones[name])
