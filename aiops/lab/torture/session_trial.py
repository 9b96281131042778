"""Hostile sessions against a simulated server, of which an honest worker has to get its steps.

The server's own code runs in virtual time, with all of its deadlines. Hostile peers connect, some
at once, and send what `draw_session` draws. Then all must be as if they had never been: the server
runs and has logged no error, the honest worker has made its steps, no buffer and no version is
held for peers that are gone, and the model is finite. What the server has said is the wire, and its
errors have the codes that are documented. A server with a token takes nothing from peers that do
not know it: there the model is what the honest worker made it, to the last bit.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from random import Random

from aiops.lab.torture.attack_trial import AttackTrial
from aiops.lab.torture.attack_variants import VARIANTS
from aiops.lab.torture.attacked import Attacked, AttackPlan, Door, draw_attack
from aiops.lab.torture.hostile_session import HostileSession, draw_session
from aiops.lab.torture.said import check_said
from aiops.net.environment import CURRENT_ENVIRONMENT

FRAMES = 40
"""The most frames of a session."""

_STAY = 100.0  # virtual seconds that a peer stays which is not dropped; longer than the deadlines


def draw_sessions(seed: int, names: tuple[str, ...] = VARIANTS) -> AttackPlan:
    """Return the plan of a seed."""
    rng = Random(f"sessions {seed}")
    plan = draw_attack(rng, seed, names)
    return replace(plan, peers=rng.choice((10, 30, 100)), together=rng.choice((1, 4, 20)))


class SessionTrial(AttackTrial):
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    async def attack(self, attacked: Attacked) -> None:
        """Have hostile peers come, some at once, while the honest worker makes steps."""
        plan, rng, doors = self.plan, self._rng, [*attacked.doors.values()]
        for left in range(plan.peers, 0, -plan.together):
            peers = [self._peer(rng.choice(doors)) for _ in range(min(left, plan.together))]
            self.result.sessions += len(peers)
            async with asyncio.TaskGroup() as group:
                for peer in peers:
                    group.create_task(peer)
                group.create_task(self.step(attacked))

    # -------------------------------------------------------------- hostile peers

    async def _peer(self, door: Door) -> None:
        session = draw_session(self._rng, door.target, FRAMES)
        peer = _HostilePeer(session.reads)
        with contextlib.suppress(OSError):
            dial = CURRENT_ENVIRONMENT.get().dial
            transport, _protocol = await dial(lambda: peer, door.host, door.port)
            await self._say(session, transport, peer)
        self.result.wrong += check_said(peer.said, self.result.answers)

    async def _say(
        self, session: HostileSession, transport: asyncio.Transport, peer: _HostilePeer
    ) -> None:
        for piece in session.pieces:
            if peer.lost.is_set():
                return
            transport.write(piece.data)
            self.result.sent += len(piece.data)
            self.result.frames += piece.frames
            await asyncio.sleep(piece.pause)
        match session.ending:
            case "close":
                transport.close()
            case "abort":
                transport.abort()
            case "eof":
                transport.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STAY):
                await peer.lost.wait()
        transport.abort()


class _HostilePeer(asyncio.Protocol):
    """The end of a hostile connection: it keeps what the server says.

    Parameters
    ----------
    reads
        Whether it reads.
    """

    def __init__(self, reads: bool) -> None:
        self.lost = asyncio.Event()
        self._reads, self.said = reads, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stop reading, if it does not read."""
        if not self._reads:
            transport.pause_reading()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.said += data

    def connection_lost(self, error: Exception | None) -> None:
        """Note it."""
        self.lost.set()
