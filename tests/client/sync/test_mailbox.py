"""Exchanges by a mailbox: what a blocking client posts, and what it makes of what it finds there.

In the first part its server is real. In the second a test plays the server: it reads and writes the
words of the mailbox, and the other end of the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiops
from aiops.client import Client
from aiops.client.sync import compiled_exchange
from aiops.client.sync.compiled_exchange import pass_mailbox
from aiops.common.variables import KNOWN
from aiops.compiled.loading import COMPILED, core
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded
from aiops.model import mailbox as mailboxes
from aiops.model.mailbox import Mailbox, size_of
from aiops.net.unix_socket import UnixSide
from tests.client.sync.test_compiled_exchange import (
    AS_IT_IS,
    PING,
    Change,
    Scripted,
    learnt,
    numbers,
    outcome,
    reals,
)
from tests.memory import patch_select
from tests.model.test_shared_memory import descriptors, held
from tests.net.test_mailboxes import (
    ANSWER_AT,
    ANSWERED_AT,
    CLIENT_SLEEPS_AT,
    ELSEWHERE,
    HERE,
    OPEN_AT,
    PAYLOAD_AT,
    POSTED,
    POSTED_AT,
    SERVER_SLEEPS_AT,
    TAKEN,
    WITHDRAWN,
    Served,
    parameters,
)
from tests.peers import eventually
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC
from tests.support import PATIENCE, server_process

pytestmark = pytest.mark.skipif(
    core() is None or core().Mailboxes is None,  # type: ignore[union-attr]
    reason="compiled code has no mailboxes here",
)

MODEL = {"w": np.zeros((30, 30), np.float32), "b": np.zeros(124, np.float32)}
NBYTES = 4096
ONES = {name: np.ones_like(array) for name, array in MODEL.items()}


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(set={"lr": 1.0}) as server:
        yield server


# ---------------------------------------------------------------- a real server


@pytest.mark.parametrize("elements", [1, 1024, 16 * 1024, 16 * 1024 + 1, 1 << 18])
def test_exchanges_go_by_it(served: Served, elements: int) -> None:
    model = {"w": np.zeros(elements, np.float32)}
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = client.define(model)
        served.warm()
        for step in range(1, 30):
            client.exchange(params, {"w": np.ones(elements, np.float32)})
            assert (params["w"] == -step).all()
        assert served.served >= 25
        assert params["w"].tobytes() == parameters(served)[: 4 * elements]


def test_coded_gradients_go_by_it() -> None:
    """In three payloads; 0.5 and 2 are coded exactly."""
    model = {"a": np.zeros(30_000, np.float32), "b": np.zeros(3, np.float32)}
    model["c"] = np.zeros((7, 100), np.float32)
    gradient = {"a": np.full(30_000, 0.5, np.float32), "b": np.ones(3, np.float32)}
    gradient["c"] = np.full((7, 100), 2, np.float32)
    with (
        Served(set={"lr": 1.0}, push_codec=["bf16"], kernels="auto") as served,
        Client(served.url, role="worker", timeout=PATIENCE) as client,
    ):
        params = client.define(model)
        served.warm()
        for step in range(1, 30):
            client.exchange(params, gradient)
            assert all((params[name] == -step * gradient[name]).all() for name in model)
        assert served.served >= 25
        assert client.ledger.traffic.kinds_out["push"].payload == 29 * (60_000 + 12 + 1400)


@pytest.mark.parametrize(("elements", "room"), [((1 << 18) + 1, 1 << 26), (1 << 15, 1 << 16)])
def test_a_model_that_is_too_large_for_it_is_lent(served: Served, elements: int, room: int) -> None:
    """And not sent by the socket, which would take longer."""
    served.call(lambda server: setattr(server.connections.mailboxes, "room", room))
    model = {"w": np.zeros(elements, np.float32)}
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = client.define(model)
        served.warm()
        for _ in range(8):
            client.exchange(params, {"w": np.ones(elements, np.float32)})
        assert served.served == 0
        assert served.call(shared) >= 4 * elements
        before = client._session._outbox._kept[-1].data[:4].tobytes()
        client.exchange(params, {"w": np.full(elements, 7, np.float32)})
        assert client._session._outbox._kept[-1].data[:4].tobytes() != before, "it was lent"
        assert (params["w"] == -15).all()


def shared(server: Any) -> int:
    """Return the bytes of segments that the newest connection's client has shown."""
    link = [*server.connections.peers.values()][-1].link
    return sum(len(segment) for segment in link.wire.shared._theirs.values())


