"""The compiled exchange does what the one in Python does: every byte, result, error and count.

Both are the short way of a client whose socket, a real one, leads to a script: what the server says
is in the socket before the push is sent. So a test decides after which byte a read ends, and needs
no thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import math
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.client import Params, coded_gradient
from aiops.client.sync import compiled_exchange as module
from aiops.client.sync.compiled_exchange import compiled_exchange
from aiops.client.sync.short_way import read_poll
from aiops.common.variables import KNOWN
from aiops.compiled import COMPILED, exchange_type
from aiops.errors import AiopsError, ConnectionLost
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST
from aiops.wire import messages
from aiops.wire.encoding import encode
from aiops.wire.template import Slot
from tests.client.test_steady import MODELS, Half, answer_with, teach
from tests.memory import patch_select
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC

pytestmark = pytest.mark.skipif(exchange_type() is None, reason="there was no C compiler")

SIZES = {name: sum(array.nbytes for array in model.values()) for name, model in MODELS.items()}

_BEAT = struct.pack("ll", 0, 5000)  # seconds and microseconds that a call waits
_FOREVER = struct.pack("ll", 0, 0)


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        patch.setattr(module, "LARGEST", 1 << 20)  # all sizes that are exchanged steadily
        yield


class Scripted:
    """A client that has learnt the steady exchange, and whose socket a test reads and writes."""

    def __init__(self, compiled: bool, model: str, policy: str) -> None:
        self.half = Half(True, model, policy)
        self.client, self.connection = self.half.client, self.half.client._connection
        teach(self.half)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.socket = socket.create_connection(listener.getsockname())
            self.peer, _address = listener.accept()
        self.wait(_BEAT)
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.short = self.connection.short
        self.short.socket, self.short.poll = self.socket, read_poll(self.socket)
        assert self.connection.short.compiled is None, "a socket of memory is none"
        if compiled:
            self.short._compile(self.short.steady)
            assert self.connection.short.compiled is not None
        self.told = 0

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.peer.close()
        self.half.__exit__()
        self.socket.close()

    def wait(self, beat: bytes) -> None:
        """Have calls of the socket end after this time."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, beat)

    def tell(self, data: bytes) -> None:
        """Say this, and wait until it is all there."""
        self.peer.sendall(data)
        self.told += len(data)
        assert len(self.socket.recv(self.told, socket.MSG_PEEK | socket.MSG_WAITALL)) == self.told

    def end(self, how: str) -> None:
        """Close the connection from the server's side, and wait until that is known."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP | select.POLLHUP)
        if how == "reset":
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.peer.close()
        else:
            self.peer.shutdown(socket.SHUT_WR)
        assert poll.poll(10_000)

    def exchange(self) -> Any:
        """Exchange in the short way; return what came of it, and what is left to do."""
        done = self.connection.short.exchange(self.half.params, self.half.gradient)
        handed = self.connection.short.handed
        if handed is None:
            return repr(done)
        [(unsent, views)] = handed.servers
        fault = handed.fault
        left = (b"".join(map(bytes, unsent)), b"".join(map(bytes, views)))
        return type(done), left, type(fault), str(fault), getattr(fault, "errno", None)

    def carry(self, rest: bytes) -> Any:
        """Have the general path finish what is left, after the server has said this."""
        handed, self.client.timeout = self.connection.short.handed, 5.0
        if handed is None:
            return None
        with contextlib.suppress(OSError):
            self.peer.sendall(rest)
            self.peer.shutdown(socket.SHUT_WR)  # it says no more, however much is waited for
        try:
            return repr(self.client._run(handed.request))
        except AiopsError as error:
            return type(error), str(error)

    def sent(self) -> bytes:
        """Return the bytes that have been sent on the socket."""
        found = b""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := self.peer.recv(1 << 20, socket.MSG_DONTWAIT):
                found += data
        return found


@functools.cache
def learnt(model: str, policy: str, increments: int = 1) -> tuple[bytes, bytes, tuple[Slot, ...]]:
    """Return the push that all of them send, the answer of a server, and what varies in that.

    ``increments``: how many the answer has, if it is coded.
    """
    with Half(True, model, policy) as half:
        teach(half)
        if half.replica is not None:
            answer_with(half, increments)
        up, down = len(half.socket.up), len(half.socket.said)
        half.client.exchange(half.params, half.gradient)
        answer, forms = half.socket.said[down:], half.client._connection.short.steady.forms
        acks = [coded.template for coded in forms.answers] or [forms.ack]
        found = [ack for ack in acks if ack.values(answer[: ack.size]) is not None]
        return half.socket.up[up:], answer, found[0].slots


# ---------------------------------------------------------------- what a server may say


class Change(NamedTuple):
    """A change of an answer: of one of its values, of a bit of its header, or of all of it.

    ``at``, ``put``: of these bytes, wherever they are.
    """

    slot: int | None = None
    value: float = 0
    bit: int | None = None
    before: bytes = b""
    instead: bytes | None = None
    behind: bytes = b""
    at: int = 0
    put: bytes = b""

    def of(self, answer: bytes, slots: Sequence[Slot]) -> bytes:
        changed = bytearray(self.before + answer if self.instead is None else self.instead)
        if self.slot is not None:
            slot = slots[self.slot % len(slots)]
            size = slot.end - slot.begin
            value = b"\xff" * size
            if slot.code in "fd":
                value = struct.pack(">" + slot.code, self.value)
            elif slot.code in "BHIQ":
                number = self.value if math.isfinite(self.value) else -1
                value = (int(number) % (1 << 8 * size)).to_bytes(size)
            changed[slot.begin : slot.end] = value
        if self.bit is not None:
            at = self.bit % (8 * (slots[0].end + 150))
            if at // 8 < len(changed):
                changed[at // 8] ^= 1 << at % 8
        if self.put:
            at = self.at % (len(changed) - len(self.put))
            changed[at : at + len(self.put)] = self.put
        return bytes(changed) + self.behind


def framed(message: messages.Message) -> bytes:
    """Return a message of the server's as it travels."""
    header = encode(message)
    return b"\xce" + len(header).to_bytes(4) + header


