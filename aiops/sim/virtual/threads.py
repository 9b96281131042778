"""Threads in virtual time: each runs only while the event loop waits for it, so all is in order.

A `VirtualThread` is a real one, but it and the event loop take turns: it runs when a callback of
the loop resumes it, until it waits for a `VirtualQueue` or for virtual time (`pause`), or ends.

An `InlineThread` is none: the loop calls its function. To wait for a queue it leaves the function,
which is called again from its beginning once there is an item. That fits functions that do
nothing but take one item after the other, and is many times as fast on a busy machine.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from aiops.sim.virtual.loop import LoopThread, VirtualLoop


class ThreadEnds(BaseException):
    """Ends a simulated thread whose world is over, or leaves its function."""


class VirtualThread:
    """A thread of a virtual event loop.

    Parameters
    ----------
    loop
        The loop, which first resumes it at this moment, after what is ready.
    run
        What it does. An error of it is raised on the loop.
    name
        For the list of threads.

    Attributes
    ----------
    context
        A copy of the context in which it was made.
    """

    def __init__(self, loop: VirtualLoop, run: Callable[[], None], name: str) -> None:
        self._loop, self._call = loop, run
        self._turn, self._loops_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._over = self._ends = False
        self._error: BaseException | None = None
        self.context = copy_context()
        self._thread = threading.Thread(
            target=self.context.run, args=(self._run,), name=name, daemon=True
        )
        self._thread.start()
        loop.threads[self._thread] = self
        loop.call_soon(self.resume)

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return not self._over

    def join(self) -> None:
        """Run it to its end, without a pause."""
        while not self._over:
            self.resume()

    def resume(self) -> None:
        """Let it run until it waits or ends; raise the error with which it ends."""
        if self._over:
            return
        self._turn.release()
        self._loops_turn.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """End it where it waits."""
        self._ends = True
        self.resume()

    def wait(self) -> None:
        """Let the loop go on until this thread is resumed; called by the thread itself."""
        self._loops_turn.release()
        self._turn.acquire()
        if self._ends:
            raise ThreadEnds

    def pause(self, seconds: float) -> None:
        """Wait for virtual time; called by the thread itself."""
        self._loop.call_later(seconds, self.resume)
        self.wait()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._ends:
                self._call()
        except ThreadEnds:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._over = True
            self._loop.threads.pop(self._thread, None)
            self._loops_turn.release()


class InlineThread:
    """A function that an event loop calls, instead of a thread.

    Parameters
    ----------
    loop
        The loop.
    run
        What it does. An error of it is raised on the loop.
    seconds
        Tells, whenever there is something to do, after how many virtual seconds it is done, all
        that has come meanwhile at once.
    """

    def __init__(
        self, loop: VirtualLoop, run: Callable[[], None], seconds: Callable[[], float]
    ) -> None:
        self._loop, self._call, self._seconds = loop, run, seconds
        self._over = self._due = False
        self.context = copy_context()
        self._key = threading.Thread()  # never started
        loop.threads[self._key] = self
        self.resume()

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return not self._over

    def join(self) -> None:
        """Run it to its end."""
        while not self._over:
            self._run()

    def resume(self) -> None:
        """Have it run in a moment."""
        if not (self._due or self._over):
            self._due = True
            self._loop.call_later(self._seconds(), self._run, context=self.context)

    def end(self) -> None:
        """Do nothing any more."""
        self._over = True
        self._loop.threads.pop(self._key, None)

    def wait(self) -> None:
        """Leave the function until it is resumed."""
        raise ThreadEnds

    def pause(self, seconds: float) -> None:
        """Do nothing: it has waited before it was called."""

    def _run(self) -> None:
        self._due = False
        if self._over:
            return
        before, self._loop.inline = self._loop.inline, self
        try:
            self._call()
        except ThreadEnds:
            return
        finally:
            self._loop.inline = before
        self.end()


class VirtualQueue:
    """A queue that simulated threads wait for.

    Parameters
    ----------
    loop
        The loop that resumes them.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._waiting: deque[LoopThread] = deque()

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiting:
            self._loop.call_soon(self._waiting.popleft().resume)

    def get(self) -> Any:
        """Return the first item, as soon as there is one."""
        while not self._items:
            thread = self._loop.inline or self._loop.threads[threading.current_thread()]
            if thread not in self._waiting:
                self._waiting.append(thread)
            thread.wait()
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Return the first item; raise `queue.Empty` if there is none."""
        if not self._items:
            raise queue.Empty
        return self._items.popleft()
