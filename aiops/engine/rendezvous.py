"""Form the rounds in which workers average their models: the members, and the time of each.

A worker that is ready sends `join_round`, and is answered with a `round` that lists all workers
that were ready:

* as soon as all workers that average are ready; or
* a grace period after two were ready: a worker that is late misses the round, and is not waited for
  again until it is ready once more; or
* if a worker is ready alone, an interval and a grace period later: the round is its own.

So no worker waits for ever, and a straggler costs the others one grace period. The models
themselves are not sent to the server.

With a group size K those that are ready are cut into rings of at most K, as even as possible, each
of which is a round of its own. The members of each are drawn again each time, by a hash of the
seed, the round's number and the connection: so every worker meets every other one, a run replays,
and a server that goes on from its state draws what it would have drawn.

A worker that has taken no average yet is *new*. If a worker in the round is not new, the models of
new ones do not count: they receive the average of the others, and begin with that. If the workers
that are not new exist but are all away, a new one has nothing to begin with: it is answered with an
empty round, and asks again. Each ring of a group size has at least one worker that is not new; new
ones for which there is none are answered with an empty round too. Founders, when all are new, form
one ring. With a group size K it has K of them: the others are answered with an empty round, and
receive the model of the founders in the next rounds. So all begin with the same model, and no ring
is larger than K.

A round with a worker that trains on the server's data set is to be settled
(`aiops.engine.round_votes`). The examples of a round of one count only if no other worker averages,
or none has for ``patience`` seconds: else their effect would be lost with the one that has it.

Chunks are encoded if all members have the same mean, and none of them is new. Under a budget each
round has the codec that it needs (`aiops.bandwidth.round_spacing`), unless one is given.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiops.bandwidth.round_spacing import needed_codec
from aiops.codecs import checked_codec
from aiops.codecs.block_codec import BlockCodec
from aiops.common import urls
from aiops.engine.client_plan import AUTO
from aiops.engine.events import Effect, Note, Reply, WakeAt
from aiops.engine.round_votes import Count, RoundVotes
from aiops.errors import BadPush, Refused, Unavailable
from aiops.model.layout import Layout, compute_dtype
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import Members
from aiops.wire.messages import WIRE_NAME, Error
from aiops.wire.ring_messages import JoinRound, Round, SettleRound
from aiops.wire.ring_proofs import ring_name, ring_token

_CHOSEN = ("bf16", "int8")
"""The codecs that a budget chooses from, the gentlest first. fp16 takes as many bytes as bf16."""

_LOST = (
    "all workers that average are new, and examples have been seen: the workers that had their"
    " effect are gone, and the model with them unless they saved it; begin again with another name"
    " of the data set, or have these workers begin with a model that was saved"
)


@dataclass(slots=True)
class _Participant:
    """The state of a worker that averages; it has a request while it is ready."""

    request: JoinRound | None = None
    host: str = ""
    since: float = 0.0
    new: bool = True
    awaited: bool = True


class Rendezvous:
    """One server's rounds.

    Parameters
    ----------
    plan
        The ``average`` part of the algorithm's plan, or None when it has none.
    relay
        The ``host:port`` of a relay through which workers reach each other; empty: there is none.
    relay_token
        What the relay shares with this server.
    patience
        Seconds after which a worker that has not been ready is not counted on
        (``--worker-deadline``).
    """

    def __init__(
        self,
        plan: Mapping[str, Any] | None,
        relay: str = "",
        relay_token: str = "",
        patience: float = 300.0,
    ) -> None:
        self._averages = plan is not None
        self._patience, self._votes = patience, RoundVotes()
        self._relay, self._relay_token = relay, relay_token
        self._interval, self._grace = 0.0, 0.0  # seconds
        self._group, self._seed, self._codec, self._budget = 0, 0, "", 0.0
        self._lengths: list[tuple[str, int]] = []  # of `needed_codec`, once there is a model
        if plan is not None:
            self._interval, self._grace = float(plan["interval"]), float(plan["grace"])
            self._group, self._seed = int(plan["group"]), int(plan["seed"])
            self._codec, self._budget = str(plan["codec"]), float(plan["budget"])
        self._participants: dict[int, _Participant] = {}  # by connection
        self.stopping = False
        self.rounds = 0
        self._told = False  # that the model is lost; again once a worker has one

    def join(self, peer: int, message: JoinRound, layout: Layout, now: float) -> list[Effect]:
        """Take the request of a worker that is ready, or (port 0) no longer ready.

        Raises
        ------
        Refused
            When no round can have this worker.
        """
        participant = self._participants.get(peer)
        if message.port == 0:
            return [*_withdraw(peer, participant, message), *self._form(now)]
        if not self._averages:
            raise Refused("this server's policy averages no models: start it with --policy average")
        if self.stopping:
            raise _ending()
        self._check_address(peer, message)
        if message.digest != layout.digest:
            raise BadPush(
                "this worker's model is not the one that the others average: give all workers"
                " tensors of the same names, shapes and dtypes"
            )
        if not self._lengths:
            self._lengths = _lengths(layout)
        given_up = participant.request if participant is not None else None
        self._participants[peer] = _Participant(message, message.host, now, message.rounds == 0)
        dismissed: list[Effect] = [] if given_up is None else [_dismissal(peer, given_up)]
        return dismissed + self._votes.left(peer) + self._form(now)

    def settle(self, peer: int, message: SettleRound, count: Count) -> list[Effect]:
        """Take the report of a member of a round that is to be settled."""
        return self._votes.report(peer, message, count)

    def left(self, peer: int, now: float) -> list[Effect]:
        """Remove the worker of a connection that ended."""
        voided = self._votes.left(peer)
        return voided if self._participants.pop(peer, None) is None else voided + self._form(now)

    def resumed(self) -> None:
        """Begin without workers, in a server that was started again; none of their rounds goes on.

        All are gone at once, so that no round is formed of some when others leave.
        """
        self._participants.clear()
        self._votes.resumed()
        self.stopping = False

    def tick(self, now: float) -> list[Effect]:
        """Form a round if the workers that are ready have waited long enough."""
        return self._form(now)

    def stop(self) -> list[Effect]:
        """Form no more rounds, and refuse the workers that wait for one."""
        self.stopping = True
        fault, ready = _ending(), self._ready()
        self._participants.clear()
        return [
            Reply(peer, Error(request.id, fault.code, str(fault), {}, False))
            for peer, request in ready.items()
        ]

    def report(self) -> dict[str, int]:
        """Return the statistics."""
        return {
            "rounds": self.rounds,
            "averaging": len(self._participants),
            "ready": len(self._ready()),
        }

    def state(self) -> dict[str, Any]:
        """Return the rounds so far, and who is ready, as plain values, for `restore`."""
        return {
            "rounds": self.rounds,
            "votes": self._votes.state(),
            "lengths": [list(each) for each in self._lengths],
            "participants": [
                [peer, None if one.request is None else encode(one.request), *_numbers(one)]
                for peer, one in self._participants.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.rounds = state["rounds"]
        self._votes.restore(state["votes"])
        self._lengths = [(name, nbytes) for name, nbytes in state["lengths"]]
        self._participants.clear()
        for peer, request, *numbers in state["participants"]:
            message = None if request is None else decode(request)
            assert message is None or isinstance(message, JoinRound)
            self._participants[peer] = _Participant(message, *numbers)

    # ------------------------------------------------------------ inside

    def _check_address(self, peer: int, message: JoinRound) -> None:
        """Refuse an address that the others cannot reach: it would cost all of them every round."""
        host = message.host
        if message.port >= 1 << 16 or not _is_literal(host):
            raise Refused(
                f"{host!r}:{message.port} is no address to be reached at: it must be an IP address"
                " without a zone, and not that of all interfaces; pass host=..."
            )
        if self._relay:  # they meet there
            return
        for other, participant in self._participants.items():
            if other != peer and urls.is_loopback(participant.host) != urls.is_loopback(host):
                raise Refused(
                    f"this worker is to be reached at {host} and another one at"
                    f" {participant.host}, but a loopback address is reached from its own machine"
                    " only: pass host=... an address that all others can reach to the worker on"
                    " loopback, or start the server with --relay"
                )

    def _ready(self) -> dict[int, JoinRound]:
        """Return the requests of the workers that are ready, by connection."""
        return {
            peer: participant.request
            for peer, participant in sorted(self._participants.items())
            if participant.request is not None
        }

    def _form(self, now: float) -> list[Effect]:
        """Answer the workers that are ready, if it is time."""
        ready = self._ready()
        if not ready or self.stopping:
            return []
        settled = any(not self._participants[peer].new for peer in ready)
        only_new = not settled and any(
            not participant.new for participant in self._participants.values()
        )
        late = [s for s in self._participants.values() if s.request is None and s.awaited]
        if late or only_new:
            due = self._due([self._participants[peer].since for peer in ready], only_new)
            if now < due:
                return [WakeAt(due)]
        for participant in late:
            participant.awaited = False
        for peer in ready:
            self._participants[peer].request = None
        if only_new:
            return [_dismissal(peer, request) for peer, request in ready.items()]
        if not 0 < self._group < len(ready):
            return self._answer(ready, settled, now)
        rings, left_out = self._rings(list(ready))
        found: list[Effect] = [_dismissal(peer, ready[peer]) for peer in left_out]
        for ring in rings:
            found += self._answer({peer: ready[peer] for peer in ring}, settled, now)
        return found

    def _rings(self, ready: list[int]) -> tuple[list[list[int]], list[int]]:
        """Cut the workers that are ready into rings; return those, and new ones for which is none.

        Each ring has a worker that is not new: newcomers receive its model. If all are new there is
        one ring, whose mean the others receive later.
        """
        draw = (self._seed, self.rounds + 1)
        settled, new = (
            sorted(
                (peer for peer in ready if self._participants[peer].new is new),
                key=lambda peer: _lot(*draw, peer),
            )
            for new in (False, True)
        )
        count = min(-(-len(ready) // self._group), max(1, len(settled)))
        dealt = (settled + new)[: count * self._group]
        rings = [sorted(dealt[n::count]) for n in range(count)]
        return rings, (settled + new)[len(dealt) :]

    def _coding(self, ready: Mapping[int, JoinRound], members: Members) -> tuple[bytes, str]:
        """Return the name of the mean that all members have, and the codec; empty: no codec."""
        means = {request.have for request in ready.values()}
        codec = self._codec
        if codec == AUTO:
            given = self._budget, self._interval, self._lengths, len(members)
            codec = needed_codec(*given) if self._lengths else ""
        if codec and len(means) == 1 and all(counts for *_address, counts in members):
            base = means.pop()
            return base, codec if base else ""
        return b"", ""

    def _due(self, since: list[float], only_new: bool) -> float:
        """Return the time until which workers that are not ready are waited for."""
        first, *others = sorted(since)
        alone = only_new or not others
        return (first + self._interval if alone else others[0]) + self._grace

    def _answer(self, ready: dict[int, JoinRound], settled: bool, now: float) -> list[Effect]:
        """Send each worker of the round its rank, all members, and the secret."""
        self.rounds += 1
        members = tuple(
            (request.host, request.port, not settled or not self._participants[peer].new)
            for peer, request in ready.items()
        )
        secret = _secret(self.rounds, [request.nonce for request in ready.values()])
        token = b""
        if self._relay:
            token = ring_token(self._relay_token, ring_name(secret, self.rounds))
        for peer in ready:
            self._participants[peer].new = False  # its next request has rounds=0 if this one fails
        known = members, secret, self._relay, token
        base, codec = self._coding(ready, members)
        settles = any(request.settles for request in ready.values())
        if settles:
            self._votes.open(self.rounds, ready, counts=self._shared(ready, now))
        effects: list[Effect] = []
        if not settled and self._votes.counted and not self._told:
            effects.append(Note(_LOST))
        self._told = not settled
        return effects + [
            Reply(peer, Round(request.id, self.rounds, rank, *known, base, settles, codec))
            for rank, (peer, request) in enumerate(ready.items())
        ]

    def _shared(self, ready: Mapping[int, JoinRound], now: float) -> bool:
        """Return whether no other worker averages that could lack what this round has."""
        return len(ready) > 1 or all(
            peer in ready or now >= participant.since + self._patience
            for peer, participant in self._participants.items()
        )


def _lengths(layout: Layout) -> list[tuple[str, int]]:
    """Return the bytes of a model as it is, and in the codecs that a budget chooses from."""
    wide = size = 0
    for section in layout.sections:
        values = (section.stop - section.start) // section.dtype.itemsize
        if compute_dtype(section.dtype).itemsize == 8:
            wide += 8 * values  # in no codec
        else:
            size += values
    found = [("", wide + 4 * size)]
    for name in _CHOSEN:
        codec = checked_codec(name)
        assert issubclass(codec, BlockCodec), "chunks have a length that is known"
        found.append((name, wide + codec.length(size)))
    return found


def _numbers(one: _Participant) -> tuple[str, float, bool, bool]:
    return one.host, one.since, one.new, one.awaited


def _withdraw(peer: int, participant: _Participant | None, message: JoinRound) -> list[Effect]:
    """Take back a worker's request, if it has one; answer that and the message that does it."""
    found: list[Effect] = []
    if participant is not None:
        participant.awaited = False
        if participant.request is not None:
            found.append(_dismissal(peer, participant.request))
            participant.request = None
    return [*found, _dismissal(peer, message)]


def _dismissal(peer: int, request: JoinRound) -> Reply:
    """Return the answer of an empty round."""
    return Reply(peer, Round(request.id, 0, 0, (), b""))


def _is_literal(host: str) -> bool:
    """Return whether this is an IP address that means the same on every machine."""
    try:
        return "%" not in host and not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _lot(seed: int, number: int, peer: int) -> bytes:
    """Return the lot that a worker draws: the order of the lots deals workers to rings."""
    fields = (seed, number, peer)
    return hashlib.sha256(b"".join(field.to_bytes(8, "big") for field in fields)).digest()


def _secret(number: int, nonces: list[bytes]) -> bytes:
    """Return the secret of a round: only members can know it, since each has drawn a nonce."""
    framed = b"".join(len(nonce).to_bytes(4, "big") + nonce for nonce in nonces)
    return hashlib.sha256(WIRE_NAME + b" round" + number.to_bytes(8, "big") + framed).digest()


def _ending() -> Unavailable:
    return Unavailable("the server is shutting down: there are no more rounds")
