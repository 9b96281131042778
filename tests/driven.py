"""A connection and its driver: for tests that have a function for sinks."""

from __future__ import annotations

from collections.abc import Callable

from aiops.wire.connection import Connection, Limits, Messages, with_sinks
from aiops.wire.messages import Message
from aiops.wire.sinks import Sink
from aiops.wire.state_machine import Side


def no_sink(message: Message) -> Sink | None:
    """Fail: no message with payloads was expected."""
    raise AssertionError(f"no sink was to be requested for {message.kind!r}")


class Driven(Connection):
    """A connection that takes its sinks from a function.

    Parameters
    ----------
    side, limits
        As for every connection.
    sink_for
        Returns the sink of a message with payloads; None: there is no room now.
    """

    __slots__ = ("sink_for",)

    def __init__(
        self,
        side: Side,
        sink_for: Callable[[Message], Sink | None] = no_sink,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(side, limits)
        self.sink_for = sink_for

    def take(self, nbytes: int) -> Messages:
        """Read received bytes, with sinks as long as there are any."""
        waiting = self.waiting
        received = self.received(nbytes)
        return received if waiting else with_sinks(self, received, self.sink_for)

    def resume(self) -> Messages:
        """Request a sink again for the message that has none."""
        return with_sinks(self, [], self.sink_for)

    @property
    def waiting(self) -> bool:
        """True while a message has no sink."""
        return self.pending is not None
