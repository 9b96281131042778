"""Lend payloads in shared memory instead of sending them.

On a connection within one machine a payload may be a *place*: the number of a segment and an offset
in it. Each side shows the other its segments (`Share`) before it names a place in one. A payload
that a server lends stays unchanged until the client gives it back (`Release`), one that a client
lends until its request is answered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiops.errors import RemoteProtocolError
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Layout
from aiops.model.mailbox import Mailbox
from aiops.model.shared_memory import Segment
from aiops.wire.messages import Share

MAILBOX = 0
"""The number by which a client announces a mailbox."""

MOST = 256
"""Segments that one side may have shown at a time."""


class LentPayload:
    """A message's only payload, in the memory of its sender.

    Parameters
    ----------
    data
        Its bytes, uint8.
    give_back
        Called when they are not needed any more.
    """

    give_back: Callable[[], object]
    data: Bytes

    __slots__ = ("data", "give_back")

    def __init__(self, data: Bytes, give_back: Callable[[], object]) -> None:
        self.data, self.give_back = data, give_back

    def arena(self, layout: Layout) -> Arena:
        """Return it as the arena of a whole model, without a copy."""
        return Arena(layout, self.data)


class SharedPayloads:
    """The segments that the two sides of one connection have shown each other.

    Parameters
    ----------
    attach
        Maps the next segment received, given its bytes; raises ValueError if it is none.
    pass_on
        Sends a segment to the other side, beside the messages; returns whether it could.
    take_mailbox
        Maps the mailbox received next, given its bytes; None if it is none. None: this side takes
        no mailboxes.

    Attributes
    ----------
    mailbox
        The mailbox announced last, until it is taken from here.
    give_back
        Called with the id of a message whose lent payload is not needed any more.
    """

    def __init__(
        self,
        attach: Callable[[int], Bytes],
        pass_on: Callable[[Segment], bool] = lambda segment: True,
        take_mailbox: Callable[[int], Mailbox | None] | None = None,
    ) -> None:
        self._attach, self._pass_on, self._take_mailbox = attach, pass_on, take_mailbox
        self.mailbox: Mailbox | None = None
        self.give_back: Callable[[int], object] = lambda id: None
        self._theirs: dict[int, Bytes] = {}
        self._numbers: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()
        self._ours: WeakValueDictionary[int, Segment] = WeakValueDictionary()

    def map(self, message: Share) -> None:
        """Map a segment that the other side shows; an earlier one of its number is forgotten.

        Number 0 announces a mailbox. One that cannot be mapped is none, and the client finds that
        it is not answered in.

        Raises
        ------
        RemoteProtocolError
            When it is not sealed memory of the announced size.
        """
        if message.segment == MAILBOX and self._take_mailbox is not None:
            self._close_mailbox()
            self.mailbox = self._take_mailbox(message.nbytes)
            return
        if not 0 < message.segment <= MOST:
            raise RemoteProtocolError(f"share.segment: 1 to {MOST}, not {message.segment}")
        try:
            self._theirs[message.segment] = self._attach(message.nbytes)
        except ValueError as error:
            raise RemoteProtocolError(f"share: segment {message.segment}: {error}") from None

    def lost(self) -> None:
        """Forget the other side's segments; each stays mapped while a payload in it is read."""
        self._theirs.clear()
        self._close_mailbox()

    def _close_mailbox(self) -> None:
        mailbox = self.taken_mailbox()
        if mailbox is not None:
            os.close(mailbox.bell)

    def taken_mailbox(self) -> Mailbox | None:
        """Return the mailbox announced last, which is the caller's from here on; None: none is."""
        mailbox, self.mailbox = self.mailbox, None
        return mailbox

    def segment(self, number: int) -> Bytes:
        """Return the bytes of a segment of the other side.

        Raises
        ------
        RemoteProtocolError
            When it was never shared.
        """
        segment = self._theirs.get(number)
        if segment is None:
            raise RemoteProtocolError(f"payload: it is in segment {number}, which was never shared")
        return segment

    def at(self, number: int, offset: int, nbytes: int) -> Bytes:
        """Return the bytes at a place.

        Raises
        ------
        RemoteProtocolError
            When there is no such place.
        """
        segment = self.segment(number)
        if offset + nbytes > len(segment):
            raise RemoteProtocolError(
                f"payload: bytes {offset} to {offset + nbytes} of segment {number}, which has"
                f" {len(segment)}"
            )
        return segment[offset : offset + nbytes]

    def show(self, segment: Segment) -> tuple[int, Share | None]:
        """Return a segment's number, and the `Share` that is to be sent before a place in it.

        The number is 0 if the other side has `MOST` segments, or takes no more. There is no `Share`
        if the other side has been shown this segment.
        """
        number = self._numbers.get(segment)
        if number is not None:
            return number, None
        number = next((n for n in range(1, MOST + 1) if n not in self._ours), 0)
        if not number or not self._pass_on(segment):
            return 0, None
        self._numbers[segment] = number
        self._ours[number] = segment
        return number, Share(0, number, len(segment.data))
