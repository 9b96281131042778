"""The short way of a turn and the general way: the same bits, statistics, accounts and record.

A course is a list of things that clients do. It is run twice, once without the short way
(`aiops.sim.turns.steady`), and everything that can be seen of the two is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.algorithms import find
from aiops.client.request_kinds import Receipt
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import BadPush, ConflictError
from aiops.model.layout import Array
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.sim.turns.steady import SteadyTurn
from tests.recording import Recording
from tests.seeds import examples
from tests.sim.turns.cases import POLICIES

START: dict[str, Array] = {
    "w": np.linspace(-2, 2, 60).reshape(10, 6).astype(np.float32),
    "h": np.linspace(-1, 1, 9).astype(np.float16),
    "few": np.ones(5, np.float32),
}

OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"gate": "bfasgd:c_push=0.05,c_fetch=0.1"}, {"push_codec": ("int8",)}),
    *({"fetch_codec": ("int8",)}, {"gate": "periodic:k_push=2,k_fetch=2,skipped=reapply"}),
)

DONE = ("step", "step", "step", "step", "array", "nan", "fetch", "look", "copy", "leave")
"""Steps with a gradient in one buffer; with one in arrays; with a bad value; a fetch; reading the
versions; parameters that become the client's own; the end of a connection."""


@dataclass(frozen=True)
class Course:
    """Something that each client does, in turn."""

    policy: str
    options: dict[str, Any]
    ahead: bool
    done: Sequence[tuple[str, int]]


class World:
    """A server and four clients, which go through a course."""

    def __init__(self, course: Course) -> None:
        name, chosen = POLICIES[course.policy]
        made = find(name).make(chosen)
        options = Options(backend="numpy", workers=4, **course.options)
        self.engine = Engine(made, options)
        self.journal = Recording(made.name, self.engine)
        self.server = MemoryServer(self.engine, journal=self.journal)
        self.clients = [
            SimulatedClient(self.server, f"client-{i}", START, ahead=course.ahead) for i in range(4)
        ]
        self.rooms = [client.params.like() for client in self.clients]
        self.random = np.random.default_rng(1)
        self.receipts: list[Any] = []

    def happen(self, what: str, number: int) -> None:
        """Have a client do something, unless it waits or has left."""
        client, room = self.clients[number], self.rooms[number]
        if client.peer not in self.server.workers or client.waits:
            return
        if what == "fetch" and client.strategy.under_way is None:
            self.receipts.append(client.ask(client.requests.fetch(client.params)))
        elif what == "look":
            self.receipts.append(client.params.versions.tolist())
        elif what == "copy":
            client.params.own()
        elif what == "leave":
            if len(self.server.workers) > 1 and self.random.integers(4) == 0:
                self.server.disconnect(client.peer)
        elif what in ("step", "array", "nan"):
            for array in room.values():
                array[...] = self.random.normal(size=array.shape)
            if what == "nan":
                room["w"][3, 4] = np.nan
            gradients: Any = room if what != "array" else {k: a.copy() for k, a in room.items()}
            try:
                self.receipts.append(shown(client.give(gradients)))
            except BadPush as error:
                self.receipts.append(str(error))

    def seen(self) -> dict[str, Any]:
        """Return what can be seen of it now, with its record."""
        store = self.engine.store
        assert store is not None
        seen: dict[str, Any] = {"report": self.engine.report(), "receipts": self.receipts}
        seen["parameters"] = store.current.arena.data.tobytes()
        seen["versions"] = store.current.tensor_versions.tolist()
        seen["state"] = [array.tobytes() for arrays in store.state for array in arrays]
        seen["masters"] = [array.tobytes() for array in store.masters if array is not None]
        seen["alive"] = store.alive, store.cut
        for client in self.clients:
            session, params = client.session, client.params
            seen[f"client {client.peer}"] = (
                *(
                    session.traffic,
                    session.ledger.report(),
                    session.pending.answered,
                    session.pending.seq,
                ),
                *(params.arena.data.tobytes(), params.versions.tolist(), params.version),
                *(client.steps, client.recomputed, client.refused, client.waits),
            )
        seen["members"] = [
            (member.last_seq, list(member.answers.items())) for member in self.engine.membership
        ]
        self.journal.end(self.server.now)
        again = self.journal.replay()
        assert again.complete
        seen["replayed"] = digest(again.engine)
        return seen


def shown(receipt: Receipt | None) -> Any:
    """Return a receipt as values that can be compared."""
    if receipt is None:
        return None
    fields = receipt.version, receipt.staleness, receipt.mean_staleness, receipt.vbar
    return *fields, dict(receipt.vbars), receipt.used, receipt.pushed


def run(course: Course, *, short: bool) -> tuple[dict[str, Any], int]:
    """Go through a course; return what was seen, and how many turns took the short way."""
    count = 0
    shortened, exchange = MemoryServer.shortened, SteadyTurn.exchange

    def counted(self: SteadyTurn, *arguments: Any) -> Any:
        nonlocal count
        receipt = exchange(self, *arguments)
        count += receipt is not None
        return receipt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteadyTurn, "exchange", counted)
        patch.setattr(MemoryServer, "shortened", shortened if short else lambda *_arguments: None)
        world = World(course)
        for what, number in course.done:
            world.happen(what, number)
        return world.seen(), count


def compare(course: Course) -> int:
    """Go through a course both ways, and compare; return how many turns took the short way."""
    general, none = run(course, short=False)
    short, count = run(course, short=True)
    assert none == 0
    for name, value in general.items():
        assert short[name] == value, name
    return count


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(OPTIONS),
    ahead=st.booleans(),
    done=st.lists(st.tuples(st.sampled_from(DONE), st.integers(0, 3)), min_size=8, max_size=40),
)
def test_both_ways_are_one(policy: str, options: Any, ahead: bool, done: Any) -> None:
    try:
        compare(Course(policy, options, ahead, done))
    except ConflictError:
        return  # not every policy can be gated, or takes what a codec leaves out


USUAL = [("step", number % 2) for number in range(12)]

SHORT = {"asgd", "sasgd", "fasgd", "exponential", "ringmaster"}
"""Policies that answer each push at once, whose workers push every gradient as it is."""


REHEARSED = {
    *("asgd-adagrad", "asgd-adam", "asgd-adamw", "asgd-rmsprop"),
    *("asgd-per-tensor", "fasgd-relative"),
}
"""Updates of float16 that may overflow for all that their bounds say: they are rehearsed first."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_goes_the_short_way(policy: str) -> None:
    count = compare(Course(policy, {}, False, USUAL))
    name, chosen = POLICIES[policy]
    short = name in SHORT and "clip" not in chosen and policy not in REHEARSED
    assert count == (10 if short else 0), policy
