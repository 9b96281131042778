"""Children: deadlines, failures, and an end whatever happens."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from aiops.lab.demo import children
from aiops.lab.demo.children import DemoFailed, Family, Interrupted
from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class TestFamily:
    async def test_lines_are_heard_and_a_good_end_is_no_trouble(self, modules: Path) -> None:
        lines: list[str] = []
        module = write(modules, "talks", "import sys\nprint('one')\nprint(*sys.argv[1:], end='')")
        async with Family() as family:
            child = await family.start("it", (module, "two", "three"), lines.append)
            await family.within(PATIENCE, "its end", child.ended.wait())
        assert lines == ["one", "two three"]
        assert child.process.returncode == 0

    async def test_a_child_that_fails_ends_every_wait(self, modules: Path) -> None:
        text = "import sys\nprint('x' * 100_000, file=sys.stderr)\nsys.exit('that is why')"
        async with Family() as family:
            await family.start("the third one", (write(modules, "fails", text),), print)
            with pytest.raises(DemoFailed, match="the third one ended with status 1") as caught:
                await family.within(PATIENCE, "nothing", forever())
        assert caught.value.details["stderr"][-1] == "that is why"

    async def test_a_child_that_is_killed(self, modules: Path) -> None:
        module = write(modules, "kills", "import os\nos.kill(os.getpid(), 9)")
        async with Family() as family:
            await family.start("it", (module,), print)
            with pytest.raises(DemoFailed, match="it was ended by signal 9"):
                await family.within(PATIENCE, "nothing", forever())

    async def test_a_lasting_child_may_not_end_at_all(self, modules: Path) -> None:
        async with Family() as family:
            await family.start("it", (write(modules, "ends", ""),), print, lasting=True)
            with pytest.raises(DemoFailed, match="it ended with status 0"):
                await family.within(PATIENCE, "nothing", forever())

    async def test_a_deadline(self) -> None:
        async with Family() as family:
            with pytest.raises(DemoFailed, match=r"waiting took more than 0\.01 s"):
                await family.within(0.01, "waiting", forever())

    async def test_an_interruption(self) -> None:
        async with Family() as family:
            asyncio.get_running_loop().call_soon(family.interrupt, signal.SIGINT)
            with pytest.raises(Interrupted) as caught:
                await family.within(PATIENCE, "waiting", forever())
            assert caught.value.details["signal"] == signal.SIGINT
            with pytest.raises(Interrupted):  # and every later wait, at once
                await family.within(PATIENCE, "waiting", forever())

    async def test_what_a_wait_raises_comes_through(self) -> None:
        async def fail() -> None:
            raise LookupError("its own")

        async with Family() as family:
            with pytest.raises(LookupError, match="its own"):
                await family.within(PATIENCE, "failing", fail())

    async def test_the_end_asks_and_then_insists(self, modules: Path) -> None:
        deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n"
        polite = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\n"
        polite += "print(1, flush=True)\n"
        ready = asyncio.Semaphore(0)
        began = time.monotonic()
        async with Family() as family:
            for name, text in (("deaf", deaf), ("polite", polite)):
                module = write(modules, name, text + "time.sleep(600)")
                await family.start(name, (module,), lambda _line: ready.release())
            for _ in range(2):
                await family.within(PATIENCE, "a line", ready.acquire())
        statuses = [child.process.returncode for child in family.children]
        assert statuses == [-signal.SIGKILL, 7]
        assert time.monotonic() - began < PATIENCE

    async def test_the_variables_of_a_child(
        self, modules: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_POLICY", "softsync")
        monkeypatch.setenv("AIOPS_DATA", "/data")
        lines: list[str] = []
        text = "import os\nfor k in sorted(os.environ):\n  if 'AIOPS' in k: print(k, os.environ[k])"
        async with Family() as family:
            child = await family.start(
                "it", (write(modules, "shows", text),), lines.append, environment={"AIOPS_X": "1"}
            )
            await family.within(PATIENCE, "its end", child.ended.wait())
        assert lines == ["AIOPS_DATA /data", "AIOPS_X 1"]

    async def test_what_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(children.sys, "executable", "/no/such/python")
        async with Family() as family:
            with pytest.raises(DemoFailed, match="it cannot be started: No such file"):
                await family.start("it", ("x",), print)
