"""The transfers of a strategy; each becomes one request, however often it is carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiops.client.params import Params, Stamped
from aiops.client.request_kinds import Request
from aiops.client.requests import Requests
from aiops.model.layout import Array, Ints


@dataclass(slots=True, eq=False)
class Transfer:
    """A push, a fetch, or both in one round trip.

    Attributes
    ----------
    arrays
        The arrays to push, by name; None: none. They do not change before the answer.
    at
        The versions of the tensors at which they were computed.
    into
        The parameters to receive the values after it; None: they are not wanted.
    wanted
        The tensors that are wanted, in arena order; None: all.
    count
        The mini-batches whose gradients are pushed.
    again
        Nothing new is pushed: the server is to apply the last gradient once more.
    request
        The request that it became when it was first carried.
    """

    arrays: Mapping[str, Array] | None
    at: Stamped
    into: Params | None
    wanted: Ints | None = None
    count: int = 1
    again: bool = False
    request: Request | None = None

    def ask(self, requests: Requests) -> Request:
        """Make the request. Made again, as after a lost connection, it is the same push."""
        if self.request is not None:
            self.request = requests.again(self.request)
        elif self.arrays is not None:
            self.request = requests.push(self.arrays, self.at, self.into, self.wanted, self.count)
        elif self.again:
            self.request = requests.reapply(self.at, self.into, self.wanted)
        elif self.into is not None:
            self.request = requests.fetch(self.into, self.wanted)
        else:
            raise ValueError("a transfer that neither pushes nor fetches")
        return self.request
