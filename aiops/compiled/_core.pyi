from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SOURCE: str
"""SHA-256 of the source that it was built from, in hexadecimal."""

class Exchange:
    """The steady exchanges of one connection: an `aiops.client.compiled_forms.CompiledExchange`.

    Parameters
    ----------
    fd
        The socket, whose SO_RCVTIMEO and SO_SNDTIMEO are set.
    push, numbers
        The header of a push in its frame, and where its numbers of 8 bytes begin: id, sequence
        number, version held, version of the tensors, and the last again for each further part.
        ``push`` is written to.
    acks
        The forms of answers; of raw ones one. Of each, in a tuple: ``ack``, the header in its
        frame; ``varies``, 0xff for each of its bytes that varies, else 0; ``slots``, the values of
        those; ``ages``, where the fourth one stands again, in 8 bytes; ``nbytes``, the bytes behind
        the header; and ``pieces``, the fields of each `aiops.client.coded_answer.AnswerPiece`, or
        None: the model follows. Of each slot there are the begin, the width in bytes, and ``"u"``,
        ``"f"``, ``"s"`` or ``"n"`` for an unsigned integer, a float, bytes, or nothing. The first
        five are the id and four numbers up to `aiops.model.parts.LARGEST`.
    room
        The buffer for answers. If it is as long as the header of raw ones, it is for headers alone,
        and payloads are received in the parameters.
    nbytes, tensors
        Bytes of the model; name, dtype and shape of each tensor in arena order.
    array
        The type of the gradients: `numpy.ndarray`.
    crowded
        Nanoseconds that the first yield of a wait, and each later one, takes at least if the
        processor is not free.
    coded
        The region that gradients are encoded into, and the fields of each
        `aiops.client.coded_gradient.CodedPiece`; None: they travel raw.
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
        numbers: tuple[int, ...],
        acks: tuple[
            tuple[
                bytes,
                bytes,
                tuple[tuple[int, int, str], ...],
                tuple[int, ...],
                int,
                tuple[tuple[int, ...], ...] | None,
            ],
            ...,
        ],
        room: memoryview,
        nbytes: int,
        tensors: tuple[tuple[str, np.dtype[Any], Sequence[int]], ...],
        array: type[npt.NDArray[Any]],
        crowded: tuple[int, int],
        coded: tuple[npt.NDArray[np.uint8], tuple[tuple[Any, ...], ...]] | None,
        /,
    ) -> Exchange: ...
    def run(
        self,
        gradients: Any,
        target: npt.NDArray[Any] | None,
        id: int,
        seq: int,
        have: int,
        age: int,
        look: int,
        /,
    ) -> tuple[Any, ...] | bool | None: ...
    @property
    def posted(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def offset(self) -> int: ...
    def give_back(self, number: int, /) -> bool: ...
    def use_mailbox(self, memory: npt.NDArray[np.uint8], bell: int, alone: bool, /) -> None:
        """Exchange by a mailbox (``mailbox.h``) from here on, where its server answers in it.

        ``alone``: where it does not, an exchange does not fit, and is not made by the socket.

        Raises
        ------
        ValueError
            When this memory is no mailbox for these messages.
        NotImplementedError
            When there are no mailboxes on this machine.
        """
    def carry(self, steady: Any, params: Any, gradients: Any, look: int, /) -> Any: ...
    def push(self, gradients: Any, id: int, seq: int, have: int, age: int, /) -> bool: ...
    def pull(
        self, target: npt.NDArray[Any], id: int, look: int, nap: int, /
    ) -> tuple[Any, ...] | bool | None: ...
    def push_usual(self, steady: Any, params: Any, gradients: Any, /) -> Any: ...
    def pull_usual(self, steady: Any, look: int, nap: int, /) -> Any: ...

DIRECT: str
"""The arguments of a kernel's loop that is called by its address, as compiled code gives them."""

CLASSES: tuple[str, ...]
"""The names of the classes whose fields compiled code uses (``fields.h``)."""

def crc32(data: bytes | bytearray | memoryview, before: int = 0, /) -> int:
    """Return the CRC-32 of bytes behind others whose CRC is given, as `zlib.crc32`."""

def copy_crc32(to: bytearray | memoryview, data: bytes | bytearray | memoryview, /) -> int:
    """Copy bytes, and return their CRC-32."""

def learn_fields(classes: Mapping[str, type], /) -> None:
    """Find where the fields of some of `CLASSES` lie in their instances.

    Raises
    ------
    LookupError
        When a field is not in the ``__slots__`` of its class.
    """

