"""Answer steady exchanges: a worker's push of its whole gradient, answered at once with the model.

Nearly all work of a server of a small model is this one exchange, again and again, so it has a way
of its own through the engine: from the bytes of the push to those of the answer in one call,
`Steady.exchange`. It changes what the general way changes: version, optimiser's state, accounts,
statistics, the remembered answer and the record. It makes no message or effect objects, and events
only for a record, because making them would take longer than the update.

An exchange goes this way when all of this holds, and the general way (`Engine.handle`) when not:

* its header is that of an earlier one of this connection but for the values of its id, its sequence
  number and its two versions (`aiops.wire.template`); so no part of it has to be checked again;
* it is the gradient of a whole model of at most `MOST` bytes, raw or in codecs whose payloads have
  constant lengths (`aiops.codecs.whole_gradient`), from a worker, which asks for nothing but all
  parameters;
* the server does nothing else with it than update and answer: no bandwidth budget, no gradients
  kept to be applied again, no shards, no device, no clipping, no rule that reads what the worker
  was sent, a policy that decides `APPLY` and is `repeatable`;
* nothing is outstanding, queued or held, no warning is due, the payload passes its survey, and
  every filter admits it (`aiops.filters.screen.PushScreen.admits`).

Until all of this has been checked nothing is changed, so that the general way finds the state as it
was, and makes the error of a push that is refused.

A push is received in its connection's head buffer. Those of larger models have `ROOM` bytes
together; a connection for which there is none left goes the general way. A coded gradient is
decoded into one arena that all connections share: each push is used before the next is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from aiops.codecs.raw import NAME as RAW
from aiops.codecs.whole_gradient import WholeGradient
from aiops.engine.coded_answers import CodedAnswers
from aiops.engine.compiled_answers import compiled_answers
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.membership import Acknowledged, Member
from aiops.engine.update_queue import UpdateQueue
from aiops.kernels.scan import Surveyor
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Ints
from aiops.model.parts import LARGEST, Part, Parts
from aiops.state.plain import pack
from aiops.store.parameters import Store
from aiops.store.resources import Resources, unmeasured
from aiops.wire.connection import SMALL, Connection
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, Push
from aiops.wire.template import Path, Template, framed, slots

if TYPE_CHECKING:
    from aiops.compiled._core import Answers

_PUSHED: tuple[Path, ...] = (("id",), ("seq",), ("have",), ("parts", 0, 4))
MOST = 1 << 20
"""The largest model in bytes whose exchanges go this way: with a larger one bytes take the time."""

ROOM = 64 << 20
"""Bytes that head buffers for models of more than 64 KiB may have, on all connections together."""

_FORMS = 32
"""The most forms of pushes learnt per connection. A client that encodes integers in a fixed width
needs one; a client that encodes each in the fewest bytes needs one per width."""


class Recorded(NamedTuple):
    """A gradient as it is recorded.

    Attributes
    ----------
    data
        Its bytes, as they travelled behind the first prefix (`aiops.codecs.whole_gradient`).
    parts
        The rest of the row, which tells how it is coded (`aiops.state.row_kinds`); empty: raw.
    coded
        Whether its worker fetches coded parameters.
    """

    data: Bytes
    parts: bytes = b""
    coded: bool = False


class ExchangeRecord(Protocol):
    """Records steady exchanges, which are no events."""

    def exchanged(
        self,
        time: float,
        leased: bool,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Recorded,
        ticket: int,
        sums: Ints,
        followed: Ints | None,
    ) -> None:
        """Record an exchange, before it is answered.

        Parameters
        ----------
        time
            At which the push came, and was applied, in seconds.
        leased
            Whether the current version had readers (`Store.freeze`).
        peer, numbers
            As of `Shortcut.update`.
        gradient
            It; the memory is used again afterwards.
        ticket, sums
            The update's number and result, as in `aiops.engine.events.Applied`.
        followed
            The result of the delta replica's step, which has the next number; None: there was none.
        """


Exchange: TypeAlias = Callable[[int, float, ExchangeRecord | None], bytes | None]
"""Answers a push, as `Steady.general`."""


class Shortcut:
    """The state that all steady exchanges of a server share.

    Attributes
    ----------
    store
        The parameters that they update.
    updates
        The engine's updates.
    answer
        The template of the answers.
    parts
        The parts of a raw push, for the accounts.
    room
        Bytes that head buffers of larger models may still have.
    coded
        Coded answers; None: there is no delta replica.
    """

    def __init__(
        self,
        store: Store,
        updates: UpdateQueue,
        surveyors: Sequence[Surveyor],
        machine: Resources,
        coded: CodedAnswers | None = None,
    ) -> None:
        self.store, self.machine, self.coded = store, machine, coded
        self.updates, self._pace, self._surveyors = updates, updates.pace, surveyors
        self._warnings = updates.warnings
        gain = updates.maker.numbers.gain
        self._note = gain.note if gain.moves else None
        self._update = machine.measure("kernel", store.update)
        self._has_statistic = store.rule.statistic is not None
        self._nbytes = nbytes = store.layout.nbytes
        self.room = ROOM  # that is left
        self.parts: Parts = (Part(0, nbytes, RAW, nbytes, 0),)
        self._decoded: Arena | None = None
        self.answer = _answers(store)

    def learn(
        self, member: Member, peer: int, wire: Connection, push: Push, known: Steady | None
    ) -> Steady | None:
        """Return the short way for exchanges like a push just read: ``known`` if that takes it.

        Parameters
        ----------
        member, peer
            The push's member, and the number of its connection.
        wire
            The state machine of that connection.
        push
            The message.
        known
            The short way that the connection has, or None.
        """
        nbytes = self._nbytes
        if not (nbytes <= MOST and member.worker and wants_all(push, self.coded is not None)):
            return known
        whole = None
        if [part[:4] for part in push.parts] != [part[:4] for part in self.parts]:
            whole = self._coded(push)
            if whole is None:
                return known
        frame = framed(wire.header, push.parts[0].nbytes)
        if known is not None and known.takes(frame):
            return known
        found, paths = slots(wire.header), list(_PUSHED)
        paths += [("parts", index, 4) for index in range(1, len(push.parts))]
        if wire.forms >= _FORMS or not all(path in found for path in paths):
            return known
        if decode(wire.header) != push:  # the header is a later message's
            return known
        coded = self.coded if push.coded else None
        if coded is not None and not coded.is_ready(self.store.requested):
            return known  # or it would never be answered by compiled code
        if known is not None:
            known.lost()  # of its room, which the other one has
        needed = nbytes if whole is None else whole.nbytes
        needed = needed if needed > SMALL else 0
        if needed > self.room:
            return None
        self.room -= needed
        template = Template(frame, [found[path] for path in paths])
        return Steady(self, member, peer, wire, template, needed, whole, coded)

    def _coded(self, push: Push) -> WholeGradient | None:
        """Return how pushes like this one lie in messages; None: they go the general way.

        A filter measures a gradient in the update queue, where it is decoded for that alone.
        """
        if self.updates.screen is not None:
            return None
        whole = WholeGradient.of(self.store.layout, push.parts)
        if whole is None or not whole.is_ready(self.store.requested):
            return None
        return whole

    @property
    def decoded(self) -> Arena:
        """The arena that coded gradients are decoded into, one at a time."""
        if self._decoded is None:
            self._decoded = Arena(self.store.layout)
        return self._decoded

    def update(
        self,
        member: Member,
        peer: int,
        numbers: tuple[int, ...],
        gradient: Arena,
        now: float,
        record: ExchangeRecord | None,
        parts: Parts | None = None,
        recorded: Recorded | None = None,
    ) -> Acknowledged | None:
        """Update the parameters with a worker's gradient of the whole model, and note the exchange.

        Parameters
        ----------
        member, peer
            The worker, and the connection on which the gradient came.
        numbers
            Of the push: its id, its sequence number, the version that the worker holds, and the
            updates that each tensor had had when the gradient was computed.
        gradient
            The gradient.
        now
            The time, in seconds.
        record
            Where the exchange is recorded, or None.
        parts, recorded
            In which it travelled, always the same object, and how it is recorded; None: raw, with a
            raw answer.

        Returns
        -------
        tuple or None
            The fields of the acknowledgement; its parameters are those of `Store.current`. None:
            the push must go the general way, and nothing has been changed or recorded.
        """
        id, seq, have, base = numbers
        store = self.store
        level, number = store.current.level, store.current.number + 1
        if level is None or not (
            member.peer == peer
            and not member.excused
            and not member.covers
            and member.last_seq < seq <= LARGEST
            and 0 <= id <= LARGEST
            and -1 <= have <= LARGEST
            and have != number  # else all would count as held, and none be sent
            and 0 <= base <= level
        ):
            return None
        coded = self.coded if recorded is not None and recorded.coded else None
        if coded is not None and not coded.may_follow:
            return None
        surveyed = []
        for survey, section in zip(self._surveyors, gradient.sections, strict=True):
            found = survey(section)
            if found >= 0:
                return None
            surveyed.append(found)
        staleness = level - base
        # The last condition: if it holds, the update is counted and must be carried out.
        begun = self.updates.at_once(member.number, base, staleness, gradient, surveyed, now)
        if begun is None:
            return None
        leased = record is not None and store.freeze()
        if now >= self._pace.due:
            self._pace.note(now, number - 1)
        sums = self._update(gradient.sections, *begun)
        if self._note is not None:
            self._note(sums)
        if store.total <= self._warnings.total:
            self._warnings.due = True
        tickets = self.updates.tickets
        followed = None if coded is None else coded.follow(have)
        if record is not None:
            recorded = recorded or Recorded(gradient.data)
            record.exchanged(now, leased, peer, numbers, recorded, tickets, sums, followed)
        vbar, vbars = store.statistic() if self._has_statistic else (None, b"")
        said = (number, True, staleness, float(staleness), vbar, vbars, "")
        member.exchanged(now, seq, said)
        member.ledger.exchanged(seq, have >= 0, self.parts if parts is None else parts)
        return said


def shortcut(
    store: Store,
    updates: UpdateQueue,
    surveyors: Sequence[Surveyor],
    machine: Resources,
    delta_replies: DeltaReplies | None = None,
) -> Shortcut | None:
    """Return the shared state of a server's steady exchanges, or None if it can have none."""
    if not store.layout.nbytes or not updates.answers_at_once:
        return None
    coded = None if delta_replies is None else CodedAnswers(delta_replies, updates)
    return Shortcut(store, updates, surveyors, machine, coded)


