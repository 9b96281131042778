"""Forks: what is inherited refuses to work, sends nothing, and takes nothing from its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common import forks
from aiops.engine.events import Tick
from aiops.net.yielding import _Holders
from aiops.serving.config import Config
from aiops.serving.server import Server
from tests import forking
from tests.peers import eventually
from tests.recording import replayed
from tests.support import PATIENCE, ServerThread
from tests.zygote import IMPORTED, ForkedPopen

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

TCP = {"AIOPS_NO_SHM": "1"}
SETTINGS: dict[str, Any] = {"lr": 1.0, "kernels": "numpy"}
CASES = [
    *("client", "worker", "computing", "room", "context"),
    *("async_client", "async_worker", "uv_worker", "not_connected"),
]
NEEDS = {"optimizer": "torch", "loader": "torch", "uv_worker": "uvloop"}


def run(case: str, where: str, env: dict[str, str] | None = None) -> Any:
    """Run one of the programs, which forks, in a process; return what it reported."""
    pytest.importorskip(NEEDS.get(case, "aiops"))
    quiet = ("-W", "ignore::DeprecationWarning")  # of Python 3.12 and up, about forks with threads
    command = [sys.executable, *quiet, "-m", "tests.forking", case, where]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    root = Path(__file__).parents[1].parent
    environment = {**os.environ, **(env or {})}
    if NEEDS.get(case) == "torch":  # an optimizer's first step imports its compiler, for a second
        environment[IMPORTED] = "torch,torch._dynamo"
    with ForkedPopen(
        command, **piped, text=True, env=environment, cwd=root, process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=2 * PATIENCE)
        finally:  # its children, too: they hold the pipes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err) == (0, ""), out
    return json.loads(out)


def check(said: Any) -> None:
    """Expect that every call in a child was refused with a sentence that says what to do."""
    assert said["used"]
    assert all(said["used"])
    for calls in said["children"]:
        assert calls.pop("close", None) is None
        assert not calls.pop("sockets", 0), "a child holds sockets of its parent"
        for name, came in calls.items():
            assert came.startswith("UsageError: this "), (name, came)
            assert "fork" in came, (name, came)


def pushed(url: str) -> list[float]:
    """Return the elements that the parent's pushes have made 1; the others are all 0."""
    with aiops.Client(url) as client:
        w = client.fetch()["w"]
    assert not np.flatnonzero(w[forking.STEPS :]).size, "a child's push was used"
    return [float(value) for value in w[: forking.STEPS]]


def expect(case: str, url: str, env: dict[str, str] | None) -> None:
    """Expect that each of the parent's pushes was used once, and nothing of a child's."""
    said = run(case, url, env)
    check(said)
    assert said["used"] == [True] * forking.STEPS
    assert said["children"]
    assert pushed(url) == [1.0] * forking.STEPS
    with aiops.Client(url) as client:
        [worker] = [one for one in client.stats()["workers"] if one["role"] == "worker"]
    assert worker["pushes"] == forking.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("env", [TCP, None], ids=["tcp", "near"])
@pytest.mark.parametrize("case", CASES)
def test_a_child_takes_nothing_from_its_parent(case: str, env: dict[str, str] | None) -> None:
    with ServerThread(policy="asgd", **SETTINGS) as server:
        expect(case, server.url, env)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "env"), [("optimizer", None), ("loader", TCP)])
def test_nor_with_pytorch(case: str, env: dict[str, str] | None) -> None:
    """Each by one transport: importing PyTorch takes seconds, and the transport is a client's."""
    with ServerThread(policy="asgd", **SETTINGS) as server:
        expect(case, server.url, env)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["worker", "async_worker"])
def test_nor_from_its_connections_to_shards(case: str) -> None:
    with ServerThread(policy="asgd", shards=2, **SETTINGS) as server:
        expect(case, server.url, None)


@pytest.mark.slow
@pytest.mark.parametrize("env", [TCP, None], ids=["tcp", "near"])
def test_nor_from_an_averager(env: dict[str, str] | None) -> None:
    settings = {"interval": 1000, "grace": PATIENCE}
    with ServerThread(policy="average", set=settings) as server:
        check(run("averager", server.url, env))


def test_a_lock_that_another_thread_has_is_not_waited_for() -> None:
    with ServerThread(policy="hardsync", workers=2, **SETTINGS) as server:
        check(run("beside", server.url))


@pytest.mark.parametrize("case", ["orphan", "async_orphan"])
@pytest.mark.parametrize("env", [TCP, None], ids=["tcp", "near"])
def test_a_server_notices_the_end_of_a_parent_whose_child_lives(
    case: str, env: dict[str, str] | None
) -> None:
    with ServerThread(policy="asgd", **SETTINGS) as server, aiops.Client(server.url) as client:
        process = ForkedPopen(
            [sys.executable, "-m", "tests.forking", case, server.url],
            stdin=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        with process:
            assert process.stdin is not None
            assert process.wait(PATIENCE) == -signal.SIGKILL

            def gone() -> bool:
                [worker] = [w for w in client.stats()["workers"] if w["name"] == "killed"]
                return not worker["present"]

            eventually(gone, "the killed worker is gone")


def test_a_server_is_its_own_process_alone(tmp_path: Path) -> None:
    """A child neither holds its port and its connections, nor writes its files again."""
    said = run("serving", str(tmp_path))
    check(said)
    assert said["near"] == [True, True]
    assert said["same"], "the child wrote to its parent's files"
    assert replayed(tmp_path / "journal").complete


def test_a_child_that_leaves_the_block_of_a_server_writes_nothing(tmp_path: Path) -> None:
    said = run("leaving", str(tmp_path))
    assert said == {"used": [True], "children": [], "saved": False, "same": True}


async def test_a_fork_writes_nothing_to_the_files_of_its_parents_server(tmp_path: Path) -> None:
    record, ledger = tmp_path / "journal", tmp_path / "ledger"
    server = Server(Config(policy="asgd", record=record, ledger=ledger))
    assert server._persistence is not None
    server._persistence.open()
    assert server._persistence.note is not None
    server._persistence.note(Tick(1.0))
    files = sorted(record.iterdir())
    before = [file.read_bytes() for file in files]
    assert b"".join(before).strip(b"\0")
    server.forked()
    server._persistence.note(Tick(2.0))
    assert server._persistence._record is not None
    assert server._persistence._ledger is not None
    assert [file.read_bytes() for file in files] == before
    server._persistence._record.discard()
    server._persistence._ledger.close()


def test_a_lock_of_who_wants_short_turns_is_not_waited_for() -> None:
    holders = _Holders()
    holders._lock.acquire()
    holders.forked()
    holders.enter()
    holders.leave()


class TestForks:
    def test_what_was_noted_is_told_in_the_child_alone(self) -> None:
        program = """
import os
from aiops.common import forks

class Thing:
    told = 0
    def forked(self):
        self.told += 1

one, two = Thing(), Thing()
forks.note(one), forks.note(two)
gone = Thing()
forks.note(gone)
del gone
child = os.fork()
assert [one.told, two.told] == ([0, 0] if child else [1, 1])
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        subprocess.run([sys.executable, "-c", program], check=True)

    def test_a_descriptor_is_let_go_of_and_its_number_stays_taken(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            forks.blank(ours.fileno())
            assert theirs.recv(1) == b""
            assert os.read(ours.fileno(), 1) == b""
            assert not os.get_inheritable(ours.fileno())
        forks.blank(-1)

    def test_one_that_is_closed_already_stays_so(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        forks.blank(reading)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(reading)
        os.close(writing)
