"""The steady exchange is the general one by a shorter way: every byte, every result, every count.

Two clients with servers of their own (`tests.memory`) are told to do the same, and what can happen
to connections happens to both. One takes the short way where it can; the other never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.client import Client, Params
from aiops.client.request_kinds import Receipt
from aiops.errors import AiopsError, BadPush, ConnectionLost
from aiops.model.layout import Array
from aiops.wire import encoding
from aiops.wire.messages import Ack, Message
from tests.memory import PING, URL, Faults, MemoryServer, patch_select, without_waiting
from tests.memory_loop import Awaited
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC

SMALL: Mapping[str, Array] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([5, 6, 7], np.float16),
    "s": np.array(8, np.float64),
    "x": np.array([1, 2, 3], ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.float32),
}
LARGE: Mapping[str, Array] = {
    "w": np.arange(20_000, dtype=np.float32),
    "b": np.arange(3, dtype=np.float64),
}
"""Larger than what is received beside the parameters."""

CODED: Mapping[str, Array] = {
    "w": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "b": np.array([5, 6, 7], np.float32),
    "none": np.zeros((0, 3), np.float32),
    "c": np.array(8, np.float32),
    "v": np.linspace(-1, 1, 300, dtype=np.float32),
}
"""Its large tensors are pushed in ``int8``, in 4 parts with the two small ones, and others."""
LARGE_CODED: Mapping[str, Array] = {
    "w": np.linspace(-1, 1, 20_000, dtype=np.float32),
    "b": np.arange(3, dtype=np.float32),
}

FETCHED: Mapping[str, Array] = {**CODED, "h": np.array([5, 6, 7], np.float16)}

MODELS = {"small": SMALL, "large": LARGE, "coded": CODED, "large coded": LARGE_CODED}
INCREMENTS = {"fetched": FETCHED, "both": CODED, "large fetched": LARGE_CODED}
"""Models that are fetched coded."""
ALL = {**MODELS, **INCREMENTS}

CODECS: Mapping[str, Sequence[str]] = {
    "coded": ["int8", "bf16@v"],
    "large coded": ["int8"],
    "both": ["bf16", "int8@v"],
}
"""Those of gradients, by model."""
FETCH_CODECS: Mapping[str, Sequence[str]] = {
    "fetched": ["int8", "bf16@v"],
    "both": ["int8", "onebit@v"],
    "large fetched": ["bf16"],
}
"""Those of parameters."""


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        yield


class Half:
    """A client and its server."""

    def __init__(
        self, steady: bool, model: str = "small", policy: str = "asgd", face: str = "blocking"
    ) -> None:
        codecs = CODECS.get(model, ()), FETCH_CODECS.get(model, ())
        self.server = MemoryServer(policy, None, *codecs)
        self.other: Client = self.server.call(Client, URL, role="worker")
        self._steady = steady
        self.short = 0  # exchanges that went the short way
        self.client: Any
        if face == "blocking":
            self.client = self.server.call(Client, URL, role="worker")
            without_waiting(self.client)
            self.count(self.client._connection)
        else:
            start = ALL[model] if face == "worker" else None
            self.client = Awaited(self.server, start, self.count)
        worker = getattr(self.client, "worker", None)
        self.params = worker.params if worker else self.client.define(ALL[model])
        self.theirs = self.other.fetch()
        self.gradient = {name: np.ones_like(array) for name, array in self.params.items()}
        self.room = self.params.like()

    def count(self, connection: Any) -> None:
        """Count the steady exchanges of a connection, or have it make none."""
        way = connection.short
        exchange = way.exchange

        def counted(params: Params, gradients: Mapping[str, Array]) -> Any:
            done = exchange(params, gradients) if self._steady else None
            if isinstance(done, asyncio.Future):
                done.add_done_callback(note)
            else:
                self.short += type(done) is Receipt
            return done

        def note(done: asyncio.Future[Any]) -> None:
            self.short += not done.cancelled() and type(done.result()) is Receipt

        way.exchange = counted

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.other.close()
        self.server.close()

    def result(self, function: Callable[..., Any], *given: Any) -> Any:
        """What a call comes to, errors included."""
        try:
            found = function(*given)
        except AiopsError as error:
            return type(error), str(error)
        return repr(found)

    def fault(self, **faults: Any) -> None:
        """Have something happen to the connection that is open, and to what follows it."""
        faulty = Faults(**faults)
        self.server.faults = faulty
        self.socket.faults = faulty

    @property
    def socket(self) -> Any:
        return getattr(self.client._connection, "socket", None) or self.server.sockets[-1]

    @property
    def replica(self) -> Any:
        """The server's delta replica, or None."""
        return self.server.engine.replica

    def coding(self) -> dict[Any, bytes]:
        """What the encoders of gradients have left out, by the byte of the arena."""
        coding = self.client._session.info.coding
        found = {} if coding is None else coding.state()
        return {place: arrays["rest"].tobytes() for place, arrays in found.items()}

    def settle(self) -> None:
        """Have what is left over travel: a pong, say."""
        self.fault()
        self.result(self.client.attend)

    def state(self) -> dict[str, Any]:
        """All there is to compare."""
        params, session = self.params.copy(), self.client._session
        pending, answered = session.pending, session.answered
        store = self.server.engine.store
        assert store is not None
        worker = getattr(self.client, "worker", None)
        return {
            "worker": worker and (worker.steps, worker.last, worker.idle_seconds),
            "up": [sock.up for sock in self.server.sockets],
            "down": [sock.said for sock in self.server.sockets],
            "params": params.arena.data.tobytes(),
            "held": params.held.tolist(),
            "versions": params.versions.tolist(),
            "version": (params.version, params.connection),
            "ledger": self.client.ledger.report(),
            "traffic": self.client.traffic,
            "numbers": (pending.next_id, pending.seq, answered),
            "pending": list(pending.by_id),
            "coding": self.coding(),
            "server": (store.version, store.current.arena.data.tobytes()),
            "replica": self.replica and self.replica.current.arena.data.tobytes(),
            "theirs": [sock.wire.traffic.counts() for sock in self.server.sockets],
        }