def wants_all(push: Push, coded: bool = False) -> bool:
    """Return whether a push is of one mini-batch, and asks for nothing but all parameters.

    ``coded``: also where they are to be coded. Default: False.
    """
    return push.fetch and not (
        (push.wants or push.count != 1 or push.lr_factors or not push.parts)
        or (push.coded and not coded)
    )


def is_steady(push: Push, nbytes: int) -> bool:
    """Return whether a push is one raw part of all ``nbytes``, and asks for all parameters."""
    return wants_all(push) and [part[:4] for part in push.parts] == [(0, nbytes, RAW, nbytes)]


def _answers(store: Store) -> Template:
    """Return the template of the answers, made from one that is encoded the general way."""
    nbytes = store.layout.nbytes
    vbar, vbars = store.statistic()
    part = Part(0, nbytes, "raw", nbytes, 0)
    header = encode(Ack(0, 0, 0, True, 0, 0.0, vbar, vbars, (part,)))
    found = slots(header)
    paths: list[Path] = [("id",), ("version",), ("current",), ("staleness",), ("mean_staleness",)]
    paths += [("vbar",), ("vbars",)] if vbar is not None else []
    chosen = [found[path] for path in (*paths, ("parts", 0, 4))]
    return Template(framed(header, nbytes), chosen)