def test_what_was_lent_before_is_given_back(served: Served) -> None:
    model = {"w": np.zeros(1 << 16, np.float32)}
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = client.define(model)
        served.warm()
        for _ in range(8):
            client.exchange(params, {"w": np.ones(1 << 16, np.float32)})
        assert served.served >= 3
        lent = served.call(lambda s: [[*p._lent] for p in s.connections.peers.values()])
        assert lent in ([[]], [[10]]), "but for the last one, perhaps"


def course(url: str) -> tuple[list[Any], Any]:
    """Return what a client's calls return, and what it has counted."""
    said: list[Any] = []
    with Client(url, role="worker", timeout=PATIENCE, name="w") as client:
        params = client.define(MODEL)
        for step in range(12):
            gradient = {name: np.full_like(array, step / 8) for name, array in MODEL.items()}
            receipt = client.exchange(params, gradient)
            said += [receipt, {name: array.tobytes() for name, array in params.items()}]
            if step % 5 == 4:
                said.append(client.fetch()["w"].tobytes())
            if step % 5 == 3:
                bad = {name: np.full_like(array, np.nan) for name, array in MODEL.items()}
                with pytest.raises(AiopsError) as caught:
                    client.exchange(params, bad)
                said.append(str(caught.value).replace(url, "URL"))
        counts = client._session.wire.traffic
        kinds = {kind: vars_of(each) for kind, each in counts.kinds_out.items() if kind != "share"}
        return [repr(each).replace(url, "URL") for each in said], kinds


def vars_of(counted: Any) -> tuple[int, int, int]:
    return counted.messages, counted.overhead, counted.payload


def test_a_client_notices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for compiled in ("1", "0"):
        monkeypatch.setenv(COMPILED, compiled)
        with Served(set={"lr": 0.5}) as server:
            found.append(course(server.url))
            assert (server.served > 0) == (compiled == "1")
    assert found[0] == found[1]


def test_a_worker_uses_it(served: Served) -> None:
    with aiops.Worker(served.url, MODEL) as worker:
        worker.step(ONES)
        served.warm()
        for _ in range(9):
            worker.step(ONES)
        assert served.served >= 6
        assert (worker.params["w"] == -10).all()