def answer_with(half: Half, increments: int) -> None:
    """Have the server answer the next exchange with so many increments, if they are fetched."""
    half.replica._lag = 1
    others_exchange(half, increments - 1 if increments else 0)
    half.replica._lag = 1 if increments else 9


def teach(half: Half) -> None:
    """Have a client learn the steady exchange, with all forms of its answers."""
    if half.replica is None:
        for _ in range(2):
            half.client.exchange(half.params, half.gradient)
        assert half.short == 1
        return
    for increments in (1, 2, 0, 3, 1):
        answer_with(half, increments)
        half.client.exchange(half.params, half.gradient)
    assert half.short >= 1


class Twins:
    """One client that takes the short way, and one that does not."""

    def __init__(self, model: str = "small", policy: str = "asgd", face: str = "blocking") -> None:
        self.halves = [Half(steady, model, policy, face) for steady in (True, False)]

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *exc: object) -> None:
        for half in self.halves:
            half.__exit__()

    @property
    def short(self) -> int:
        assert self.halves[1].short == 0
        return self.halves[0].short

    def both(self, do: Callable[[Half], Any]) -> Any:
        """Have both do it, and compare; return what it came to."""
        short, long = (half.result(do, half) for half in self.halves)
        assert short == long
        for half in self.halves:
            half.settle()
        one, other = (half.state() for half in self.halves)
        for name in one:
            assert one[name] == other[name], name
        return short

    def push(self) -> Any:
        """Exchange a gradient of ones."""
        return self.both(lambda half: half.client.exchange(half.params, half.gradient))


# ---------------------------------------------------------------- what may be done in a step


def with_the_same_arrays(half: Half, seed: int) -> Any:
    for array in half.gradient.values():
        array[...] = seed % 5 - 2
    return half.client.exchange(half.params, half.gradient)


def with_other_arrays(half: Half, seed: int) -> Any:
    gradient = {name: np.full_like(a, seed % 3) for name, a in reversed([*half.params.items()])}
    return half.client.exchange(half.params, gradient)


def with_room(half: Half, seed: int) -> Any:
    half.room.arena.data[:] = 0
    half.room["w"][...] = seed % 4
    return half.client.exchange(half.params, half.room)


