"""Push values that are no gradients (NaN, infinities, huge ones), and look at what remains.

Each trial draws an algorithm, an optimiser, dtypes, a learning rate and a model's values, and has
one engine handle pushes, of which most hold something bad or bring an update to the edge. After
each answer the state must be whole: a refused push leaves every byte of parameters, optimiser's
state and versions as it was, and its refusal names a tensor; after one that is acknowledged all
values are finite.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from aiops.algorithms import find
from aiops.algorithms.optimizers import OPTIMIZERS
from aiops.engine.engine import Engine
from aiops.engine.events import Applied, Apply, Event, Initialised, Joined, Options, Received, Reply
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Layout, dtype_named, split
from aiops.wire.messages import PROTOCOL, Ack, Error, Hello, Message, Push

_ALGORITHMS = (
    *("asgd", "sasgd", "fasgd", "exponential", "softsync", "hardsync", "fedbuff", "easgd"),
    *("diloco", "downpour", "dcasgd", "gap-aware", "ssp", "rennala", "ringmaster"),
)
_OPTIMISED = frozenset({"asgd", "softsync", "hardsync", "fedbuff", "rennala", "ringmaster", "ssp"})
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SPECIAL = (np.nan, np.inf, -np.inf, 9e17, -9e17, 1e18, 3e38, 6e4, -6e4, 1e-40, 0.0, 1e9)
_WORKERS = 2
_PUSHES = 20


@dataclass(slots=True)
class BadValues:
    """The pushes tried so far, and each that was not handled as it must be.

    Attributes
    ----------
    seed
        Of the first trial.
    cases
        Pushes so far.
    outcomes
        How many were refused for a value in them (``value``) or for what they would have made of
        the model (``result``), and how many acknowledged (``used``) or held (``held``).
    wrong
        A sentence for each that was not handled as it must.
    """

    seed: int = 0
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self, count: int, on_trial: Callable[[int], object] = lambda cases: None) -> None:
        """Try pushes until there are ``count``."""
        trial = self.seed
        while self.cases < count:
            _Trial(random.Random(trial), self, trial).run()
            on_trial(self.cases)
            trial += 1


class _Trial:
    """One engine and its pushes."""

    def __init__(self, draw: random.Random, found: BadValues, number: int) -> None:
        self._draw, self._found, self._number = draw, found, number
        name = draw.choice(_ALGORITHMS)
        settings: dict[str, object] = {"lr": 10.0 ** draw.uniform(-4, draw.choice((0, 0, 4, 30)))}
        if name in _OPTIMISED:
            settings["optimizer"] = draw.choice(sorted(OPTIMIZERS))
        if name in _OPTIMISED and draw.random() < 0.2:
            settings["clip"] = 10.0 ** draw.uniform(-2, 6)
        self._text = f"trial {number}: {name} {settings}"
        algorithm = find(name).make(settings)
        backend = draw.choice(("numpy", "numpy", "numba"))
        self._engine = Engine(algorithm, Options(workers=_WORKERS, backend=backend))
        self._answers: list[Message] = []
        names = [draw.choice(_DTYPES) for _ in range(draw.choice((1, 1, 2, 3)))]
        sizes = [draw.choice((1, 7, 64, 300)) for _ in names]
        rows = [
            (f"t{i}", dtype, (n,)) for i, (dtype, n) in enumerate(zip(names, sizes, strict=True))
        ]
        self._layout = layout = Layout(tuple(rows))
        data = aligned(layout.nbytes)
        self._fill(Arena(layout, data), special=0.0)
        self._post(Initialised(0.0, tuple(rows), data))
        for peer in range(1, _WORKERS + 1):
            hello = Hello(
                *(0, PROTOCOL, f"client-{peer}", 1, f"w{peer}", "worker", False),
                b"n" * 16,
                "torture",
            )
            self._post(Joined(0.0, peer, hello))

    def run(self) -> None:
        """Push, and look at the state after each answer."""
        for seq in range(1, _PUSHES // _WORKERS + 1):
            for peer in range(1, _WORKERS + 1):
                self._try(peer, seq)

    def _try(self, peer: int, seq: int) -> None:
        draw, layout, store = self._draw, self._layout, self._engine.defined_store
        before, collected = self._state(), self._engine.version
        gradient = aligned(layout.nbytes)
        self._fill(Arena(layout, gradient), special=draw.choice((0.0, 0.0, 0.01, 0.2)))
        level = store.current.level or 0
        parts = tuple(split(0, layout.nbytes, "raw", level))
        message = Push(1000 * peer + seq, seq, draw.random() < 0.5, -1, parts)
        sink = self._engine.admission.sink_for(message)
        if sink is None:
            raise MemoryError("the receive buffers are used up")
        sink.view(0, 0)[: len(gradient)] = gradient.data
        sink.filled(0, 0, len(gradient))
        self._answers.clear()
        self._post(Received(0.0, peer, message, sink))
        self._found.cases += 1
        mine = [each for each in self._answers if each.id == message.id]
        self._judge(mine, before, collected)

    def _judge(self, answers: list[Message], before: bytes, version: int) -> None:
        found, outcome = self._found, "held"
        if answers and isinstance(answers[0], Error):
            error = answers[0]
            known = {tensor.name for tensor in self._layout.tensors}
            named = error.details.get("tensor") in known
            outcome = "result" if "update would make" in error.text else "value"
            if error.code == "bad-push" and not named:
                found.wrong.append(f"{self._text}: the refusal names no tensor: {error.text}")
            if self._state() != before:
                found.wrong.append(f"{self._text}: a refused push changed the state")
        elif answers and isinstance(answers[0], Ack):
            outcome = "used" if answers[0].used else "ignored"
        found.outcomes[outcome] += 1
        if not self._is_finite():
            found.wrong.append(f"{self._text}: version {self._engine.version} is not finite")
        if self._engine.version == version and self._state() != before:
            found.wrong.append(f"{self._text}: the state of version {version} was changed")

    def _state(self) -> bytes:
        """Return the digest of parameters, masters, optimiser's state and versions."""
        store, total = self._engine.defined_store, hashlib.sha256()
        total.update(memoryview(store.current.arena.data))  # type: ignore[arg-type]
        arrays = [array for section in store.state for array in section]
        arrays += [array for array in store.masters if array is not None]
        for array in (*arrays, store.current.tensor_versions):
            total.update(array.tobytes())
        return total.digest()

    def _is_finite(self) -> bool:
        store = self._engine.defined_store
        arrays = [*store.current.arena.sections, *(a for arrays in store.state for a in arrays)]
        return all(np.isfinite(array.astype(np.float64)).all() for array in arrays)

    def _fill(self, arena: Arena, special: float) -> None:
        """Fill an arena with normal values, and with special ones at this rate."""
        draw = np.random.default_rng(self._draw.getrandbits(64))
        scale = 10.0 ** self._draw.uniform(-3, self._draw.choice((0, 1, 4, 17)) if special else 0)
        with np.errstate(all="ignore"):
            for view in arena.views.values():
                values = draw.standard_normal(view.shape) * scale
                chosen = draw.random(view.shape) < special
                values[chosen] = draw.choice(_SPECIAL, int(chosen.sum()))
                view[...] = values.astype(dtype_named(view.dtype.name))

    def _post(self, event: Event) -> None:
        events = deque([event])
        while events:
            for effect in self._engine.handle(events.popleft()):
                if isinstance(effect, Apply):
                    events.append(Applied(0.0, effect.ticket, effect.run()))
                elif isinstance(effect, Reply):
                    self._answers.append(effect.message)
                    if effect.lease is not None:
                        effect.lease.release()
