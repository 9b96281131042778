"""What several tests need: a server in a thread of this process, and servers as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np

import aiops
from aiops.serving.server import Server
from tests.zygote import ForkedPopen

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test gives up waiting; never reached when all is well."""


SHARDS = 1
"""Servers that a model is spread over, if a test says nothing else; see `tests.transports`."""


class LoopThread(Generic[T]):
    """A context in which something runs on an event loop in a thread of this process.

    `_main` runs it. It calls `_begun`, and ends when `_end`, which is called on the loop, says so.
    """

    def __init__(self) -> None:
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: T | None = None
        self.url = ""
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def _main(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _begun(self, running: T, url: str) -> None:
        self._loop, self._running, self.url = asyncio.get_running_loop(), running, url
        self._started.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE), "it did not start"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and wait until it has ended; may be called twice."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it did not stop"

    def call(self, function: Callable[[T], Any]) -> Any:
        """Run a function of it on its own loop, and return the result."""
        assert self._loop is not None

        async def run() -> Any:
            assert self._running is not None
            return function(self._running)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()


class ServerThread(LoopThread[Server]):
    """A real server on a real socket."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = {"port": 0, "shards": SHARDS, "shard_bytes": 1, **settings}
        self._stop: asyncio.Event | None = None

    @property
    def server(self) -> Server | None:
        """The server, once it has started."""
        return self._running

    def wait(self) -> None:
        """Wait until the server begins to end by itself."""
        assert self._loop is not None
        assert self.server is not None
        ending = self.server._ending.wait()
        asyncio.run_coroutine_threadsafe(ending, self._loop).result(PATIENCE)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        assert self._stop is not None
        self._stop.set()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        async with aiops.serve(**self._settings) as server:
            self._begun(server, server.url)
            await self._stop.wait()


def assert_same(got: Any, expected: Any) -> None:
    """Expect the same names, and under each the same dtype, shape and values."""
    assert set(got) == set(expected)
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert got[name].shape == expected[name].shape, name
        np.testing.assert_array_equal(got[name], expected[name], name)


@contextlib.contextmanager
def server_process(*flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    """Run ``python -m aiops.server`` as a process; yield it with its URL."""
    process = Process("-m", "aiops.server", "--port", "0", *flags, env=env)
    try:
        process.url = process.line()
        yield process
    finally:
        process.kill()


class Process:
    """A child process whose lines can be waited for, and which never outlives its test.

    It is forked, unless ``started`` asks for an interpreter's own start.
    """

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, started: bool = False
    ) -> None:
        self.url = ""
        self.popen = (subprocess.Popen if started else ForkedPopen)(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            cwd=Path(__file__).parent.parent,
        )

    def line(self) -> str:
        """Return the next line of stdout (a hanging child is ended by the test's time-out)."""
        assert self.popen.stdout is not None
        found = self.popen.stdout.readline()
        if not found:
            code, _out, err = self.end()
            raise AssertionError(f"it ended with {code}, before it printed a line: {err[-2000:]}")
        return found.strip()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def end(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
        """Wait for the end; return exit status, stdout and stderr.

        Raises
        ------
        AssertionError
            It has not ended in time; the error has what it has printed so far.
        """
        try:
            out, err = self.popen.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            out, err = (
                (said or b"").decode(errors="replace") for said in (late.output, late.stderr)
            )
            printed = f"stdout: {out[-4000:]}\nstderr: {err[-8000:]}"
            raise AssertionError(f"it has not ended after {timeout:g} s; {printed}") from None
        return self.popen.returncode, out, err

    def kill(self) -> None:
        """Make sure that it is gone, and its pipes are closed."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()
