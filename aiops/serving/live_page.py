"""The live page of a server (``--dashboard``), and its events.

::

    /         the page, and beside it its script, its style and the library that draws its charts
    /events   server-sent events: the whole document, then what changes

A sample of the server is taken every second while the page is open somewhere, and every two else:
the page shows the run from its beginning. The values are gathered on the event loop, of 64 clients
at a time, with other work in between; the rest is done on another thread, once for all viewers.
Both together take a hundredth of a processor's time, with what wakes them and hands it on: where
there are thousands of workers, samples are rarer.

A viewer that is behind by more than one tick is sent the whole document in the place of the
differences that it has missed, so nothing is queued for it. The listener cuts one that does not
read an event in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Protocol, TypeAlias

from aiops.common.gathering import Gathering
from aiops.dashboard.board import MOST_WORKERS, Board, ServerSample
from aiops.dashboard.document import STALENESS_BUCKETS
from aiops.errors import Refused, Unauthorised
from aiops.net.http_listener import Action, HttpResponse
from aiops.net.thread_times import ThreadShares
from aiops.net.yielding import yielding
from aiops.serving.in_turns import in_turns
from aiops.serving.members import Members
from aiops.serving.norms import Normed, ParameterNorms
from aiops.serving.repeated_error import RepeatedError

_SHARE = 0.0065
"""The most of a processor's time that samples take, as they measure it: half as much again is
taken around them, by the loop, threads that begin, and viewers (`aiops bench dashboard`)."""

_EVERY, _UNSEEN = 1.0, 2.0
"""Seconds between samples, while there are viewers and without any."""

_FIRST = 5.0
"""Seconds that a viewer waits for the first sample."""

_GUESS = 1.0
"""Seconds that a wrong token costs: others wait meanwhile, so that one a second can be tried."""

_RAREST = 10.0
"""Seconds between samples at most, however long one takes: they are the page's signs of life."""

_THREADS = {
    "aiops-update": "updates",
    "aiops-helper": "updates",
    "aiops-journal": "journal",
    "aiops-segments": "journal",
    "asyncio": "metrics and this page",
}

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (("Content-Security-Policy", _POLICY), ("Referrer-Policy", "no-referrer"))


class Watched(Normed, Protocol):
    """A server that the page shows, or a standby."""

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        """Return its statistics, with lines of this many workers at most, and pauses."""

    def members(self, most: int) -> Members:
        """Return its clients, with the rows of this many at most."""

    def administrator(self, token: str) -> str:
        """Return the name of a token that may direct the server; raises `Unauthorised`."""

    async def take_snapshot(self, by: str) -> str:
        """Take a snapshot for the holder of a token; return a sentence; raises `Refused`."""

    def send_away(self, by: str, client: str) -> str:
        """Send a client away, by name or ``#number``; return a sentence; raises `Refused`."""

    @property
    def not_ready(self) -> str:
        """The reason for which it takes no pushes; empty: it takes them."""


_Action: TypeAlias = Callable[[Watched, str, str], Awaitable[str]]


