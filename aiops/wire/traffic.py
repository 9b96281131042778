"""Count the bytes and messages that cross connections, in all and by kind of message."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiops.errors import RemoteProtocolError
from aiops.wire.encoding import encode
from aiops.wire.messages import Message


class KindTraffic:
    """The sums over all messages of one kind, in one direction.

    Attributes
    ----------
    messages
        The number of messages.
    overhead
        Their bytes beside payloads: headers, and the prefixes of headers and payloads.
    payload
        Bytes of their payloads.
    """

    messages: int
    overhead: int
    payload: int

    __slots__ = ("messages", "overhead", "payload")

    def __init__(self) -> None:
        self.messages = self.overhead = self.payload = 0

    def add(self, messages: int, overhead: int, payload: int) -> None:
        """Add to the sums."""
        self.messages += messages
        self.overhead += overhead
        self.payload += payload


@dataclass(slots=True)
class Traffic:
    """The bytes and messages that crossed one connection so far, headers included.

    ``kinds_in`` and ``kinds_out`` are the same by kind of message. The bytes of an incomplete
    message are in ``bytes_in`` already, and in no kind.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    kinds_in: dict[str, KindTraffic] = field(default_factory=lambda: defaultdict(KindTraffic))
    kinds_out: dict[str, KindTraffic] = field(default_factory=lambda: defaultdict(KindTraffic))

    def exchanged(
        self, sent: tuple[str, int, int], received: tuple[str, int, int], count: int = 1
    ) -> None:
        """Count equal exchanges: a message sent, and one received.

        Parameters
        ----------
        sent, received
            Of each message: its kind, its bytes beside payloads, and those of its payloads.
        count
            The number of exchanges. Default: 1.
        """
        (kind_out, out, given), (kind_in, back, taken) = sent, received
        self.messages_out += count
        self.messages_in += count
        self.bytes_out += count * (out + given)
        self.bytes_in += count * (back + taken)
        counted = self.kinds_out[kind_out]  # `KindTraffic.add` in line: two calls less per exchange
        counted.messages += count
        counted.overhead += count * out
        counted.payload += count * given
        counted = self.kinds_in[kind_in]
        counted.messages += count
        counted.overhead += count * back
        counted.payload += count * taken

    def received(self, kind: str, overhead: int, payload: int) -> None:
        """Count a message that was received whole, of these `sizes`."""
        self.messages_in += 1
        self.bytes_in += overhead + payload
        self.kinds_in[kind].add(1, overhead, payload)

    def sent(self, kind: str, overhead: int, payload: int, times: int = 1) -> None:
        """Count a message that was sent, of these `sizes`; -1 times takes that back."""
        self.messages_out += times
        self.bytes_out += times * (overhead + payload)
        self.kinds_out[kind].add(times, times * overhead, times * payload)

    def add(self, other: Traffic) -> None:
        """Add the counts of another connection."""
        if not (other.bytes_in or other.bytes_out):
            return
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.messages_in += other.messages_in
        self.messages_out += other.messages_out
        for mine, theirs in (
            (self.kinds_in, other.kinds_in),
            (self.kinds_out, other.kinds_out),
        ):
            for name, kind in theirs.items():  # `KindTraffic.add` in line: of thousands of clients
                counted = mine[name]
                counted.messages += kind.messages
                counted.overhead += kind.overhead
                counted.payload += kind.payload

    @property
    def volume(self) -> int:
        """The sum of all counts, a bound on each."""
        kinds = [*self.kinds_in.values(), *self.kinds_out.values()]
        messages = self.messages_in + self.messages_out
        by_kind = sum(kind.messages + kind.overhead + kind.payload for kind in kinds)
        return self.bytes_in + self.bytes_out + messages + by_kind

    def counts(self) -> tuple[Any, ...]:
        """Return all counts as plain values, for `from_counts`."""
        kinds = (
            {name: (kind.messages, kind.overhead, kind.payload) for name, kind in found.items()}
            for found in (self.kinds_in, self.kinds_out)
        )
        return self.bytes_in, self.bytes_out, self.messages_in, self.messages_out, *kinds

    def state(self) -> list[Any] | None:
        """Return all counts as lists and maps, for `from_state`; None if nothing crossed."""
        if not (self.bytes_in or self.bytes_out):
            return None
        *numbers, kinds_in, kinds_out = self.counts()
        kinds = ({name: list(each) for name, each in k.items()} for k in (kinds_in, kinds_out))
        return [*numbers, *kinds]

    @classmethod
    def from_state(cls, state: list[Any] | None) -> Traffic:
        """Return the `Traffic` of which `state` returned this."""
        return cls() if state is None else cls.from_counts(state)

    @classmethod
    def from_counts(cls, values: Any) -> Traffic:
        """Return the `Traffic` of which `counts` returned these values.

        Raises
        ------
        RemoteProtocolError
            When they are anything else.
        """
        traffic = cls()
        try:
            *counts, kinds_in, kinds_out = values
            traffic.bytes_in, traffic.bytes_out, traffic.messages_in, traffic.messages_out = counts
            for mine, theirs in ((traffic.kinds_in, kinds_in), (traffic.kinds_out, kinds_out)):
                for name, (count, overhead, payload) in theirs.items():
                    kind = mine[name]
                    kind.messages, kind.overhead, kind.payload = count, overhead, payload
                    counts += count, overhead, payload
        except (AttributeError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"traffic_counted.clients: {error}") from None
        if any(type(count) is not int or count < 0 for count in counts):
            raise RemoteProtocolError("traffic_counted.clients: a count is an integer from 0")
        return traffic


def sizes(message: Message) -> tuple[int, int]:
    """Return the bytes of a message beside its payloads, as `encode` writes it, and of those."""
    parts = getattr(message, "parts", ())
    return 5 + len(encode(message)) + 5 * len(parts), sum(part.nbytes for part in parts)