def with_some(half: Half, seed: int) -> Any:
    return half.client.exchange(half.params, {"w": half.gradient["w"]})


def with_a_wrong_shape(half: Half, seed: int) -> Any:
    return half.client.exchange(half.params, {**half.gradient, "b": np.zeros(4, np.float16)})


def with_a_wrong_dtype(half: Half, seed: int) -> Any:
    return half.client.exchange(half.params, {**half.gradient, "b": np.zeros(3, np.int64)})


def with_a_wrong_name(half: Half, seed: int) -> Any:
    gradient = dict(half.gradient)
    gradient["c"] = gradient.pop("b")
    return half.client.exchange(half.params, gradient)


def with_another_order_of_bytes(half: Half, seed: int) -> Any:
    turned = {**half.gradient, "w": np.asfortranarray(half.gradient["w"] * (seed % 3)).copy("F")}
    return half.client.exchange(half.params, turned)


def with_nan(half: Half, seed: int) -> Any:
    bad = {name: array.copy() for name, array in half.gradient.items()}
    bad["w"].reshape(-1)[seed % 3] = np.nan
    return half.client.exchange(half.params, bad)


def into_another(half: Half, seed: int) -> Any:
    return half.client.exchange(half.params, half.gradient, half.params.copy())


def without_parameters(half: Half, seed: int) -> Any:
    return half.client.push(half.params, half.gradient)


def fetch(half: Half, seed: int) -> Any:
    return half.client.fetch(half.params).version


def forget(half: Half, seed: int) -> Any:
    half.params.version = -1


def look_at_versions(half: Half, seed: int) -> Any:
    return half.params.held.tolist(), half.params.versions.tolist()


def others_push(half: Half, seed: int) -> Any:
    for _ in range(seed % 4):
        half.other.push(half.theirs, {name: np.ones_like(a) for name, a in half.theirs.items()})


def others_exchange(half: Half, seed: int) -> Any:
    """With a coded fetch the next answer has as many increments more."""
    for _ in range(seed % 4):
        half.other.exchange(half.theirs, {n: np.ones_like(a) for n, a in half.theirs.items()})


def replica_may_lag(half: Half, seed: int) -> Any:
    if half.replica is not None:
        half.replica._lag = seed % 4


def ping_first(half: Half, seed: int) -> Any:
    half.socket.say(PING)
    return half.client.exchange(half.params, half.gradient)


def stats(half: Half, seed: int) -> Any:
    return half.client.stats()["version"]


DEEDS = [
    *(with_the_same_arrays, with_the_same_arrays, with_other_arrays, with_room, with_some),
    *(with_a_wrong_shape, with_a_wrong_dtype, with_a_wrong_name, with_another_order_of_bytes),
    *(with_nan, into_another, without_parameters, fetch, forget, look_at_versions, others_push),
    *(ping_first, stats, others_exchange, others_exchange, replica_may_lag),
]

pieces = st.none() | st.integers(1, 400) | st.sampled_from((4096, 70_000))
places = st.none() | st.integers(0, 600)
faults = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "up": pieces,
        "down": pieces,
        "slow_up": st.integers(0, 2),
        "slow_down": st.integers(0, 2),
        "cut_up": places,
        "cut_down": places,
    },
)
steps = st.tuples(st.sampled_from(DEEDS), st.integers(0, 11), faults)


Does = list[tuple[Callable[[Half, int], Any], int, dict[str, Any]]]

anything = given(
    st.sampled_from(("small", *ALL)),
    st.sampled_from(("asgd", "fasgd", "sasgd")),
    st.lists(steps, min_size=1, max_size=12),
)


@pytest.mark.slow
@settings(DETERMINISTIC, max_examples=examples(60))
@anything
def test_both_ways_are_one(model: str, policy: str, does: Does) -> None:
    check(model, policy, "blocking", does)


@pytest.mark.parametrize("face", ["async", "worker"])
@settings(DETERMINISTIC, max_examples=examples(40))
@anything
def test_both_ways_of_an_async_client_are_one(
    face: str, model: str, policy: str, does: Does
) -> None:
    check(model, policy, face, does)