class LivePage:
    """Samples a server, and has the events for all viewers.

    Parameters
    ----------
    about
        What does not change of it, by name.
    running
        Returns the server that runs now, or None while there is none.
    norms
        Of its parameters; viewers ask for them.
    tokens
        Whether the server has tokens: then administrators may direct it from the page.
    """

    def __init__(
        self,
        about: Mapping[str, str],
        running: Callable[[], Watched | None],
        norms: ParameterNorms,
        *,
        tokens: bool = False,
    ) -> None:
        self._running, self._norms = running, norms
        # Points are timed by a clock that is never set: that of the start, and what has passed.
        self._began = time.time() - time.monotonic()
        since = {"since": round(self._now(), 1), "staleness": STALENESS_BUCKETS}
        self._board = Board({**about, **since, "administered": tokens})
        self._tokens, self._guessing = tokens, asyncio.Lock()
        self._shares: ThreadShares | None = None
        self._working = asyncio.Lock()  # a thread has the board
        self._ticked = asyncio.Event()  # set once the next tick is there
        self._asked = asyncio.Event()  # a viewer has come
        self._last: tuple[int, bytes] = (0, b"")  # the last tick, and the difference of it
        self._whole: tuple[int, bytes] = (-1, b"")  # a tick, and the whole document of it
        self._viewers = 0
        self._error, self._refused = RepeatedError(), RepeatedError()
        self._task: asyncio.Task[None] | None = None

    def files(self) -> dict[str, Callable[[], HttpResponse]]:
        """Return what answers for each file of the page, by path."""
        folder = files("aiops.dashboard") / "static"
        found: dict[str, Callable[[], HttpResponse]] = {}
        for path, (name, kind) in _FILES.items():
            content = (folder / name).read_bytes()
            response = HttpResponse(HTTPStatus.OK, content, kind, _HEADERS)
            found[path] = partial(_given, response)
        return found

    def actions(self) -> dict[str, Action]:
        """Return what administrators may do from the page, by path; without tokens nothing."""
        found = {"/snapshot": _snapshot, "/remove": _remove} if self._tokens else {}
        return {path: partial(self._act, what) for path, what in found.items()}

    async def _act(self, what: _Action, token: str, body: bytes) -> HttpResponse:
        running = self._running()
        if running is None:
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, b"it is starting\n")
        try:
            async with self._guessing:
                try:
                    by = running.administrator(token)
                except Unauthorised:
                    await asyncio.sleep(_GUESS)
                    raise
            said = await what(running, by, body.decode())
        except UnicodeDecodeError:
            return HttpResponse(HTTPStatus.BAD_REQUEST, b"the body is no UTF-8\n")
        except Unauthorised as error:
            why = f"a request from the live page was refused: {error}"
            self._refused.log(time.monotonic(), str(error), why)
            return HttpResponse(HTTPStatus.UNAUTHORIZED, f"{error}\n".encode())
        except Refused as error:
            return HttpResponse(HTTPStatus.CONFLICT, f"{error}\n".encode())
        return HttpResponse(HTTPStatus.OK, f"{said}\n".encode())

    def begin(self) -> None:
        """Take samples from here on."""
        self._shares = ThreadShares(_THREADS, "event loop")
        self._task = asyncio.get_running_loop().create_task(self._sample())

    def close(self) -> None:
        """Take no more samples."""
        if self._task is not None:
            self._task.cancel()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the whole document, then each tick's difference to the one before."""
        self._viewers += 1
        try:
            self._asked.set()
            if not self._board.tick:  # while samples fail a viewer is told what there is
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_FIRST):
                        await self._ticked.wait()
            seen = -1
            while True:
                tick, difference = self._last
                if seen == tick:
                    await self._ticked.wait()
                elif seen > 0 and seen == tick - 1:
                    seen = tick
                    yield difference
                else:
                    seen, whole = await self._all()
                    yield whole
        finally:
            self._viewers -= 1

    async def _all(self) -> tuple[int, bytes]:
        """Return the whole document and its tick; it is made once for all that want it."""
        async with self._working:
            tick = self._board.tick
            if self._whole[0] != tick:
                self._whole = tick, await asyncio.to_thread(self._board.whole)
            return self._whole

    async def _sample(self) -> None:
        while True:
            begun, took = time.monotonic(), 0.0
            try:
                if self._viewers:
                    self._norms.ask()
                took = await self._tick()
            except Exception as error:  # the page is no reason for a server to end
                self._error.log(begun, repr(error), f"the live page has no sample: {error!r}")
            due = begun + min(max(took / _SHARE, _EVERY), _RAREST)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self._viewers:
                self._asked.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_UNSEEN - _EVERY):
                        await self._asked.wait()

    async def _tick(self) -> float:
        """Take a sample, and have the events of it; return the seconds of a processor it took."""
        running = self._running()
        if running is None:
            return 0.0
        found, took = await in_turns(running.gather(0))
        if self._shares is None or not found:  # it has not started
            return took
        begun, report = time.thread_time(), dict(found)
        report["ready"] = running.not_ready
        self._norms.add_to(report)
        members = running.members(MOST_WORKERS if self._viewers else 0)
        sample = ServerSample(
            *(self._now(), members.clock, report, members.rows if self._viewers else None),
            *(members.workers, members.arrivals, members.arrived, self._shares.take()),
        )
        took += time.thread_time() - begun
        async with self._working:
            difference, wrote = await asyncio.to_thread(self._taken, sample)
            self._last = self._board.tick, difference
        self._ticked.set()
        self._ticked = asyncio.Event()
        return took + wrote

    def _now(self) -> float:
        return self._began + time.monotonic()

    def _taken(self, sample: ServerSample) -> tuple[bytes, float]:
        """Return the difference that a sample makes, and the seconds of a processor it took."""
        begun = time.thread_time()
        with yielding():  # the event loop has the interpreter when it wants it
            made = self._board.take(sample)
        return made, time.thread_time() - begun


async def _snapshot(running: Watched, by: str, body: str) -> str:
    return await running.take_snapshot(by)


async def _remove(running: Watched, by: str, body: str) -> str:
    return running.send_away(by, body)


def _given(response: HttpResponse) -> HttpResponse:
    return response
