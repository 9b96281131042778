"""What a client asks of a server, and what it hears."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.client.coding import Encoded
from aiops.client.outbox import Lending
from aiops.client.params import Params
from aiops.client.rows import RowsInto
from aiops.common.frozen import value
from aiops.errors import AiopsError
from aiops.model.layout import Array, Layout
from aiops.model.parts import Wants
from aiops.wire.messages import Message


class Means(Mapping[str, float]):
    """The mean of the statistic per tensor, as it was told; read when somebody looks at it.

    Parameters
    ----------
    layout
        The tensors.
    told
        float32, little endian, in arena order.
    """

    __slots__ = ("_layout", "_told")

    def __init__(self, layout: Layout, told: bytes) -> None:
        self._layout, self._told = layout, told

    def __getitem__(self, name: str) -> float:
        return float(np.frombuffer(self._told, "<f4")[self._layout.index[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.index)

    def __len__(self) -> int:
        return len(self._layout.index)

    def __repr__(self) -> str:
        return repr(dict(self))


@value
class Receipt:
    """What became of a push.

    Attributes
    ----------
    version
        The model version after it.
    staleness
        Updates between the parameters the gradient was computed on and its use: the largest over
        the tensors pushed.
    mean_staleness
        The same, as the mean weighted by the tensors' bytes.
    vbar
        The mean of the algorithm's statistic over all parameters, or None if it keeps none.
    vbars
        The same per tensor.
    used
        Whether the gradient is part of the model; False: the policy ignored it (it was too stale).
    pushed
        False when a step was made by the worker alone, as the policy has it, and nothing travelled:
        the rest is then what the last push came to.
    """

    version: int
    staleness: int
    mean_staleness: float
    vbar: float | None
    vbars: Mapping[str, float]
    used: bool = True
    pushed: bool = True


@value
class News:
    """What an answer says, beside the parameters, for the bandwidth gates.

    Attributes
    ----------
    vbar
        The mean of the algorithm's statistic over all parameters, or None if it keeps none.
    vbars
        float32, the same per tensor in arena order; empty if it keeps none.
    gate
        c_push and c_fetch, where a budget has the server choose them.
    """

    vbar: float | None
    vbars: Array
    gate: tuple[float, ...]


def _never(_: Any) -> Any:
    raise AssertionError("it has been answered")


@dataclass(slots=True, eq=False)
class Request:
    """Something asked of the server, from asking to its answer."""

    what: str
    make: Callable[[int], Message]
    finish: Callable[[Message], Any]
    payloads: Sequence[Sequence[memoryview]] = ()
    into: Params | RowsInto | None = None
    connection: tuple[str, int] = ("", 0)  # of a push: by which came what it was computed at
    done: bool = False
    result: Any = None
    error: AiopsError | None = None
    encoded: Encoded = field(default_factory=list)  # what its push carries coded
    have: int = -1  # of `into`, as it was asked for last, and
    wants: Wants = ()
    lent: Lending | None = None  # its payloads that the server reads where they lie here
    news: News | None = None  # what the answer says of the statistics
    on_done: Callable[[], None] = field(default=lambda: None)

    def resolve(self, result: Any = None, error: AiopsError | None = None) -> None:
        """Take the answer, once."""
        if self.done:
            return
        self.done, self.result, self.error = True, result, error
        if error is None:  # it is not asked again; what asks refers back to it: let go of it all
            self.make, self.finish, self.payloads = _never, _never, ()
        self.on_done()

    def value(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result
