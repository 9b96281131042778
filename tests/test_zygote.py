"""Processes that are forked are like those that are started, except for their start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiops.net.process_tree import having
from tests import zygote
from tests.zygote import IMPORTED, NESTED, ForkedPopen

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
    text = command("import sys; print('sched' in sys.modules)")
    for environment, found in ({IMPORTED: "sched,no_such_module"}, "True"), ({}, "False"):
        with ForkedPopen(text, **PIPES, text=True, env={**os.environ, **environment}) as process:
            assert process.communicate() == (f"{found}\n", "")


FULL = "import sys; sys.stdout = open('/dev/full', 'w'); print('said')"

THREAD = """
import atexit, sys, threading

def last():
    threading.main_thread().join()
    atexit.register(print, "end", file=sys.stderr)

threading.Thread(target=last).start()
sys.exit(3)
"""

PENDING = """
import asyncio, logging

def main():
    logging.basicConfig(format="%(name)s %(levelname)s %(message).37s")
    loop = asyncio.new_event_loop()
    loop.create_task(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.create_task(forever(loop.create_future()))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

async def forever(future):
    await future

main()
"""


@pytest.mark.parametrize(
    ("text", "status", "last"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end"),
        ("import sys; sys.exit('why')", 1, "why"),
        (FULL, 120, "OSError: [Errno 28] No space left on device"),
        (THREAD, 3, "end"),
        (PENDING, 0, "asyncio ERROR Task was destroyed but it is pending!"),
    ],
)
def test_the_end(popen: Any, text: str, status: int, last: str) -> None:
    with popen(command(text), **PIPES, text=True) as process:
        _out, err = process.communicate()
    assert process.returncode == status
    assert err.strip().rpartition("\n")[2] == last


def test_signals_reach_it_alone(popen: Any) -> None:
    # A signal that arrives just before a system call blocks is seen when that returns: it is short.
    text = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
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
    assert zygote._zygote(["/bin/true"], here) is None


SCRIPT = """
import sys
from beside import VALUE
if __name__ == "__main__":
    print(sys.argv, VALUE, sys.path[0], __file__, sys.modules["__main__"].VALUE)
"""


def test_a_script_is_the_main_module_and_finds_what_is_beside_it(
    popen: Any, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5")
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "program.py", "-c", "x"]
    with popen(words, **PIPES, text=True, cwd=os.path.relpath(tmp_path)) as process:
        said = process.communicate()
    assert said == (f"['program.py', '-c', 'x'] 5 {tmp_path} {script} 5\n", "")


def test_the_system_shows_its_command_and_its_environment(popen: Any) -> None:
    words = command("print('begun', flush=True); input()", "word", "of many")
    with popen(words, **PIPES, text=True, env={**os.environ, "AIOPS_X": "1 2"}) as process:
        assert process.stdout.readline() == "begun\n"
        shown = Path(f"/proc/{process.pid}")
        assert (shown / "cmdline").read_bytes().rstrip(b"\0").split(b"\0") == [
            os.fsencode(word) for word in words
        ]
        assert having("AIOPS_X=1 2") == [process.pid]
        process.communicate("")


OUTER = """
import asyncio, os, subprocess, sys
from tests.test_zygote import INNER, deaf

async def main():
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INNER, str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "RANK": "7", "OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"},
        preexec_fn=deaf,
    )
    print((await made.stdout.readline()).decode(), end="")
    made.terminate()
    made.stdin.close()
    print(await made.wait())

with asyncio.Runner(loop_factory=LOOP.new_event_loop) as runner:
    runner.run(main())
"""

INNER = """
import os, sys
print(
    *(os.environ["RANK"], os.environ["OMP_NUM_THREADS"], os.getppid() == int(sys.argv[1])),
    *(os.getsid(0) == os.getpid(), "imported" if "aiops.serving.main" in sys.modules else "new"),
)
sys.stdin.read()
sys.exit(5)
"""


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("nested", "loop", "how"),
    [("", "asyncio", "new"), ("1", "asyncio", "imported"), ("1", "uvloop", "imported")],
)
def test_what_a_process_starts_is_forked_if_that_is_asked_for(
    nested: str, loop: str, how: str
) -> None:
    pytest.importorskip(loop)
    environment = {**os.environ, NESTED: nested}
    outer = f"import {loop} as LOOP{OUTER}"
    with ForkedPopen(command(outer), **PIPES, text=True, env=environment) as process:
        out, err = process.communicate()
    assert (out, err) == (f"7 3 True True {how}\n5\n", "")


MANY = f"""
import os, subprocess, sys
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
words = [sys.executable, "-c", {OPEN!r}]
subprocess.run(words, pass_fds=files, check=True, env={{**os.environ, "{NESTED}": ""}})
"""


def test_what_is_forked_by_a_forked_process_has_all_descriptors_that_it_is_given() -> None:
    with ForkedPopen(command(MANY), **PIPES, text=True, env={**os.environ, NESTED: "1"}) as process:
        out, err = process.communicate()
    assert (out, err) == (" ".join(map(str, range(23))) + " ", "")


def test_a_process_leaves_no_zygote_of_its_own() -> None:
    text = "import os; print(open('/proc/self/task/%d/children' % os.getpid()).read()); input()"
    with ForkedPopen(command(text), **PIPES, text=True, env={**os.environ, NESTED: "1"}) as process:
        [own] = map(int, process.stdout.readline().split())
        handle = os.pidfd_open(own)
        process.kill()
        process.communicate()
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(60_000)
        os.close(handle)
