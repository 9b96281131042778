"""Mutated frames, handed to a server's connections in this process, as many as it can take.

The servers are those of `aiops.lab.torture.attacked`, in virtual time: their acceptors, transports,
wires and engines are those of every server. Only the network is left out: a `FedConnection` hands
bytes to the transport, as an event loop does with those of a socket. Right frames are drawn, or
recorded, once for each trial. Then one thing is changed in frame after frame
(`aiops.lab.torture.frame_templates`), and most that a server is sent are changed. Where workers may
make steady exchanges, half of the frames, or all, belong to such
(`aiops.lab.torture.steady_frames`).

A frame whose header is no message is refused by the decoder, which ends a connection. To make a new
connection takes as long as fifty refusals, so only one in 64 of such frames is also sent to the
server. All others are sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

from aiops.lab.torture.attack_trial import AttackTrial
from aiops.lab.torture.attack_variants import OF_FRAMES
from aiops.lab.torture.attacked import Attacked, AttackPlan, draw_attack
from aiops.lab.torture.changed_frames import DoorFrames, ScriptedSession
from aiops.lab.torture.steady_frames import SteadyFrames

FRAMES = 200_000
"""The changed frames of a trial."""

_SLOW = ("shards", "follower", "standby", "rendezvous")
"""Of several servers, and of sessions that are said in their order."""

_SESSIONS = 5  # with changes, one after the other, after which what is held is checked
_PAUSE = 0.5  # virtual seconds between batches: longer than the server's own timers


def draw_frames(seed: int, names: tuple[str, ...] = OF_FRAMES) -> AttackPlan:
    """Return the plan of a seed."""
    rng = Random(f"frames {seed}")
    plan = draw_attack(rng, seed, names)
    frames = FRAMES // (10 if plan.variant in _SLOW else 1)
    if plan.variant == "steady":  # each of some thousand bytes, and most of them are taken
        plan, frames = replace(plan, token=False), FRAMES // 10
    if plan.token and plan.variant != "roles":  # then each frame takes a connection
        frames = FRAMES // 40
    return replace(plan, peers=frames, together=rng.choice((1, 2, 8)))


class FrameTrial(AttackTrial):
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    """

    async def attack(self, attacked: Attacked) -> None:
        """Send the frames: changed ones of many peers, and whole sessions with changes."""
        plan, result, rng = self.plan, self.result, self._rng
        doors = list[DoorFrames | SteadyFrames]()
        for door in attacked.doors.values():
            if door.accept is not None and plan.variant != "steady":
                doors.append(DoorFrames(rng, door, result))
            if door.answered is not None:
                doors.append(SteadyFrames(rng, door, result))
        scripts = [
            ScriptedSession(rng, script, attacked.doors, result) for script in attacked.scripts
        ]
        while result.frames < plan.peers and not result.wrong:
            if scripts and rng.random() < (0.8 if plan.variant in _SLOW else 0.1):
                for _ in range(_SESSIONS):
                    await rng.choice(scripts).say()
                    await self.step(attacked)
            else:
                rng.choice(doors).send(plan.together)
            await asyncio.sleep(_PAUSE)
            await self.step(attacked)
            result.wrong += attacked.held()
