"""Several answers on their way into the same arrays, in any pieces, and connections cut midway."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client.session import Session
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.model.layout import Array
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.simulated_client import SimulatedClient
from aiops.wire.connection import Buffer
from tests.seeds import seeds
from tests.sim.turns.lines import ByteLine, pour

START: dict[str, Array] = {
    "w": np.linspace(-1, 1, 600).astype(np.float32),
    "v": np.linspace(-1, 1, 400).astype(np.float32),
    "b": np.ones(5),
    "empty": np.ones((0, 3), np.float32),
}
SEEDS = seeds(4)


class SlowLine(ByteLine):
    """A connection by which bytes come to the worker when a test says so."""

    kept: bytearray | None = None

    def receive(self, session: Session, buffers: list[Buffer]) -> None:
        """Keep the bytes, once told to."""
        if self.kept is None:
            super().receive(session, buffers)
        else:
            self.kept += b"".join(buffers)


class Slow(SimulatedClient):
    """A worker to whom bytes come when a test says so."""

    @property
    def line(self) -> SlowLine:
        line = self._server.lines[self.peer]
        assert isinstance(line, SlowLine)
        return line

    @property
    def kept(self) -> bytearray:
        assert self.line.kept is not None
        return self.line.kept

    def keep(self) -> None:
        """Keep the bytes that come from now on."""
        self.line.kept = bytearray()

    def arrive(self, nbytes: int) -> None:
        """Have the next bytes arrive, in one piece."""
        piece = bytes(self.kept[:nbytes])
        del self.kept[:nbytes]
        pour(self.session, [piece])

    def say(self) -> None:
        """Send what has been asked."""
        self._send()

    def reconnect(self) -> None:
        """Lose the connection, and have another one; the answers under way are lost."""
        self._server.disconnect(self.peer)
        self.session.lost()
        self.peer = self._server.connect(self)
        self._server.receive(self.peer, self.session.connected())
        self.say()


class Fixture:
    """A server, one worker, and every version that the worker may hold."""

    def __init__(self, codec: tuple[str, ...], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        options = Options(backend="numpy", fetch_codec=codec, fetch_lag=1 + seed % 2)
        self.engine = Engine(find("asgd").make({"lr": 0.1}), options)
        self.seat = Slow(MemoryServer(self.engine, line=SlowLine), "slow", START)
        self.versions: dict[int, dict[str, bytes]] = {}
        handle = self.engine.handle

        def noted(event: Any, leased: bool | None = None) -> Any:
            effects = handle(event, leased)
            self.note()
            return effects

        self.engine.handle = noted  # type: ignore[method-assign]
        self.note()

    def note(self) -> None:
        store, replica = self.engine.store, self.engine.replica
        assert store is not None
        if store.busy or self.engine.working:
            return
        current = replica.current if replica else store.current
        arrays = current.arena.views.items()
        self.versions[current.number] = {name: array.tobytes() for name, array in arrays}

    def ask(self) -> list[Any]:
        """Make some requests, of all or some tensors, all into the same arrays."""
        seat, layout, found = self.seat, self.seat.params.layout, []
        for _ in range(self.rng.integers(1, 7)):
            some = np.flatnonzero(self.rng.random(len(layout.tensors)) < 0.6)
            wanted = some if len(some) and self.rng.random() < 0.5 else None
            names = {"w", *(name for name in START if self.rng.random() < 0.5)}
            given = {name: self.rng.normal(size=START[name].shape) for name in sorted(names)}
            pushed = {name: g.astype(START[name].dtype) for name, g in given.items()}
            if self.rng.random() < 0.6:
                at = seat.params.copy()
                at.versions[:] = 0
                found.append(seat.requests.push(pushed, at, seat.params, wanted))
            else:
                found.append(seat.requests.fetch(seat.params, wanted))
        return found

    def check(self) -> None:
        """What is said to be held is held: each tensor of a version that there was."""
        params = self.seat.params
        for index, tensor in enumerate(params.layout.tensors):
            held = int(params.held[index])
            if held >= 0:
                assert params[tensor.name].tobytes() == self.versions[held][tensor.name], held


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("codec", [(), ("int8",), ("topk:0.2",), ("bf16@w", "onebit@v")], ids=str)
def test_what_is_said_to_be_held_is_held(codec: tuple[str, ...], seed: int) -> None:
    """After every piece, and after a cut anywhere."""
    run = Fixture(codec, seed)
    seat, rng = run.seat, run.rng
    pushes = 0
    for _ in range(25):
        seat.keep()
        requests = run.ask()
        pushes += sum(request.what == "the answer to its push" for request in requests)
        seat.say()
        total = len(seat.kept)
        cut = int(rng.integers(total)) if rng.random() < 0.3 else total
        longest = int(rng.choice([20, 300, 5000, 50_000]))
        while total - len(seat.kept) < cut:
            left = cut - (total - len(seat.kept))
            seat.arrive(min(left, int(rng.integers(1, longest + 1))))
            run.check()
        if cut < total:
            seat.reconnect()
            run.check()
        seat.line.kept = None
        for request in requests:
            assert request.done
            request.value()
    seat.ask(seat.requests.fetch(seat.params))
    run.check()
    assert (seat.params.held == max(run.versions)).all()
    assert run.engine.report()["gradients"] == pushes, "each was applied once"
