"""Push values that are no gradients (NaN, infinities, huge ones), and look at what remains.

Each trial draws an algorithm, an optimiser, dtypes, a learning rate and a model's values, and has
one server, or several that share the model, handle pushes, of which most hold something bad or
bring an update to the edge. After each answer the state must be whole: a refused push leaves every
byte of parameters, optimiser's state and versions as it was on all servers, and its refusal names a
tensor; after one that is acknowledged all values are finite. Several servers give the answers of
one, and the same parameters.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiops.algorithms import find
from aiops.algorithms.base import Algorithm
from aiops.algorithms.optimizers import OPTIMIZERS
from aiops.engine.events import Options
from aiops.lab.torture.sharded_engine import ShardedEngine
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Bytes, Layout, dtype_named
from aiops.wire.messages import Ack, Error, Message

_ALGORITHMS = (
    *("asgd", "sasgd", "fasgd", "exponential", "softsync", "hardsync", "fedbuff", "easgd"),
    *("diloco", "downpour", "dcasgd", "gap-aware", "ssp", "rennala", "ringmaster"),
)
_OPTIMISED = frozenset({"asgd", "softsync", "hardsync", "fedbuff", "rennala", "ringmaster", "ssp"})
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SPECIAL = (np.nan, np.inf, -np.inf, 9e17, -9e17, 1e18, 3e38, 6e4, -6e4, 1e-40, 0.0, 1e9)
_SHARDS = (1, 1, 2, 2, 3, 4)
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
        the model (``result``), and how many acknowledged (``used``) or held (``held``); those at
        several servers once more, as ``shards`` of each.
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
    """One model, on one server or several, and its pushes."""

    def __init__(self, draw: random.Random, found: BadValues, number: int) -> None:
        self._draw, self._found, self._number = draw, found, number
        name = draw.choice(_ALGORITHMS)
        settings: dict[str, object] = {"lr": 10.0 ** draw.uniform(-4, draw.choice((0, 0, 4, 30)))}
        if name in _OPTIMISED:
            settings["optimizer"] = draw.choice(sorted(OPTIMIZERS))
        if name in _OPTIMISED and draw.random() < 0.2:
            settings["clip"] = 10.0 ** draw.uniform(-2, 6)
            if draw.random() < 0.5:  # the first tensor apart
                settings["per_tensor"] = f"clip={10.0 ** draw.uniform(-2, 6):g}@t0"
        backend = draw.choice(("numpy", "numpy", "numba"))
        names = [draw.choice(_DTYPES) for _ in range(draw.choice((1, 1, 2, 3)))]
        sizes = [draw.choice((1, 7, 64, 300)) for _ in names]
        rows = [
            (f"t{i}", dtype, (n,)) for i, (dtype, n) in enumerate(zip(names, sizes, strict=True))
        ]
        self._layout = layout = Layout(tuple(rows))
        data = aligned(layout.nbytes)
        self._fill(Arena(layout, data), special=0.0)
        self._shards = draw.choice(_SHARDS)
        self._text = f"trial {number}: {name} {settings}, {self._shards} servers"

        def servers(shards: int) -> ShardedEngine:
            algorithm: Algorithm = find(name).make(settings)
            options = Options(workers=_WORKERS, backend=backend, shards=shards, shard_bytes=1)
            made = ShardedEngine(algorithm, options, random.Random(number))
            made.define(tuple(rows), data.copy())
            for peer in range(1, _WORKERS + 1):
                made.join(peer)
            return made

        self._servers = servers(self._shards)
        # One server, with the same pushes. Norms are sums, which several servers add up in another
        # order: then the last bit may differ, and with it what is an overflow.
        same = self._shards > 1 and "clip" not in settings
        self._alone = servers(1) if same else None

    def run(self) -> None:
        """Push, and look at the state after each answer."""
        for seq in range(1, _PUSHES // _WORKERS + 1):
            for peer in range(1, _WORKERS + 1):
                self._try(peer, seq)

    def _try(self, peer: int, seq: int) -> None:
        draw, servers = self._draw, self._servers
        before, version = self._state(), servers.engine.version
        gradient = aligned(self._layout.nbytes)
        self._fill(Arena(self._layout, gradient), special=draw.choice((0.0, 0.0, 0.01, 0.2)))
        fetch = draw.random() < 0.5
        answers = servers.push(peer, seq, gradient, fetch=fetch)
        self._found.cases += 1
        id = 1000 * peer + seq
        self._judge([each for each in answers if each.id == id], before, version)
        if self._alone is not None:
            self._compare(answers, self._alone.push(peer, seq, gradient, fetch=fetch))

    def _judge(self, answers: list[Message], before: bytes, version: int) -> None:
        found, outcome, servers = self._found, "held", self._servers
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
        if self._shards > 1:
            found.outcomes[f"shards: {outcome}"] += 1
        if not self._is_finite():
            found.wrong.append(f"{self._text}: version {servers.engine.version} is not finite")
        if servers.engine.version == version and self._state() != before:
            found.wrong.append(f"{self._text}: the state of version {version} was changed")

    def _compare(self, answers: list[Message], expected: list[Message]) -> None:
        """Compare the answers and the parameters with those of one server."""
        assert self._alone is not None, "there is one"
        if list(map(_essence, answers)) != list(map(_essence, expected)):
            self._found.wrong.append(f"{self._text}: {answers} instead of {expected}")
        mine = b"".join(arena.tobytes() for arena in self._servers.arenas)
        if mine != self._alone.arenas[0].tobytes():
            self._found.wrong.append(f"{self._text}: the parameters are not those of one server")

    def _state(self) -> bytes:
        """Return the digest of parameters, masters, optimiser's state and versions."""
        total = hashlib.sha256()
        for arena in self._servers.arenas:
            total.update(arena.tobytes())
        for store in self._servers.stores:
            arrays = [array for section in store.state for array in section]
            arrays += [array for array in store.masters if array is not None]
            for array in arrays:
                total.update(array.tobytes())
        total.update(self._servers.stores[0].current.tensor_versions.tobytes())
        return total.digest()

    def _is_finite(self) -> bool:
        servers = self._servers
        whole: Bytes = np.concatenate(servers.arenas)
        arrays: list[Any] = [*Arena(self._layout, _on_boundary(whole)).sections]
        arrays += [a for store in servers.stores for arrays in store.state for a in arrays]
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


def _essence(answer: Message) -> tuple[Any, ...]:
    """Return what an answer of several servers has in common with that of one.

    Of several bad values it tells the one that was found first, on whichever server.
    """
    if isinstance(answer, Error):
        result = "update would make" in answer.text
        return answer.id, answer.code, answer.text if result else ""
    if isinstance(answer, Ack):
        return answer.id, answer.used, answer.version, answer.staleness, answer.vbar, answer.vbars
    return answer.id, answer.kind


def _on_boundary(data: Bytes) -> Bytes:
    """Return the same bytes where an arena may have them."""
    found = aligned(len(data))
    found[:] = data
    return found
