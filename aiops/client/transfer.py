"""What a routine wants moved, and how it becomes a request: once, however often it is carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.client.params import Params, Stamped
from aiops.client.request_kinds import Request
from aiops.client.requests import Requests
from aiops.model.layout import Array, Ints


@dataclass(slots=True, eq=False)
class Transfer:
    """What is to travel: a push, a fetch, or both in one round trip.

    Attributes
    ----------
    arrays
        What to push, by name; None: nothing. Left alone by the routine until it has arrived.
    at
        At which versions of the tensors that was computed.
    into
        Where the parameters after it are to be received; None: they are not wanted.
    wanted
        Which tensors are wanted, in arena order; None: all.
    count
        How many mini-batches' gradients are pushed.
    again
        Nothing new is pushed: the server is to apply the last gradient once more.
    request
        What it became when it was first carried.
    """

    arrays: Mapping[str, Array] | None
    at: Stamped
    into: Params | None
    wanted: Ints | None = None
    count: int = 1
    again: bool = False
    request: Request | None = None

    def ask(self, asks: Requests) -> Request:
        """Ask for it. Asked again (nobody knows what became of it), it is the same push."""
        if self.request is not None:
            self.request = asks.again(self.request)
        elif self.arrays is not None:
            self.request = asks.push(self.arrays, self.at, self.into, self.wanted, self.count)
        elif self.again:
            self.request = asks.reapply(self.at, self.into, self.wanted)
        elif self.into is not None:
            self.request = asks.fetch(self.into, self.wanted)
        else:
            raise ValueError("a transfer that neither pushes nor fetches")
        return self.request
