"""The coded answers of steady exchanges: increments of the delta replica, sent at once.

`aiops.engine.delta_replies` has an answer wait for its turn in the update queue, where the replica
is brought up to the model. Behind a steady exchange's update nothing is queued, so both are done in
the same call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiops.bandwidth.byte_accounting import Ledger
from aiops.codecs.block_codec import BlockCodec
from aiops.codecs.raw import NAME as RAW
from aiops.compiled.loading import core
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.membership import Acknowledged
from aiops.engine.update_queue import UpdateQueue
from aiops.kernels import numba_pending, resolve
from aiops.model.layout import Ints
from aiops.model.parts import Parts
from aiops.wire.connection import Connection
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack
from aiops.wire.template import Path, slots

if TYPE_CHECKING:
    from aiops.compiled._core import Increments

_NUMBERS: tuple[Path, ...] = (
    *(("id",), ("version",), ("current",), ("staleness",), ("mean_staleness",)),
)
_STATISTICS: tuple[Path, ...] = ("vbar",), ("vbars",)


class CodedAnswers:
    """The coded answers of one server's steady exchanges.

    Parameters
    ----------
    replies
        The delta replica, and who waits for it.
    updates
        The engine's updates, among which steps of the replica are numbered.
    """

    def __init__(self, replies: DeltaReplies, updates: UpdateQueue) -> None:
        self.replies, self._updates = replies, updates
        self._increments: Increments | None = None

    @property
    def may_follow(self) -> bool:
        """True if no answer waits for the replica."""
        return not self.replies.waiting

    def is_ready(self, backend: str) -> bool:
        """Return whether no codec has to be compiled before `compiled` can give what it may.

        ``backend``: the requested one.
        """
        if numba_pending():
            return False
        codecs = [each for _, each in self.replies.replica.pieces if isinstance(each, BlockCodec)]
        return all(each.entered() for each in codecs) or resolve(backend) == "numpy"

    def follow(self, have: int) -> Ints | None:
        """Bring the replica up to the model after an update, if it is too far behind.

        Parameters and result as of `DeltaReplies.follow`; a step takes the next ticket.
        """
        results = self.replies.follow(have)
        if results is not None:
            self._updates.tickets += 1
        return results

    def answer(
        self,
        wire: Connection,
        ledger: Ledger,
        nbytes: int,
        id: int,
        have: int,
        said: Acknowledged,
    ) -> bytes:
        """Count the push that `Connection.match` found, and its answer; return the answer.

        Parameters
        ----------
        wire, ledger, nbytes
            The connection, its client's account, and the argument of `match`.
        id, have
            Of the push.
        said
            The fields of its acknowledgement.
        """
        number, used, staleness, mean, vbar, vbars, _why = said
        ack = Ack(id, number, number, used, staleness, mean, vbar, vbars)
        ack, payloads = self.replies.answer_at_once(ack, have)
        wire.took_expected(nbytes)
        ledger.brought(parts_alike(ack.parts))
        if self._increments is not None:
            self._learn(self._increments, ack, have)
        return b"".join(wire.send(ack, payloads))

    # ------------------------------------------------------------ compiled code

    def compiled(self) -> Increments | None:
        """Return the steps of the replica, and the forms of answers, in compiled code.

        None: there is none, or a loop of a codec is not compiled, or has no entries.
        """
        library, replica = core(), self.replies.replica
        if self._increments is not None or library is None:
            return self._increments
        places = {piece: (begin, nbytes) for piece, _codec, begin, nbytes in replica.places}
        pieces = []
        for number, (tensor, codec) in enumerate(replica.pieces):
            place = tensor.offset, tensor.offset + tensor.nbytes
            if codec is None:
                pieces.append((0, *place, 0, 0, 0))
                continue
            entries = codec.entered() if isinstance(codec, BlockCodec) else None
            if entries is None or not isinstance(codec, BlockCodec):
                return None
            pieces.append((entries.follow, *place, *places[number], codec.second(tensor.size)))
        try:
            made: Increments = library.Increments(
                tuple(pieces),
                replica.layout.nbytes,
                sum(nbytes for _begin, nbytes in places.values()),
            )
        except ValueError:  # a model of more pieces than are usual
            return None
        self._increments = replica.steps = made
        return made

    def _learn(self, increments: Increments, ack: Ack, have: int) -> None:
        """Teach compiled code the form of an answer, if it is made of increments in a usual way."""
        replica = self.replies.replica
        regions = replica.regions_since(have)
        if regions is None or increments.knows(len(regions)):
            return
        if replica.current.level is None:  # its neighbours without a codec are parts of their own
            return
        places = {replica.pieces[place[0]][0].offset: place[2:] for place in replica.places}
        segments, used = [], dict.fromkeys(places, 0)
        for part in ack.parts:
            if part.codec == RAW:
                segments.append((-1, part.start, part.nbytes))
                continue
            segments.append((used[part.start], *places[part.start]))
            used[part.start] += 1
        header = encode(ack)
        found = slots(header)
        numbers = _NUMBERS if ack.vbar is None else (*_NUMBERS, *_STATISTICS)
        ages: list[Path] = [("parts", index, 4) for index in range(len(ack.parts))]
        if any(path not in found or found[path].code != "Q" for path in ages):
            return  # more parts than have versions of constant width
        try:
            increments.learn(
                len(regions),
                b"\xce" + len(header).to_bytes(4) + header,
                tuple(found[path].begin for path in numbers),
                tuple(found[path].begin for path in ages),
                tuple(segments),
                len(ack.vbars),
                parts_alike(ack.parts),
            )
        except ValueError:  # an answer of more parts than are usual
            return


def parts_alike(parts: Parts) -> Parts:
    """Return the parts of an answer as those of all answers that differ in the version alone."""
    return tuple(part._replace(version=0) for part in parts)
