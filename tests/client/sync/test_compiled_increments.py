"""Increments are received, checked and added by compiled code as in Python: see its neighbour."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.client import Worker, coded_answer
from aiops.client.coded_answer import CodedAnswer
from aiops.client.steady_increments import IncrementExchange
from aiops.client.sync.compiled_exchange import compiled_exchange
from aiops.compiled import exchange_type
from aiops.errors import ConnectionLost, RemoteProtocolError
from aiops.model import mailbox
from aiops.model.parts import LARGEST
from tests.client.sync.test_compiled_exchange import (
    _FOREVER,
    AS_IT_IS,
    PING,
    TWO,
    Change,
    Scripted,
    changes,
    compare,
    interrupt,
    learnt,
    parts,
    signalling,
    ways,
)
from tests.client.test_steady import INCREMENTS
from tests.memory import patch_select
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC
from tests.support import ServerThread

pytestmark = pytest.mark.skipif(exchange_type() is None, reason="there was no C compiler")


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        yield


def form_of(model: str, increments: int) -> CodedAnswer:
    """Return the form of the answer with so many increments."""
    answer = learnt(model, "asgd", increments)[1]
    with Scripted(False, model, "asgd") as one:
        found: CodedAnswer = next(
            each
            for each in one.connection.short.steady.forms.answers
            if each.values(answer[: each.template.size]) is not None
        )
        return found


@settings(DETERMINISTIC, max_examples=examples(60))
@given(
    st.sampled_from(sorted(INCREMENTS)),
    st.sampled_from(["asgd", "fasgd"]),
    changes
    | st.tuples(st.integers(0, 1 << 12), st.binary(min_size=1, max_size=4)).map(
        lambda pair: Change(at=pair[0], put=pair[1])
    ),
    *ways[1:],
    st.sampled_from([0, 400, 40_000]),
    st.integers(0, 3),
)
def test_of_increments(
    model: str,
    policy: str,
    change: Change,
    cut: int,
    end: str,
    looks: bool,
    more: int,
    increments: int,
) -> None:
    """Of a header, a prefix, or a payload; wherever it is cut."""
    compare(model, policy, change, cut + more, end, looks, increments)


@each_row("model", INCREMENTS)
@each_row("policy", ["asgd", "fasgd"])
@each_row("increments", range(4))
def test_a_whole_answer_is_a_receipt(model: str, policy: str, increments: int) -> None:
    _push, answer, _slots = learnt(model, policy, increments)
    found = compare(model, policy, AS_IT_IS, len(answer), "", False, increments)
    assert found["short"].startswith("Receipt(version=")
    assert found["version"][0] > 0


def test_they_are_added_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("it is Python's")

    for increments in range(4):
        answer = learnt("both", "asgd", increments)[1]
        with Scripted(True, "both", "asgd") as one, monkeypatch.context() as patch:
            patch.setattr(CodedAnswer, "add", refuse)
            one.tell(answer)
            assert one.exchange().startswith("Receipt")


@pytest.mark.parametrize("increments", range(4))
def test_each_place_at_which_an_answer_may_break(increments: int) -> None:
    """Until it is all there, the parameters are those from before."""
    _push, answer, _slots = learnt("both", "asgd", increments)
    head = form_of("both", increments).template.size
    for cut in {0, 1, head - 1, *{head, head + 1, len(answer) - 1} & {*range(len(answer))}}:
        for end in ("", "end", "reset"):
            found = compare("both", "asgd", AS_IT_IS, cut, end, False, increments)
            if end == "":
                assert found["short"][1:3] == ((b"", answer[:cut]), type(None))
            elif end == "end" and cut in (0, head):
                assert found["short"][1:3] == ((b"", answer[:cut]), ConnectionLost)
            assert "Receipt(version=" in found["then"]


def test_an_answer_of_a_length_that_is_not_its_forms() -> None:
    """Whatever is in the room behind it: it is another message's."""
    for increments in range(3):
        _push, answer, _slots = learnt("both", "asgd", increments)
        change = Change(behind=PING)
        found = compare("both", "asgd", change, len(answer) + len(PING), "", False, increments)
        assert found["short"][1] == (b"", answer + PING)
        assert "Receipt(version=" in found["then"]


NAN = struct.pack("<f", np.nan)
LAST = 4
"""The last payload of an answer of two increments, of five payloads."""


def bad(piece: int, offset: int, put: bytes) -> Change:
    """Return a change of bytes at a payload, or before it."""
    form = form_of("both", 2)
    assert len(form.whole.pieces) == LAST + 1
    return Change(at=form.template.size + form.whole.pieces[piece].begin + offset, put=put)