AS_IT_IS = Change()
PING = framed(messages.Ping(0))
ERROR = framed(messages.Error(5, "bad_push", "'w' holds nan", {}, False))

numbers = st.sampled_from([0, 1, 3, LARGEST, LARGEST + 1, -1]) | st.integers(0, 1 << 64)
reals = st.sampled_from([math.nan, math.inf, -1.5, 1e300])
changes = (
    st.just(AS_IT_IS)
    | st.tuples(st.integers(0, 7), numbers).map(lambda pair: Change(*pair))
    | st.tuples(st.just(5), reals).map(lambda pair: Change(*pair))
    | st.integers(0, 1 << 11).map(lambda bit: Change(bit=bit))
    | st.sampled_from([Change(before=PING), Change(instead=ERROR), Change(instead=b"\0" * 300)])
)
ways = changes, st.integers(0, 400), st.sampled_from(["", "end", "reset"]), st.booleans()


def outcome(
    compiled: bool,
    model: str,
    policy: str,
    change: Change,
    cut: int,
    end: str,
    looks: bool,
    increments: int = 1,
) -> dict[str, Any]:
    """Return all that can be seen of one exchange.

    The server says ``cut`` bytes of the changed answer, counted from its end if the model is large;
    then it ends the connection, or says the rest when the client has waited for a while.
    """
    push, answer, slots = learnt(model, policy, increments)
    said = change.of(answer, slots)
    with Scripted(compiled, model, policy) as one:
        one.connection.short.spin.resting = 0 if looks else 1 << 30
        at = min(cut, len(said))
        one.tell(said[:at])
        if end:
            one.end(end)
        short = one.exchange()
        sent = one.sent()
        assert end == "reset" or sent == push, "the script's answer is one to this push"
        found = {"short": short, "sent": sent, "then": one.carry(said[at:])}
        one.half.result(one.client.attend)  # a pong travels, say
        return {**found, "late": one.sent(), **one.half.state()}


def compare(*way: Any) -> dict[str, Any]:
    """Return the outcome of both, which is the same."""
    short, long = outcome(True, *way), outcome(False, *way)
    for name in long:
        assert short[name] == long[name], name
    return short


@settings(DETERMINISTIC, max_examples=examples(60))
@given(st.sampled_from(["small", "coded"]), st.sampled_from(["asgd", "fasgd"]), *ways)
def test_of_a_small_model(
    model: str, policy: str, change: Change, cut: int, end: str, looks: bool
) -> None:
    """The answer has about 200 bytes, and with coded gradients 4,000."""
    compare(model, policy, change, cut, end, looks)


