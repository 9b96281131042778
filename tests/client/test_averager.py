"""The model averager over real sockets: several workers, and partners that do as a test says."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiops.averaging.ring_allreduce import Flat, Piece, Ring
from aiops.client import ModelAverager
from aiops.errors import (
    BadPush,
    ConnectionLost,
    DeadlineExceeded,
    RemoteProtocolError,
    Unauthorised,
    UsageError,
)
from aiops.model.arena import Arena
from aiops.model.layout import Array, Layout
from aiops.model.parts import Part
from aiops.wire import messages, ring_messages
from aiops.wire.encoding import KINDS
from aiops.wire.messages import Message
from aiops.wire.ring_messages import RingChunk, RingHello, Round
from aiops.wire.ring_proofs import proof
from aiops.wire.sinks import Sink
from tests.driven import Driven
from tests.peers import Peer, Taken, eventually, frame
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

ASKED = {"interval": 1000.0, "grace": PATIENCE}
"""Nobody averages but when a test asks for it."""


@contextlib.contextmanager
def meeting_point(**settings: Any) -> Iterator[ServerThread]:
    chosen = {key: settings.pop(key) for key in ("interval", "grace", "stall", "warmup", "lr")
              if key in settings}  # fmt: skip
    with ServerThread(policy="average", set={**ASKED, **chosen}, **settings) as server:
        yield server


def ready(server: ServerThread) -> int:
    """How many wait for a round."""
    count: int = server.call(lambda s: s.engine.report()["averages"]["ready"])
    return count


def joined(server: ServerThread, *params: Any, **more: Any) -> list[ModelAverager]:
    """Averagers that come one after the other, each with those before it ready to share."""
    found: list[ModelAverager] = []
    with ThreadPoolExecutor(len(params)) as pool:
        for given in params:
            coming = pool.submit(ModelAverager, server.url, given, timeout=PATIENCE, **more)
            if found:
                eventually(lambda: ready(server) == 1, "the newcomer is ready")
            sharing = [pool.submit(other.average) for other in found]
            found.append(coming.result(PATIENCE))
            assert {one.result(PATIENCE) for one in sharing} <= {len(found)}
    return found


def average(*averagers: ModelAverager) -> list[int]:
    """Have all of these average at the same time."""
    with ThreadPoolExecutor(len(averagers)) as pool:
        return list(pool.map(lambda one: one.average(), averagers))


def model(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(700, 300)).astype(np.float32),
        "b": rng.normal(size=5),
        "h": rng.normal(size=33).astype(np.float16),
    }


def bits(params: dict[str, Array]) -> bytes:
    return b"".join(params[name].tobytes() for name in sorted(params))


class TestAverage:
    def test_all_get_the_mean_and_keep_the_sum(self) -> None:
        params = [model(seed) for seed in range(3)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            for index, averager in enumerate(averagers):
                with averager.step():
                    for array in params[index].values():
                        array += np.asarray(index, array.dtype)
            before = {k: sum(p[k].astype(np.float64) for p in params) for k in params[0]}
            assert average(*averagers) == [3, 3, 3]
        assert len({bits(p) for p in params}) == 1
        for name, total in before.items():
            after = sum(p[name].astype(np.float64) for p in params)
            tolerance = 1e-2 if name == "h" else 1e-5
            np.testing.assert_allclose(after, total, atol=tolerance)
        assert [one.stats.failed for one in averagers] == [0, 0, 0]
        assert averagers[0].stats.workers == 3

    def test_equal_models_are_not_changed(self) -> None:
        params = [model(0) for _ in range(3)]
        expected = bits(params[0])
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            for _ in range(3):
                assert average(*averagers) == [3, 3, 3]
                assert [bits(p) for p in params] == [expected] * 3
        assert averagers[1].stats.rounds == 2 + 3

    def test_each_moves_about_twice_the_model(self) -> None:
        params = [{"w": np.zeros(300_000, np.float32)} for _ in range(3)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            before = averagers[0].stats.traffic.bytes_out
            average(*averagers)
            sent = averagers[0].stats.traffic.bytes_out - before
        assert 1_600_000 <= sent < 1_610_000

    def test_a_lone_worker_goes_on_alone(self) -> None:
        params = model(1)
        before = bits(params)
        with meeting_point() as server, ModelAverager(server.url, params) as averager:
            assert averager.average() == 1
            assert bits(params) == before
            assert averager.stats.alone == 2
            assert averager.stats.rounds == 0

    def test_rounds_come_by_themselves(self) -> None:
        params = [model(seed) for seed in range(3)]
        with meeting_point(interval=0.01) as server, contextlib.ExitStack() as stack:
            averagers = [
                stack.enter_context(ModelAverager(server.url, p, timeout=PATIENCE)) for p in params
            ]

            def enough() -> bool:
                with averagers[0].step():
                    params[0]["w"] += 1
                server.call(lambda s: None)
                return all(one.stats.rounds >= 5 for one in averagers)

            eventually(enough, "five rounds")
            assert averagers[0].steps > 0

    @pytest.mark.parametrize(("rounds", "strangers"), [(70, 0), (4, 24)])
    def test_many_rounds_and_strangers_in_a_short_time(self, rounds: int, strangers: int) -> None:
        """Neither links of rounds that are over nor idle strangers keep out the next round's."""
        params = [{"w": np.full(6, seed, np.float32)} for seed in range(2)]
        with meeting_point(stall=PATIENCE) as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            port = averagers[0]._core.started.result().rounds._listener.port
            for _ in range(rounds):
                for _ in range(strangers):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                assert average(*averagers) == [2, 2]
        assert [one.stats.failed for one in averagers] == [0, 0]

    def test_with_a_token(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point(token="s3cret") as server, contextlib.ExitStack() as stack:
            for one in joined(server, *params, token="s3cret"):
                stack.enter_context(one)
            assert bits(params[0]) == bits(params[1])
            with pytest.raises(Unauthorised):
                ModelAverager(server.url, model(0), token="guess")


class TestJoining:
    def test_the_first_founds_and_the_others_begin_with_its_model(self) -> None:
        params = [model(seed) for seed in range(3)]
        first = bits(params[0])
        with meeting_point() as server, contextlib.ExitStack() as stack:
            for one in joined(server, *params):
                stack.enter_context(one)
        assert [bits(p) for p in params] == [first] * 3

    def test_a_late_joiner_begins_with_the_current_average(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            for index, averager in enumerate(averagers):
                with averager.step():
                    params[index]["w"] += 1 + index
            late = model(9)
            with ThreadPoolExecutor(3) as pool:
                coming = pool.submit(ModelAverager, server.url, late, timeout=PATIENCE)
                eventually(lambda: ready(server) == 1, "the newcomer is ready")
                sharing = [pool.submit(one.average) for one in averagers]
                stack.enter_context(coming.result(PATIENCE))
                assert [one.result(PATIENCE) for one in sharing] == [3, 3]
            np.testing.assert_allclose(late["w"], model(0)["w"] + 1.5, atol=1e-5)
            assert bits(late) == bits(params[0]) == bits(params[1])

    def test_who_comes_while_the_others_are_away_is_told(self) -> None:
        with (
            meeting_point(interval=0.01, grace=0.05) as server,
            ModelAverager(server.url, model(0)) as founder,
        ):
            founder.abort()
            with pytest.raises(DeadlineExceeded, match="are they paused by abort"):
                ModelAverager(server.url, model(1), timeout=0.3)

    def test_who_comes_while_the_others_warm_up_is_let_in_between_their_steps(self) -> None:
        params = [model(seed) for seed in range(3)]
        with (
            meeting_point(interval=0.01, grace=0.05, warmup=100) as server,
            contextlib.ExitStack() as stack,
        ):
            for steps, given in enumerate(params):
                one = stack.enter_context(ModelAverager(server.url, given, timeout=PATIENCE))
                assert bits(given) == bits(params[0])
                for _ in range(steps):
                    with one.step():
                        pass

    def test_a_first_average_is_given_up_in_time_however_long_the_server_is_silent(self) -> None:
        with (
            meeting_point(interval=1000.0, grace=1000.0) as server,
            ModelAverager(server.url, model(0)) as founder,
        ):
            founder.abort()
            with pytest.raises(DeadlineExceeded, match=r"shared its model with this one in 0\.3 s"):
                ModelAverager(server.url, model(1), timeout=0.3)

    def test_a_worker_that_left_is_not_missed(self) -> None:
        params = [model(seed) for seed in range(3)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = joined(server, *params)
            for one in averagers[:2]:
                stack.enter_context(one)
            averagers[2].close()
            assert average(*averagers[:2]) == [2, 2]

    def test_another_model_is_refused_with_the_difference(self) -> None:
        with meeting_point() as server, ModelAverager(server.url, model(0)):
            other = {**model(0), "b": np.zeros(6)}
            with pytest.raises(BadPush, match=r"its 'b' has shape \(5,\), not \(6,\)"):
                ModelAverager(server.url, other)

    def test_a_server_that_averages_nothing_is_refused(self) -> None:
        with (
            ServerThread(policy="asgd") as server,
            pytest.raises(UsageError, match="--policy average"),
        ):
            ModelAverager(server.url, model(0))

    def test_no_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with pytest.raises(ConnectionLost, match="is the server running"):
            ModelAverager(f"127.0.0.1:{port}", model(0), timeout=0.3)

    def test_an_address_that_is_not_ours(self) -> None:
        with meeting_point() as server, pytest.raises(UsageError, match="pass host="):
            ModelAverager(server.url, model(0), host="203.0.113.1")

    def test_a_host_by_name(self) -> None:
        with (
            meeting_point() as server,
            ModelAverager(server.url, model(0), host="localhost") as averager,
        ):
            rounds = averager._core.started.result().rounds
            assert rounds._listener.host in ("127.0.0.1", "::1")

    def test_a_name_that_is_not_found_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answered = threading.Event()

        def silent(*_args: Any, **_options: Any) -> None:
            answered.wait(PATIENCE)
            raise socket.gaierror("nobody knows")

        with meeting_point() as server:
            module = SimpleNamespace(getaddrinfo=silent, SOCK_STREAM=socket.SOCK_STREAM)
            monkeypatch.setattr("aiops.net.dns.socket", module)
            with pytest.raises(UsageError, match=r"no answer in 0\.3 s"):
                ModelAverager(server.url, model(0), host="worker.example", timeout=0.3)
            answered.set()


class TestSteps:
    def test_warm_up_averages_after_every_step(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point(warmup=3) as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]

            def train(index: int) -> list[bytes]:
                seen = []
                for _ in range(4):
                    with averagers[index].step():
                        params[index]["w"] += index + 1
                    seen.append(bits(params[index]))
                return seen

            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(train, range(2))
        assert first[:3] == second[:3]
        assert first[3] != second[3], "the warm-up is over"
        assert averagers[0].stats.rounds == 1 + 3

    def test_the_rate_is_the_server_s(self) -> None:
        with meeting_point(lr=0.25) as server, ModelAverager(server.url, model(0)) as averager:
            assert averager.lr == 0.25
            assert averager.plan["interval"] == ASKED["interval"]
            assert "0 steps, 0 averages" in repr(averager)

    def test_a_step_that_fails_is_not_counted_and_lets_go(self) -> None:
        with meeting_point() as server, ModelAverager(server.url, model(0)) as averager:
            with pytest.raises(ZeroDivisionError), averager.step():
                raise ZeroDivisionError
            assert averager.steps == 0
            assert not averager.lock.held

    def test_a_model_that_diverged_is_reported_and_spoils_nobody_s(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            averagers = [stack.enter_context(one) for one in joined(server, *params)]
            before = bits(params[1])
            params[0]["b"][2] = np.nan
            with pytest.raises(BadPush, match="'b' holds a value that is not finite"):
                averagers[0].average()
            assert averagers[1].average() == 1, "the other has left"
            assert bits(params[1]) == before
            with pytest.raises(BadPush, match="training has diverged"), averagers[0].step():
                pass

    def test_nobody_waits_for_themselves(self) -> None:
        with (
            meeting_point() as server,
            ModelAverager(server.url, model(0)) as averager,
            averager.step(),
        ):
            for wait in (averager.average, averager.abort, averager.resume):
                with pytest.raises(UsageError, match="needs the lock"):
                    wait()
            with pytest.raises(UsageError, match="within another"), averager.step():
                pass

    def test_closed_is_closed(self) -> None:
        with meeting_point() as server:
            averager = ModelAverager(server.url, model(0))
            averager.close()
            averager.close()
            with pytest.raises(UsageError, match="is closed"):
                averager.average()
            with pytest.raises(UsageError, match="is closed"), averager.step():
                pass
            assert server.call(lambda s: s.engine.report()["averages"]["averaging"]) == 0


class TestAbort:
    def test_nothing_changes_the_model_and_nobody_waits(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            first, second = (stack.enter_context(one) for one in joined(server, *params))
            first.abort()
            params[1]["w"] += 1
            before = bits(params[0])
            assert second.average() == 1
            assert bits(params[0]) == before
            first.resume()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(first.average)
                eventually(lambda: ready(server) == 1, "the first is back")
                assert second.average() == asked.result(PATIENCE) == 2
            assert bits(params[0]) == bits(params[1])

    def test_a_wait_for_others_is_given_up(self) -> None:
        """With a grace of a thousand seconds, abort() returns at once all the same."""
        params = [model(seed) for seed in range(2)]
        with meeting_point() as server, contextlib.ExitStack() as stack:
            first, second = (stack.enter_context(one) for one in joined(server, *params))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(first.average)
                eventually(lambda: ready(server) == 1, "the first is ready")
                first.abort()
                assert waiting.result(PATIENCE) == 0
            assert second.average() == 1

    def test_interval_averages_stop_and_start(self) -> None:
        params = [model(seed) for seed in range(2)]
        with meeting_point(interval=0.01, grace=0.05) as server, contextlib.ExitStack() as stack:
            first, second = (
                stack.enter_context(ModelAverager(server.url, p, timeout=PATIENCE)) for p in params
            )
            first.abort()
            rounds = first.stats.rounds
            for _ in range(3):
                assert second.average() == 1
            assert first.stats.rounds == rounds
            first.resume()
            eventually(lambda: second.average() == 2, "both again")

    def test_an_average_asked_for_is_made_while_paused(self) -> None:
        with meeting_point() as server, ModelAverager(server.url, model(0)) as averager:
            averager.abort()
            assert averager.average() == 1


class Partner:
    """A worker in the test's hands: it meets, greets, and passes on as much as it is told to."""

    def __init__(self, server: ServerThread, values: dict[str, Array]) -> None:
        self.peer = Peer(server.url)
        assert self.peer.welcome is not None
        self.layout = Layout(row[:3] for row in self.peer.welcome.model)
        arena = Arena(self.layout)
        for name, array in values.items():
            arena.views[name][...] = array
        self.flat = Flat(self.layout)
        self.flat.load(arena)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE)
        self.round: Round
        self.before: Peer
        self.after: Peer
        self.ring: Ring
        self._ids = itertools.count(1)

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hang_up()
        self.listener.close()
        self.peer.close()

    def hang_up(self) -> None:
        """End the connections to the neighbours."""
        for name in ("before", "after"):
            if hasattr(self, name):
                getattr(self, name).close()

    def be_ready(self) -> None:
        """Ask for a round."""
        port, nonce = self.listener.getsockname()[1], secrets.token_bytes(16)
        request = ring_messages.JoinRound(
            next(self._ids), "127.0.0.1", port, 1, self.layout.digest, nonce
        )
        self.peer.send(frame(request))

    def receive_round(self) -> None:
        """Wait for a round."""
        round = self.peer.receive()
        assert isinstance(round, Round)
        self.round = round
        counts = [counts for *_, counts in round.members]
        self.ring = Ring(round.rank, counts, self.flat)

    def proof(self, side: Any, rank: int) -> bytes:
        return proof(self.round.secret, side, self.round.number, rank)

    def call(self, given: bytes | None = None) -> Peer:
        """Connect to the other worker, and greet it."""
        round = self.round
        host, port, _counts = round.members[1 - round.rank]
        self.after = Neighbour(socket.create_connection((host, port), PATIENCE))
        proof = self.proof("client", round.rank) if given is None else given
        self.after.send(frame(RingHello(0, round.number, round.rank, proof)))
        return self.after

    def answer(self) -> Peer:
        """Take the other worker's connection, and greet it."""
        round = self.round
        self.before = Neighbour(self.listener.accept()[0])
        received = self.before.receive()
        assert isinstance(received, RingHello)
        assert received.proof == self.proof("client", 1 - round.rank)
        self.before.send(
            frame(RingHello(0, round.number, round.rank, self.proof("server", round.rank)))
        )
        return self.before

    def pair(self) -> None:
        """Greet both ways."""
        self.call()
        self.answer()
        received = self.after.receive()
        assert isinstance(received, RingHello)
        assert received.proof == self.proof("server", 1 - self.round.rank)

    def send(self, piece: Piece) -> None:
        nbytes = piece.stop - piece.start
        part = Part(piece.start, piece.stop, "raw", nbytes, self.round.number)
        self.after.send(frame(RingChunk(0, piece.hop, (part,)), bytes(piece.view)))

    def finish(self) -> None:
        """Do the rest of the round as it should be done."""
        for piece in self.ring.begin():
            self.send(piece)
        while not self.ring.done:
            received = self.before.receive()
            assert isinstance(received, RingChunk)
            part = received.parts[0]
            self.ring.room(part.start, part.stop, received.hop)[:] = self.before.payloads[0]
            onward = self.ring.received(part.start, received.hop)
            if onward is not None:
                self.send(onward)


class Neighbour(Peer):
    """One connection between two workers of a round."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE)
        self.wire = _Unpoliced("client", self._land)
        self.wire.state = "open"
        self.payloads = []
        self._received: list[tuple[Message, Sink | None]] = []

    @staticmethod
    def _land(message: Message) -> Sink:
        return Taken(message)


class _Unpoliced(Driven):
    """A wire that takes any message in any state."""

    def received(self, nbytes: int) -> list[tuple[Message, Sink | None]]:
        self.state = "any"
        return super().received(nbytes)


@contextlib.contextmanager
def with_partner(
    params: dict[str, Array], values: dict[str, Array], **settings: Any
) -> Iterator[tuple[ModelAverager, Partner, Callable[[], Future[int]]]]:
    """An averager and a partner; the third is called to have the averager average."""
    with (
        meeting_point(**settings) as server,
        ModelAverager(server.url, params, timeout=PATIENCE) as averager,
        Partner(server, values) as partner,
        ThreadPoolExecutor(1) as pool,
    ):

        def both() -> Future[int]:
            partner.be_ready()
            eventually(lambda: ready(server) == 1, "the partner is ready")
            asked = pool.submit(averager.average)
            partner.receive_round()
            return asked

        yield averager, partner, both


SMALL = {"w": np.zeros(6, np.float32)}
LARGE = {"w": np.zeros(1_000_000, np.float32)}


@pytest.fixture(autouse=True)
def _any_message_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test checks what a partner receives."""
    from aiops.wire import connection

    anything = dict.fromkeys(KINDS, "any")
    says = {"any": {"client": anything, "server": anything}}
    monkeypatch.setattr(connection, "HANDSHAKE", {**connection.HANDSHAKE, **says})


class TestConcurrency:
    def test_the_lock_is_free_while_a_round_stands_still_and_no_progress_is_lost(self) -> None:
        params = {"w": np.zeros(6, np.float32)}
        with with_partner(params, {"w": np.full(6, 8, np.float32)}) as (averager, partner, both):
            asked = both()
            partner.pair()  # the averager now waits for chunks
            for _ in range(10):
                with averager.step():
                    params["w"][:3] += 1
            assert averager.steps == 10
            assert not asked.done()
            partner.finish()
            assert asked.result(PATIENCE) == 2
        np.testing.assert_array_equal(params["w"], [14, 14, 14, 4, 4, 4])
        np.testing.assert_array_equal(partner.flat.runs[0], 4)

    def test_the_lock_is_free_while_others_are_waited_for(self) -> None:
        params = {"w": np.zeros(6, np.float32)}
        with with_partner(params, SMALL) as (averager, partner, both):
            asked = both()
            with averager.step():  # nobody has greeted it yet
                params["w"] += 1
            partner.pair()
            partner.finish()
            assert asked.result(PATIENCE) == 2
        np.testing.assert_array_equal(params["w"], 1)


class TestDeath:
    def expect_failure(
        self, averager: ModelAverager, asked: Future[int], kind: type, words: str
    ) -> None:
        assert asked.result(PATIENCE) == 0
        assert averager.stats.failed == 1
        error = averager.stats.last_error
        assert isinstance(error, kind)
        assert words in str(error)

    @pytest.mark.parametrize("chunks", [0, 1, 3])
    def test_a_partner_that_dies_costs_the_round_and_nothing_else(self, chunks: int) -> None:
        params = {"w": np.arange(1_000_000, dtype=np.float32)}
        before = bits(params)
        with with_partner(params, LARGE) as (averager, partner, both):
            asked = both()
            partner.pair()
            for piece in partner.ring.begin()[:chunks]:
                partner.send(piece)
            partner.hang_up()
            partner.peer.close()
            self.expect_failure(averager, asked, ConnectionLost, "worker 127.0.0.1:")
            assert bits(params) == before
            assert averager.average() == 1
            with averager.step():
                pass

    def test_the_next_round_is_as_if_nothing_had_been(self) -> None:
        params = {"w": np.arange(1_000_000, dtype=np.float32)}
        with with_partner(params, LARGE) as (averager, partner, both):
            asked = both()
            partner.pair()
            partner.send(partner.ring.begin()[0])
            partner.hang_up()
            self.expect_failure(averager, asked, ConnectionLost, "worker 127.0.0.1:")
            partner.flat.data[:] = 0
            asked = both()
            partner.pair()
            partner.finish()
            assert asked.result(PATIENCE) == 2
        np.testing.assert_array_equal(params["w"], np.arange(1_000_000, dtype=np.float32) / 2)

    @pytest.mark.parametrize("when", ["before it greets", "before it is called", "in the midst"])
    def test_a_partner_that_hangs_is_given_up_by_name(self, when: str) -> None:
        params = {"w": np.arange(6, dtype=np.float32)}
        before = bits(params)
        with with_partner(params, SMALL, stall=0.2) as (averager, partner, both):
            asked = both()
            if when != "before it greets":
                partner.call()
            if when == "in the midst":
                partner.answer()
            self.expect_failure(averager, asked, DeadlineExceeded, "worker 127.0.0.1:")
            assert bits(params) == before

    def test_a_partner_that_cannot_be_reached(self) -> None:
        with with_partner(dict(SMALL), SMALL) as (averager, partner, both):
            partner.listener.close()
            partner.listener = socket.socket()
            partner.listener.bind(("127.0.0.1", 0))  # and does not listen
            asked = both()
            self.expect_failure(averager, asked, ConnectionLost, "cannot be reached from here")

    def test_closing_in_the_midst_of_a_round(self) -> None:
        with with_partner({"w": SMALL["w"].copy()}, SMALL, stall=PATIENCE) as three:
            averager, partner, both = three
            asked = both()
            partner.pair()
            closing = threading.Thread(target=averager.close)
            closing.start()
            assert partner.after.dropped()
            closing.join(PATIENCE)
            assert not closing.is_alive()
            with pytest.raises(ConnectionLost, match="was closed"):
                asked.result(PATIENCE)

    def test_a_server_that_is_started_anew(self) -> None:
        params = [model(seed) for seed in range(2)]
        with contextlib.ExitStack() as stack:
            with meeting_point() as server:
                port = int(server.url.rpartition(":")[2])
                first, second = (stack.enter_context(one) for one in joined(server, *params))
            with meeting_point(port=port, interval=0.01, grace=0.5):
                params[0]["w"] += 2
                eventually(lambda: average(first, second) == [2, 2], "a round at the new server")
                assert bits(params[0]) == bits(params[1])


class TestHostile:
    @each_row("value", [np.nan, np.inf, 1e18])
    def test_a_value_that_no_model_survives_changes_nothing(self, value: float) -> None:
        params = {"w": np.arange(6, dtype=np.float32)}
        before = bits(params)
        with with_partner(params, {"w": np.full(6, value, np.float32)}) as (
            averager,
            partner,
            both,
        ):
            asked = both()
            partner.pair()
            partner.send(partner.ring.begin()[0])
            assert asked.result(PATIENCE) == 0
            assert isinstance(averager.stats.last_error, RemoteProtocolError)
            assert "not finite" in str(averager.stats.last_error)
        assert bits(params) == before

    @each_row(
        "change",
        [{"hop": 2}, {"hop": 0}, {"parts": ()}, {"start": 4}, {"codec": "int8"}, {"twice": 1}],
    )
    def test_a_chunk_out_of_place_changes_nothing(self, change: dict[str, Any]) -> None:
        params = {"w": np.arange(6, dtype=np.float32)}
        before = bits(params)
        with with_partner(params, SMALL) as (averager, partner, both):
            asked = both()
            partner.pair()
            [piece] = partner.ring.begin()
            part = Part(piece.start, piece.stop, "raw", piece.stop - piece.start, 1)
            fields: dict[str, Any] = {"id": 0, "hop": 1, "parts": (part,)}
            payloads = [bytes(piece.view)]
            if "start" in change or "codec" in change:
                fields["parts"] = (part._replace(**change),)
            elif "twice" in change:
                fields["parts"], payloads = (part, part), payloads * 2
            else:
                fields |= change
                payloads = payloads[: len(fields["parts"])]
            partner.after.send(frame(RingChunk(**fields), *payloads))
            partner.after.send(frame(RingChunk(0, 1, (part,)), bytes(piece.view)))
            assert asked.result(PATIENCE) == 0
            assert isinstance(averager.stats.last_error, RemoteProtocolError)
        assert bits(params) == before

    @each_row(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xce\xff\xff\xff\xff",
            frame(messages.Ping(1)),
            frame(RingHello(0, 1, 0, b"guess")),
            frame(RingChunk(0, 1, (Part(0, 4, "raw", 4, 1),)), b"1234"),
            b"",
        ],
    )
    def test_strangers_at_the_door_disturb_no_round(self, said: bytes) -> None:
        params = {"w": np.zeros(6, np.float32)}
        with with_partner(params, {"w": np.full(6, 2, np.float32)}) as (averager, partner, both):
            asked = both()
            host, port, _counts = partner.round.members[1 - partner.round.rank]
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(said)
                forged = partner.call(given=partner.proof("server", partner.round.rank))
                partner.pair()
                partner.finish()
                assert asked.result(PATIENCE) == 2
                forged.close()
            assert averager.stats.failed == 0
        np.testing.assert_array_equal(params["w"], 1)

    def test_who_does_not_know_the_secret_is_told_nothing(self) -> None:
        params = {"w": np.arange(1_000_000, dtype=np.float32)}
        with with_partner(params, LARGE) as (averager, partner, both):
            asked = both()
            partner.call()
            thief = Neighbour(partner.listener.accept()[0])
            assert isinstance(thief.receive(), RingHello)
            thief.send(frame(RingHello(0, partner.round.number, partner.round.rank, b"x" * 32)))
            assert asked.result(PATIENCE) == 0
            assert isinstance(averager.stats.last_error, Unauthorised)
            assert "does not know the secret" in str(averager.stats.last_error)
            with pytest.raises(ConnectionResetError):
                thief.receive()
            thief.close()

    def test_the_server_is_no_worker_of_a_round(self) -> None:
        with meeting_point() as server, Peer(server.url, greet=False) as peer:
            peer.send(frame(RingHello(0, 1, 0, b"x" * 32)))
            received = peer.receive()
            assert isinstance(received, messages.Error)
            assert received.fatal
            assert "listen at other addresses" in received.text
            assert peer.dropped()


def test_what_is_no_model() -> None:
    with pytest.raises(UsageError, match="must be a mapping of NumPy arrays or a"):
        ModelAverager("127.0.0.1:1", [np.zeros(3)])


@pytest.mark.slow  # it may be the first to import torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_modules() -> None:
    import torch

    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    with meeting_point() as server, contextlib.ExitStack() as stack:
        averagers = [stack.enter_context(one) for one in joined(server, *modules)]
        start = [p.detach().clone() for p in modules[0].parameters()]
        for index, averager in enumerate(averagers):
            opt = torch.optim.SGD(modules[index].parameters(), lr=0.1)
            with averager.step():
                modules[index](torch.full((1, 4), 1.0 + index)).sum().backward()
                opt.step()
        expected = [
            (a.detach() + b.detach()) / 2
            for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True)
        ]
        assert average(*averagers) == [2, 2]
    for module in modules:
        for got, mean, first in zip(module.parameters(), expected, start, strict=True):
            torch.testing.assert_close(got.detach(), mean)
            assert not torch.equal(got.detach(), first)