@pytest.mark.parametrize("which", ["client", "server"])
def test_where_one_side_has_no_compiled_code_the_socket_is_taken(which: str) -> None:
    assert COMPILED in KNOWN
    env = {COMPILED: "0"} if which == "server" else {}
    with server_process("--policy", "asgd", "--set", "lr=1", env=env) as server:
        code = (
            "import sys, numpy as np, aiops\n"
            "with aiops.Client(sys.argv[1], role='worker') as one:\n"
            "    params = one.define({'w': np.zeros(8, np.float32)})\n"
            "    for _ in range(9): one.exchange(params, {'w': np.ones(8, np.float32)})\n"
            "    print(params['w'][0], one.near)\n"
        )
        environment = {**os.environ, **({COMPILED: "0"} if which == "client" else {})}
        done = subprocess.run(
            [sys.executable, "-c", code, server.url],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        assert done.stdout.split() == ["-9.0", "True"]


def test_several_lose_nothing(served: Served) -> None:
    def work() -> None:
        with Client(served.url, role="worker", timeout=PATIENCE) as client:
            params = client.define(MODEL)
            for _ in range(150):
                client.exchange(params, ONES)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    found = np.frombuffer(parameters(served), np.float32)
    assert (found[: 1024 - 64] == -600).all()


def test_it_ends_with_its_connection(served: Served) -> None:
    for number in range(2):  # the first loads what it needs, and others may have left something
        before = descriptors(), held()
        with Client(served.url, role="worker", timeout=PATIENCE) as client:
            params = client.define(MODEL)
            for _ in range(6):
                client.exchange(params, ONES)
            assert number == 0 or held() > before[1]
        del client
        eventually(lambda: served.call(lambda s: not s.connections.peers), "it has left")
    eventually(lambda: (descriptors(), held()) <= before, "nothing is left")


def test_a_killed_server_is_noticed() -> None:
    with (
        server_process("--policy", "asgd", "--set", "lr=1") as server,
        Client(server.url, role="worker", timeout=2.0) as client,
    ):
        params = client.define(MODEL)
        for _ in range(9):
            client.exchange(params, ONES)
        assert client._connection.short.compiled is not None
        server.popen.send_signal(signal.SIGKILL)
        server.popen.wait()
        begun = time.monotonic()
        with pytest.raises((ConnectionLost, DeadlineExceeded)):
            client.exchange(params, ONES)
        assert time.monotonic() - begun < 10


def test_a_stopped_server_costs_time_alone() -> None:
    """A push that it has not taken is taken back, and goes by the socket."""
    with (
        server_process("--policy", "asgd", "--set", "lr=1") as server,
        Client(server.url, role="worker", timeout=PATIENCE) as client,
    ):
        params = client.define(MODEL)
        for _ in range(9):
            client.exchange(params, ONES)
        server.popen.send_signal(signal.SIGSTOP)
        timer = threading.Timer(1.2, server.popen.send_signal, (signal.SIGCONT,))
        timer.start()
        begun = time.monotonic()
        for _ in range(40):
            client.exchange(params, ONES)
        timer.join()
        assert (params["w"] == -49).all()
        assert time.monotonic() - begun < 10, "and once: the next push is posted again"


_PUSHES = """
import sys, numpy as np, aiops
one = aiops.Client(sys.argv[1], role="worker", name=sys.argv[2])
params = one.define({"w": np.zeros(1024, np.float32)})
for step in range(1, 1 << 30):
    one.exchange(params, {"w": np.ones(1024, np.float32)})
    if step % 20 == 0 or step < 20:
        print(step, flush=True)
"""


def test_workers_killed_at_any_instant_leave_whole_pushes() -> None:
    """What was acknowledged is in the parameters, once; one more may be, and never a part."""
    with server_process("--policy", "asgd", "--set", "lr=1") as server:
        least = most = 0
        for turn in range(12):
            command = [sys.executable, "-c", _PUSHES, server.url, f"w{turn}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
                assert worker.stdout is not None
                for _ in range(15 + turn):
                    line = worker.stdout.readline()
                worker.kill()
                lines = [line, *worker.stdout]
            said = max(int(each) for each in lines if each.strip().isdigit())
            least += said
            most += said + 21  # since the last line
        with Client(server.url, timeout=PATIENCE) as client:
            found = client.fetch()["w"]
            assert (found == found[0]).all(), "each push is whole"
            assert least <= -found[0] <= most


def test_ctrl_c_while_it_sleeps() -> None:
    with (
        server_process("--policy", "asgd", "--set", "lr=1") as server,
        Client(server.url, role="worker", timeout=PATIENCE) as client,
    ):
        params = client.define(MODEL)
        for _ in range(9):
            client.exchange(params, ONES)
        server.popen.send_signal(signal.SIGSTOP)
        thread = threading.get_ident()
        timer = threading.Timer(0.1, signal.pthread_kill, (thread, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.exchange(params, ONES)
        timer.join()
        server.popen.send_signal(signal.SIGCONT)
        for _ in range(5):
            client.exchange(params, ONES)
        assert params["w"][0, 0] in (-14.0, -15.0)


def test_another_thread_may_interrupt(served: Served) -> None:
    client = Client(served.url, role="worker", timeout=PATIENCE)
    params = client.define(MODEL)
    for _ in range(9):
        client.exchange(params, ONES)
    served.call(lambda s: [peer.link.hold() for peer in s.connections.peers.values()])
    timer = threading.Timer(0.1, client._connection.interrupt)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(AiopsError):
        client.exchange(params, ONES)
    assert time.monotonic() - begun < PATIENCE / 2
    timer.join()
    client.close()


def test_a_message_on_the_socket_is_not_left_waiting(served: Served) -> None:
    """A push that waits is taken back, and a ping is answered meanwhile."""
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = client.define(MODEL)
        for _ in range(9):
            client.exchange(params, ONES)

        def hold(server: Any) -> None:
            (peer,) = server.connections.peers.values()
            peer.link.hold()
            peer.link.send(peer.link.wire.send(aiops.wire.messages.Ping(5)))

        served.call(hold)
        timer = threading.Timer(
            0.2,
            lambda: served.call(
                lambda s: [peer.link.release() for peer in s.connections.peers.values()]
            ),
        )
        timer.start()
        client.exchange(params, ONES)
        timer.join()
        assert (params["w"] == -10).all()

        def ponged(server: Any) -> bool:
            (peer,) = server.connections.peers.values()
            return "pong" in peer.link.wire.traffic.kinds_in

        assert served.call(ponged)


# ---------------------------------------------------------------- a server that a test plays


@pytest.fixture(autouse=True, scope="module")
def _large_ones_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        patch.setattr(compiled_exchange, "LARGEST", 1 << 20)
        yield


class Played:
    """A client whose mailbox is open, and a server that a test plays."""

    def __init__(self, model: str = "small", policy: str = "asgd", *, alone: bool = False) -> None:
        self.model, self.policy = model, policy
        self.scripted = Scripted(True, model, policy)
        self.connection = self.scripted.connection
        compiled: Any = self.connection.short.compiled
        self.compiled = compiled
        self.nbytes: int = self.connection.short.steady.forms.nbytes  # type: ignore[union-attr]
        ours, theirs = socket.socketpair()
        side = UnixSide(ours)
        made = pass_mailbox(compiled, side, self.nbytes, alone)
        assert made is not None
        assert len(made.data) == size_of(self.nbytes)
        self.made: Mailbox = made
        taken = UnixSide(theirs).take_mailbox(size_of(self.nbytes))
        assert taken is not None
        side.close()
        theirs.close()
        self.mailbox: Mailbox = taken
        self.write(OPEN_AT, 1)

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *exc: object) -> None:
        self.scripted.__exit__()
        os.close(self.mailbox.bell)

    def word(self, at: int) -> int:
        return int(self.mailbox.data[at : at + 4].view("<u4")[0])

    def write(self, at: int, value: int) -> None:
        self.mailbox.data[at : at + 4].view("<u4")[0] = value

    def answer(self, data: bytes, state: int = HERE, number: int = 1) -> None:
        """Leave an answer. It may be there before its push is posted."""
        head = len(data) - self.nbytes
        at = PAYLOAD_AT + -(-self.nbytes // 4096) * 4096
        self.mailbox.data[ANSWER_AT : ANSWER_AT + head] = np.frombuffer(data[:head], np.uint8)
        self.mailbox.data[at : at + self.nbytes] = np.frombuffer(data[head:], np.uint8)
        self.write(ANSWERED_AT, number << 2 | state)

    @property
    def pushed(self) -> bytes:
        """What has been posted last."""
        head = len(learnt(self.model, self.policy)[0]) - self.nbytes
        memory = self.mailbox.data
        return bytes(memory[4096 : 4096 + head]) + bytes(
            memory[PAYLOAD_AT : PAYLOAD_AT + self.nbytes]
        )

    def when_posted(self, do: Callable[[], object]) -> threading.Thread:
        """Have something happen once a push is posted."""

        def wait() -> None:
            eventually(lambda: self.word(POSTED_AT) == 1 << 2 | POSTED, "a push is posted")
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def rung(self) -> bool:
        """Return whether the bell has rung."""
        try:
            return bool(os.read(self.mailbox.bell, 8))
        except BlockingIOError:
            return False


def seen(played: Played, short: Any, then: Any) -> dict[str, Any]:
    """Return all that can be seen of an exchange."""
    one = played.scripted
    one.half.result(one.client.attend)
    found = {"short": short, "then": then, "late": one.sent(), **one.half.state()}
    return found


def said_by(change: Change, model: str, policy: str) -> bytes:
    _push, answer, slots = learnt(model, policy)
    return change.of(answer, slots)


def by_mailbox(model: str, policy: str, change: Change) -> dict[str, Any]:
    with Played(model, policy) as played:
        played.answer(said_by(change, model, policy))
        short = played.scripted.exchange()
        assert played.pushed == learnt(model, policy)[0]
        assert played.word(POSTED_AT) == 1 << 2 | POSTED
        return seen(played, short, played.scripted.carry(b""))


def by_socket(model: str, policy: str, change: Change) -> dict[str, Any]:
    found = outcome(False, model, policy, change, 1 << 20, "", False)
    assert found.pop("sent") == learnt(model, policy)[0]
    return found


same_length = (
    st.just(AS_IT_IS)
    | st.tuples(st.integers(0, 7), numbers).map(lambda pair: Change(*pair))
    | st.tuples(st.just(5), reals).map(lambda pair: Change(*pair))
    | st.integers(0, 1 << 11).map(lambda bit: Change(bit=bit))
)


@settings(DETERMINISTIC, max_examples=examples(40))
@given(st.sampled_from(["asgd", "fasgd"]), same_length)
def test_an_answer_is_what_it_would_be_by_the_socket(policy: str, change: Change) -> None:
    assert by_mailbox("small", policy, change) == by_socket("small", policy, change)


def test_so_is_a_large_one() -> None:
    assert by_mailbox("large", "asgd", AS_IT_IS) == by_socket("large", "asgd", AS_IT_IS)


def test_a_large_one_that_is_none_is_a_lost_connection() -> None:
    """There is no room for it but in the parameters, and these are as they were."""
    with Played("large") as played:
        before = played.scripted.half.params.arena.data.tobytes()
        played.answer(said_by(Change(bit=80), "large", "asgd"))
        short = played.scripted.exchange()
        assert short[1:3] == ((b"", b""), ConnectionLost)
        assert played.scripted.half.params.arena.data.tobytes() == before


def test_one_that_comes_by_the_socket_is_waited_for_there() -> None:
    with Played() as played:
        push, answer, _slots = learnt("small", "asgd")
        played.write(ANSWERED_AT, 1 << 2 | ELSEWHERE)
        short = played.scripted.exchange()
        assert played.pushed == push
        then = played.scripted.carry(answer)
        assert "Receipt" in then
        assert short[1:] == ((b"", b""), type(None), "None", None)
        assert played.scripted.sent() == b""


def test_a_closed_one_is_left_alone() -> None:
    with Played() as played:
        push, answer, _slots = learnt("small", "asgd")
        played.write(OPEN_AT, 0)
        played.scripted.tell(answer)
        assert "Receipt" in played.scripted.exchange()
        assert played.scripted.sent() == push
        assert played.word(POSTED_AT) == 0


def ping(played: Played) -> None:
    played.scripted.peer.sendall(PING)


def close(played: Played) -> None:
    played.write(OPEN_AT, 0)


@each_row("cause", [ping, close])
def test_it_is_taken_back_at_once(cause: Callable[[Played], None]) -> None:
    """Not after a beat, half a second: of several tries one is not held up by other work."""

    def tried() -> float:
        with Played() as played:
            began: list[float] = []

            def begin() -> None:
                began.append(time.monotonic())
                cause(played)

            thread = played.when_posted(begin)
            played.scripted.exchange()
            ended = time.monotonic()
            thread.join()
            return ended - began[0]

    assert any(tried() < 0.3 for _ in range(6))


def test_where_the_socket_is_not_to_be_taken_nothing_is_done() -> None:
    with Played(alone=True) as played:
        played.write(OPEN_AT, 0)
        assert played.scripted.exchange() == "None"
        assert played.scripted.sent() == b""
        assert played.word(POSTED_AT) == 0
        played.write(OPEN_AT, 1)
        played.answer(learnt("small", "asgd")[1])
        assert "Receipt" in played.scripted.exchange()


def nothing(played: Played) -> None:
    """For a beat."""


@each_row("cause", [ping, close, nothing])
def test_a_push_that_waits_is_taken_back(cause: Callable[[Played], None]) -> None:
    with Played() as played:
        push, answer, _slots = learnt("small", "asgd")
        thread = played.when_posted(lambda: cause(played))
        short = played.scripted.exchange()
        thread.join()
        assert played.word(POSTED_AT) == 1 << 2 | WITHDRAWN
        assert short[1] == (push, b""), "nothing was sent"
        assert "Receipt" in played.scripted.carry(answer)
        assert played.scripted.sent()[: len(push)] == push
        assert played.word(POSTED_AT) == 1 << 2 | WITHDRAWN


def test_what_is_taken_is_waited_for() -> None:
    """Also with a message on the socket: it cannot be sent again while it may be applied."""
    with Played() as played:
        _push, answer, _slots = learnt("small", "asgd")

        def take() -> None:
            played.write(POSTED_AT, 1 << 2 | TAKEN)
            ping(played)
            threading.Event().wait(0.1)
            played.answer(answer)

        thread = played.when_posted(take)
        assert "Receipt" in played.scripted.exchange()
        thread.join()


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_taken_and_not_answered_is_a_lost_connection(ends: bool) -> None:
    """The same push is sent again then, with its number."""
    with Played() as played:

        def take() -> None:
            played.write(POSTED_AT, 1 << 2 | TAKEN)
            if ends:
                played.scripted.peer.close()

        thread = played.when_posted(take)
        begun = time.monotonic()
        short = played.scripted.exchange()
        thread.join()
        assert short[1] == (b"", b"")
        assert short[2] is ConnectionLost
        assert (time.monotonic() - begun > 0.9) != ends


def test_an_answer_just_before_the_end_counts() -> None:
    with Played() as played:
        _push, answer, _slots = learnt("small", "asgd")

        def take() -> None:
            played.write(POSTED_AT, 1 << 2 | TAKEN)
            played.scripted.peer.close()
            played.answer(answer)

        thread = played.when_posted(take)
        assert "Receipt" in played.scripted.exchange()
        thread.join()


@each_row("value", [0, 2 << 2 | HERE, 0 << 2 | HERE, 1 << 2, 1 << 2 | 3, 0xFFFFFFFF])
def test_another_word_is_no_answer(value: int) -> None:
    with Played() as played:
        _push, answer, _slots = learnt("small", "asgd")
        played.answer(answer)
        played.write(ANSWERED_AT, value)

        def then() -> None:
            threading.Event().wait(0.05)
            played.write(ANSWERED_AT, 1 << 2 | HERE)

        thread = played.when_posted(then)
        assert "Receipt" in played.scripted.exchange()
        thread.join()


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_server_that_sleeps_is_woken(sleeps: bool) -> None:
    with Played() as played:
        played.write(SERVER_SLEEPS_AT, int(sleeps))
        played.answer(learnt("small", "asgd")[1])
        assert "Receipt" in played.scripted.exchange()
        assert played.rung() == sleeps


def test_it_says_that_it_sleeps() -> None:
    with Played() as played:
        _push, answer, _slots = learnt("small", "asgd")

        def wake() -> None:
            eventually(lambda: played.word(CLIENT_SLEEPS_AT) == 1, "it sleeps")
            played.answer(answer)

        thread = played.when_posted(wake)
        assert "Receipt" in played.scripted.exchange()
        thread.join()
        assert played.word(CLIENT_SLEEPS_AT) == 0


def test_one_whose_socket_is_closed_posts_nothing() -> None:
    """In a fork, say, or while another thread ends the connection."""
    with Played() as played:
        played.compiled.fd = -1
        played.scripted.exchange()
        assert played.word(POSTED_AT) == 0


def test_one_whose_socket_is_closed_ends() -> None:
    with Played() as played:
        thread = played.when_posted(played.connection.short.end)
        assert played.scripted.exchange()[1] == (learnt("small", "asgd")[0], b"")
        thread.join()


@each_row("change", [-4096, -1, 1, 4096])
def test_memory_of_another_size_is_none(change: int) -> None:
    with Played() as played:
        memory = np.zeros(size_of(played.nbytes) + 2 * 4096, np.uint8)
        with pytest.raises(ValueError, match="no mailbox"):
            played.compiled.use_mailbox(memory[: size_of(played.nbytes) + change], 0, False)


def test_a_system_that_has_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with Played() as played:
        ours, theirs = socket.socketpair()
        with theirs:
            side = UnixSide(ours)

            def none(*given: Any) -> int:
                raise OSError(24, "too many open files")

            monkeypatch.setattr(os, "eventfd", none)
            before = descriptors()
            assert pass_mailbox(played.compiled, side, played.nbytes, False) is None
            assert descriptors() == before
            monkeypatch.undo()
            monkeypatch.setattr(mailboxes, "supported", lambda: False)
            assert pass_mailbox(played.compiled, side, played.nbytes, False) is None
            side.close()