BAD: dict[str, tuple[int, int, bytes]] = {
    "the first scale": (0, 0, NAN),
    "a later scale": (1, 0, NAN),
    "the last scale": (LAST, 0, NAN),
    "a mark": (1, -5, b"\xc5"),
    "the last mark": (LAST, -5, b"\xc5"),
    "the first byte of a length": (2, -4, b"\1"),
    "the last byte of a length": (LAST, -1, b"\0"),
}


@each_row("name", BAD)
def test_what_is_no_increment_is_refused(name: str) -> None:
    """As on the general path, and nothing has been added until then."""
    change = bad(*BAD[name])
    _push, answer, slots = learnt("both", "asgd", 2)
    found = compare("both", "asgd", change, len(answer), "", False, 2)
    assert found["short"][1] == (b"", change.of(answer, slots))
    assert found["then"][0] in (RemoteProtocolError, ConnectionLost)
    with Scripted(True, "both", "asgd") as one:
        before = one.half.params.arena.data.copy()
        one.tell(change.of(answer, slots))
        one.exchange()
        assert (one.half.params.arena.data == before).all()


@each_row("number", range(6))
@each_row("increments", [0, 2])
def test_each_number_out_of_its_bounds(number: int, increments: int) -> None:
    _push, answer, slots = learnt("both", "asgd", increments)
    value = np.nan if slots[number % len(slots)].code == "d" else LARGEST + 1
    found = compare("both", "asgd", Change(number, value), len(answer), "end", False, increments)
    assert isinstance(found["short"], tuple)


@each_row("increments", [0, 1, 2])
@each_row("name", ["used", "parts", "gate", "kind"])
def test_another_header_of_the_same_length(increments: int, name: str) -> None:
    _push, answer, _slots = learnt("both", "asgd", increments)
    at = answer.index(name.encode()) + len(name)
    for change in (Change(at=at, put=b"\xc2"), Change(at=at + 1, put=b"\x01")):
        found = compare("both", "asgd", change, len(answer), "end", False, increments)
        assert isinstance(found["short"], tuple)


@each_row("further", range(4))
@each_row("value", [0, 1 << 56, LARGEST])
def test_parts_of_several_versions_go_the_general_way(further: int, value: int) -> None:
    _push, answer, slots = learnt("both", "asgd", 2)
    assert [slot.path for slot in slots[6:]] == [("parts", at + 1, 4) for at in range(4)]
    found = compare("both", "asgd", Change(6 + further, value), len(answer), "", False, 2)
    assert isinstance(found["short"], tuple)


@each_row("compiled", [True, False])
@each_row("at", [0, 300])
def test_ctrl_c_ends_a_wait_without_end(compiled: bool, at: int) -> None:
    with Scripted(compiled, "both", "asgd") as one:
        one.tell(learnt("both", "asgd", 2)[1][:at])
        one.wait(_FOREVER)
        assert one.client._session.answered
        seq, before = one.client._session.pending.seq, one.half.params.arena.data.copy()
        with signalling(one, interrupt), pytest.raises(KeyboardInterrupt):
            one.exchange()
        assert one.connection.short.socket is None
        assert one.client._session.pending.seq == seq + 1, "it may be part of the model"
        assert one.client._session.pending.by_id == {}
        assert (one.half.params.arena.data == before).all()


def test_ctrl_c_just_after_an_answer_leaves_no_version_that_the_parameters_are_not() -> None:
    """They are brought up to date before the interpreter looks for signals again."""
    with Scripted(True, "both", "asgd") as one:
        compiled: Any = one.connection.short.compiled

        class Interrupted:
            def run(self, *given: Any) -> Any:
                assert compiled.run(*given)
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(compiled, name)

        one.connection.short.compiled = Interrupted()  # type: ignore[assignment]
        one.tell(learnt("both", "asgd", 1)[1])
        before = one.half.params.arena.data.copy()
        with pytest.raises(KeyboardInterrupt):
            one.exchange()
        assert (one.half.params.arena.data != before).any()
        assert one.half.params.version == -1


def test_its_steps_are_pythons() -> None:
    """Compiled code has done nothing then; and no answers come by a mailbox."""
    with Scripted(True, "both", "asgd") as one:
        assert one.connection.short.steady is not None
        compiled: Any = one.connection.short.compiled
        one.tell(learnt("both", "asgd", 1)[1])
        assert one.exchange().startswith("Receipt")
        steady = one.connection.short.steady
        assert steady.unsettled
        one.sent()
        given = steady, one.half.params, one.half.gradient
        assert compiled.carry(*given, 0) is NotImplemented
        assert compiled.push_usual(*given) is NotImplemented
        steady._params = one.half.params
        assert compiled.pull_usual(steady, 0, 0) is NotImplemented
        steady._params = None
        assert one.sent() == b""


