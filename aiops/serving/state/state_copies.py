"""Keep copies of a server's state in a store, beside training: ``--state-copy URL``.

A copy is made by a process of its own (`aiops.serving.state.copying`), which has a deadline: it is
killed when the store does not answer in time, and a later one makes a copy of what is newest then.
Training does not wait for copies, and goes on when there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiops.errors import UsageError
from aiops.serving.repeated_error import RepeatedError

_log = logging.getLogger("aiops.server")

PATIENCE = 120.0
"""Seconds in which a piece of a state has to move, or the store has to answer."""

_RETRY, _LONGEST = 5.0, 60.0
"""Seconds after which a copy that failed is tried again: twice as many each time, up to a bound."""


_ROOM = 1 << 16  # bytes of output that are read at once
_PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
"""Of a process that makes copies: it ends when its standard input does, with the server."""


def shown(url: str) -> str:
    """Return a store's URL without its options and keys, for people."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def fetch(folder: Path, url: str) -> int:
    """Bring a folder to the newest copy of a store, unless it holds a state as new.

    It waits for the store, `PATIENCE` seconds at most: a server that began without it might go on
    from a state which another has left behind.

    Returns
    -------
    The row of the copy; 0: there was none, or the folder stays as it is.

    Raises
    ------
    UsageError
        When the store cannot be read, or has no copy that is whole.
    """
    where = shown(url)
    with subprocess.Popen(_command("fetch", folder, url), **_PIPES) as child:
        try:
            done = _result(_output(child), child.wait())
        except TimeoutError:
            done = _late()
        finally:
            child.kill()
    if "error" in done:
        raise UsageError(f"copies of a state in {where}: {done['error']}")
    for note in done["notes"]:
        _log.warning("%s: %s", where, note)
    if "row" in done:
        _log.info("%s: fetched from %s: the state of row %d", folder, where, done["row"])
    return int(done.get("row", 0))


class StateCopies:
    """The copies of one server's state.

    Parameters
    ----------
    folder
        The folder of the state.
    url
        The store's.
    now
        The time, in seconds.
    """

    def __init__(self, folder: Path, url: str, now: Callable[[], float]) -> None:
        self._folder, self._url, self._now, self._where = folder, url, now, shown(url)
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error = RepeatedError()
        self._found: dict[str, Any] = {
            "url": self._where,
            "version": 0,
            "copies": 0,
            "failed": 0,
            "seconds": 0.0,
            "error": "",
        }

    def begin(self) -> None:
        """Make copies from here on; the first says which generation has begun."""
        self._wanted.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def saved(self) -> None:
        """Have a copy be made: there is a newer snapshot."""
        self._wanted.set()

    def report(self) -> dict[str, Any]:
        """Return its part of the statistics."""
        return dict(self._found)

    async def end(self) -> None:
        """Make a last copy, of what the server has left in its folder."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        why = await self._send()
        if why:
            _log.error("%s lacks what was trained at last: %s", self._where, why)

    async def _run(self) -> None:
        pause = _RETRY
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            why = await self._send()
            if not why:
                self._error.over()
                pause = _RETRY
                continue
            text = f"no copy of the state in {self._where}: {why}; training goes on, and it is"
            self._error.log(self._now(), self._where, f"{text} tried again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            self._wanted.set()

    async def _send(self) -> str:
        """Make a copy of the newest snapshot; return the reason for which there is none, or ''."""
        began, out = self._now(), bytearray()
        child = await asyncio.create_subprocess_exec(
            *_command("send", self._folder, self._url), **_PIPES
        )
        assert child.stdout is not None
        try:
            more = True
            while more:
                async with asyncio.timeout(PATIENCE):
                    more = bool(came := await child.stdout.read(_ROOM))
                    out += came
            done = _result(out, await child.wait())
        except TimeoutError:
            done = _late()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
            if child.stdin is not None:
                child.stdin.close()
        found, self._found["error"] = self._found, done.get("error", "")
        if self._found["error"]:
            found["failed"] += 1
        elif done["nbytes"]:
            found["copies"] += 1
            found["seconds"] = self._now() - began
        found["version"] = done.get("version", found["version"])
        return str(found["error"])


def _command(order: str, folder: Path, url: str) -> list[str]:
    module = "aiops.serving.state.copying"
    guard = [sys.executable, "-m", "aiops.net.child_guard", module]
    return [*guard, order, str(folder), url, shown(url)]


def _late() -> dict[str, Any]:
    return {"error": f"it has not answered in {PATIENCE:g} s"}


def _output(child: subprocess.Popen[bytes]) -> bytes:
    """Return all that a process prints.

    Raises
    ------
    TimeoutError
        When it prints nothing for too long.
    """
    assert child.stdout is not None
    out, poll = bytearray(), select.poll()
    poll.register(child.stdout, select.POLLIN)
    while poll.poll(1e3 * PATIENCE):
        came = os.read(child.stdout.fileno(), _ROOM)
        if not came:
            return bytes(out)
        out += came
    raise TimeoutError


def _result(out: bytes | bytearray, status: int) -> dict[str, Any]:
    """Return what the last line says that a process has printed, or that there is none."""
    try:
        found: dict[str, Any] = json.loads(out.rstrip().rpartition(b"\n")[2])
    except ValueError:
        return {"error": f"the process that makes copies ended with status {status}"}
    return found
