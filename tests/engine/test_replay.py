"""What is recorded replays: the same effects, the same state and the same report, in any order.

The worlds are in memory. A seed decides which client does what, how long an update takes, and when
a reader drops what it was sent: between events, or in the middle of one, as another thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aiops.codecs import find as codec
from aiops.durable.rows import passes
from aiops.durable.run_record import Replayed
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, BudgetTick, Effect, Event, Reply, Stopping, Warm
from aiops.engine.statistics import decided
from aiops.engine.update_queue import UpdateQueue
from aiops.filters import screen
from aiops.kernels.parallel import LARGE
from aiops.model.layout import Array, Layout, split
from aiops.model.parts import Part, Parts, Wants
from aiops.model.tables import ID_BYTES, Table, Tables, fetch_parts, push_parts
from aiops.net.thread_pool import pool_of
from aiops.store.parameters import UpdateJob
from aiops.store.resources import Resources
from aiops.wire import messages
from aiops.wire.messages import Fetch, FetchRows, Message, PushRows, Reapply, Report
from aiops.wire.ring_messages import JoinRound
from tests.contract.cases import CASES, WORKERS
from tests.inline import Inline
from tests.recording import Recording
from tests.seeds import by_turns, seeds

MODEL: Mapping[str, Array] = {
    "wide": np.linspace(-1, 1, 384).reshape(16, 24).astype(np.float32),
    "exact": np.linspace(-2, 2, 7),
    "narrow": np.linspace(0, 1, 5).astype(np.float16),
    "bias": np.linspace(0, 1, 6).astype(np.float32),
}
TABLE = Table(50, 3, scale=0.5, seed=4)
CODECS = ("int8", "topk:0.1", "onebit", "lowrank:2", "fp16", "bf16")
PEERS = 5
"""Connections at once: one of an observer, the others of workers."""

REAPPLY = "bfasgd:c_push=0.1,c_fetch=0.1,skipped=reapply"
OPTIONS: Mapping[str, dict[str, Any]] = {
    "pushed-int8": {"push_codec": ("int8",)},
    "pushed-topk": {"push_codec": ("topk:0.1", "lowrank:2@wide")},
    "fetched-int8": {"fetch_codec": ("int8",)},
    "fetched-topk": {"fetch_codec": ("topk:0.1",), "fetch_lag": 2},
    "fetched-lowrank": {"fetch_codec": ("lowrank:2",), "push_codec": ("onebit",)},
    "fetched-onebit": {"fetch_codec": ("onebit",), "fetch_lag": 3},
    "gate": {"gate": "bfasgd:c_push=0.1,c_fetch=0.1"},
    "reapply": {"gate": REAPPLY, "recall": 1 << 20},
    "reapply-little": {"gate": REAPPLY, "recall": 4000},
    "budget": {"budget": 1 << 20},
    "worker-budget": {"worker_budget": 1 << 18, "fetch_codec": ("int8",)},
    "live": {"live": 2},
    "filter": {"filter": "norm:3+curvature+agreement+kardam"},
    "max-model": {"max_model": 4096, "heartbeat": 3.0},
}


class World(Inline):
    """An engine whose events are recorded, with clients that do what a seed says."""

    def __init__(
        self, policy: str, settings: Mapping[str, Any], seed: int, tables: bool, **options: Any
    ) -> None:
        super().__init__(
            policy, settings, hold=True, workers=WORKERS, worker_deadline=40.0, **options
        )
        self.journal = Recording(policy, self.engine)
        self.on_event = self.journal.note
        self.random = np.random.default_rng(seed)
        self.views: list[Any] = []  # what readers have not dropped yet
        self.peers: dict[int, str] = {}  # of those connected: the client
        self.last: dict[str, tuple[Message, bytes]] = {}  # the last push of each client
        self.client_seqs: dict[str, int] = {}
        self.connections = 0
        self.ids = 0
        self.tables = tables

    def one_of(self, values: Any) -> Any:
        """Return one of some values."""
        values = list(values)
        return values[int(self.random.integers(len(values)))]

    def chance(self, share: float) -> bool:
        """Return True as often as ``share`` says."""
        return bool(self.random.random() < share)

    def next_id(self) -> int:
        """Return a request id that has not been used."""
        self.ids += 1
        return self.ids

    # ------------------------------------------------------------ readers

    def post(self, event: Event) -> None:
        """Handle an event; what was sent is read later, as on a server."""
        super().post(event)
        for _peer, lease in self.leases:
            self.views.append(lease.payloads())
            lease.release()
        self.leases.clear()

    def read(self) -> None:
        """Have one reader drop what it was sent."""
        if self.views:
            del self.views[int(self.random.integers(len(self.views)))]

    # ------------------------------------------------------------ clients

    def act(self) -> None:
        """Have something happen."""
        self.now += float(self.random.exponential(0.3))
        if self.outstanding is not None and self.chance(0.4):
            self.run_kernel()
            return
        if self.chance(0.25):
            self.read()
        if len(self.peers) < PEERS or self.chance(0.03):
            self.connect()
            return
        peer = self.one_of(self.peers)
        what = self.one_of(self.choices())
        what(peer)

    def choices(self) -> list[Callable[[int], Any]]:
        """Return what a client may do, as often as it is to do it."""
        common = [self.give] * 10 + [self.fetch] * 6
        rare: list[Callable[[int], Any]] = [self.repeat, self.spoil, self.disconnect, self.pause]
        rare += [self.ask, self.reapply, self.reapply, self.average]
        if self.tables:
            common += [self.fetch_rows] * 2 + [self.push_rows] * 4
        if self.engine.budget is not None:
            rare += [self.pace] * 3
        return [*common, *rare]

    def connect(self) -> None:
        """Have a client come, or come back."""
        client = "observer" if self.chance(0.15) else f"client-{self.random.integers(PEERS)}"
        self.connections += 1
        peer = self.connections
        for other in [old for old, name in self.peers.items() if name == client]:
            del self.peers[other]  # it has a newer connection now
        self.peers[peer] = client
        role = "observer" if client == "observer" else "worker"
        self.join(peer, role, client, epoch=peer)
        if self.engine.store is None and self.chance(0.5):
            self.define_model(peer)

    def disconnect(self, peer: int) -> None:
        """Lose a connection."""
        del self.peers[peer]
        self.leave(peer)

    def define_model(self, peer: int) -> None:
        """Offer the model; now and then one that has a bad value."""
        layout, data = Layout.of(MODEL), bytearray()
        for tensor in layout.tensors:
            array = MODEL[tensor.name].copy()
            if self.chance(0.1):
                array.flat[0] = np.nan
            data += bytes(tensor.offset - len(data)) + array.tobytes()
        data += bytes(layout.nbytes - len(data))
        tables = Tables({"t": TABLE}).described if self.tables else ()
        parts = tuple(split(0, layout.nbytes, "raw", 0))
        tensors = tuple((each.name, each.dtype.name, each.shape) for each in layout.tensors)
        message = messages.Define(self.next_id(), tensors, parts, tables)
        self.receive(peer, message, bytes(data))

    def give(self, peer: int, *, bad: bool = False) -> None:
        """Push a gradient of some tensors, raw or coded; ``bad``: with something wrong in it."""
        client = self.peers[peer]
        seq = self.client_seqs[client] = self.client_seqs.get(client, 0) + 1
        parts, data = self.gradient(bad)
        fetch = self.chance(0.7)
        message = messages.Push(
            *(self.next_id(), seq, fetch, self.have(), parts, self.wants() if fetch else ()),
            coded=bool(self.engine.codecs[1]) and self.chance(0.6),
            count=int(self.random.integers(1, 3)),
        )
        self.last[client] = message, data
        self.receive(peer, message, data)

    def gradient(self, bad: bool) -> tuple[Parts, bytes]:
        """Return the parts of a push, and their payloads."""
        layout, store = Layout.of(MODEL), self.engine.store
        whole = self.chance(0.5)
        chosen = [t for t in layout.tensors if whole or self.chance(0.6)] or [layout.tensors[0]]
        wrong = self.one_of(("nan", "ahead", "codec", "nothing")) if bad else ""
        if wrong == "nothing":
            return (), b""
        late = int(self.random.integers(0, 3))
        parts, data = list[Part](), b""
        for tensor in chosen:
            values = self.random.standard_normal(tensor.shape).astype(tensor.dtype)
            if wrong == "nan":
                values.flat[-1] = np.nan
            base = 0
            if store is not None:
                index = store.layout.index[tensor.name]
                base = max(0, int(store.current.tensor_versions[index]) - late)
            base += 1000 * (wrong == "ahead")
            begin, end = tensor.offset, tensor.offset + tensor.nbytes
            kind, payload = "raw", values.tobytes()
            if tensor.dtype == np.float32 and self.chance(0.3) and not wrong:
                coder = codec(self.one_of(CODECS))
                kind = coder.name
                payload = bytes(coder.encoder(tensor.shape, feedback=False).encode(values.ravel()))
            if wrong == "codec":
                kind = "unheard-of"
            parts.append(Part(begin, end, kind, len(payload), base))
            data += payload
        return tuple(parts), data

    def have(self) -> int:
        """Return the version of the model that a client says it holds."""
        return int(self.random.integers(-1, self.engine.version + 1))

    def wants(self) -> Wants:
        """Return the tensors that a client asks for; mostly all."""
        if self.chance(0.7):
            return ()
        return ((0, int(self.random.integers(1, 5)), self.have()),)

    def spoil(self, peer: int) -> None:
        """Push something that is refused."""
        self.give(peer, bad=True)

    def repeat(self, peer: int) -> None:
        """Send the last push of this client again."""
        if self.peers[peer] in self.last:
            self.receive(peer, *self.last[self.peers[peer]])

    def reapply(self, peer: int) -> None:
        """Have the last gradient applied again, whether there is one or not."""
        client = self.peers[peer]
        seq = self.client_seqs[client] = self.client_seqs.get(client, 0) + 1
        message = Reapply(self.next_id(), seq, self.chance(0.5), self.have(), self.wants())
        self.last[client] = message, b""
        self.receive(peer, message)

    def fetch(self, peer: int) -> None:
        """Fetch parameters."""
        coded = bool(self.engine.codecs[1]) and self.chance(0.6)
        asked = self.have(), self.wants(), coded, self.chance(0.3)
        self.receive(peer, Fetch(self.next_id(), *asked))

    def fetch_rows(self, peer: int) -> None:
        """Fetch rows; now and then one that does not exist."""
        ids = self.random.integers(0, TABLE.rows + self.chance(0.1), 4)
        self.receive(peer, FetchRows(self.next_id(), 0, fetch_parts(TABLE, 4)), ids.tobytes())

    def push_rows(self, peer: int) -> None:
        """Push gradients of rows; now and then with a bad value, or of rows not fetched yet."""
        client = self.peers[peer]
        seq = self.client_seqs[client] = self.client_seqs.get(client, 0) + 1
        count, wanted = int(self.random.integers(1, 6)), int(self.random.integers(0, 3))
        ids = self.random.integers(0, TABLE.rows, count + wanted)
        values = self.random.standard_normal((count, TABLE.width)).astype(np.float32)
        if self.chance(0.1):
            values[0, 0] = np.inf
        version = self.engine.tables[0].version if self.engine.tables else 0
        version = max(0, version - int(self.random.integers(0, 3))) + 1000 * self.chance(0.05)
        message = PushRows(self.next_id(), seq, 0, version, push_parts(TABLE, count, wanted))
        data = ids.tobytes() + values.tobytes()
        assert len(data) == (count + wanted) * ID_BYTES + values.nbytes
        self.last[client] = message, data
        self.receive(peer, message, data)

    def average(self, peer: int) -> None:
        """Be ready to average models."""
        digest = b"d" * 32 if self.engine.store is None else self.engine.store.layout.digest
        nonce = self.random.bytes(16)
        message = JoinRound(self.next_id(), "127.0.0.1", 4000 + peer, 0, digest, nonce)
        self.receive(peer, message)

    def ask(self, peer: int) -> None:
        """Ask for the statistics."""
        self.receive(peer, messages.Stats(self.next_id()))

    def pause(self, peer: int) -> None:
        """Let time pass, so that deadlines may be over."""
        self.wait(float(self.random.exponential(20.0)))

    def pace(self, peer: int) -> None:
        """Measure the traffic under a budget."""
        nbytes, second, peak, backlog = (int(n) for n in self.random.integers(0, 1 << 20, 4))
        busy, limited = int(self.random.integers(0, 4)), self.chance(0.5)
        self.post(BudgetTick(self.now, nbytes, second, peak, backlog, busy, limited))

    def end(self, *, kept: bool) -> None:
        """End as a server does."""
        self.post(Stopping(self.now, kept))
        for peer in list(self.peers)[:2]:
            self.give(peer)
            self.repeat(peer)
        while self.outstanding is not None:
            self.run_kernel()
        for peer in list(self.peers):
            self.disconnect(peer)
        self.journal.end(self.now)


def shown(effect: Effect) -> Any:
    """Return what an effect does, as values that can be compared."""
    if isinstance(effect, Reply) and isinstance(effect.message, Report):
        return effect.peer, effect.message.id, decided(effect.message.report)
    if isinstance(effect, Reply):
        rows = None if effect.rows is None else bytes(effect.rows.answer)
        return effect.peer, effect.message, rows
    if isinstance(effect, Apply):
        job = effect.job
        in_place = isinstance(job, UpdateJob) and job.target is job.store.current
        return "apply", effect.ticket, type(job).__name__, in_place
    return "warm" if isinstance(effect, Warm) else effect


def state(engine: Engine) -> dict[str, Any]:
    """Return what an engine has come to, as values that can be compared."""
    found: dict[str, Any] = {"digest": digest(engine), "report": decided(engine.report())}
    for member in engine.membership:
        sent = None if member.sent is None else member.sent.version.number
        found[member.client] = member.last_seq, list(member.answers.items()), sent
    store = engine.store
    if store is not None:
        found["versions"] = store.current.tensor_versions.tolist(), store.current.changed.tolist()
        found["state"] = [array.tobytes() for arrays in store.state for array in arrays]
        found["masters"] = [array.tobytes() for array in store.masters if array is not None]
        found["sums"] = store.sums.tolist()
    return found


class Effects:
    """Notes the effects of every engine, in order, also of servers that other tests have left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[Engine, list[Any]] = {}  # not by `id`, which an engine that ends leaves free
        handle = Engine.handle

        def noted(engine: Engine, event: Event, leased: bool | None = None) -> list[Effect]:
            effects = handle(engine, event, leased)
            if not passes(event):
                self.of.setdefault(engine, []).append([shown(effect) for effect in effects])
            return effects

        monkeypatch.setattr(Engine, "handle", noted)


