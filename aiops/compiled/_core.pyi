from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SOURCE: str
"""SHA-256 of the source that it was built from, in hexadecimal."""

class Exchange:
    """The steady exchanges of one connection: an `aiops.client.steady.CompiledExchange`.

    Parameters
    ----------
    fd
        The socket, whose SO_RCVTIMEO and SO_SNDTIMEO are set.
    push, numbers
        The header of a push in its frame, and where its four numbers of 8 bytes begin: id, sequence
        number, version held, version of the tensors.
        ``push`` is written to.
    ack, varies, slots
        The header of an answer in its frame; 0xff for each of its bytes that varies, else 0; and
        the values of those: of each the begin, the
        width in bytes, and ``"u"``, ``"f"`` or ``"s"`` for an unsigned integer, a float or bytes.
        The first five are the id and four numbers up to `aiops.model.parts.LARGEST`.
    room
        The buffer for answers. If it is as long as ``ack``, it is for headers alone, and payloads
        are received in the parameters.
    nbytes, tensors
        Bytes of the model; name, dtype and shape of each tensor in arena order.
    array
        The type of the gradients: `numpy.ndarray`.
    crowded
        Nanoseconds that the first yield of a wait, and each later one, takes at least if the
        processor is not free.
    """

    fd: int
    @property
    def sent(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def fault(self) -> int: ...
    @property
    def missed(self) -> int: ...
    def __new__(
        cls,
        fd: int,
        push: bytearray,
        numbers: tuple[int, int, int, int],
        ack: bytes,
        varies: bytes,
        slots: tuple[tuple[int, int, str], ...],
        room: memoryview,
        nbytes: int,
        tensors: tuple[tuple[str, np.dtype[Any], Sequence[int]], ...],
        array: type[npt.NDArray[Any]],
        crowded: tuple[int, int],
        /,
    ) -> Exchange: ...
    def run(
        self,
        gradients: Any,
        target: npt.NDArray[Any],
        id: int,
        seq: int,
        have: int,
        age: int,
        look: int,
        /,
    ) -> tuple[Any, ...] | bool | None: ...
