"""Workers that follow their client plan, driven over an inline engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiops.client.encode_push import parts_of
from aiops.client.lr_factors import LrFactors, in_order
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import Transfer, strategy_for
from aiops.model.layout import Array
from aiops.store.snapshots import Lease
from aiops.wire import messages
from aiops.wire.messages import Ack, Error, Message
from tests.inline import Inline

Gradient = Callable[[Any, np.random.Generator], dict[str, Array]]


class Hand:
    """One worker: its routine, and what it was told."""

    def __init__(self, inline: Inline, peer: int, client: str | None = None) -> None:
        self.inline, self.peer = inline, peer
        self.seq = self.steps = self.pushes = 0
        self.blocked = False
        self.refusals: list[Error] = []
        self.acks: list[Ack] = []
        inline.seqs[peer] = 0
        inline.listeners[peer] = self._hear
        inline.join(peer, client=client)
        store = inline.engine.store
        assert store is not None
        self.params = Params(store.layout)
        self._into: Params | None = self.params
        inline.receive(peer, messages.Fetch(1, -1))
        self._into = None
        self.strategy = strategy_for(inline.engine.plan, self.params)
        self.lr_factors: LrFactors = None

    @property
    def waits(self) -> bool:
        """Whether it may not compute now."""
        return self.blocked or (self.strategy.under_way is not None and self.strategy.waits)

    def step(self, gradient: Gradient, rng: np.random.Generator) -> None:
        """Compute a gradient, and do what the routine says."""
        assert not self.waits
        self.steps += 1
        self.strategy.apply(gradient(self.params, rng), self.lr_factors)
        self._go_on()

    def _go_on(self) -> None:
        self.blocked = self.strategy.due and self.strategy.under_way is not None
        if self.blocked:
            return
        transfer = self.strategy.transfer()
        if transfer is not None:
            self.send(transfer)

    def finish(self) -> None:
        """Push what is left, as a worker does that is closed."""
        if self.strategy.under_way is None:
            rest = self.strategy.rest()
            if rest is not None:
                self.send(rest)

    def send(self, transfer: Transfer) -> None:
        """Push or fetch."""
        self._into = transfer.into
        have = -1
        if transfer.arrays is None:
            self.inline.receive(self.peer, messages.Fetch(1, have))
            return
        parts, payloads = parts_of(self.params.layout, transfer.arrays, transfer.at.versions)
        data = b"".join(bytes(view) for views in payloads for view in views)
        self.seq += 1
        self.pushes += 1
        factors = in_order(transfer.lr_factors, self.params.layout, transfer.arrays)
        push = messages.Push(
            self.seq, self.seq, transfer.into is not None, have, parts, lr_factors=factors
        )
        self.inline.receive(self.peer, push, data)

    def _hear(self, message: Message, lease: Lease | None) -> None:
        if not isinstance(message, Ack | Error | messages.FetchedParams):
            return
        into = self._into
        if into is not None and lease is not None:
            into.arena.data[:] = lease.version.arena.data
            into.version, into.versions[:] = lease.version.number, lease.version.tensor_versions
        if not hasattr(self, "strategy"):
            return
        if isinstance(message, Error):
            self.refusals.append(message)
            self.strategy.failed()
            return
        receipt = None
        if isinstance(message, Ack):
            self.acks.append(message)
            receipt = Receipt(message.version, message.staleness, 0.0, None, {}, message.used)
        self.strategy.arrived(receipt)
        if self.blocked:
            self._go_on()


def crew_of(inline: Inline, size: int) -> list[Hand]:
    """Have so many workers join."""
    return [Hand(inline, peer) for peer in range(1, size + 1)]


def train(hands: list[Hand], steps: int, gradient: Gradient, seed: int = 0) -> None:
    """Let workers that may compute do so, in a random order."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        free = [hand for hand in hands if not hand.waits]
        assert free, "every worker waits"
        free[int(rng.integers(len(free)))].step(gradient, rng)
        hands[0].inline.release()
