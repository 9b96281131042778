"""Forms of a steady exchange for compiled code, and the calls of that: `aiops.compiled`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from aiops.client.coded_answer import CodedAnswer
from aiops.client.coded_gradient import CodedGradient
from aiops.client.params import Params
from aiops.model.layout import Array
from aiops.wire.template import Template


class Forms(NamedTuple):
    """The messages of a steady exchange.

    Attributes
    ----------
    push, ack
        Their headers. What varies: of a push the id, the sequence number, the version held, and the
        version of the tensors, once for each part; of an answer as `SteadyExchange._permits` has
        it.
    room
        The buffer for answers, or for their headers.
    nbytes, tensors
        The model: its bytes, and each tensor's name, dtype and shape.
    coded
        What gradients are encoded into; None: they travel raw.
    answers
        The answers that there may be, if they are coded; ``ack`` is the first one's header then.
        Else there are none.
    """

    push: Template
    ack: Template
    room: memoryview
    nbytes: int
    tensors: tuple[tuple[str, Any, tuple[int, ...]], ...]
    coded: CodedGradient | None
    answers: tuple[CodedAnswer, ...] = ()

    @property
    def is_ready(self) -> bool:
        """True if no loop of a codec has to be compiled before compiled code can be used."""
        wholes = [answer.whole for answer in self.answers]
        ready = self.coded is None or self.coded.whole.is_ready("auto")
        return ready and all(whole.is_ready("auto") for whole in wholes)

    def warm(self) -> None:
        """Compile those loops, on any thread."""
        if self.coded is not None:
            self.coded.compiled()
        for answer in self.answers:
            answer.compiled()


class CompiledExchange(Protocol):
    """The steady exchanges of one socket in compiled code: `aiops.compiled`."""

    fd: int
    """The socket's descriptor. It is set to -1 before the socket is closed."""

    @property
    def sent(self) -> int:
        """Bytes of the last push that have been sent."""

    @property
    def received(self) -> int:
        """Bytes of its answer that have come."""

    @property
    def fault(self) -> int:
        """Why the connection was gone then, an errno; -1: the server closed it, 0: it was not."""

    @property
    def missed(self) -> int:
        """1 if it looked for the answer in vain; 2 more if `pull` slept for it in vain."""

    @property
    def posted(self) -> int:
        """The number of the last push that was posted in the mailbox."""

    @property
    def lent(self) -> int:
        """1 if the last answer's parameters lie in a segment of the server: this one, there."""

    @property
    def segment(self) -> int:
        """The number of the segment."""

    @property
    def offset(self) -> int:
        """The offset in it at which they begin."""

    def give_back(self, number: int, /) -> bool:
        """Have the parameters of all answers up to a number be the server's again.

        Returns whether the server hears that, or need not: not if it has left the mailbox.
        """

    def use_mailbox(self, memory: Array, bell: int, alone: bool, /) -> None:
        """Exchange by a mailbox from here on, where its server answers in it.

        ``alone``: where it does not, an exchange does not fit, and is not made by the socket.

        Raises
        ------
        ValueError
            When this memory is no mailbox for these messages.
        NotImplementedError
            When there are no mailboxes on this machine.
        """

    def run(
        self,
        gradients: Any,
        target: Array | None,
        id: int,
        seq: int,
        have: int,
        age: int,
        look: int,
        /,
    ) -> tuple[Any, ...] | bool | None:
        """Push gradients, and receive the parameters.

        Parameters
        ----------
        gradients
            Arrays by name, or the whole gradient as one array.
        target
            The parameters, as bytes. None: they are to stay where they lie, and the exchange does
            not fit if it would not go by a mailbox alone.
        id, seq, have, age
            The numbers of the push.
        look
            Nanoseconds to look for the answer before sleeping; 0: not at all.

        Returns
        -------
        The values of the answer. None: it has not come, or it is another one. False: the gradients
        do not fit, and nothing has been done.

        Raises
        ------
        KeyboardInterrupt
            Or what else the handler of a signal raises; a message may be cut.
        """

    def carry(self, steady: Any, params: Params, gradients: Any, look: int, /) -> Any:
        """Do what `SteadyExchange.carry` does, if parameters are as the last exchange left them.

        NotImplemented: nothing has been done.
        """

    def push(self, gradients: Any, id: int, seq: int, have: int, age: int, /) -> bool:
        """Push gradients as `run` does, as far as the socket takes them without waiting.

        `sent` says how far that is. False: they do not fit, and nothing has been done.
        """

    def pull(self, target: Array, id: int, look: int, nap: int, /) -> tuple[Any, ...] | bool | None:
        """Receive the answer to the push of this id, and wait for it for a moment.

        Parameters
        ----------
        target
            The parameters, as bytes.
        id
            The number of the push.
        look, nap
            Nanoseconds to look for the answer, and then to sleep for it; 0: not at all.

        Returns
        -------
        The values of the answer. None: it has not all come; `received` says how much of it has.
        False: it is another one.
        """

    def push_usual(self, steady: Any, params: Params, gradients: Any, /) -> Any:
        """Do what `SteadyExchange.push_by` does, under the conditions of `carry`.

        Returns whether the gradients fit. NotImplemented: nothing has been done.
        """

    def pull_usual(self, steady: Any, look: int, nap: int, /) -> Any:
        """Do what `SteadyExchange.pull_by` does, under the conditions of `carry`.

        NotImplemented: nothing has been done.
        """