class Answers:
    """The steady exchanges of one connection of a server: an `aiops.engine.steady.Steady`.

    Parameters
    ----------
    parts
        An object with the attributes that ``answers.h`` names, of classes whose fields are learnt.
    peer
        The number of the connection.
    head
        The head buffer of the connection.
    form, varies
        A push up to its first payload; 0xff for each of its bytes that varies, else 0.
    answer
        An answer up to its payload.
    pushed, answered
        Where the numbers of a push lie, each with its width in bytes and whether it is signed; and
        where those of an answer begin, in their order: all have 8 bytes, but the statistic by
        tensor.
    sections
        Of each section of the model: bytes, bytes of an element, the bits of a magnitude, and the
        first of those that is unfit (`aiops.kernels.scan`).
    nbytes, cost, vbars_width, parameters
        Bytes of the model; of an update; of the statistic by tensor; elements of the model.
    scheduled, scalars, has_statistic
        Whether learning rates are scheduled; the number of the rule's scalars; whether it has a
        statistic.
    coded
        Of coded gradients: where the version of a push begins once more, for each further part; of
        each payload the address of its loop, or 0, its begin and its bytes behind ``form``, the
        bytes of the model that it is for, [start, stop), and the bytes before its second section
        (`aiops.codecs.whole_gradient`); the memory that they are decoded into; and the bytes behind
        ``form``, and those of them that are prefixes. None: gradients are raw.
    """

    @property
    def answered(self) -> int:
        """Exchanges that were answered here, and not by Python."""

    @property
    def direct(self) -> int:
        """Updates that were made by kernels that are called by their addresses."""

    def __new__(
        cls,
        parts: Any,
        peer: int,
        head: memoryview,
        form: bytes,
        varies: bytes,
        answer: bytes,
        pushed: tuple[tuple[int, int, bool], ...],
        answered: tuple[int, ...],
        sections: tuple[tuple[int, int, int, int], ...],
        nbytes: int,
        cost: int,
        vbars_width: int,
        parameters: int,
        scheduled: bool,
        scalars: int,
        has_statistic: bool,
        coded: tuple[Any, ...] | None,
        /,
    ) -> Answers: ...
    def exchange(self, nbytes: int, now: float, record: Any, /) -> bytes | None:
        """Do what `aiops.engine.steady.Steady.exchange` does."""

    def connect(self, parts: Any, /) -> None:
        """Take the parts of a server."""

    def answer(self, nbytes: int, /) -> bytes | None:
        """Do what `aiops.serving.event_dispatcher.EventDispatcher.exchange` does."""

class Increments:
    """The steps of a delta replica: `aiops.store.delta_replica.WholeSteps`; and forms of answers.

    Parameters
    ----------
    pieces
        Of each the address of its loop, or 0; the bytes of the model that it is, [start, stop); and
        of its payload the begin in an increment, the bytes, and those before its second section.
    nbytes, region
        Bytes of the model, and of an increment.
    """

    def __new__(
        cls, pieces: tuple[tuple[int, int, int, int, int, int], ...], nbytes: int, region: int, /
    ) -> Increments: ...
    @property
    def complete(self) -> bool:
        """As of `aiops.store.delta_replica.WholeSteps`."""

    def step(
        self,
        model: npt.NDArray[np.uint8],
        replica: npt.NDArray[np.uint8],
        results: npt.NDArray[np.int64],
        behind: npt.NDArray[np.bool_],
        /,
    ) -> bytes:
        """As of `aiops.store.delta_replica.WholeSteps`."""

    def learn(
        self,
        steps: int,
        header: bytes,
        numbers: tuple[int, ...],
        ages: tuple[int, ...],
        segments: tuple[tuple[int, int, int], ...],
        vbars_width: int,
        parts: tuple[Any, ...],
        /,
    ) -> None:
        """Take the form of answers with this many increments.

        Parameters
        ----------
        steps
            The number of increments.
        header
            That of such an answer, with the prefix before it.
        numbers
            Where its id, its two versions, its staleness and its mean begin, and its statistics, if
            it has them: of 8 bytes each, but the last.
        ages
            Where the version of each part begins.
        segments
            Of each payload the number of the increment, or -1 for the replica; its begin there; its
            bytes.
        vbars_width
            Bytes of the last of the numbers.
        parts
            Of `aiops.bandwidth.byte_accounting.Ledger.brought`.

        Raises
        ------
        ValueError
            When it is no such form.
        """

    def knows(self, steps: int, /) -> bool:
        """Return whether it has the form of such answers."""

class Poller:
    """Reads connections in turn; `fd` is to be watched by the event loop, which calls `ready`.

    Raises
    ------
    OSError
        When the system has no descriptor for it.
    """

    @property
    def fd(self) -> int:
        """The descriptor of its epoll instance; below 0 once closed."""

    @property
    def served(self) -> int:
        """Exchanges that were answered here."""

    def __new__(cls) -> Poller: ...
    def add(self, link: Any, fd: int, shortcut: Any, /) -> int:
        """Read from the socket of an `aiops.net.transport.MessageTransport`; return its number.

        ``shortcut``: an `Answers.answer`, or what else the transport calls with received bytes.
        """

    def remove(self, number: int, /) -> None:
        """Read from it no longer; to be called before its socket is closed."""

    def ready(self) -> None:
        """Read from those that are ready, for a millisecond at most."""

    def close(self) -> None:
        """End."""

class Mailboxes:
    """Answers what is posted in mailboxes; `fd` is to be watched by the event loop.

    Parameters
    ----------
    look
        Nanoseconds to look for the next push before sleeping.

    Raises
    ------
    OSError
        When the system has no descriptor for it.
    """

    @property
    def fd(self) -> int:
        """The descriptor of an epoll instance of the bells; below 0 once closed."""

    @property
    def served(self) -> int:
        """Exchanges that were answered in mailboxes."""

    def __new__(cls, look: int, /) -> Mailboxes: ...
    def add(
        self, link: Any, shortcut: Any, memory: npt.NDArray[np.uint8], bell: int, lender: Any, /
    ) -> int:
        """Answer in the mailbox of an `aiops.net.transport.MessageTransport`; return its number.

        ``shortcut`` is its `Answers.answer`. The bell is closed with the mailbox. ``lender`` is an
        `aiops.net.mailboxes.Lender`; None: parameters are copied.

        Raises
        ------
        ValueError
            When this is no mailbox for this connection.
        OSError
            When the bell is none.
        """

    def remove(self, number: int, /) -> None:
        """Answer in it no longer."""

    def answer(self) -> bool:
        """Answer what is posted, for a millisecond at most; return whether to be called again.

        If not, the clients have been told to ring.
        """

    def take_returned(self) -> None:
        """Release the parameters that clients have given back."""

    def forked(self) -> None:
        """Let go of all in a fork, of what others see nothing."""

    def close(self) -> None:
        """End."""
