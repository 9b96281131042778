"""The steady exchange: a gradient of the whole model for the whole model, over and over.

Most messages of a worker are equal but for a few numbers. After one such exchange on the general
path (`aiops.client.requests`), there is a template of both headers: the next push is packed from
the one, and an answer that matches the other needs no decoding. ::

    buffers = steady.begin(params, gradients)    # None: this one takes the general path
    ...send them...; received = recv_into(steady.room)
    receipt = steady.finish(received)                # None: it was no such answer
    if receipt is None:                          # the same push, as a request that is under way
        request, unsent, rest = session.hand_over(steady, sent, received)

It is a short path through the same state, not a state of its own. Ids, sequence numbers, traffic
and ledger are those of the session; every byte that is sent is what the general path would have
sent. So the exchange can be handed over at any time (after an error, a ping, half an answer, a lost
connection): the push becomes a request with the numbers that it was sent under, its unsent bytes
are sent, and the bytes that have come are parsed. Nothing is lost, and nothing is applied twice.

A gradient that travels coded is encoded when its exchange begins, into a region that lies behind
the header as a raw one would (`aiops.client.coded_gradient`).

A client that fetches coded is answered by increments (`aiops.client.steady_increments`).

An answer of at most `ROOM` bytes is received beside the parameters, and copied when it is all
there; a larger one has its header compared first, and is then received where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.coded_gradient import CodedGradient
from aiops.client.coding import Encoded
from aiops.client.compiled_forms import CompiledExchange, Forms
from aiops.client.encode_push import parts_of
from aiops.client.handover import without
from aiops.client.params import Leased, Params
from aiops.client.pending import PendingRequests
from aiops.client.posting import Posting
from aiops.client.receive_params import ParameterSink
from aiops.client.request_kinds import Means, PushRequest, Receipt, Request
from aiops.client.server_info import ServerInfo
from aiops.codecs.raw import NAME as RAW
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout
from aiops.model.parts import LARGEST as LARGEST_INTEGER
from aiops.wire.connection import Buffer
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, Message, Push
from aiops.wire.sinks import Sink
from aiops.wire.template import Path, framed, template_of

ROOM: Final = 64 * 1024
"""The largest answer, in bytes, that is received beside the parameters."""

LARGEST: Final = 1 << 20
"""The largest model in bytes: in a larger one's exchange the Python calls take no notable time."""

_VIEWS: Final = 256
"""The most tensors whose gradients are sent from arrays of their own."""

_PUSH: Sequence[Path] = (("id",), ("seq",), ("have",), ("parts", 0, 4))
_ACK: Sequence[Path] = (
    *(("id",), ("version",), ("current",), ("parts", 0, 4), ("staleness",), ("mean_staleness",)),
)
_STATISTICS: Sequence[Path] = (("vbar",), ("vbars",))


def steady_push(
    request: Request, answer: Message, sink: Sink | None, info: ServerInfo
) -> Push | None:
    """Return the push of an exchange that the next ones may be like; None if it was a special one.

    Parameters
    ----------
    request, answer, sink
        A request on the general path, the answer to it, and the sink of that.
    info
        The server, which holds the whole model.
    """
    push = request.sent if type(request) is PushRequest else None
    layout = info.layout
    if (
        push is None
        or layout is None
        or not (type(answer) is Ack and answer.used and not answer.gate)
        or not (info.increments or _brings_all(answer, sink, layout))
        or (push.count != 1 or push.lr_factors or push.wants)
        or (push.have < 0 or info.placement is not None or len(push.parts) < 1)
        or (info.coding is None and push.parts[0][:4] != (0, layout.nbytes, RAW, layout.nbytes))
        or info.plan.get("routine", "direct") != "direct"
        or layout.nbytes > LARGEST
    ):
        return None
    return push


def _brings_all(answer: Ack, sink: Sink | None, layout: Layout) -> bool:
    """Return whether an answer is the whole model, raw."""
    return (
        isinstance(sink, ParameterSink) and sink.whole and len(answer.parts) == 1
    ) and answer.parts[0][:4] == (0, layout.nbytes, RAW, layout.nbytes)