def check(model: str, policy: str, face: str, does: Does) -> None:
    """Have both ways do the same, and compare after each step."""
    with Twins(model, policy, face) as twins:
        twins.push()
        for deed, seed, happens in does:

            def do(half: Half) -> Any:
                half.fault(**happens)  # noqa: B023 - it is called at once
                return deed(half, seed)  # noqa: B023

            twins.both(do)
        for _ in range(10 if model in INCREMENTS else 2):  # until what is not held is brought
            twins.push()  # and each number of increments has come once
        before, versions = twins.short, twins.halves[0].params.copy().versions
        twins.push()
        level = len(set(versions.tolist())) == 1  # else a push has several parts
        assert twins.short == before + level, "whatever has happened, the next is steady again"


@pytest.mark.parametrize("model", ALL)
@pytest.mark.parametrize("policy", ["asgd", "fasgd"])
def test_it_is_taken_for_all_but_the_first(model: str, policy: str) -> None:
    with Twins(model, policy) as twins:
        for _ in range(10):
            twins.push()
        assert twins.short == 9
        assert twins.halves[0].params.version == 10


def test_a_worker_that_pushes_directions_takes_it() -> None:
    """What travels is the momentum, orthogonalised; each worker has its own."""
    with Twins(policy="schedule-free", face="worker") as twins:
        before = twins.halves[0].params.copy()
        for seed in range(5):
            twins.both(lambda half, seed=seed: with_the_same_arrays(half, seed))
            twins.both(lambda half, seed=seed: with_nan(half, seed))
            twins.both(lambda half, seed=seed: with_room(half, seed))
        assert twins.short == 9
        moved = twins.halves[0].params["w"] - before["w"]
        assert np.abs(moved).max() > 1e-4


def test_numbers_that_need_another_width_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    with Twins() as twins:
        for _ in range(300):
            twins.push()
        assert 280 < twins.short < 300


@pytest.mark.parametrize("model", ALL)
def test_a_lost_answer_is_asked_for_again(model: str) -> None:
    with Twins(model) as twins:
        twins.push()
        nbytes = len(twins.halves[0].socket.said)
        twins.push()
        answer = len(twins.halves[0].socket.said) - nbytes
        for cut in (0, 1, 5, 60, 120, answer - 1):

            def do(half: Half, cut: int = cut) -> Any:
                half.fault(cut_down=cut)
                return half.client.exchange(half.params, half.gradient)

            twins.both(do)
            store = twins.halves[0].server.engine.store
            assert store is not None
            assert store.version == twins.halves[0].params.version, "applied once"
            twins.push()


@pytest.mark.parametrize("model", ALL)
def test_a_push_cut_midway_is_sent_again(model: str) -> None:
    with Twins(model) as twins:
        twins.push()
        for number, cut in enumerate((0, 1, 5, 50, 100, 110, 130)):

            def do(half: Half, cut: int = cut) -> Any:
                half.fault(cut_up=cut)
                return half.client.exchange(half.params, half.gradient)

            twins.both(do)
            assert twins.halves[0].params.version == 2 + 2 * number
            twins.push()


def test_an_error_in_place_of_the_answer() -> None:
    with Twins() as twins:
        twins.push()
        kind, text = twins.both(lambda half: with_nan(half, 1))
        assert kind is BadPush
        assert "'w' holds nan at [0, 1]" in text
        twins.push()
        twins.push()
        assert twins.short == 2


@each_row(
    "change",
    [
        {"used": False},
        {"id": 99},
        {"version": 1 << 62},
        {"current": 0},
        {"staleness": 3},
        {"mean_staleness": -1.5},
        {"vbar": 0.25},
        {"gate": (0.5, 0.5)},
        {"vbars": b"\0" * 20},
        {"vbars": b"\0" * 4},
    ],
    ids=str,
)
def test_any_other_answer(change: dict[str, Any]) -> None:
    def answer(message: Message) -> Message:
        if type(message) is Ack:
            for name, value in change.items():
                setattr(message, name, value)
        return message

    with Twins() as twins:
        for half in twins.halves:
            half.server.call(lambda: None)
        twins.push()
        for half in twins.halves:
            half.server.answer = answer
        if "id" in change:  # nobody has asked for that
            for half in twins.halves:
                half.client.timeout = 5.0
            twins.both(lambda half: (half.fault(cut_down=400), twins_push(half))[1])
        else:
            twins.push()
            twins.push()
        for half in twins.halves:
            half.server.answer = lambda message: message
        twins.push()