class Steady:
    """One connection's short way for its steady exchanges.

    Parameters
    ----------
    shared
        The state of the server that they change.
    member, peer
        The connection's member and number; if the member has another connection, nothing goes this
        way.
    wire
        The state machine of the connection.
    template
        The form that pushes must have.
    room
        The bytes of `Shortcut.room` that it has taken. Default: 0.
    whole
        How coded gradients lie in messages; None: they are raw.
    coded
        Gives the answers their parameters, if they are coded; None: they are raw.

    Attributes
    ----------
    cost
        Bytes that an exchange's update reads and writes.
    member, peer, nbytes
        As above; the model's bytes, of each push and of each answer.
    store, gradient, parts, whole, coded
        The parameters, a push's gradient and parts, and as above.
    recorded
        The last push, as it is recorded.
    compiled
        What does the same as `general` in compiled code; None: there is none.
    exchange
        Answers a push: `general`, or compiled code.
    """

    def __init__(
        self,
        shared: Shortcut,
        member: Member,
        peer: int,
        wire: Connection,
        template: Template,
        room: int = 0,
        whole: WholeGradient | None = None,
        coded: CodedAnswers | None = None,
    ) -> None:
        self._room, self.coded = room, coded
        self._shared, self.member, self.peer, self._wire = shared, member, peer, wire
        self.store, self._template, self.whole = shared.store, template, whole
        layout = shared.store.layout
        if whole is None:
            self.parts, payload = shared.parts, wire.expect(template, layout.nbytes)
            self.gradient = Arena(layout, np.frombuffer(payload, np.uint8))
        else:
            self.parts, self.gradient = whole.parts, shared.decoded
            payload = wire.expect(template, whole.nbytes, whole.between)
        self._payload: Bytes = np.frombuffer(payload, np.uint8)
        parts = b"" if whole is None else pack([list(part[:4]) for part in whole.parts])
        self.recorded = Recorded(self._payload, parts, coded is not None)
        self._answer, measure = shared.answer, shared.machine.measure
        self._answered = measure("send", wire.answered)
        self._answered_coded = None if coded is None else measure("send", coded.answer)
        self.cost, self.nbytes = shared.store.cost, layout.nbytes
        self.compiled: Answers | None = None
        if shared.machine.measure is unmeasured:
            self.compiled = compiled_answers(self, template, shared.answer, wire, shared.updates)
        self.exchange: Exchange = self.general if self.compiled is None else self.compiled.exchange

    def lost(self) -> None:
        """Give back the room of its head buffer: the connection has ended, or has another form."""
        self._shared.room += self._room
        self._room = 0

    def takes(self, frame: bytes) -> bool:
        """Return whether the connection already matches messages of this form."""
        return self._wire.expected is self._template and self._template.values(frame) is not None

    def general(self, nbytes: int, now: float, record: ExchangeRecord | None) -> bytes | None:
        """Answer a push if these bytes complete it, and it meets all conditions: `exchange`.

        This is the specification of compiled code.

        Parameters
        ----------
        nbytes
            The bytes that have arrived in the connection's last buffer.
        now, record
            As of `Shortcut.update`.

        Returns
        -------
        bytes or None
            The answer; ``b""`` while the push is incomplete. None: it must go the general way, and
            nothing has been changed or recorded.
        """
        found = self._wire.match(nbytes)
        if not found:
            return None if found is None else b""
        whole, numbers = self.whole, found[:4]
        if whole is not None:
            if any(age != found[3] for age in found[4:]):
                return None
            if not whole.decode(self._payload, self.gradient):
                return None
        given = self.member, self.peer, numbers, self.gradient, now
        said = self._shared.update(*given, record, self.parts, self.recorded)
        if said is None:
            return None
        id, _seq, have, base = numbers
        if self._answered_coded is not None:
            wire, ledger = self._wire, self.member.ledger
            made: bytes = self._answered_coded(wire, ledger, nbytes, id, have, said)
            return made
        number, _used, staleness, mean, vbar, vbars, _why = said
        values: list[float | bytes] = [id, number, number, staleness, mean, base + staleness + 1]
        if vbar is not None:
            values[5:5] = vbar, vbars
        payload = self.store.current.room.data.data
        answer: bytes = self._answered(nbytes, self._answer, values, payload)
        return answer