def coded_gradient(push: Push, info: ServerInfo) -> CodedGradient | None:
    """Return what gradients like that of a `steady_push` are encoded into; None: they are raw.

    Raises
    ------
    ValueError
        When its parts are coded in a way that is not for steady exchanges.
    """
    layout, coding = info.known_layout, info.coding
    if coding is None or _is_raw(push, layout):
        return None
    found = CodedGradient.of(layout, push.parts, coding)
    if found is None:
        raise ValueError("codecs whose payloads differ in length from push to push")
    return found


def _is_raw(push: Push, layout: Layout) -> bool:
    return push.parts[0][:4] == (0, layout.nbytes, RAW, layout.nbytes)


class SteadyExchange:
    """The steady exchange of one connection.

    With more workers than processors an exchange finds little of its memory in the caches, so this
    touches few objects. Parameters that are as the last exchange left them are known by identity,
    and exchanges are counted as one number, which `settle` enters in the accounts.

    Parameters
    ----------
    layout
        The model.
    push, ack
        A push and its acknowledgement, as they were sent on the general path; the latter's header
        as it came.
    coded
        What its gradients are encoded into; None: they travel raw.
    connection
        This client's id, and the epoch of the connection.
    pending
        The session's requests, whose numbers are used.
    ledger
        The session's account.

    Attributes
    ----------
    room
        The buffer for an answer, or for its header.
    answer_size
        The length of an answer, in bytes.
    push_size
        The length of a push, in bytes.
    direct
        True if payloads are received in the parameters, once the header is known to match.
    lends
        True if another way than a mailbox would lend payloads, which is quicker than sending them.
    posting
        The mailbox by which it goes, once there is one; else None.
    failed
        True after an exchange that did not match the templates: others are to be made.
    unsettled
        The number of exchanges that the accounts do not contain yet.

    Raises
    ------
    ValueError
        When one of them has no fields of constant width.
    """

    answer_size: int
    direct: bool
    failed: bool
    lends: bool
    room: memoryview
    unsettled: int

    __slots__ = (
        *("_ack", "_age", "_coded", "_connection", "_constants", "_gradients", "_has_vbar"),
        *("_ages", "_has_vbars"),
        *("_have", "_id", "_layout", "_ledger", "_nbytes", "_pack", "_params", "_parts"),
        *("_payload", "_pending", "_pick", "_push", "_read", "_seq", "_tensors", "_traffic"),
        *("_unpack", "_usual", "_whole", "answer_size", "direct", "failed", "push_size", "room"),
        *("lends", "posting", "unsettled"),
    )

    def __init__(
        self,
        layout: Layout,
        push: Push,
        ack: bytes,
        connection: tuple[str, int],
        pending: PendingRequests,
        ledger: Ledger,
        coded: CodedGradient | None = None,
    ) -> None:
        self._pending, self._ledger, self._traffic = pending, ledger, ledger.traffic
        self._layout, nbytes = layout, layout.nbytes
        self._coded, more = coded, [("parts", at, 4) for at in range(1, len(push.parts))]
        self._push, _others = template_of(encode(push), push.parts[0].nbytes, (*_PUSH, *more))
        if any(bounds != (0, LARGEST_INTEGER) for bounds in self._push.bounds):
            raise ValueError("a push without room for all later numbers")
        # What every exchange needs, with fewer steps than by way of the templates:
        self._pack, self._constants = self._push.pack, self._push.constants
        self._tensors = tuple((t.name, t.dtype, t.shape) for t in layout.tensors)
        self._ages = len(push.parts)  # times that the version stands in a push, last of its numbers
        self._connection = connection
        self._nbytes, self._parts = nbytes, push.parts
        self.push_size: int = self._push.size + (nbytes if coded is None else coded.whole.nbytes)
        self.failed = self.lends = False
        self.posting: Posting | None = None
        self._params: Params | None = None  # those of the exchange under way, with
        self._gradients: Mapping[str, Array] = {}
        self._usual: Params | None = None  # those of the last exchange, with what they held then:
        self._have = self._age = 0
        self._id = self._seq = 0  # the numbers of the exchange under way, or of the last one
        self.unsettled = 0
        self._expect(ack)

    def _expect(self, ack: bytes) -> None:
        """Learn what is answered from the header of an answer."""
        self._ack, found = template_of(ack, self._nbytes, _ACK, _STATISTICS)
        self._has_vbar, self._has_vbars = (path in found for path in _STATISTICS)
        if self._has_vbars and not self._has_vbar:
            raise ValueError("statistics by tensor, and none of the model")
        if not all(most for _least, most in self._ack.bounds[:5]):
            raise ValueError("integers of a form that this client does not write")
        self._unpack, self._read, self._pick = self._ack.unpack, self._ack.constants, self._ack.pick
        self.answer_size = self._ack.size + self._nbytes
        self.direct = self.answer_size > ROOM  # received where it belongs
        self._whole = memoryview(bytearray(self._ack.size if self.direct else self.answer_size))
        self.room = self._whole
        self._payload = self._whole[self._ack.size :]

    def still(self, push: Push, ack: bytes) -> bool:
        """Return whether an exchange on the general path matches; if so, the templates stay."""
        alike = [part[:4] for part in push.parts] == [part[:4] for part in self._parts]
        self.failed = not alike or not self._knows(ack)
        return not self.failed

    def _knows(self, ack: bytes) -> bool:
        """Return whether the header of an answer has the form that is expected."""
        return self._ack.values(framed(ack, self._nbytes)) is not None

    def begin(self, params: Params, gradients: Mapping[str, Array]) -> list[Buffer] | None:
        """Begin to push gradients computed at ``params``, which are then to be brought up to date.

        Returns what to send; None if this exchange does not fit, and nothing has happened then.
        """
        if (
            (params is not self._usual or params.connection is not self._connection)
            or (params.level is not self._have or params.age is not self._age)
        ) and not self._takes(params):
            return None
        views: list[Any] = [b""]
        if type(gradients) is dict and len(gradients) == len(self._tensors) <= _VIEWS:
            for name, dtype, shape in self._tensors:
                array = gradients.get(name)
                if type(array) is not np.ndarray or (
                    (array.dtype is not dtype and array.dtype != dtype)
                    or (array.shape != shape or not array.flags.c_contiguous)
                ):
                    return None
                views.append(array)
        elif type(gradients) is Params and gradients.layout is self._layout:
            views.append(gradients.arena.data)
        else:
            return None
        if self._coded is not None:
            return self._begin_coded(self._coded, params, gradients, views[1:])
        if not self.unsettled:  # others may have used numbers since
            self._id, self._seq = self._pending.next_id - 1, self._pending.seq
        self._id, self._seq = id, seq = self._id + 1, self._seq + 1
        first, second, third, fourth, last = self._constants
        age = self._age
        views[0] = self._pack(first, id, second, seq, third, self._have, fourth, age, last)
        self._params, self._gradients = params, gradients
        return views

    def _begin_coded(
        self,
        coded: CodedGradient,
        params: Params,
        gradients: Mapping[str, Array],
        arrays: list[Array],
    ) -> list[Buffer] | None:
        """Begin to push gradients that fit, coded, as `begin` does."""
        arrays = arrays if type(gradients) is dict else list(gradients.values())
        try:
            if not coded.encode(arrays):
                return None
            if not self.unsettled:
                self._id, self._seq = self._pending.next_id - 1, self._pending.seq
            id, seq = self._id + 1, self._seq + 1
            head = self._push.filled((id, seq, self._have, *[self._age] * self._ages))
            self._id, self._seq, self._params, self._gradients = id, seq, params, gradients
            coded.begun = False
        except BaseException:  # such as Ctrl-C: nothing is sent
            coded.take_back()
            self._params = None
            raise
        return [head, coded.region.data]

    def _takes(self, params: Params) -> bool:
        """Return whether gradients computed at these parameters fit, and prepare to push them."""
        have, age = params.level, params.age
        if (
            (have is None or age is None or have < 0)
            or (type(params) not in (Params, Leased) or params.layout is not self._layout)
            or params.connection != self._connection
        ):
            return False
        if not self.lends:
            params.own()
        params.connection = self._connection  # equal before, and now known by identity
        self._usual, self._have, self._age = params, have, age
        return True

    def carry(
        self,
        compiled: CompiledExchange,
        params: Params,
        gradients: Mapping[str, Array],
        look: int,
    ) -> Receipt | None:
        """Exchange by compiled code, which does `begin`, `finish` and all between.

        None: this one does not fit, and nothing has happened; or, if it is `under_way`, the general
        path is to go on with it.

        Parameters
        ----------
        compiled
            Made of `forms`.
        params, gradients
            As of `begin`.
        look
            Nanoseconds to look for an answer before sleeping.
        """
        given = self._next(params, gradients)
        if given is None:
            return None
        numbers = self._id, self._seq, self._have, self._age
        views = self.lends and isinstance(params, Leased)
        found = compiled.run(given, None if views else params.arena.data, *numbers, look)
        if found is None or isinstance(found, bool):
            if found is False:
                self._take_number_back()
            return None
        if self.posting is not None:
            self.posting.bring(params, self._id)
        return self._took(found, params)

    def push_by(self, compiled: CompiledExchange, params: Params, gradients: Any) -> bool:
        """Begin an exchange by compiled code, which sends what a socket takes without waiting.

        False: this one does not fit, and nothing has happened. Else ``compiled.sent`` says how many
        bytes have been sent; `unsent` are the others.
        """
        given = self._next(params, gradients)
        if given is None:
            return False
        if not compiled.push(given, self._id, self._seq, self._have, self._age):
            self._take_number_back()
            return False
        return True

    def unsent(self, sent: int) -> list[Buffer]:
        """Return what of the push under way is behind its first ``sent`` bytes."""
        head = self._push.filled((self._id, self._seq, self._have, *[self._age] * self._ages))
        given: Any = self._gradients
        if self._coded is not None:
            arrays = [self._coded.region]
        elif type(given) is Params:
            arrays = [given.arena.data]
        else:
            arrays = [given[name] for name, _dtype, _shape in self._tensors]
        return without([head, *(array.reshape(-1).view(np.uint8).data for array in arrays)], sent)

    def pull_by(self, compiled: CompiledExchange, look: int, nap: int) -> Receipt | bool | None:
        """Finish an exchange by compiled code, if the answer comes in time (`pull`).

        None: it has not all come. False: it is another one.
        """
        params = self._params
        if params is None:
            return False
        found = compiled.pull(params.arena.data, self._id, look, nap)
        if found is None or isinstance(found, bool):
            return found
        return self._took(found, params)

    def _next(self, params: Params, gradients: Mapping[str, Array]) -> Any:
        """Number an exchange by compiled code; return what is pushed. None: it does not fit."""
        if (
            (params is not self._usual or params.connection is not self._connection)
            or (params.level is not self._have or params.age is not self._age)
        ) and not self._takes(params):
            return None
        given: Any = gradients
        if type(gradients) is Params and gradients.layout is self._layout:
            given = gradients.arena.data
        elif type(gradients) is not dict:
            return None
        if not self.unsettled:  # others may have used numbers since
            self._id, self._seq = self._pending.next_id - 1, self._pending.seq
        self._id, self._seq = self._id + 1, self._seq + 1
        self._params, self._gradients = params, gradients
        if self.direct:
            self._payload = params.arena.data.data
        return given

    def _take_number_back(self) -> None:
        """End an exchange of which nothing has been sent."""
        self._id, self._seq, self._params = self._id - 1, self._seq - 1, None

    def _took(self, found: tuple[Any, ...], params: Params) -> Receipt:
        """Take the values of an answer whose parameters are in their place."""
        _id, version, current, age, staleness, mean, *statistics = found
        params.level = self._have = current
        params.age = self._age = age
        self._params = None
        self.unsettled += 1
        if not statistics:
            return Receipt(version, staleness, mean, None, {})
        vbars = Means(self._layout, statistics[1]) if self._has_vbars else {}
        return Receipt(version, staleness, mean, statistics[0], vbars)

    @property
    def forms(self) -> Forms:
        """The messages of this exchange, for compiled code."""
        return Forms(self._push, self._ack, self.room, self._nbytes, self._tensors, self._coded)

    @property
    def gradient_room(self) -> Arena | None:
        """Room for a gradient that is posted without a copy; None: there is none."""
        return self.posting.room if self.posting is not None and self._coded is None else None

    @property
    def seq(self) -> int:
        """The sequence number of the exchange under way, or of the last one; 0: of none yet."""
        return self._seq

    @property
    def params(self) -> Params | None:
        """The parameters of the exchange that is under way."""
        return self._params

    @property
    def under_way(self) -> bool:
        """True while an exchange has begun, and is not over."""
        return self._params is not None

    def rest(self, received: int) -> memoryview | None:
        """Return the buffer for the rest of an answer of which some bytes have been received.

        None if that is not an answer that can be finished here, or that is not known yet.
        """
        head, params = self._ack.size, self._params
        if params is None or received < head:
            return None
        found = self._ack.values(bytes(self._whole[:head]))
        if found is None or not self._permits(found):
            return None
        if self.direct:
            params.now_at(-1)  # a mixture, until all has come
            self._payload = params.arena.data.data
        return self._payload[received - head :]

    def finish(self, received: int) -> Receipt | None:
        """Take an answer, once its ``received`` bytes are all there; None if it does not match."""
        params, had = self._params, self._have
        if received != self.answer_size or params is None:
            return None
        pieces = self._unpack(self._whole)  # `Template.values` in line
        if pieces[::2] != self._read:
            return None
        found = self._pick(pieces)
        id, version, current, age, staleness, mean = found[:6]
        # Nearly always the model is a later one.
        if not (
            (id == self._id and staleness <= version <= current and had <= current)
            and (current <= LARGEST_INTEGER and self._age <= age <= LARGEST_INTEGER)
            and (mean - mean == 0.0 and not self._has_vbar)
        ) and not self._permits(found):
            return None
        if not self.direct:
            params.arena.data.data[:] = self._payload
        params.level = self._have = current
        params.age = self._age = age
        self._params = None
        self.unsettled += 1
        if not self._has_vbar:
            return Receipt(version, staleness, mean, None, {})
        vbars = Means(self._layout, found[7]) if self._has_vbars else {}
        return Receipt(version, staleness, mean, found[6], vbars)

    def _permits(self, found: tuple[Any, ...]) -> bool:
        """Return whether the fields of an answer are what an answer may have."""
        return (
            (found[0] == self._id and max(found[1:5]) <= LARGEST_INTEGER)
            and found[5] - found[5] == 0.0  # it is finite
            and not (self._has_vbar and found[6] - found[6] != 0.0)
        )

    def settle(self) -> None:
        """Enter the exchanges since the last call in the accounts."""
        count, self.unsettled = self.unsettled, 0
        if not count:
            return
        last = self._seq - (self._params is not None)  # without the one under way
        whole = None if self._coded is None else self._coded.whole
        between, region = (0, self._nbytes) if whole is None else (whole.between, whole.nbytes)
        self._account(("push", self._push.size + between, region - between), last, count)
        self._pending.answered += count
        self._pending.next_id += count
        seq, acknowledged = self._pending.seq, self._pending.acknowledged
        if acknowledged.runs and acknowledged.runs[-1][1] == seq:  # nearly always
            acknowledged.runs[-1][1] = seq + count
        else:
            acknowledged.add(seq + 1, seq + count)
        self._pending.seq = seq + count

    def _account(self, push: tuple[str, int, int], last: int, count: int) -> None:
        """Enter exchanges in the accounts of bytes.

        ``push``: as of `Traffic.exchanged`. ``last``: the sequence number of the last.
        """
        self._traffic.exchanged(push, ("ack", self._ack.size, self._nbytes), count)
        self._ledger.exchanged(last, True, self._parts, count)

    def as_request(self) -> tuple[PushRequest, int]:
        """Return the push under way as a request, with its id; `end` is due when it is pending."""
        params = self._params
        if params is None:
            raise ValueError("no exchange is under way")
        self.settle()
        self._pending.next_id, self._pending.seq = self._id + 1, self._seq  # used up
        self._pending.model_seq = self._seq
        params.level = self._have
        encoded: Encoded = []
        if self._coded is None:
            parts, payloads = parts_of(self._layout, self._gradients, self._age)
        else:
            parts, payloads, encoded = self._coded.request(self._age)
        push = PushRequest(parts, payloads, params, None, params.connection, self._have, 1)
        push.seq, push.encoded = self._seq, encoded
        return push, self._id

    def end(self, received: int) -> list[memoryview]:
        """End the exchange under way; return the ``received`` bytes of its answer."""
        params, head = self._params, self._ack.size
        self._params, self._gradients, self.failed = None, {}, True
        if params is None or not self.direct or received <= head:
            return [self._whole[:received]]
        params.now_at(-1)  # a mixture, until all has come
        return [self._whole, self._payload[: received - head]]