def interrupted(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Have readers end in the middle of events, as they do on other threads."""
    advance = UpdateQueue.advance

    def read_first(queue: UpdateQueue, now: float) -> list[Effect]:
        training = world.engine.training  # not a replay's
        if training is not None and training.updates is queue and world.chance(0.3):
            world.read()
        return advance(queue, now)

    monkeypatch.setattr(UpdateQueue, "advance", read_first)


def live(world: World, steps: int = 150, *, kept: bool = False) -> World:
    """Have a world go on for some steps, and end."""
    for _ in range(steps):
        world.act()
    world.end(kept=kept)
    return world


def again(world: World) -> Replayed:
    """Replay what a world has recorded."""
    return world.journal.replay()


def compare(monkeypatch: pytest.MonkeyPatch, world: World, *, kept: bool = False) -> World:
    """Have a world go on, replay its record, and compare all that can be seen of both."""
    effects = Effects(monkeypatch)
    interrupted(monkeypatch, world)
    live(world, kept=kept)
    seen = state(world.engine)
    replayed = again(world)
    assert replayed.complete
    recorded, repeated = effects.of[world.engine], effects.of[replayed.engine]
    for number, (before, after) in enumerate(zip(recorded, repeated, strict=True)):
        assert after == before, f"event {number}"
    found = state(replayed.engine)
    assert found.keys() == seen.keys()
    for name, value in seen.items():
        assert found[name] == value, name
    return world


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_policy(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, settings = CASES[case]
    world = World(policy, settings, seed, False, backend="numpy")
    compare(monkeypatch, world)
    assert world.version > 0


# An option is of what comes before a policy, or after it: codecs, gates, filters, records.
@pytest.mark.parametrize(
    ("name", "policy"), by_turns(sorted(OPTIONS), ["fasgd", "asgd", "softsync"])
)
def test_every_option(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS[name]
    if policy != "fasgd" and "gate" in options:
        options = {**options, "gate": "constant:p_push=0.5,skipped=reapply"}
    monkeypatch.setattr(screen, "SEEDING", 2)
    monkeypatch.setattr(screen, "LEARNT", 2)
    world = World(policy, {}, 5, False, backend="numpy", **options)
    compare(monkeypatch, world)
    assert world.version > 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("policy", ["asgd", "sasgd", "fasgd"])
def test_tables(policy: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, World(policy, {}, 7, True, backend="numpy"), kept=kept)


@pytest.mark.parametrize("policy", ["hardsync", "softsync", "ssp"])
def test_a_server_whose_state_is_kept(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, World(policy, {}, 3, False, backend="numpy"), kept=True)


def test_averaging_and_a_server_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, World("average", {}, 1, False, backend="numpy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "settings", "options"),
    [
        ("fasgd", {}, {"fetch_codec": ("int8",)}),
        ("asgd", {"clip": 1.0, "optimizer": "adam"}, {"fetch_codec": ("topk:0.01",)}),
        ("hardsync", {"per_tensor": "clip=1@square clip=2@*[ae]*"}, {"fetch_codec": ("int8",)}),
        ("softsync", {"n": 2}, {"fetch_codec": ("lowrank:2",)}),
    ],
)
def test_threads_and_kernels_give_the_same_bits(
    policy: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """A record may be replayed on any machine: work is cut by size, and sums have one order."""
    big = {
        "square": np.linspace(-1, 1, 1200 * 1200).reshape(1200, 1200).astype(np.float32),
        "narrow": np.linspace(0, 1, 1 << 20).astype(np.float16),
        "exact": np.linspace(0, 1, 1 << 17),
    }
    assert sum(array.nbytes for array in big.values()) > LARGE
    found = []
    random = np.random.default_rng(0)
    steps = [
        {
            name: random.standard_normal(array.shape).astype(array.dtype)
            for name, array in big.items()
        }
        for _ in range(4)
    ]
    for threads, backend in ((1, "numpy"), (1, "numba"), (2, "numpy"), (3, "numba")):
        machine = Resources(parallel_map=pool_of(threads).all)
        inline = Inline(
            policy, settings, machine=machine, workers=WORKERS, backend=backend, **options
        )
        inline.define(big)
        inline.engine.defined_store.warm()
        for peer in range(1, WORKERS + 1):
            inline.join(peer)
        for step, gradients in enumerate(steps):
            inline.push(step % WORKERS + 1, gradients, 0, fetch=True)
            inline.receive(1, Fetch(100 + step, max(0, inline.version - 1), (), True))
            inline.release()
        replica = inline.engine.replica
        assert replica is not None
        found.append((state(inline.engine), replica.current.arena.data.tobytes()))
    assert all(each == found[0] for each in found[1:])