def twins_push(half: Half) -> Any:
    half.server.answer = _other_id(half.server.answer)
    return half.client.exchange(half.params, half.gradient)


def _other_id(answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
    """Change one answer only."""
    left = [answer]

    def changed(message: Message) -> Message:
        return left.pop()(message) if left and type(message) is Ack else message

    return changed


@each_row("at", ["sendmsg", "recv_into"])
@each_row("model", ALL)
def test_what_breaks_in_uses_up_the_number(at: str, model: str) -> None:
    """A push may be part of the model when Ctrl-C comes: the next is another one."""
    with Twins(model) as twins:
        twins.push()
        for half in twins.halves:
            assert half.client._session.answered, "and so nothing is left to be settled"
            seq, sock = half.client._session.pending.seq, half.socket
            real = getattr(sock, at)

            def broken(*given: Any, real: Any = real) -> int:
                real(*given)
                raise KeyboardInterrupt

            setattr(sock, at, broken)
            with pytest.raises(KeyboardInterrupt):
                half.client.exchange(half.params, half.gradient)
            assert half.client._session.pending.seq == seq + 1
            assert half.client._session.pending.by_id == {}
        twins.both(fetch_anew)
        twins.push()
        assert twins.halves[0].params.version == 3, "both pushes are part of the model"


def test_what_breaks_in_midway_leaves_a_mixture_that_is_known() -> None:
    """Ctrl-C may come when a part of the payload has been received, and before it is counted."""
    with Twins("large") as twins:
        twins.push()
        half = twins.halves[0]
        before, real, calls = half.params["w"].copy(), half.socket.recv_into, []

        def broken(*given: Any) -> int:
            half.socket.faults = Faults(down=40_000)
            count: int = real(*given)
            calls.append(count)
            if len(calls) == 2:  # the first is for the header
                raise KeyboardInterrupt
            return count

        half.socket.recv_into = broken
        with pytest.raises(KeyboardInterrupt):
            half.client.exchange(half.params, half.gradient)
        assert calls[1] == 40_000
        assert (half.params["w"] != before).any()
        assert half.params.version == -1
        fetch_anew(half)
        store = half.server.engine.store
        assert store is not None
        assert half.params.arena.data.tobytes() == store.current.arena.data.tobytes()


def fetch_anew(half: Half) -> Any:
    return half.client.fetch(half.params).version


def test_parameters_that_were_cut_midway_are_known_to_be_a_mixture() -> None:
    with Twins("large") as twins:
        twins.push()
        twins.push()

        def do(half: Half) -> Any:
            half.fault(cut_down=1000)
            connection: Any = half.client._connection
            connection.dialler.wait = lambda seconds: connection.interrupt()
            return half.client.exchange(half.params, half.gradient)

        kind, _text = twins.both(do)
        assert kind is ConnectionLost
        assert twins.halves[0].params.version == -1
        for half in twins.halves:
            half.client._connection.dialler.interrupted = False
            without_waiting(half.client)
        twins.both(fetch_anew)
        twins.push()


def test_a_server_with_another_order_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its integers have widths of their own, too: a template is what the peer says."""
    import msgpack

    def encode(message: Message) -> bytes:
        if type(message) is not Ack:
            return encoding.encode(message)
        names, values = encoding._NAMES[type(message)]
        pairs = list(zip(names, values(message), strict=True))
        packed = [bytes([0x80 | len(pairs)])]
        for name, value in reversed(pairs):
            packed.append(msgpack.packb(name))
            wide = type(value) is int
            packed.append(b"\xcf" + value.to_bytes(8) if wide else msgpack.packb(value))
        return b"".join(packed)

    with Twins() as twins:
        for module in ("wire.connection", "client.steady", "engine.steady"):
            monkeypatch.setattr(f"aiops.{module}.encode", encode)
        for _ in range(5):
            twins.push()
        assert twins.short == 4
