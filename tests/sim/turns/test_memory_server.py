"""Server and clients in memory: deterministic, every byte counted, gates and codecs at work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.client.params import Params
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import BadPush, ConflictError
from aiops.lab.workloads.digits import load_digits
from aiops.lab.workloads.mlp import MLP
from aiops.model.layout import Array
from aiops.sim.turns.memory_server import MemoryServer
from aiops.sim.turns.simulated_client import SimulatedClient
from tests.recording import Recording
from tests.sim.turns.lines import ByteLine

DIGITS = load_digits()
START: dict[str, Array] = {
    "wide": np.linspace(-2, 2, 40 * 30).reshape(40, 30).astype(np.float32),
    "narrow": np.linspace(-1, 1, 900).astype(np.float16),
    "exact": np.linspace(3, 4, 300),
    "few": np.ones(5, np.float32),
}
GATES = [
    "",
    "bfasgd:c_push=0.05,c_fetch=0.1",
    "bfasgd:c_push=0.05,c_fetch=0.1,skipped=reapply",
    "bfasgd:c_push=0.05,c_fetch=0.1,by=tensor,stamp=mean,combine=sum,floor_free=yes",
    "constant:p_push=0.4,p_fetch=0.3,by=tensor,stamp=newest",
    "periodic:k_push=3,k_fetch=2,skipped=discard",
]
CODECS = [
    ((), ()),
    (("topk:0.05",), ("int8",)),
    (("onebit", "int8@narrow"), ("topk:0.1", "lowrank:2@wide")),
    (("lowrank:2", "fp16@exact"), ("onebit",)),
]


PLAIN = 2 * 650 * 4
"""Bytes of an exchange of logistic regression on digits, there and back."""


SETTINGS: dict[str, dict[str, Any]] = {
    "fasgd": {"lr": 0.01},
    "schedule-free": {"lr": 0.05, "schedule": "warmup:10"},  # its steps are of one length
}


class Run:
    """Some workers in an order drawn at random, who pull everything towards 1."""

    def __init__(
        self, policy: str = "fasgd", workers: int = 3, seed: int = 0, **options: Any
    ) -> None:
        made = find(policy).make(SETTINGS.get(policy, {}))
        chosen = {"backend": "numpy", "workers": workers, **options}
        self.engine = Engine(made, Options(**chosen))
        self.rng = np.random.default_rng(seed)
        self.journal = Recording(made.name, self.engine)
        self.server = MemoryServer(self.engine, journal=self.journal, line=ByteLine)
        self.workers = [SimulatedClient(self.server, f"worker-{i}", START) for i in range(workers)]

    def gradient(self, params: Params) -> dict[str, Array]:
        return {
            name: (w.astype(np.float64) - 1 + 0.1 * self.rng.normal(size=w.shape)).astype(w.dtype)
            for name, w in params.items()
        }

    def train(self, steps: int) -> Run:
        """Have workers take steps."""
        for _ in range(steps):
            free = [worker for worker in self.workers if not worker.waits]
            free[self.rng.integers(len(free))].step(self.gradient)
        return self

    @property
    def digest(self) -> str:
        """Of the model, the replica, and what all workers hold."""
        store, replica = self.engine.store, self.engine.replica
        assert store is not None
        found = hashlib.sha256(store.current.arena.data.tobytes())
        if replica is not None:
            found.update(replica.current.arena.data.tobytes())
        for worker in self.workers:
            found.update(worker.params.arena.data.tobytes())
            found.update(worker.params.versions.tobytes())
        return found.hexdigest()


RUNS = [(gate, CODECS[(i + more) % 4]) for i, gate in enumerate(GATES) for more in (1, 2)]


@pytest.mark.parametrize(("gate", "codecs"), RUNS, ids=str)
class TestRuns:
    def test_are_the_same_twice_and_backends_agree_to_the_bit(self, gate: str, codecs: Any) -> None:
        push, fetch = codecs
        options = {"gate": gate, "push_codec": push, "fetch_codec": fetch}
        digests = {Run(backend=name, **options).train(40).digest for name in ("numpy", "numba")}
        assert len(digests) == 1
        assert Run(seed=1, **options).train(40).digest not in digests

    def test_replay_to_the_same_bits(self, gate: str, codecs: Any) -> None:
        push, fetch = codecs
        run = Run(gate=gate, push_codec=push, fetch_codec=fetch).train(40)
        run.journal.end(run.server.now)
        again = run.journal.replay("numba")
        assert again.complete
        theirs, ours = again.engine.store, run.engine.store
        assert theirs is not None
        assert ours is not None
        assert theirs.current.arena.data.tobytes() == ours.current.arena.data.tobytes()
        assert ours.version > 0

    def test_readers_hold_the_shadow(self, gate: str, codecs: Any) -> None:
        """Or the model itself, where fetches are not coded."""
        push, fetch = codecs
        run = Run(gate=gate, push_codec=push, fetch_codec=fetch).train(40)
        replica, store = run.engine.replica, run.engine.store
        assert (replica is not None) == bool(fetch)
        assert store is not None
        for worker in run.workers:
            worker.ask(worker.requests.fetch(worker.params))
            current = replica.current if replica else store.current
            assert worker.params.version == current.number
            assert worker.params.arena.data.tobytes() == current.arena.data.tobytes()
            np.testing.assert_array_equal(worker.params.versions, current.tensor_versions)

    def test_every_byte_is_counted_at_both_ends(self, gate: str, codecs: Any) -> None:
        push, fetch = codecs
        run = Run(gate=gate, push_codec=push, fetch_codec=fetch).train(40)
        for worker, row in zip(run.workers, run.engine.report()["workers"], strict=True):
            received, sent = worker.session.traffic
            assert (row["bytes_fetched"], row["bytes_pushed"]) == (received, sent)
            assert sent > sum(array.nbytes for array in START.values()), "it offered a model"


@pytest.mark.parametrize("policy", sorted(set(BUILT_IN) - {"average"}))
def test_every_algorithm_takes_coded_pushes_and_fetches(policy: str) -> None:
    """Each comes nearer to 1, as it does raw; who squares gradients takes only whole ones."""
    if not find(policy).accepts_sums:
        with pytest.raises(ConflictError, match="squares each gradient, and topk leaves most"):
            Run(policy, workers=2, push_codec=("int8", "topk:0.3@wide"))
    codec = "topk:0.3" if find(policy).accepts_sums else "int8"
    run = Run(policy, workers=2, push_codec=(codec,), fetch_codec=("int8",))
    run.train(160 if policy == "diloco" else 112)  # its cycles are long
    for worker in run.workers:
        worker.finish()
    store = run.engine.store
    assert store is not None
    wide = store.current.arena.views["wide"]
    assert float(np.abs(wide - 1).mean()) < 0.95 * float(np.abs(START["wide"] - 1).mean())
    assert run.engine.admission.pool.out == 0


def test_a_rule_that_reads_is_given_what_its_worker_was_sent() -> None:
    """DC-ASGD with one worker: nothing lies between, so it is plain SGD, coded fetches or not."""
    results = []
    for lag in (1, 4):
        run = Run("dcasgd", workers=1, fetch_codec=("onebit",), fetch_lag=lag)
        reads: list[bytes] = []
        worker = run.workers[0]
        for _ in range(12):
            held = worker.params.arena.data.tobytes()
            member = next(iter(run.engine.membership))
            assert member.sent is not None
            reads.append(member.sent.version.arena.data.tobytes())
            assert reads[-1] == held
            worker.step(run.gradient)
        results.append(len(set(reads)))
    assert results[0] == 12
    assert results[1] == 3


def train_digits(steps: int, **options: Any) -> tuple[float, int]:
    """Train logistic regression on digits; return its error and the bytes that moved."""
    model = MLP([64, 10])
    engine = Engine(find("fasgd").make({"lr": 0.005}), Options(backend="numpy", **options))
    server, start = MemoryServer(engine, line=ByteLine), model.init(0)
    workers = [SimulatedClient(server, f"worker-{i}", start) for i in range(4)]
    rng = np.random.default_rng(5)
    x = DIGITS.train_x.reshape(len(DIGITS.train_x), -1)

    def gradient(params: Params) -> Mapping[str, Array]:
        rows = rng.integers(0, len(x), 16)
        return model.gradients(params, x[rows], DIGITS.train_y[rows])[1]

    offered = sum(sum(worker.session.traffic) for worker in workers)
    for _ in range(steps):
        workers[rng.integers(4)].step(gradient)
    for worker in workers:
        worker.finish()
    store = engine.store
    assert store is not None
    test = DIGITS.test_x.reshape(len(DIGITS.test_x), -1)
    accuracy = model.accuracy(store.current.arena.views, test, DIGITS.test_y)
    return 1 - accuracy, sum(sum(worker.session.traffic) for worker in workers) - offered


class TestLearning:
    """FASGD × gates × codecs: less moves, and the model is as good."""

    @pytest.mark.parametrize(
        ("gate", "push", "fetch"),
        [
            ("bfasgd:c_push=0.04,c_fetch=0.06", (), ()),
            ("bfasgd:c_push=0.04,c_fetch=0.06,combine=sum", (), ()),
            ("bfasgd:c_push=0.04,c_fetch=0.06,by=tensor", ("int8",), ("int8",)),
            ("constant:p_push=0.5,p_fetch=0.5", ("topk:0.1",), ("int8",)),
            ("periodic:k_push=3,k_fetch=3", ("onebit",), ("int8",)),
            ("", ("topk:0.05",), ("topk:0.2",)),
            ("", ("lowrank:2",), ("int8",)),
            ("bfasgd:c_push=0.04,c_fetch=0.06", ("topk:0.05",), ("topk:0.2",)),
        ],
    )
    def test_digits(self, gate: str, push: tuple[str, ...], fetch: tuple[str, ...]) -> None:
        error, nbytes = train_digits(500, gate=gate, push_codec=push, fetch_codec=fetch)
        assert error < 0.25  # by guessing: 0.9
        assert nbytes < 500 * PLAIN / 1.8

    def test_raw_and_ungated(self) -> None:
        error, nbytes = train_digits(500)
        assert error < 0.15
        assert 500 * PLAIN < nbytes < 1.2 * 500 * PLAIN


def test_a_refused_push_is_put_back_once() -> None:
    """A refused gradient stays in the gate's sum, and nothing of it in the encoders."""
    run = Run("asgd", workers=1, gate="periodic:k_push=2,combine=mean", push_codec=("topk:0.1",))
    worker, engine = run.workers[0], run.engine
    ones = {name: np.ones_like(array) for name, array in START.items()}
    place, refusing = engine.admission.sink_for, [True]

    def refuse(message: Any) -> Any:
        sink = place(message)
        if refusing and message.kind == "push":
            refusing.clear()
            sink.fault = BadPush("not now")  # type: ignore[union-attr]
        return sink

    engine.admission.sink_for = refuse  # type: ignore[method-assign]
    for line in run.server.lines.values():
        line.sink_for = refuse
    worker.step(lambda _params: ones)
    with pytest.raises(BadPush, match="not now"):
        worker.step(lambda _params: ones)
    for _ in range(400):  # zeros push out what the encoders hold
        worker.step(lambda params: {name: np.zeros_like(array) for name, array in params.items()})
    # Of two ones and two zeros the mean was pushed, once.
    lr = engine.algorithm.settings()["lr"]
    for name in ("wide", "few"):
        moved = (START[name] - _model(engine)[name]) / lr
        np.testing.assert_allclose(moved, 0.5, rtol=2e-2)


def _model(engine: Engine) -> Mapping[str, Array]:
    assert engine.store is not None
    return engine.store.current.arena.views
