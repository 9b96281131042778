"""Answer what clients on this machine post in their mailboxes: `aiops.model.mailbox`.

Compiled code does that (`aiops.compiled._core.Mailboxes`), by one reader of the event loop for all
of them. It takes only what it would answer at once if it came by the connection's socket. All else
that is posted comes to the connection's `MessageTransport`, as if it had come by the socket, and is
answered by that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from aiops.common import forks
from aiops.compiled.loading import core
from aiops.model.mailbox import Mailbox
from aiops.net.busy_poll import Spin
from aiops.net.cpu_count import usable
from aiops.net.transport import MessageTransport

if TYPE_CHECKING:
    from aiops.compiled._core import Mailboxes

_log = logging.getLogger("aiops.server")

ROOM = 64 << 20
"""Bytes that all mailboxes of a server may have together. More clients go by their sockets."""

_LOOK = 50e-6
"""Seconds to look for the next push before the event loop sleeps."""


class Lender(Protocol):
    """Lends parameters to one client on this machine: `aiops.serving.peer.Peer`."""

    def lend_current(self, id: int) -> tuple[int, int] | bool | None:
        """Lend the newest ones for the answer of this id."""

    def given_back(self, id: int) -> None:
        """Take note that the client does not read those of an answer any more."""


class MailboxTable:
    """The mailboxes of one server's connections.

    Attributes
    ----------
    room
        Bytes that more of them may have.
    """

    def __init__(self) -> None:
        self.room = ROOM
        self._boxes: Mailboxes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tried = self._due = False
        self._places: dict[MessageTransport, tuple[int, int]] = {}  # numbers, and bytes
        self._shut: dict[MessageTransport, Mailbox] = {}  # those that are not open yet

    @property
    def served(self) -> int:
        """Exchanges that were answered in mailboxes."""
        return 0 if self._boxes is None else self._boxes.served

    def take(self, link: MessageTransport, mailbox: Mailbox) -> None:
        """Take a connection's mailbox, which is to be opened. An earlier one of it is left."""
        self.drop(link)
        self._shut[link] = mailbox

    def open(self, link: MessageTransport, lender: Lender) -> None:
        """Answer in a connection's mailbox from here on, with the `shortcut` that it has now.

        That is a method of compiled code. If there is no room for the mailbox, or it cannot be, the
        client goes on by the socket. ``lender``: lends the parameters.
        """
        mailbox = self._shut.pop(link, None)
        if mailbox is None:
            return
        if not self._tried:
            self._begin()
        size = len(mailbox.data)
        if self._boxes is not None and size <= self.room:
            try:
                self._places[link] = (
                    self._boxes.add(link, link.shortcut, mailbox.data, mailbox.bell, lender),
                    size,
                )
            except (OSError, ValueError) as error:
                _log.debug("%s has no mailbox: %s", link.peer_name, error)
            else:
                self.room -= size
                return
        os.close(mailbox.bell)

    def take_returned(self) -> None:
        """Release the parameters that clients have given back: no push need follow that one."""
        if self._boxes is not None:
            self._boxes.take_returned()

    def drop(self, link: MessageTransport) -> None:
        """Leave a connection's mailbox, if it has one: it has ended, say."""
        shut = self._shut.pop(link, None)
        if shut is not None:
            os.close(shut.bell)
        place, size = self._places.pop(link, (-1, 0))
        self.room += size
        if place >= 0 and self._boxes is not None:
            self._boxes.remove(place)

    def _begin(self) -> None:
        library, self._tried = core(), True
        if library is None or library.Mailboxes is None:
            return
        _learn(library)
        loop = asyncio.get_running_loop()
        look = int(1e9 * _LOOK) if Spin().budget and usable() > 1 else 0
        try:
            boxes = library.Mailboxes(look)
            loop.add_reader(boxes.fd, self._rung)
        except (NotImplementedError, OSError) as error:
            _log.warning("clients on this machine get no mailboxes: %s", error)
            return
        self._boxes, self._loop = boxes, loop

    def _rung(self) -> None:
        """Answer what is posted: a bell has rung."""
        if not self._due:
            self._answer()

    def _answer(self) -> None:
        boxes, loop = self._boxes, self._loop
        self._due = boxes is not None and loop is not None and boxes.answer()
        if self._due and loop is not None:
            loop.call_soon(self._answer)

    def close(self) -> None:
        """Leave all of them."""
        boxes, self._boxes = self._boxes, None
        for mailbox in self._shut.values():
            os.close(mailbox.bell)
        self._shut.clear()
        self._places.clear()
        if boxes is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(boxes.fd)
            boxes.close()

    def forked(self) -> None:
        """Let go of them in a fork: they are the parent's."""
        boxes, self._boxes = self._boxes, None
        for mailbox in self._shut.values():
            os.close(mailbox.bell)
        self._shut.clear()
        self._places.clear()
        if boxes is not None:
            fd = boxes.fd
            forks.blank(fd)
            boxes.forked()


@cache
def _learn(library: Any) -> None:
    """Have compiled code find the fields that it reads of a transport."""
    library.learn_fields({MessageTransport.__name__: MessageTransport})
