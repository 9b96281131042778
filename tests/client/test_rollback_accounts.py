"""What a client still holds of its gradients is right after its server has lost some of them.

A server is killed at any moment and comes back with any earlier state (as with ``--acks
applied``), while coded pushes are pipelined. Nothing that was pushed may be left out or count
twice: in the model that is left, in the encoders' rests (the error that is fed back), in what the
client was told.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.algorithms import find
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt, Request
from aiops.durable.generations import Generations
from aiops.engine.capture import Capture, capture
from aiops.engine.engine import Engine
from aiops.engine.events import Event, Joined, Options, Received, Reply
from aiops.engine.restore import restore
from aiops.errors import Restarted
from aiops.model.layout import Array
from aiops.state.directory import GenerationFile
from aiops.state.plain import pack, unpack
from aiops.wire.messages import Hello, Push, Reapply, Welcome
from tests.client.test_session import Pair, Server
from tests.seeds import examples
from tests.strategies import DETERMINISTIC

RUN, SIZE = "8c2f", 2048  # elements: small tensors are not coded
MODEL = {"w": np.zeros(SIZE, np.float32)}


@dataclass
class Left:
    """What is left of a server at a moment: its state, and what each push has changed."""

    found: Capture | None
    changes: dict[int, Array]
    generation: GenerationFile


class Rolling(Server):
    """A server of one run, which comes back with an earlier state of its own."""

    def __init__(self, policy: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(policy, settings={"lr": 1.0, **settings}, run=RUN, **options)
        self._made = policy, {"lr": 1.0, **settings}, Options(run=RUN, **options)
        self.changes: dict[int, Array] = {}  # by sequence number
        self.generation = GenerationFile(0).started(0, [])
        self._instrument()

    def _instrument(self) -> None:
        """Have welcomes say what is left, and note what each push changes."""
        handle = self.engine.handle

        def noted(event: Event) -> list[Any]:
            effects: list[Any] = [*handle(event)]
            if isinstance(event, Joined) and isinstance(event.hello, Hello):
                told = Generations(RUN, self.generation).told
                for index, effect in enumerate(effects):
                    if isinstance(effect, Reply) and isinstance(effect.message, Welcome):
                        welcome = told(effect.message, event.hello, "applied")
                        effects[index] = replace(effect, message=welcome)
            return effects

        self.engine.handle = noted  # type: ignore[assignment, method-assign]

    def _post(self, event: Event) -> None:
        store = self.engine.store
        before = None if store is None else self.model()
        super()._post(event)
        message = event.message if isinstance(event, Received) else None
        if before is not None and isinstance(message, Push | Reapply):
            change = before - self.model()
            if message.seq in self.changes:
                assert not change.any(), f"push {message.seq} has counted twice"
            elif change.any():
                self.changes[message.seq] = change

    def model(self) -> Array:
        """The parameters, as a copy."""
        store = self.engine.store
        assert store is not None
        return store.current.arena.views["w"].copy()

    def left(self) -> Left:
        """All that would be left if it were killed now, and had written its state."""
        found = capture(self.engine)
        found.copy()
        found.arrays = {name: array.copy() for name, array in found.arrays.items()}
        found.owners = unpack(pack(found.owners), "owners")
        found.release()
        return Left(found, dict(self.changes), self.generation)

    def come_back(self, left: Left) -> None:
        """Be killed, and started again from that state."""
        assert left.found is not None
        policy, settings, options = self._made
        self.engine = Engine(find(policy).make(settings), options)
        restore(self.engine, left.found, left.found.array)
        self.changes = dict(left.changes)
        self.generation = self.generation.started(0, [self.version])
        self._instrument()


@dataclass
class Account:
    """A push, and the gradient that was given for it; None: the last one again."""

    request: Request
    gradient: Array | None
    changed: Array | None = None  # what it had the server change, once it was answered


@dataclass
class World:
    """A client with pipelined pushes, and its server."""

    pair: Pair
    params: Params
    accounts: list[Account] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # acknowledged, and then lost
    states: list[Left] = field(default_factory=list)

    @classmethod
    def begun(cls, policy: str, settings: dict[str, Any], options: dict[str, Any]) -> World:
        pair = Pair(Rolling(policy, settings, options))
        pair.connect()
        pair.ask(pair.requests.define(MODEL))
        params = pair.room()
        pair.ask(pair.requests.fetch(params))
        return cls(pair, params)

    @property
    def server(self) -> Rolling:
        assert isinstance(self.pair.server, Rolling)
        return self.pair.server

    def push(self, gradient: Array) -> None:
        request = self.pair.requests.push({"w": gradient}, self.params, self.params)
        self.accounts.append(Account(request, gradient))

    def reapply(self) -> None:
        request = self.pair.requests.reapply(self.params, None)
        self.accounts.append(Account(request, None))

    def killed(self, moment: int) -> None:
        """Have the server killed, and all lost that it did after a moment."""
        del self.states[moment + 1 :]
        left = self.states[moment]
        self.note()
        acked = {each.request.seq for each in self.used()} - self.lost
        self.pair.cut()
        self.server.come_back(left)
        self.lost |= acked - set(self.server.changes)
        self.pair.connect()
        self.pair.move()

    def note(self) -> None:
        """Note what the answered pushes have changed, before it may be lost."""
        for each in self.accounts:
            if each.changed is None and each in self.used():
                each.changed = self.server.changes.get(each.request.seq, np.zeros(SIZE))

    def used(self) -> list[Account]:
        return [
            each
            for each in self.accounts
            if each.request.done
            and each.request.error is None
            and isinstance(each.request.value(), Receipt)
            and each.request.value().used
        ]

    def check(self) -> None:
        """Settle everything, and compare all accounts."""
        pair, server = self.pair, self.server
        for _ in range(3):
            pair.settle()
        self.note()
        used = self.used()
        for each in self.accounts:
            assert each.request.done
            assert (
                each in used
                or each.request.error is None
                or isinstance(each.request.error, Restarted)
            )
        # The model has each push that is left, once.
        left = sum(server.changes.values(), np.zeros(SIZE))
        np.testing.assert_allclose(server.model(), -left, atol=1e-3)
        # What was told is what was lost.
        acked = {each.request.seq for each in used}
        assert acked - set(server.changes) == self.lost
        assert pair.session.restarts.rolled_back == len(self.lost)
        # A rest has what the pushes that were taken have left out, and nothing of others.
        coding = pair.session.info.coding
        if coding is not None:
            rest = sum((each.rest for each in coding._encoders.values()), np.zeros(SIZE))
            left_out = np.zeros(SIZE)
            for each in used:
                if each.gradient is not None and each.changed is not None:
                    left_out += each.gradient - each.changed
            np.testing.assert_allclose(rest, left_out, atol=1e-3)
        # Parameters that are fetched are those of the server, also by increments.
        pair.ask(pair.requests.fetch(self.params))
        replica = server.engine.replica
        current = server.engine.store.current if replica is None else replica.current  # type: ignore[union-attr]
        np.testing.assert_array_equal(self.params["w"], current.arena.views["w"])


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "raw": ("asgd", {}, {}),
    "topk": ("asgd", {}, {"push_codec": ("topk:0.25",)}),
    "int8": ("asgd", {}, {"push_codec": ("int8",)}),
    "onebit": ("asgd", {}, {"push_codec": ("onebit",)}),
    "ignored": ("ringmaster", {"r": 2}, {"push_codec": ("topk:0.25",)}),
    "increments": ("asgd", {}, {"push_codec": ("topk:0.25",), "fetch_codec": ("topk:0.5",)}),
    "reapply": (
        "asgd",
        {},
        {"gate": "constant:p_push=0.5,p_fetch=1,skipped=reapply", "push_codec": ("topk:0.25",)},
    ),
}
KINDS = ("push", "push", "push", "fetch", "move", "settle", "keep", "kill", "reapply")
STEP = st.tuples(st.sampled_from(KINDS), st.integers(0, 30_000), st.integers(0, 2))


@pytest.mark.parametrize("case", CASES)
@settings(DETERMINISTIC, max_examples=examples(20))
@given(steps=st.lists(STEP, min_size=10, max_size=40))
def test_the_accounts_are_right_after_rollbacks(
    case: str, steps: list[tuple[str, int, int]]
) -> None:
    world, rng = World.begun(*CASES[case]), np.random.default_rng(len(steps))
    world.states.append(world.server.left())
    for kind, number, which in steps:
        if kind == "push":
            world.push(rng.integers(-8, 9, SIZE).astype(np.float32))
        elif kind == "reapply" and case == "reapply":
            world.reapply()
        elif kind == "fetch":
            world.pair.requests.fetch(world.params)
        elif kind == "move":  # some bytes, in one direction or both
            world.pair.move(None if which == 1 else number, None if which == 2 else number)
        elif kind == "settle":
            world.pair.settle()
        elif kind == "keep":
            world.states.append(world.server.left())
        elif kind == "kill":
            world.killed(max(0, len(world.states) - 1 - which))
    world.check()
