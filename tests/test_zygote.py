"""Processes that are forked are like those that are started, except for their start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.zygote import IMPORTED, ForkedPopen

PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


def command(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", text, *arguments]


@pytest.fixture(params=[subprocess.Popen, ForkedPopen], ids=["started", "forked"])
def popen(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_pipes_arguments_folder_and_environment(popen: Any, tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv, os.getcwd(), os.environ['AIOPS_X'], input())"
    environment = {**os.environ, "AIOPS_X": "its own"}
    with popen(
        command(text, "one", "two"), **PIPES, text=True, cwd=tmp_path, env=environment
    ) as process:
        out, err = process.communicate("said\n")
    assert (out, err) == (f"['-c', 'one', 'two'] {tmp_path} its own said\n", "")
    assert process.returncode == 0
    assert "AIOPS_X" not in os.environ


def test_modules_that_it_asks_for_are_imported_before_it_begins() -> None:
    text = command("import sys; print('colorsys' in sys.modules)")
    for environment, found in ({IMPORTED: "colorsys,no_such_module"}, "True"), ({}, "False"):
        with ForkedPopen(text, **PIPES, text=True, env={**os.environ, **environment}) as process:
            assert process.communicate() == (f"{found}\n", "")


@pytest.mark.parametrize(
    ("text", "status", "last"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end"),
    ],
)
def test_the_end(popen: Any, text: str, status: int, last: str) -> None:
    with popen(command(text), **PIPES, text=True) as process:
        _out, err = process.communicate()
    assert process.returncode == status
    assert err.strip().rpartition("\n")[2] == last


def test_signals_reach_it_alone(popen: Any) -> None:
    text = "print('ready', flush=True); input()"
    with popen(command(text), **PIPES, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        assert os.getsid(process.pid) == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


OPEN = """
import os
for fd in range(1024):
    try:
        os.fstat(fd)
    except OSError:
        continue
    print(fd, end=" ")
"""


def test_it_has_no_descriptor_but_what_it_is_given(popen: Any) -> None:
    reading, writing = os.pipe()
    with popen(command(OPEN), **PIPES, text=True, pass_fds=[writing]) as process:
        assert process.communicate()[0] == f"0 1 2 {writing} "
    os.close(reading)
    os.close(writing)


def test_a_module_is_run_and_is_the_main_one() -> None:
    done = zygote.run("-m", "aiops", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("aiops")
    assert done.stderr == ""


def test_another_environment_is_a_start(tmp_path: Path) -> None:
    """What Python and NumPy read at their start cannot be changed afterwards."""
    here = {**os.environ, "AIOPS_X": "read later"}
    words = [sys.executable, "-m", "aiops"]
    assert zygote._zygote(words, here) is not None
    assert zygote._zygote(words, {**here, "PYTHONHASHSEED": "1"}) is None
    assert zygote._zygote(words, {**here, "PYTHONPATH": str(tmp_path)}) is None
    assert zygote._zygote([sys.executable, "-X", "dev", "-m", "aiops"], here) is None
    assert zygote._zygote([sys.executable, "examples/numpy_loop.py"], here) is None
