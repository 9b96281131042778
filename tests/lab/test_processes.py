"""Child processes: deadlines, failures, and an end however the parent fares."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aiops.lab.processes import (
    ONE_THREAD,
    ChildProcess,
    Interrupted,
    PipedProcess,
    ProcessFailed,
    Supervisor,
    command,
)
from aiops.net import process_tree
from aiops.net.process_tree import session
from tests.peers import eventually
from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules children can run."""
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), known))))
    return tmp_path


def write(folder: Path, name: str, text: str) -> list[str]:
    (folder / f"{name}.py").write_text(text)
    return command(name)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class TestSupervisor:
    async def test_lines_are_read_and_a_good_end_is_no_failure(self, modules: Path) -> None:
        lines: list[str] = []
        words = write(modules, "talks", "import sys\nprint('one')\nprint(*sys.argv[1:], end='')")
        async with Supervisor() as supervisor:
            child = supervisor.start("it", [*words, "two", "three"], lines.append)
            await supervisor.within(PATIENCE, "its end", child.ended.wait())
        assert lines == ["one", "two three"]
        assert child.popen.returncode == 0

    async def test_a_child_that_fails_ends_every_wait(self, modules: Path) -> None:
        text = "import sys\nprint('x' * 100_000, file=sys.stderr)\nsys.exit('that is why')"
        async with Supervisor() as supervisor:
            supervisor.start("the third one", write(modules, "fails", text), print)
            with pytest.raises(ProcessFailed, match="the third one ended with status 1") as caught:
                await supervisor.within(PATIENCE, "nothing", forever())
        assert caught.value.details["stderr"][-1] == "that is why"

    async def test_a_child_that_is_killed(self, modules: Path) -> None:
        words = write(modules, "kills", "import os\nos.kill(os.getpid(), 9)")
        async with Supervisor() as supervisor:
            supervisor.start("it", words, print)
            with pytest.raises(ProcessFailed, match="it was ended by signal 9"):
                await supervisor.within(PATIENCE, "nothing", forever())

    async def test_a_lasting_child_may_not_end_at_all(self, modules: Path) -> None:
        async with Supervisor() as supervisor:
            supervisor.start("it", write(modules, "ends", ""), print, lasting=True)
            with pytest.raises(ProcessFailed, match="it ended with status 0"):
                await supervisor.within(PATIENCE, "nothing", forever())

    async def test_a_deadline(self) -> None:
        async with Supervisor() as supervisor:
            with pytest.raises(ProcessFailed, match=r"waiting took more than 0\.01 s"):
                await supervisor.within(0.01, "waiting", forever())

    async def test_an_interruption(self) -> None:
        async with Supervisor() as supervisor:
            asyncio.get_running_loop().call_soon(supervisor.interrupt, signal.SIGINT)
            with pytest.raises(Interrupted) as caught:
                await supervisor.within(PATIENCE, "waiting", forever())
            assert caught.value.details["signal"] == signal.SIGINT
            with pytest.raises(Interrupted):  # and every later wait, at once
                await supervisor.within(PATIENCE, "waiting", forever())

    async def test_what_a_wait_raises_comes_through(self) -> None:
        async def fail() -> None:
            raise LookupError("its own")

        async with Supervisor() as supervisor:
            with pytest.raises(LookupError, match="its own"):
                await supervisor.within(PATIENCE, "failing", fail())

    async def test_the_end_is_a_request_and_then_a_kill(self, modules: Path) -> None:
        deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n"
        polite = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\n"
        polite += "print(1, flush=True)\n"
        ready = asyncio.Semaphore(0)
        began = time.monotonic()
        async with Supervisor() as supervisor:
            for name, text in (("deaf", deaf), ("polite", polite)):
                words = write(modules, name, text + "time.sleep(600)")
                supervisor.start(name, words, lambda _line: ready.release())
            for _ in range(2):
                await supervisor.within(PATIENCE, "a line", ready.acquire())
        statuses = [child.popen.returncode for child in supervisor.children]
        assert statuses == [-signal.SIGKILL, 7]
        assert time.monotonic() - began < PATIENCE

    async def test_the_variables_of_a_child(
        self, modules: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_POLICY", "softsync")
        monkeypatch.setenv("AIOPS_DATA", "/data")
        monkeypatch.setenv("AIOPS_KERNELS", "numpy")
        lines: list[str] = []
        text = "import os\nfor k in sorted(os.environ):\n  if 'AIOPS' in k: print(k, os.environ[k])"
        async with Supervisor() as supervisor:
            child = supervisor.start(
                "it", write(modules, "shows", text), lines.append, environment={"AIOPS_X": "1"}
            )
            await supervisor.within(PATIENCE, "its end", child.ended.wait())
        assert lines == ["AIOPS_DATA /data", "AIOPS_KERNELS numpy", "AIOPS_X 1"]

    async def test_what_cannot_be_started(self) -> None:
        async with Supervisor() as supervisor:
            with pytest.raises(ProcessFailed, match="it cannot be started: No such file"):
                supervisor.start("it", ["/no/such/python"], print)


class TestChildProcess:
    def test_its_lines(self, modules: Path) -> None:
        text = "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c', end='')"
        with ChildProcess("it", write(modules, "talks", text), lines="both") as child:
            assert sorted(child.lines()) == ["a", "b", "c"]
            assert child.end(PATIENCE) == 0

    def test_the_first_line_and_the_rest(self, modules: Path) -> None:
        text = "print(' url ', 'more', sep='\\n')"
        with ChildProcess("it", write(modules, "talks", text), lines=True) as child:
            assert child.first_line(PATIENCE) == "url"
            assert list(child.lines()) == ["more"]

    def test_an_end_without_a_line(self, modules: Path) -> None:
        words = write(modules, "fails", "import sys\nsys.exit(3)")
        with (
            ChildProcess("it", words, lines=True) as child,
            pytest.raises(ProcessFailed, match="it ended with status 3 before it printed a line"),
        ):
            child.first_line(PATIENCE)

    def test_a_line_that_does_not_come(self, modules: Path) -> None:
        words = write(modules, "sleeps", "import time\ntime.sleep(600)")
        with (
            ChildProcess("it", words, lines=True) as child,
            pytest.raises(ProcessFailed, match=r"it printed no line within 0\.01 s"),
        ):
            child.first_line(0.01)
        assert child.popen.returncode in (-signal.SIGTERM, -signal.SIGKILL)

    def test_a_line_to_a_child_that_has_ended_is_no_failure(self, modules: Path) -> None:
        with ChildProcess("it", write(modules, "ends", "")) as child:
            child.popen.wait(PATIENCE)
            child.write_line("go")
        assert child.popen.returncode == 0

    def test_its_session_is_killed_with_it(self, modules: Path) -> None:
        text = (
            "import signal, subprocess, time\nsignal.signal(15, signal.SIG_IGN)\n"
            "subprocess.Popen(['sleep', '600'], process_group=0)\n"
            "print(1, flush=True)\ntime.sleep(600)"
        )
        with ChildProcess("it", write(modules, "starts", text), lines=True, grace=0.0) as child:
            child.first_line(PATIENCE)
            assert len(session(child.popen.pid)) == 2
        eventually(lambda: not session(child.popen.pid), "the session is empty")

    def test_it_ends_with_its_parent(self, modules: Path) -> None:
        """However that ends: here it is killed while the child sleeps."""
        write(modules, "sleeps", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
        text = (
            "import os\nfrom aiops.lab.processes import ChildProcess, command\n"
            "child = ChildProcess('it', command('sleeps'), lines=True)\n"
            "print(child.first_line(60), flush=True)\nos.kill(os.getpid(), 9)"
        )
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL
        eventually(lambda: not session(int(ended.stdout)), "the child has ended, too")


def echo(pipe: Connection) -> None:
    """Answer what the pipe brings until that is None."""
    while (value := pipe.recv()) is not None:
        pipe.send((value, [os.environ.get(name) for name in ONE_THREAD], os.environ.get("MINE")))
    print("the last words", file=sys.stderr)
    sys.exit(5)


class TestPipedProcess:
    def test_objects_go_both_ways(self) -> None:
        with PipedProcess("it", echo, {"MINE": "yes"}) as child:
            child.send({"a": 1})
            assert child.receive() == ({"a": 1}, ["1"] * len(ONE_THREAD), "yes")

    def test_an_end_is_an_error_with_its_last_line(self) -> None:
        with PipedProcess("it", echo) as child:
            child.send(None)
            with pytest.raises(
                ProcessFailed, match=r"^it ended with status 5; its last line: the last words"
            ):
                child.receive()

    def test_a_function_that_fails(self) -> None:
        child = PipedProcess("it", process_tree.kill_session)  # type: ignore[arg-type]
        with child, pytest.raises(ProcessFailed, match="it ended with status 1; its last line"):
            child.receive()