@settings(DETERMINISTIC, max_examples=examples(30))
@given(
    st.sampled_from(["large", "large coded"]),
    st.sampled_from(["asgd", "fasgd"]),
    *ways,
    st.sampled_from([0, 40_000, 80_000]),
)
def test_of_a_large_model(
    model: str, policy: str, change: Change, cut: int, end: str, looks: bool, more: int
) -> None:
    """The answer's payload is received in the parameters."""
    compare(model, policy, change, cut + more, end, looks)


@each_row("model", MODELS)
@each_row("policy", ["asgd", "fasgd"])
def test_a_whole_answer_is_a_receipt(model: str, policy: str) -> None:
    _push, answer, _slots = learnt(model, policy)
    found = compare(model, policy, AS_IT_IS, len(answer), "", False)
    assert "Receipt(version=3, staleness=0" in found["short"]
    assert found["version"][0] == 3


@pytest.mark.parametrize("model", MODELS)
def test_each_place_at_which_an_answer_may_break(model: str) -> None:
    """At the end of the header a large model's parameters begin to be a mixture."""
    _push, answer, _slots = learnt(model, "asgd")
    head = len(answer) - SIZES[model]
    for cut in (0, 1, head - 1, head, head + 1, len(answer) - 1):
        for end in ("", "end", "reset"):
            found = compare(model, "asgd", AS_IT_IS, cut, end, False)
            if end == "":
                assert found["short"][1:3] == ((b"", answer[:cut]), type(None))
            elif end == "end" and cut in (0, head):
                assert found["short"][1:3] == ((b"", answer[:cut]), ConnectionLost)
            assert "Receipt(version=3" in found["then"]


@each_row("number", range(6))
def test_each_number_out_of_its_bounds(number: int) -> None:
    value = math.nan if number == 5 else 1 << 7 if number == 0 else LARGEST + 1
    _push, answer, slots = learnt("small", "asgd")
    if number != 5 and slots[number].code != "Q":
        value = -1  # as large as its bytes can be
    found = compare("small", "asgd", Change(number, value), len(answer), "end", False)
    large = number in (0, 5) or slots[number].code == "Q"
    assert isinstance(found["short"], tuple) == large


# ---------------------------------------------------------------- what else may happen

GIVEN: Mapping[str, Callable[[Half], Any]] = {
    "the same": lambda half: half.gradient,
    "another order": lambda half: dict(reversed(half.gradient.items())),
    "room": lambda half: half.room,
    "room of another model": lambda half: Params(Layout.of({"w": np.zeros(3, np.float32)})),
    "one less": lambda half: {"w": half.gradient["w"]},
    "one more": lambda half: {**half.gradient, "more": np.zeros(1, np.float32)},
    "another name": lambda half: {**half.gradient, "b": None, "c": half.gradient["b"]},
    "another shape": lambda half: {**half.gradient, "b": np.zeros(4, np.float16)},
    "another dtype": lambda half: {**half.gradient, "b": np.zeros(3, np.int16)},
    "an equal dtype": lambda half: {
        **half.gradient, "b": half.gradient["b"].view(np.dtype("f2", metadata={"a": 1}))
    },
    "another order of bytes": lambda half: {**half.gradient, "b": np.zeros(3, ">f2")},
    "not contiguous": lambda half: {**half.gradient, "w": np.zeros((4, 3), np.float32).T},
    "with gaps": lambda half: {**half.gradient, "b": np.zeros(6, np.float16)[::2]},
    "read-only": lambda half: {n: np.broadcast_to(a, a.shape) for n, a in half.gradient.items()},
    "a subclass": lambda half: {**half.gradient, "b": half.gradient["b"].view(np.ma.MaskedArray)},
    "a list": lambda half: {**half.gradient, "b": [0.0, 0.0, 0.0]},
    "another mapping": lambda half: MappingProxyType(half.gradient),
}  # fmt: skip


@each_row("name", GIVEN)
def test_the_same_gradients_fit(name: str) -> None:
    found = []
    for compiled in (True, False):
        with Scripted(compiled, "small", "asgd") as one:
            one.tell(learnt("small", "asgd")[1])
            one.half.gradient = GIVEN[name](one.half)
            done = one.exchange()
            found.append((done, one.sent(), one.half.state()))
            assert one.connection.short.steady is not None, "the next may be one"
    assert found[0] == found[1]
    assert (found[0][0] != "None") == (found[0][1] != b"")


