"""The transfers that a worker's thread carries while gradients are computed."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

from aiops.client.request_kinds import Receipt
from aiops.client.requests import Transfer
from aiops.client.sync.client import Client


class ThreadTransfer:
    """One transfer, and what became of it; ``clock``: that of traces, if its end is noted."""

    done: threading.Event

    def __init__(self, transfer: Transfer, clock: Callable[[], int] | None = None) -> None:
        self.transfer, self._clock = transfer, clock
        self.done = threading.Event()
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self.ended = 0  # by the clock; 0: not noted

    @property
    def over(self) -> bool:
        """True once it has been answered, or has failed."""
        return self.done.is_set()

    def end(self, receipt: Receipt | None = None, error: BaseException | None = None) -> None:
        """Note what became of it."""
        self.receipt, self.error = receipt, error
        if self._clock is not None:
            self.ended = self._clock()
        self.done.set()


class TransferQueue:
    """Hands transfers to the thread that carries them, in order.

    With ``several`` under way it is a `aiops.client.sync.connection.MoreRequests`: the thread that
    waits for one answer is woken by the next transfer, and sends it. All methods but `put` are that
    thread's.

    Parameters
    ----------
    client
        Carries them.
    several
        Whether more than one may be under way.
    """

    def __init__(self, client: Client, *, several: bool) -> None:
        self._client = client
        self._given: queue.SimpleQueue[ThreadTransfer | None] = queue.SimpleQueue()
        self._asked: deque[ThreadTransfer | None] = deque()
        self._wake = socket.socketpair() if several else None  # read here, written by `put`
        for end in self._wake or ():
            end.setblocking(False)

    def put(self, transfer: ThreadTransfer | None) -> None:
        """Add a transfer; None: the thread is to end after those before."""
        self._given.put(transfer)
        if self._wake is not None:
            with contextlib.suppress(OSError):  # many are unread, or the thread has ended
                self._wake[1].send(b"\0")

    def next(self, seconds: float) -> ThreadTransfer | None:
        """Return the next transfer; None: the thread is to end.

        Raises
        ------
        queue.Empty
            When there has been none for so long.
        """
        return self._asked.popleft() if self._asked else self._given.get(timeout=seconds)

    def carry(self, background: ThreadTransfer) -> None:
        """Carry a transfer until it is over, and send those that are put meanwhile."""
        request = background.transfer.request
        if background.over:  # it could not be asked
            return
        try:
            if request is not None and request.done:  # answered before those that it was asked with
                result = request.value()
                background.end(result if isinstance(result, Receipt) else None)
            else:
                more = None if self._wake is None else self
                background.end(self._client.carry(background.transfer, more))
        except BaseException as error:
            background.end(error=error)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are more."""
        assert self._wake is not None, "only of several"
        return self._wake[0].fileno()

    def ask(self) -> None:
        """Have those that have been put asked, so that they are sent."""
        assert self._wake is not None, "only of several"
        with contextlib.suppress(BlockingIOError):
            self._wake[0].recv(4096)
        while True:
            try:
                background = self._given.get_nowait()
            except queue.Empty:
                return
            self._asked.append(background)
            if background is not None:
                try:
                    self._client.ask(background.transfer)
                except BaseException as error:
                    background.end(error=error)

    def close(self) -> None:
        """Close the descriptors."""
        for end in self._wake or ():
            end.close()
