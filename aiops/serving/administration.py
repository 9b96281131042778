"""Carry out what administrators ask of a running server; the acceptor has checked that they may."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from aiops.engine.engine import Engine
from aiops.engine.events import Event, Paused
from aiops.errors import Kicked, NotReady, Refused, nearest
from aiops.serving.acceptor import Acceptor
from aiops.serving.run_state import RunState
from aiops.wire.admin_messages import (
    Done,
    Drain,
    Kick,
    Pause,
    Resume,
    RollbackTo,
    TakeSnapshot,
)
from aiops.wire.messages import Error, Hello, Message

_log = logging.getLogger("aiops.server")

_NO_STATE = "the server keeps no state (--state DIR), so there are no snapshots"


class Administration:
    """The requests by which administrators direct one server.

    Parameters
    ----------
    engine, connections, run_state
        The server's.
    now
        Its clock.
    post
        Handles an event.
    drain
        Has the server end.
    roll_back
        Has it begin again from the snapshot that has been noted; takes the reason, a sentence.
    send_away
        Has the followers of the server take a client no more, by its id and for a reason.
    """

    def __init__(
        self,
        engine: Engine,
        connections: Acceptor,
        run_state: RunState,
        now: Callable[[], float],
        post: Callable[[Event], None],
        drain: Callable[[], None],
        roll_back: Callable[[str], None],
        send_away: Callable[[str, str], None],
    ) -> None:
        self._engine, self._connections, self._run_state = engine, connections, run_state
        self._now, self._post, self._drain, self._roll_back = now, post, drain, roll_back
        self._send_away = send_away

    def handle(self, number: int, message: Message) -> None:
        """Carry out a request of `ADMIN_REQUESTS` from a connection, and answer it."""
        try:
            done = self._carry_out(number, message)
        except Refused as fault:
            self._refuse(number, message.id, fault)
            return
        if done is not None:
            self.answer(number, done)
        if isinstance(message, Drain):
            self._drain()
        elif isinstance(message, RollbackTo):
            by = self._connections.access.name_of(number)
            self._roll_back(f"{by} has the server go back to version {message.version:,}")

    def _carry_out(self, number: int, message: Message) -> Done | None:
        """Return the answer; None: it comes later."""
        by, version, count = self._connections.access.name_of(number), self._engine.version, 0
        match message:
            case Kick():
                count = self._kick(message, by)
            case Pause():
                self._pause(message, by)
            case Resume():
                if self._engine.closure.paused:
                    self._post(Paused(self._now(), ""))
            case TakeSnapshot():
                self._take_snapshot(number, message.id, by)
                return None
            case RollbackTo():
                version = self._note_rollback(message.version)
            case Drain():
                _log.warning("asked to end by %s", by)
        return Done(message.id, version, count)

    def answer(self, number: int, message: Message) -> None:
        """Send a connection an answer, if it is still there."""
        peer = self._connections.peers.get(number)
        if peer is not None and peer.link.wire.state != "closed":
            peer.link.send(peer.link.wire.send(message))

    def _refuse(self, number: int, id: int, fault: Refused) -> None:
        self.answer(number, Error(id, fault.code, str(fault), fault.details, False))

    # ------------------------------------------------------------ requests

    def _kick(self, message: Kick, by: str) -> int:
        """End the connections of a client; return how many there were."""
        connections, found = self._connections, self._peers_of(message.client)
        if not found:
            hellos = (peer.handshake.hello for peer in connections.peers.values())
            names = {hello.name for hello in hellos if isinstance(hello, Hello)}
            raise Refused(
                f"no client {message.client!r} is connected; {nearest(message.client, names)}"
            )
        why = Kicked(f"this client was sent away by {_because(by, message.why)}")
        for number in found:
            peer = connections.peers[number]
            hello = peer.handshake.hello
            if isinstance(hello, Hello):
                connections.access.send_away(hello.client, why)
                self._send_away(hello.client, str(why))
            _log.warning("%s at %s: %s", message.client, peer.link.peer_name, why)
            connections.refuse_one(peer, why)
        return len(found)

    def _peers_of(self, client: str) -> list[int]:
        """Return the connections of the clients of a name, or of a worker's number as ``#7``."""
        peers = self._connections.peers
        if re.fullmatch(r"#\d{1,9}", client):
            wanted = int(client[1:])
            numbers = [m.peer for m in self._engine.membership if m.number == wanted]
            return [number for number in numbers if number in peers]
        found = []
        for number, peer in peers.items():
            hello = peer.handshake.hello
            if isinstance(hello, Hello) and peer.handshake.admitted and hello.name == client:
                found.append(number)
        return found

    def _pause(self, message: Pause, by: str) -> None:
        if "average" in self._engine.plan:
            raise Refused(
                "workers that average push nothing, so a pause would change nothing: drain the"
                " server instead"
            )
        self._post(Paused(self._now(), f"paused by {_because(by, message.why)}"))

    def kick(self, client: str, by: str) -> int:
        """End the connections of a client, as `Kick`; return how many there were.

        Raises
        ------
        Refused
            When there is none of this name or number.
        """
        return self._kick(Kick(0, client, ""), by)

    def _take_snapshot(self, number: int, id: int, by: str) -> None:
        def taken(version: int, why: str) -> None:
            if why:
                self._refuse(number, id, Refused(f"no snapshot was taken: {why}"))
            else:
                self.answer(number, Done(id, version))

        self.take_snapshot(by, taken)

    def take_snapshot(self, by: str, taken: Callable[[int, str], None]) -> None:
        """Take a snapshot that ``by`` asks for; call ``taken`` then.

        It is called with the snapshot's version, or why there is none.

        Raises
        ------
        Refused
            When there is nothing to take one of, or the server keeps no state.
        """
        if self._engine.training is None:
            raise NotReady("there is nothing to take a snapshot of: no worker has defined a model")
        if not self._run_state.take_snapshot(taken):
            raise Refused(f"{_NO_STATE}: start it with one, or have --save write the model")
        _log.info("a snapshot was asked for by %s", by)

    def _note_rollback(self, version: int) -> int:
        if not self._run_state.note_rollback(version):
            raise Refused(f"{_NO_STATE} to go back to: begin another run with --init")
        return version


def _because(by: str, why: str) -> str:
    return f"{by}: {why}" if why else by