@each_row("shift", ["connection", "level", "age"])
def test_parameters_that_do_not_fit(shift: str) -> None:
    found = []
    for compiled in (True, False):
        with Scripted(compiled, "small", "asgd") as one:
            value = ("another", 1) if shift == "connection" else None
            setattr(one.half.params, shift, value)
            found.append((one.exchange(), one.sent()))
    assert found[0] == found[1] == ("None", b"")


def test_a_push_that_the_socket_does_not_take_at_once() -> None:
    """The rest of it is for the general path, which looks at the clock."""
    found = []
    for compiled in (True, False):
        with Scripted(compiled, "large", "asgd") as one:
            push, _answer, _slots = learnt("large", "asgd")
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            one.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            kind, (unsent, views), *fault = one.exchange()
            assert 0 < len(unsent) < len(push)
            assert push.endswith(unsent)
            found.append((kind, views, fault))
    assert found[0] == found[1] == (found[0][0], b"", [type(None), "None", None])


def test_a_server_that_resets_the_connection_in_the_midst() -> None:
    """It is known from the errno, whatever of the answer has come."""
    head = len(learnt("large", "asgd")[1]) - SIZES["large"]
    for model, at in (("small", 0), ("large", 0), ("large", head)):
        for compiled in (True, False):
            with Scripted(compiled, model, "asgd") as one:
                one.tell(learnt(model, "asgd")[1][:at])
                one.socket.settimeout(None)
                one.wait(_FOREVER)
                thread = threading.Thread(target=reset_when_pushed, args=(one, model))
                thread.start()
                _kind, (unsent, _views), fault, *_ = one.exchange()
                thread.join()
                assert (unsent, fault) == (b"", ConnectionResetError)


def reset_when_pushed(one: Scripted, model: str) -> None:
    """Reset the connection once the push has come but for a byte, which is left unread."""
    left = len(learnt(model, "asgd")[0]) - 1
    while left:
        left -= len(one.peer.recv(left))
    one.peer.recv(1, socket.MSG_PEEK)
    one.end("reset")


@contextlib.contextmanager
def signalling(one: Scripted, handler: Callable[[], object]) -> Iterator[None]:
    """Have a signal's handler run once, in a call that waits for the answer to a push.

    A signal that comes just before the call waits does not end it, so it is sent again and again.
    """
    handled, main = threading.Event(), threading.get_ident()

    def handle(*_: object) -> None:
        if not handled.is_set():
            handled.set()
            handler()

    def send() -> None:
        one.peer.recv(1, socket.MSG_PEEK)
        while not handled.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    raise KeyboardInterrupt


@each_row("compiled", [True, False])
@each_row(("model", "at"), [("small", 0), ("small", 170), ("large", 0)])
def test_ctrl_c_ends_a_wait_without_end(compiled: bool, model: str, at: int) -> None:
    with Scripted(compiled, model, "asgd") as one:
        one.tell(learnt(model, "asgd")[1][:at])
        one.wait(_FOREVER)
        assert one.client._session.answered, "and so nothing is left to be settled"
        seq = one.client._session.pending.seq
        with signalling(one, interrupt), pytest.raises(KeyboardInterrupt):
            one.exchange()
        assert one.connection.short.socket is None
        assert one.client._session.pending.seq == seq + 1, "it may be part of the model"
        assert one.client._session.pending.by_id == {}