def test_without_the_loops_python_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_answer, "resolve", lambda name: "numpy")
    with Scripted(False, "fetched", "asgd") as one:
        assert compiled_exchange(one.connection.short.steady.forms, one.socket) is None


@each_row("code", ["q", "I"])
def test_versions_of_another_width_are_pythons(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(False, "both", "asgd") as one:
        forms = one.connection.short.steady.forms
        ack = forms.answers[0].template
        slots = ack.slots[-1]._replace(code=code, end=ack.slots[-1].begin + 4)
        monkeypatch.setattr(ack, "slots", (*ack.slots[:-1], slots))
        assert compiled_exchange(forms, one.socket) is None


def test_no_mailbox_is_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> int:
        raise AssertionError("there is none")

    monkeypatch.setattr("aiops.client.sync.short_way.pass_mailbox", refuse)
    with Scripted(False, "both", "asgd") as one:
        near: Any = object()
        one.short._near = near
        assert one.short._compile(one.short.steady) is False
        assert one.connection.short.compiled is not None


@each_row("codecs", [{"fetch_codec": "int8"}, {"fetch_codec": "bf16", "push_codec": "int8"}])
@each_row("near", [False, True])
def test_workers_hold_the_replica(codecs: dict[str, str], near: bool) -> None:
    """All have the same values of the same version, and few of their exchanges are general."""
    start = {"w": np.zeros(4000, np.float32), "b": np.zeros(3, np.float32)}
    held: list[tuple[int, bytes]] = []
    with ServerThread(policy="asgd", set={"lr": 0.01}, no_shm=not near, **codecs) as server:
        with Worker(server.url, start) as first, Worker(server.url, start) as second:
            for step in range(60):
                for worker in (first, second):
                    worker.step({n: np.full_like(a, step % 7 - 3) for n, a in start.items()})
            for worker in (first, second):
                assert worker.near == near
                short = worker._client._connection.short
                assert short.steady is not None
                assert short.compiled is not None
                assert 1 <= len(short.steady.forms.answers) <= 4
                held.append((worker.params.version, worker.params.arena.data.tobytes()))
        current = server.call(lambda running: running.engine.replica).current
        assert (current.number, current.arena.data.tobytes()) == max(held)


def test_a_model_of_many_tensors() -> None:
    """The header of an answer has a part for each increment."""
    start = {f"layer.{number}": np.zeros(300, np.float32) for number in range(200)}
    ones = {name: np.ones(300, np.float32) for name in start}
    with (
        ServerThread(policy="asgd", fetch_codec="int8", fetch_lag=1) as server,
        Worker(server.url, start) as worker,
    ):
        for _ in range(4):
            worker.step(ones)
        assert isinstance(worker._client._session.steady, IncrementExchange)
        held = server.call(lambda s: s.engine.replica.current.arena.data.tobytes())
        assert worker.params.arena.data.tobytes() == held


def test_nothing_is_lent_within_a_machine() -> None:
    """Gradients of more than 64 KiB would be, on the general way, which is slower."""
    start = {"w": np.zeros(20_000, np.float32)}
    with (
        ServerThread(policy="asgd", fetch_codec="int8") as server,
        Worker(server.url, start) as worker,
    ):
        for _ in range(4):
            worker.step({"w": np.ones(20_000, np.float32)})
        assert worker.near
        steady = worker._client._session.steady
        assert steady is not None
        assert not steady.lends


# ---------------------------------------------------------------- what an Exchange is made of

RAW = (0, 0, 0, 4, 0, 4, 0)
CODED = (1 << 20, 1 << 20, 4, 12, 9, 6, 4)
AGAIN = (1 << 20, 1 << 20, 4, 12, 20, 6, 6)
PIECES = (RAW, CODED, AGAIN)


def answers(**changed: Any) -> dict[str, Any]:
    """Return the parts of an exchange whose answers are three payloads."""
    found = {"tensors": TWO, "nbytes": 12, "room": memoryview(bytearray(60 + 26))}
    return {**found, "ages": (2, 52), "behind": 26, "pieces": PIECES, **changed}


def piece(number: int, **changed: Any) -> dict[str, Any]:
    """Return them with a payload changed."""
    names = "check", "add", "start", "stop", "begin", "nbytes", "second"
    found = list(PIECES)
    found[number] = tuple({**dict(zip(names, found[number], strict=True)), **changed}.values())
    return {"pieces": tuple(found)}


def ack(**changed: Any) -> Any:
    """Return a form of answers."""
    return parts(**answers(**changed))[3][0]


NOTHING = ack(pieces=(), behind=0)
SLOTS = parts()[3][0][2]


@each_row(
    "changed",
    [
        {},
        {"ages": ()},
        {"pieces": (), "behind": 0},
        {"room": memoryview(bytearray(60 + 27))},
        {"slots": (*SLOTS[:3], (0, 0, "n"), *SLOTS[4:])},
        {"acks": (ack(), NOTHING) * 8},
    ],
    ids=str,
)
def test_of_these_one_is_made(changed: dict[str, Any]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    exchange(*parts(**answers(**changed)))


@pytest.mark.skipif(not mailbox.supported(), reason="there are no mailboxes here")
def test_none_comes_by_a_mailbox() -> None:
    exchange = exchange_type()
    assert exchange is not None
    memory: Any = np.frombuffer(mmap.mmap(-1, 5 * 4096), np.uint8)
    room = memoryview(bytearray(72))
    exchange(*parts(tensors=TWO, nbytes=12, room=room)).use_mailbox(memory, 0, False)
    with pytest.raises(ValueError, match="no mailbox"):
        exchange(*parts(**answers())).use_mailbox(memory, 0, False)


@each_row(
    "changed",
    [
        {"acks": ()},
        {"acks": (7,)},
        {"acks": (ack()[:-1],)},
        {"acks": (ack(), *(NOTHING,) * 16)},
        {"acks": (ack(), parts(tensors=TWO, nbytes=12)[3][0])},
        {"acks": (ack(), (*NOTHING[:4], 1, ()))},
        {"ack": bytes(4), "varies": bytes(4), "slots": ((0, 1, "u"),) * 6, "ages": ()},
        {"room": memoryview(bytearray(60 + 25))},
        {"ages": (53,)},
        {"ages": (-1,)},
        {"ages": (2**62,)},
        {"ages": ("1",)},
        {"ages": (2,) * 256},
        {"pieces": None, "behind": 12, "room": memoryview(bytearray(72))},
        {"pieces": None, "behind": 26, "ages": ()},
        {"pieces": None, "behind": 11, "ages": (), "room": memoryview(bytearray(72))},
        {"acks": (NOTHING, parts(tensors=TWO, nbytes=12)[3][0]),
         "room": memoryview(bytearray(72))},
        piece(0, start=-4, stop=0),
        {**piece(2, nbytes=0, second=0), "behind": 20},
        {"pieces": (RAW, (*CODED[:5], 1 << 62, 4), (*AGAIN[:4], (1 << 62) + 14, 1 << 62, 6)),
         "behind": 14 - (1 << 63)},
        {"pieces": 7},
        {"pieces": (7,)},
        {"pieces": (RAW[:6],)},
        {"pieces": PIECES[:2]},
        {"pieces": (RAW, *((1, 1, 4, 12, 9 + 6 * n, 1, 0) for n in range(256))), "behind": 1540,
         "room": memoryview(bytearray(1600))},
        {"behind": 25},
        {"behind": 27, "room": memoryview(bytearray(87))},
        {"slots": (*SLOTS[:2], (0, 0, "n"), *SLOTS[3:])},
        {"slots": (*SLOTS[:3], (0, 1, "n"), *SLOTS[4:])},
        *(
            piece(at, **{name: wrong})
            for at, name, wrong in (
                *((0, "begin", 1), (0, "begin", -1), (0, "start", -4), (0, "stop", 0)),
                *((0, "stop", 5), (0, "nbytes", 3), (0, "check", 1), (0, "add", 1)),
                *((0, "check", "1"), (0, "add", "1"), (1, "check", 0), (1, "add", 0)),
                *((1, "begin", 8), (1, "begin", 10), (2, "begin", 19), (1, "nbytes", 5)),
                *((1, "nbytes", 0), (2, "stop", 13), (2, "stop", 16), (2, "stop", 11)),
                *((2, "start", 12), (2, "second", -1), (2, "second", 7), (2, "nbytes", 1 << 62)),
                *((2, "nbytes", 7), (2, "nbytes", 5)),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_of_these_none_is_made(changed: dict[str, Any]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises((ValueError, TypeError, BufferError)):
        exchange(*parts(**answers(**changed)))


def test_it_holds_on_to_nothing() -> None:
    """Forms are copied; the buffers of headers are let go of."""
    import sys

    exchange = exchange_type()
    assert exchange is not None
    head, varies, pieces = bytes(range(60)), bytes(60), (*PIECES,)
    held = [head, varies, pieces]
    before = [sys.getrefcount(each) for each in held]
    given = parts(**answers(ack=head, varies=varies, pieces=pieces))
    one = exchange(*given)
    del given, one
    with pytest.raises(ValueError, match="not the templates"):
        exchange(*parts(**answers(ack=head, varies=varies, pieces=pieces, behind=25)))
    assert [sys.getrefcount(each) for each in held] == before
