"""A mailbox as its client uses it: room for a gradient, and parameters that a server lends there.

Compiled code posts pushes and takes their answers (``aiops/compiled/mailbox.c``). The parameters of
a model of more than 64 KiB stay where the server has them: an answer names a place in a segment
that the server has shared. They are read there, or copied at once, and are the server's again when
the mailbox's word *returned* says so: all answers up to a number are given back.
"""

from __future__ import annotations

from functools import partial

from aiops.client.compiled_forms import CompiledExchange
from aiops.client.params import Leased, Params
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Layout
from aiops.model.mailbox import Mailbox
from aiops.wire.shared_payloads import SharedPayloads


class Posting:
    """Reads the parameters that answers in a mailbox lend, and gives them back.

    Parameters
    ----------
    compiled
        Posts in it.
    mailbox, layout
        It, and the model.
    shared
        The segments of the connection, by which an answer is given back where the server has left
        the mailbox.
    """

    def __init__(
        self,
        compiled: CompiledExchange,
        mailbox: Mailbox,
        layout: Layout,
        shared: SharedPayloads,
    ) -> None:
        self._compiled, self._mailbox = compiled, mailbox
        self._layout, self._shared = layout, shared
        self._room = Arena(layout, mailbox.pushed(layout.nbytes), mailbox)
        self._lent = _LentAnswers(compiled, shared)
        self._arenas: dict[int, tuple[Bytes, int, Arena]] = {}  # by the segment's number

    @property
    def room(self) -> Arena | None:
        """The memory of the next gradient, which is not copied if it is written there.

        None while the server does not answer in the mailbox, and would read a copy.
        """
        return self._room if self._mailbox.is_open else None

    def bring(self, params: Params, id: int) -> None:
        """Bring parameters up to date with the answer of this id, which was taken just now.

        Raises
        ------
        RemoteProtocolError
            When it names a place that there is not.
        """
        compiled = self._compiled
        if not compiled.lent:  # compiled code has copied them, but for views
            if isinstance(params, Leased):
                arena = Arena(self._layout)
                arena.data[:] = self._mailbox.answered(self._layout.nbytes)
                params.keep(arena)
            return
        number, arena = compiled.posted, self._arena()
        self._lent.add(number, id)
        if isinstance(params, Leased):
            params.read(arena, partial(self._lent.give_back, number))
        else:
            params.arena.data[:] = arena.data
            self._lent.give_back(number)

    def _arena(self) -> Arena:
        """Return the parameters that lie where the last answer says, to be read."""
        number, offset = self._compiled.segment, self._compiled.offset
        segment = self._shared.segment(number)
        known = self._arenas.get(number)
        if known is None or known[0] is not segment or known[1] != offset:
            data = self._shared.at(number, offset, self._layout.nbytes)
            known = self._arenas[number] = segment, offset, Arena(self._layout, data)
        return known[2]


class _LentAnswers:
    """The answers of which the server may not know yet that they are given back.

    Parameters that a program keeps refer to these, and so to the mailbox, but to no segment but the
    one that they lie in: others are unmapped with the end of the connection.
    """

    def __init__(self, compiled: CompiledExchange, shared: SharedPayloads) -> None:
        self._compiled, self._shared = compiled, shared
        self._ids: dict[int, int] = {}  # by their numbers, in the order of these
        self._read = set[int]()  # those that are still read

    def add(self, number: int, id: int) -> None:
        """Take one that is read from now on."""
        self._ids[number] = id
        self._read.add(number)

    def give_back(self, number: int) -> None:
        """Have the parameters of an answer be the server's again, with all that are older."""
        self._read.discard(number)
        done = list[int]()
        for each in self._ids:
            if each in self._read:
                break
            done.append(each)
        if not done:
            return
        known = self._compiled.give_back(done[-1])
        for each in done:
            id = self._ids.pop(each)
            if not known:
                self._shared.give_back(id)
