"""Carry out a server's effects: send answers, run kernels, set timers."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from aiops.engine.events import (
    Applied,
    Apply,
    Drop,
    Effect,
    End,
    Event,
    LyingRows,
    Note,
    Order,
    Reply,
    Shares,
    Tick,
    WakeAt,
    Warm,
)
from aiops.model.layout import Ints
from aiops.model.parts import Parts
from aiops.net.environment import Environment
from aiops.net.update_thread import KernelRunner
from aiops.net.yielding import yielding
from aiops.serving.acceptor import Acceptor
from aiops.serving.shard_links import ShardLinks
from aiops.store.resources import Resources, unmeasured
from aiops.wire.connection import SMALL
from aiops.wire.messages import Message

_log = logging.getLogger("aiops.server")

_SOON = 1.0
"""Seconds within which kernels are ready if an earlier process has compiled them.

Until then the loop has priority (`yielding`). Compiling takes longer, and is not slowed down.
"""

_LONG = 3.0
"""Seconds after which who waits is told that kernels are being compiled."""


class EffectRunner:
    """Carries out the effects of one server's engine, and posts the events that follow.

    Parameters
    ----------
    loop, env
        The loop of timers, and the environment that makes the kernel runner.
    connections
        The connections that answers are sent on.
    post
        Handles an event: an update that is done, a timer that is due.
    failed
        Called when an update failed midway: the parameters cannot be trusted any more.
    end
        Ends the server, as the engine has decided.
    links
        The connections to followers; None: the server has none, and its engine no orders.
    machine
        Counts the time of updates and answers.

    Attributes
    ----------
    actions
        By type of effect, the function that carries it out and returns an immediate event or None.
    at_once
        Bytes: an update that touches no more is done on the event loop, at present.
    gentle
        Whether warming yields to the event loop; False while that waits for it.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "at_once")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Environment,
        connections: Acceptor,
        post: Callable[[Event], None],
        failed: Callable[[BaseException], None],
        end: Callable[[End], None],
        links: ShardLinks | None = None,
        machine: Resources | None = None,
    ) -> None:
        self._measure = measure = (machine or Resources()).measure
        self.actions: dict[type[Any], Callable[[Any], Event | None]] = {
            Reply: measure("send", self._reply),
            Apply: self._apply,
            Warm: self._warm_up,
            Drop: self._drop,
            WakeAt: self._wake_at,
            Note: self._note,
            Shares: self._share,
            End: end,
        }
        if links is not None:
            self.actions[Order] = links.send
        self._loop, self._now, self._post, self._failed = loop, env.now, post, failed
        self._connections, self._peers = connections, connections.peers
        self._make_runner = partial(env.kernel_runner, loop, failed)
        self._runner = self._make_runner()
        self._warmer: KernelRunner | None = None  # compiles kernels, while there are any to compile
        self._closing, self.gentle = False, True
        self._gentle_until = 0.0  # the time until which warming yields to the loop
        self._warmings = list[Warm]()  # under way; updates run on its thread meanwhile
        self._slow: asyncio.TimerHandle | None = None  # tells of them, if they take long
        self._begun_warming, self._told = 0.0, False
        self.at_once = self._runner.at_once
        self._tick: asyncio.TimerHandle | None = None

    @property
    def warm(self) -> bool:
        """True if no kernel is being warmed."""
        return not self._warmings

    def perform(self, effect: Effect) -> None:
        """Carry an effect out, and post the event that follows at once, if any."""
        event = self.actions[type(effect)](effect)
        if event is not None:
            self._post(event)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._tick is not None:
            self._tick.cancel()

    def close(self) -> None:
        """End the kernel runner and the warming, when their current work is finished."""
        self._runner.close()
        self._closing = True
        if self._warmer is not None:
            self._warmer.close()
        self.end_warming()

    def end_warming(self) -> None:
        """Omit the steps that have not begun, without waiting for the one that has."""
        self._closing = True
        if self._slow is not None:
            self._slow.cancel()
        for effect in self._warmings:  # or the process would have to go on without Numba
            effect.over()

    # ------------------------------------------------------------ answers

    def _reply(self, effect: Reply) -> None:
        if effect.rows is not None:
            self._reply_rows(effect, effect.rows)
            return
        peer = self._peers.get(effect.peer)
        lease = effect.lease
        if peer is None or peer.link.wire.state == "closed":
            if lease is not None:
                lease.release()
            return
        if lease is None:
            peer.link.send(peer.link.wire.send(effect.message))
            return
        parts = effect.message.parts  # type: ignore[attr-defined]
        nbytes = 0
        for part in parts:
            nbytes += part.nbytes
        if nbytes <= SMALL:  # it is copied at once
            peer.link.send(peer.link.wire.send(effect.message, lease.borrowed_views(parts)))
            lease.release()
            return
        if peer.lend(effect.message, lease):
            return
        payloads = lease.payloads(parts)
        buffers = peer.link.wire.send(effect.message, payloads)
        del payloads
        sent = lease if lease.in_use else None  # what is all coded holds no version
        lease.release()
        peer.link.send(buffers, sent)

    def _reply_rows(self, effect: Reply, rows: LyingRows) -> None:
        """Send rows from the buffer that they were gathered in."""
        peer = self._peers.get(effect.peer)
        if peer is None or peer.link.wire.state == "closed":
            rows.free()
            return
        view = rows.answer
        if len(view) <= SMALL:  # it is copied at once
            peer.link.send(peer.link.wire.send(effect.message, _only(effect.message, view)))
            rows.free()
            return
        whole = rows.answer_later()
        peer.rows = weakref.ref(whole)
        buffers = peer.link.wire.send(effect.message, _only(effect.message, whole.data))
        del whole
        peer.link.send(buffers)

    def _drop(self, effect: Drop) -> None:
        peer = self._peers.get(effect.peer)
        if peer is not None:
            _log.debug("closing %s: %s", peer.link.peer_name, effect.why)
            peer.link.close()

    # ------------------------------------------------------------ kernels

    def _apply(self, effect: Apply) -> Applied | None:
        if effect.job.cost > self.at_once:
            done = partial(self._applied, effect.ticket)
            self._runner.submit(self._measure("kernel", effect.run), effect.job.cost, done)
            return None
        run = effect.job.run
        try:
            sums = run() if self._measure is unmeasured else self._measure("kernel", run)()
        except BaseException as error:
            self._failed(error)
            return None
        return Applied(self._now(), effect.ticket, sums)

    def _applied(self, ticket: int, sums: Ints) -> None:
        self._post(Applied(self._now(), ticket, sums))

    def _warm_up(self, effect: Warm) -> None:
        """Run the steps on another thread than the updates, so that no update waits for them."""
        if self._warmer is None:
            self._warmer = self._make_runner()
        if not self._warmings:
            self._begun_warming = now = self._now()
            self._gentle_until = now + _SOON
            self._slow = self._loop.call_later(_LONG, self._tell)
        self._warmings.append(effect)
        self.at_once = -1.0
        for step in effect.steps:
            self._warmer.submit(partial(self._warm_step, step), 0, _nothing)
        self._warmer.submit(_nothing, 0, partial(self._warmed, effect))

    def _warm_step(self, step: Callable[[], object]) -> None:
        if self._closing:
            return
        gentle = self.gentle and self._now() < self._gentle_until
        with yielding() if gentle else nullcontext():
            step()

    def _warmed(self, effect: Warm, _done: None) -> None:
        effect.over()
        self._warmings.remove(effect)
        if not self._warmings:
            self.at_once = self._runner.at_once
            if self._warmer is not None:
                self._warmer.close()
                self._warmer = None
            self._all_warm()

    def _tell(self) -> None:
        """Say that kernels are being compiled."""
        if not self._closing:
            self._told = True
            _log.info(
                "kernels are being compiled, once for this machine: NumPy updates until they are"
                " ready, which takes several times as long"
            )

    def _all_warm(self) -> None:
        """Say so to who was told that they are not."""
        if self._slow is not None:
            self._slow.cancel()
        if self._told:
            _log.info("the kernels are ready, in %.1f s", self._now() - self._begun_warming)
        self._slow, self._told = None, False

    # ------------------------------------------------------------ the rest

    def _wake_at(self, effect: WakeAt) -> None:
        if self._tick is not None:
            self._tick.cancel()
        due = effect.time  # the clock may be behind it by a rounding error when the timer is not
        self._tick = self._loop.call_later(
            max(0.0, due - self._now()), lambda: self._post(Tick(max(due, self._now())))
        )

    def _share(self, effect: Shares) -> None:
        pacing = self._connections.pacing
        if pacing is not None:
            pacing.share(effect, self._peers)

    def _note(self, effect: Note) -> None:
        _log.warning("%s", effect.text)


def _nothing(_done: None = None) -> None:
    pass


def _only(message: Message, view: memoryview) -> list[list[memoryview]]:
    """Return the payloads of a message of which one part, at most, is sent from here."""
    parts: Parts = message.parts  # type: ignore[attr-defined]
    return [[view] if part.nbytes else [] for part in parts]