@pytest.mark.parametrize("compiled", [True, False])
def test_ctrl_c_in_the_midst_of_a_payload_leaves_a_mixture(compiled: bool) -> None:
    """The parameters are known to be one, and are fetched again."""
    with Scripted(compiled, "large", "asgd") as one:
        answer = learnt("large", "asgd")[1]
        one.tell(answer[: len(answer) - SIZES["large"] // 2])
        one.wait(_FOREVER)
        before = one.half.params.arena.data.copy()
        with signalling(one, interrupt), pytest.raises(KeyboardInterrupt):
            one.exchange()
        assert (one.half.params.arena.data != before).any()
        assert one.half.params.version == -1


@pytest.mark.parametrize("usual", [True, False])
def test_ctrl_c_just_after_an_answer_leaves_no_version_that_the_parameters_are_not(
    usual: bool,
) -> None:
    """They are copied before the interpreter looks for signals again."""
    with Scripted(True, "small", "asgd") as one:
        compiled: Any = one.connection.short.compiled

        class Interrupted:
            def run(self, *given: Any) -> Any:
                assert compiled.run(*given)
                raise KeyboardInterrupt

            def carry(self, *given: Any) -> Any:
                if not usual:
                    return NotImplemented
                assert compiled.carry(*given).version == 3
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(compiled, name)

        one.connection.short.compiled = Interrupted()  # type: ignore[assignment]
        one.tell(learnt("small", "asgd")[1])
        before = one.half.params.arena.data.copy()
        with pytest.raises(KeyboardInterrupt):
            one.exchange()
        assert (one.half.params.arena.data != before).any()
        assert one.half.params.version == -1


@pytest.mark.parametrize("compiled", [True, False])
def test_a_signal_whose_handler_raises_nothing_loses_no_answer(compiled: bool) -> None:
    answer = learnt("small", "asgd")[1]
    with Scripted(compiled, "small", "asgd") as one:
        one.wait(_FOREVER)
        with signalling(one, lambda: one.peer.sendall(answer)):
            found = one.exchange()
        if compiled:  # a signal ends its beat, and the general path looks at the clock
            found = one.carry(b"")
        assert found.startswith("Receipt(version=3")


def test_an_array_that_a_finalizer_takes_away_is_held() -> None:
    """While its shape is compared, the dict lets it go; and a call from there is refused."""

    class Shape(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            gradient.clear()
            try:
                compiled.run(gradient, one.half.params.arena.data, 9, 9, 9, 9, 0)
            except RuntimeError as error:
                refused.append(str(error))
            gc.collect()
            return tuple(self) == other

        __hash__ = tuple.__hash__

    refused: list[str] = []
    with Scripted(True, "small", "asgd") as one:
        steady = one.connection.short.steady
        assert steady is not None
        tensors = tuple((name, dtype, Shape(shape)) for name, dtype, shape in steady.forms.tensors)
        compiled: Any = compiled_exchange(steady.forms._replace(tensors=tensors), one.socket)
        gradient = {name: array.copy() for name, array in one.half.gradient.items()}
        compiled.run(gradient, one.half.params.arena.data, 9, 9, 9, 9, 0)
    assert refused
    assert all("one caller" in each for each in refused)


def test_a_handler_cannot_begin_another() -> None:
    with Scripted(True, "small", "asgd") as one:
        compiled = one.connection.short.compiled
        one.wait(_FOREVER)
        given = one.half.gradient, one.half.params.arena.data, 9, 9, 9, 9, 0
        with (
            signalling(one, lambda: compiled.run(*given)),
            pytest.raises(RuntimeError, match="one caller"),
        ):
            compiled.run(*given)


def test_a_socket_that_is_closed_is_left_alone() -> None:
    """Its descriptor may be another file's by now."""
    with Scripted(True, "small", "asgd") as one:
        compiled = one.connection.short.compiled
        one.connection.hang_up()
        assert compiled.fd == -1
        assert one.connection.short.compiled is None
        given = one.half.gradient, one.half.params.arena.data, 9, 9, 9, 9, 0
        assert compiled.run(*given) is None
        assert (compiled.fault, compiled.sent, compiled.received) == (errno.EBADF, 0, 0)


def test_a_large_model_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(False, "large", "asgd") as one:
        for largest in (SIZES["large"], SIZES["large"] - 1):
            monkeypatch.setattr(module, "LARGEST", largest)
            made = compiled_exchange(one.connection.short.steady.forms, one.socket)
            assert (made is not None) == (largest == SIZES["large"])


def test_times_are_noted_by_python() -> None:
    with Scripted(True, "small", "asgd") as one:
        compiled = one.connection.short.compiled
        one.connection.note_times(time.monotonic_ns)
        assert (compiled.fd, one.connection.short.compiled) == (-1, None)
        one.short._compile(one.short.steady)
        assert one.connection.short.compiled is None
        one.tell(learnt("small", "asgd")[1])
        assert one.exchange().startswith("Receipt(version=3")


def test_looking_is_decided_by_busy_poll() -> None:
    with Scripted(True, "small", "asgd") as one:
        spin = one.connection.short.spin
        one.exchange()
        assert spin.resting == 1, "it looked in vain"
    with Scripted(True, "small", "asgd") as one:
        one.tell(learnt("small", "asgd")[1])
        one.connection.short.spin._rest = 8
        one.exchange()
        assert (one.connection.short.spin.resting, one.connection.short.spin._rest) == (0, 1)
    with Scripted(True, "small", "asgd") as one:
        one.connection.short.spin.resting = 5
        one.exchange()
        assert one.connection.short.spin.resting == 4
        assert one.connection.short.spin._rest == 1


# ---------------------------------------------------------------- what an Exchange is made of


def parts(**changed: Any) -> list[Any]:
    """Return the parameters of an exchange, some of them changed."""
    slots = tuple((2 + 9 * n, 8, "u" if n < 5 else "f") for n in range(6))
    found = {
        "fd": -1, "push": bytearray(50), "numbers": (2, 12, 22, 32), "acks": None,
        "room": memoryview(bytearray(64)), "nbytes": 4,
        "tensors": (("w", np.dtype("f4"), (1,)),), "array": np.ndarray, "crowded": (20_000, 5_000),
        "coded": None,
    }  # fmt: skip
    ack = {
        "ack": bytes(60), "varies": bytes(60), "slots": slots, "ages": (), "behind": None,
        "pieces": None,
    }  # fmt: skip
    assert (found.keys() | ack.keys()) >= changed.keys()
    found |= {name: value for name, value in changed.items() if name in found}
    ack |= {name: value for name, value in changed.items() if name in ack}
    if ack["behind"] is None:
        ack["behind"] = found["nbytes"]
    if found["acks"] is None:
        found["acks"] = (tuple(ack.values()),)
    return [*found.values()]


def test_of_these_one_is_made() -> None:
    exchange = exchange_type()
    assert exchange is not None
    exchange(*parts())
    exchange(*parts(room=memoryview(bytearray(60))))


SLOTS = parts()[3][0][2]


@each_row(
    "changed",
    [
        {"numbers": (2, 12, 22, 43)},
        {"numbers": (-1, 12, 22, 32)},
        {"numbers": (2**62, 12, 22, 32)},
        {"push": bytearray(7)},
        {"ack": b"", "varies": b""},
        {"varies": bytes(59)},
        {"room": memoryview(bytearray(59))},
        {"room": memoryview(bytearray(65))},
        {"nbytes": -4},
        {"nbytes": 1 << 40},
        {"slots": SLOTS[:5]},
        {"slots": SLOTS * 2},
        {"slots": (*SLOTS[:5], (53, 8, "f"))},
        {"slots": (*SLOTS[:5], (-1, 8, "f"))},
        {"slots": (*SLOTS[:5], (2**62, 8, "f"))},
        {"slots": (*SLOTS[:5], (0, 8, "s"))},
        {"slots": (*SLOTS[:5], (0, 8, "q"))},
        {"slots": (*SLOTS[:5], (0, 3, "u"))},
        {"slots": (*SLOTS[:5], (0, 2, "f"))},
        {"slots": (*SLOTS, (0, -1, "s"))},
        {"slots": (*SLOTS, (0, 61, "s"))},
        {"slots": ((0, 8, "f"), *SLOTS[1:])},
        {"slots": (*SLOTS[:5], 7)},
        {"tensors": (("w", np.dtype("f4")),)},
        {"tensors": ("w",)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_of_these_none_is_made(changed: dict[str, Any]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises(ValueError, match="not the templates of a steady exchange"):
        exchange(*parts(**changed))


@each_row(
    ("given", "error"),
    [
        ((np.zeros(5, np.uint8), 1, 1, 1, 1, 0), ValueError),
        ((b"read", 1, 1, 1, 1, 0), BufferError),
        ((np.zeros(4, np.uint8), 1, 1, 1, 1), RuntimeError),
        ((np.zeros(4, np.uint8), 1, 1, 1, -1, 0), ValueError),
        ((np.zeros(4, np.uint8), 1, 1, 1 << 64, 1, 0), OverflowError),
        ((np.zeros(4, np.uint8), 1, "1", 1, 1, 0), TypeError),
    ],
    ids=map(str, range(6)),
)
def test_a_call_that_makes_no_sense(given: tuple[Any, ...], error: type[Exception]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises(error):
        exchange(*parts()).run({"w": np.zeros(1, np.float32)}, *given)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILED in KNOWN
    monkeypatch.setenv(COMPILED, "0")
    assert exchange_type() is None
    with Scripted(False, "small", "asgd") as one:
        one.short._compile(one.short.steady)
        assert one.connection.short.compiled is None


def test_a_mean_of_another_form_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(False, "small", "asgd") as one:
        steady = one.connection.short.steady
        for code in ("q", "8s"):
            slots = (*steady.forms.ack.slots[:5], steady.forms.ack.slots[5]._replace(code=code))
            monkeypatch.setattr(steady._ack, "slots", slots)
            assert compiled_exchange(steady.forms, one.socket) is None


def test_it_holds_on_to_nothing() -> None:
    exchange = exchange_type()
    assert exchange is not None
    w, target, tensors = np.zeros(1, np.float32), np.zeros(4, np.uint8), parts()[6]
    held = [w, target, w.dtype, tensors, np.ndarray]
    ours, peer = socket.socketpair()
    answer = bytearray(64)
    answer[2:10] = (1).to_bytes(8)
    varies = b"\0\0" + b"\xff" * 8 + bytes(50)
    with ours, peer:
        before = [sys.getrefcount(each) for each in held]
        one = exchange(*parts(fd=ours.fileno(), tensors=tensors, varies=varies))
        for said, found in ((answer, (1, 0, 0, 0, 0, 0.0)), (bytes(64), None), (b"", False)):
            peer.sendall(said)
            given = {"w": w if said else w[:0]}
            assert one.run(given, target, 1, 1, 1, 1, 0) == found
        with pytest.raises(ValueError, match="another length"):
            one.run({"w": w}, target[:3], 1, 1, 1, 1, 0)
        del one, given
        assert [sys.getrefcount(each) for each in held] == before


class Named(dict[str, Any]):
    """No plain dict: its items may be anything."""


UNUSUAL: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "other parameters": lambda half, steady: (half.params.copy(), half.gradient),
    "exchanges that are settled": lambda half, steady: (
        steady.settle() or half.params,
        half.gradient,
    ),
    "gradients of another model": lambda half, steady: (
        half.params,
        Params(Layout.of({"v": np.zeros(half.params.arena.data.size, np.uint8).view(np.float32)})),
    ),
    "gradients that are no dict": lambda half, steady: (half.params, Named(half.gradient)),
    "gradients that are nothing of the kind": lambda half, steady: (half.params, None),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_exchange_that_is_unlike_the_last_is_pythons(name: str) -> None:
    """Compiled code has done nothing then."""
    with Scripted(True, "small", "asgd") as one:
        steady, compiled = one.connection.short.steady, one.connection.short.compiled
        assert steady is not None
        assert compiled is not None
        params, gradients = UNUSUAL[name](one.half, steady)
        assert compiled.carry(steady, params, gradients, 0) is NotImplemented
        assert not steady.under_way
        assert one.sent() == b""


@pytest.mark.parametrize(("model", "policy"), [("large", "asgd"), ("small", "fasgd")])
def test_an_exchange_that_is_pythons(model: str, policy: str) -> None:
    """Of payloads that are received in the parameters, and of statistics."""
    with Scripted(True, model, policy) as one:
        assert one.connection.short.compiled is not None
        given = one.connection.short.steady, one.half.params, one.half.gradient, 0
        assert one.connection.short.compiled.carry(*given) is NotImplemented  # type: ignore[arg-type]
        assert one.sent() == b""


def test_an_exchange_like_the_last_is_not_pythons() -> None:
    """It is over when it has an answer; until then it has its own gradients."""
    with Scripted(True, "small", "asgd") as one:
        steady, compiled = one.connection.short.steady, one.connection.short.compiled
        assert steady is not None
        assert compiled is not None
        one.tell(learnt("small", "asgd")[1])
        receipt = compiled.carry(steady, one.half.params, one.half.gradient, 0)
        assert (receipt.version, receipt.why, receipt.used, receipt.pushed) == (3, "", True, True)
        assert not steady.under_way
        other = {name: array.copy() for name, array in one.half.gradient.items()}
        assert compiled.carry(steady, one.half.params, other, 0) is None
        assert steady.under_way
        assert steady._gradients is other


# ---------------------------------------------------------------- coded gradients


@pytest.mark.parametrize("compiled", [True, False])
def test_a_value_that_cannot_be_encoded_leaves_the_encoders_as_they_were(compiled: bool) -> None:
    """It is in the last tensor, when the others have been encoded."""
    with Scripted(compiled, "coded", "asgd") as one:
        right = one.half.gradient
        coding = one.half.client._session.info.coding
        for arrays in coding.state().values():  # other than before the last push
            arrays["rest"][:] = 0.25
        before = one.half.coding()
        one.half.gradient = {name: array.copy() for name, array in right.items()}
        one.half.gradient["w"] *= np.linspace(-1, 1, 30, dtype=np.float32)  # each leaves a rest
        one.half.gradient["v"][7] = np.nan
        assert one.exchange() == "None"
        assert one.half.coding() == before
        assert one.sent() == b""
        one.half.gradient = right
        for arrays in coding.state().values():
            arrays["rest"][:] = 0.0
        one.tell(learnt("coded", "asgd")[1])
        assert one.exchange().startswith("Receipt(version=3")
        assert one.sent() == learnt("coded", "asgd")[0]


@pytest.mark.parametrize("in_one_room", [True, False])
def test_every_tensor_is_encoded_anew(in_one_room: bool) -> None:
    found = []
    for compiled in (True, False):
        with Scripted(compiled, "coded", "asgd") as one:
            gradient = one.half.room if in_one_room else one.half.gradient
            for number, array in enumerate(gradient.values()):
                array[...] = number + 2
            one.half.gradient = gradient
            one.tell(learnt("coded", "asgd")[1])
            found.append((one.exchange(), one.sent()))
    assert found[0] == found[1]
    assert found[0][1] != learnt("coded", "asgd")[0]


def test_gradients_that_lie_in_one_room_are_encoded_from_there() -> None:
    found = []
    for compiled in (True, False):
        with Scripted(compiled, "coded", "asgd") as one:
            for name, array in one.half.gradient.items():
                one.half.room[name][...] = array
            one.half.gradient = one.half.room
            one.tell(learnt("coded", "asgd")[1])
            done = one.exchange()
            found.append((done, one.sent(), one.half.state()))
    assert found[0] == found[1]
    assert found[0][1] == learnt("coded", "asgd")[0]


def test_in_numpy_python_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_gradient, "resolve", lambda name: "numpy")
    with Scripted(False, "coded", "asgd") as one:
        assert compiled_exchange(one.connection.short.steady.forms, one.socket) is None


REST = np.zeros(2, np.float32)
PIECES = ((0, 0, 1, 0, 0, 4, 0, None, None), (1 << 20, 1, 2, 4, 9, 6, 4, REST, REST.copy()))
TWO = (("w", np.dtype("f4"), (1,)), ("v", np.dtype("f4"), (2,)))


def coded(piece: int, **changed: Any) -> dict[str, Any]:
    """Return the parts of an exchange of coded gradients, one of whose pieces is changed."""
    names = "encode", "first", "last", "start", "begin", "nbytes", "second", "rest", "before"
    found = list(PIECES)
    found[piece] = tuple({**dict(zip(names, found[piece], strict=True)), **changed}.values())
    region = np.zeros(15, np.uint8)
    room = memoryview(bytearray(60 + 16))
    return {"coded": (region, tuple(found)), "tensors": TWO, "nbytes": 16, "room": room}


def test_of_these_one_with_coded_gradients_is_made() -> None:
    exchange = exchange_type()
    assert exchange is not None
    one = exchange(*parts(**coded(0), numbers=(2, 12, 22, 32, 42)))
    del one


@each_row(
    "changed",
    [
        {"numbers": (2, 12, 22)},
        {"numbers": (2, 12, 22, 32, 43)},
        {"numbers": (2, 12, 22, 32, -1)},
        {"numbers": (2, 12, 22, 32) + (40,) * 256},
        {"coded": 7},
        {"coded": (np.zeros(15, np.uint8),)},
        {"coded": (np.zeros(15, np.uint8), ())},
        {"coded": (np.zeros(15, np.uint8), (7,))},
        {"coded": (b"", ())},
        {"coded": (np.zeros(17, np.uint8), PIECES)},
        {"coded": (np.zeros(15, np.uint8), PIECES[:1] * 257)},
        *(
            {"coded": coded(at, **{name: wrong})["coded"]}
            for at, name, wrong in (
                *((0, "first", -1), (0, "first", 1), (0, "last", 3), (0, "begin", -1)),
                *((0, "begin", 12), (0, "nbytes", 0), (0, "nbytes", 16), (0, "start", -4)),
                *((0, "start", 13), (0, "start", 16), (0, "encode", "1")),
                *((1, "last", 3), (1, "first", 0), (1, "begin", 10), (1, "second", -1)),
                *((1, "second", 7), (1, "rest", None), (1, "before", None), (1, "start", 12)),
                *((1, "rest", np.zeros(3, np.float32)), (1, "rest", np.zeros(7, np.uint8))),
                *((1, "before", b"12345678"), (1, "begin", 1 << 62), (1, "nbytes", 1 << 62)),
            )
        ),
    ],
)
def test_of_these_none_with_coded_gradients_is_made(changed: dict[str, Any]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises((ValueError, TypeError, BufferError)):
        exchange(*parts(**{**coded(0), **changed}))
