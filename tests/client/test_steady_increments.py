"""Steady exchanges whose answers are increments: as on the general path, and on it if need be."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiops.client import steady_increments
from aiops.client.coded_answer import CodedAnswer
from aiops.client.handover import process
from aiops.client.params import Params
from aiops.client.steady_increments import IncrementExchange
from aiops.codecs.onebit import OneBit
from aiops.codecs.whole_answer import WholeAnswer
from aiops.errors import RemoteProtocolError
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST, Part
from aiops.wire.encoding import encode
from aiops.wire.messages import Ack, Message
from tests.client.test_steady import (
    INCREMENTS,
    Half,
    Twins,
    answer_with,
    fetch_anew,
    look_at_versions,
    others_exchange,
)
from tests.memory import PING, patch_select
from tests.rows import each_row


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        yield


def push(twins: Twins, increments: int) -> tuple[int, int]:
    """Have both push, and be answered by so many increments.

    Returns how many of the pushes of one went the short way, and the bytes of the answer.
    """
    before = twins.short
    twins.both(lambda half: answer_with(half, increments))
    said = len(twins.halves[0].socket.said)
    assert "Receipt" in twins.push()
    return twins.short - before, len(twins.halves[0].socket.said) - said


def steady_of(half: Half) -> IncrementExchange:
    found = half.client._session.steady
    assert isinstance(found, IncrementExchange)
    return found


@pytest.mark.parametrize("model", INCREMENTS)
@pytest.mark.parametrize("policy", ["asgd", "fasgd"])
def test_each_number_of_increments_is_learnt_once(model: str, policy: str) -> None:
    """Three are many enough for a tensor to be sent raw instead."""
    with Twins(model, policy) as twins:
        push(twins, 1)
        sizes = {}
        for again in (False, True):
            for increments in (1, 2, 0, 3, 4):
                short, nbytes = push(twins, increments)
                assert nbytes == sizes.setdefault(increments, nbytes)
                if again or increments == 1:
                    assert short == 1, increments
        forms = steady_of(twins.halves[0]).answers
        assert len(forms) == len(set(sizes.values()))
        assert forms[0].template.size != forms[0].size
        assert any(form.template.size == form.size for form in forms), "one has no increments"


def test_an_exchange_that_is_in_numpy_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.codecs.block_codec.current_backend", lambda backend: "numpy")
    with Twins("both") as twins:
        for increments in (1, 1, 2, 2):
            push(twins, increments)
        assert twins.short == 2


def test_the_oldest_of_many_forms_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_increments, "MOST", 2)
    with Twins("fetched") as twins:
        for increments, short in ((1, 0), (2, 0), (1, 1), (2, 1), (0, 0), (2, 1), (0, 1), (1, 0)):
            assert push(twins, increments)[0] == short
        assert len(steady_of(twins.halves[0]).answers) == 2


def test_versions_that_were_read_are_of_one_age_again() -> None:
    with Twins("fetched") as twins:
        push(twins, 1)
        twins.both(lambda half: look_at_versions(half, 0))
        assert push(twins, 1)[0] == 0
        assert push(twins, 1)[0] == 1
        twins.both(lambda half: look_at_versions(half, 0))
        assert push(twins, 0)[0] == 0, "nothing has come that says what they are"
        assert twins.halves[0].params.age is None


@each_row(("versions", "age"), [([5, 3, 5], 5), ([5, 5, 4], None), ([0, 0, 0], 0)], ids=str)
def test_tensors_without_elements_have_no_age(versions: list[int], age: int | None) -> None:
    shapes = {"v": np.zeros(2, np.float32), "none": np.zeros(0, np.float32)}
    params = Params(Layout.of({**shapes, "w": np.zeros(3, np.float32)}))
    params.versions = np.array(versions)
    params.find_age()
    assert params.age == age


# ---------------------------------------------------------------- other answers


def change_next(twins: Twins, change: Callable[[bytes, CodedAnswer], bytes]) -> None:
    """Have the next answer, of the form that was learnt last, changed."""
    form = steady_of(twins.halves[0]).answers[-1]
    for half in twins.halves:
        sock: Any = half.socket

        def say(data: bytes, sock: Any = sock) -> bytes:
            sock.change = lambda data: data
            assert len(data) == form.size
            return change(data, form)

        sock.change = say


def put(offset: int, instead: bytes, piece: int) -> Callable[[bytes, CodedAnswer], bytes]:
    """Return what changes bytes at a payload, or before it."""

    def change(data: bytes, form: CodedAnswer) -> bytes:
        at = form.template.size + form.whole.pieces[piece].begin + offset
        return data[:at] + instead + data[at + len(instead) :]

    return change


def slot(index: int, value: int) -> Callable[[bytes, CodedAnswer], bytes]:
    """Return what changes a number of the header."""

    def change(data: bytes, form: CodedAnswer) -> bytes:
        slot = form.template.slots[index]
        return data[: slot.begin] + value.to_bytes(8) + data[slot.end :]

    return change


NAN = struct.pack("<f", np.nan)
BAD: dict[str, Callable[[bytes, CodedAnswer], bytes]] = {
    "the first scale": put(0, NAN, 0),
    "a later scale": put(0, NAN, 1),
    "the last scale": put(0, NAN, 4),
    "a mark": put(-5, b"\xc5", 1),
    "a length": put(-1, b"\0", 4),
    "a version held": slot(2, LARGEST + 1),
    "a version": slot(1, LARGEST + 1),
    "a version of the tensors": lambda data, form: slot(3, LARGEST + 1)(data, form),
    "a later version of the tensors": lambda data, form: slot(-1, LARGEST + 1)(data, form),
}


@each_row("name", BAD)
def test_what_is_no_increment_is_refused(name: str) -> None:
    """As on the general path, and what is coded stays what it was."""
    with Twins("both") as twins:
        push(twins, 1)
        push(twins, 2)
        twins.both(lambda half: others_exchange(half, 1))
        params = twins.halves[0].params
        before = {each: array.copy() for each, array in params.items()}
        change_next(twins, BAD[name])
        kind, _text = twins.push()
        assert kind is RemoteProtocolError
        for each in ("w", "v"):
            assert (params[each] == before[each]).all()
        twins.both(fetch_anew)
        for _ in range(3):
            push(twins, 1)


@each_row("piece", [1, 2, 3, 4])
def test_parts_of_several_versions_go_the_general_way(piece: int) -> None:
    with Twins("both") as twins:
        push(twins, 1)
        push(twins, 2)
        twins.both(lambda half: others_exchange(half, 1))
        change_next(twins, slot(5 + piece, 77))
        before = twins.short
        assert "Receipt" in twins.push()
        assert twins.short == before
        assert (77 in twins.halves[0].params.copy().versions) == (piece != 3), "the last counts"


@each_row("index", [1, 2, 4])
@each_row("value", [0, 1, 1 << 40, LARGEST])
def test_other_numbers_are_taken_as_they_are(index: int, value: int) -> None:
    with Twins("both") as twins:
        push(twins, 1)
        push(twins, 2)
        twins.both(lambda half: others_exchange(half, 1))
        change_next(twins, slot(index, value))
        before = twins.short
        assert "Receipt" in twins.push()
        assert twins.short == before + 1


def say_and_ping(sock: Any, message: Message, *payloads: bytes) -> None:
    """Say one thing, and then a ping."""
    del sock.say
    sock.say(message, *payloads)
    sock.say(PING)


@each_row("increments", [0, 1, 2])
def test_something_behind_the_answer(increments: int) -> None:
    """It may come in the same read, as the room is for longer answers; all is as if it had not."""
    with Twins("both") as twins:
        for several in (1, 3, 2, 0, increments):
            push(twins, several)
        for half in twins.halves:
            sock: Any = half.socket
            plain = sock.say

            def say(
                message: Message, *payloads: bytes, sock: Any = sock, plain: Any = plain
            ) -> None:
                del sock.say
                plain(message, *payloads)
                plain(PING)

            sock.say = say
        before, steady = twins.short, steady_of(twins.halves[0])
        push(twins, increments)
        assert twins.short == before
        assert push(twins, increments)[0] == 1
        assert steady_of(twins.halves[0]) is steady, "nothing new was learnt"


def test_an_answer_in_pieces() -> None:
    """Once its header is there, the rest is waited for, wherever it is cut."""
    with Twins("both") as twins:
        for increments in (1, 2, 0, 2):
            push(twins, increments)
        size = steady_of(twins.halves[0]).answers[1].size
        for down in (size // 2, size // 2 + 1, size - 1):
            twins.both(lambda half: others_exchange(half, 1))

            def do(half: Half, down: int = down) -> Any:
                half.replica._lag = 1
                half.fault(down=down)
                return half.client.exchange(half.params, half.gradient)

            before = twins.short
            assert "Receipt" in twins.both(do)
            assert twins.short == before + 1


@each_row("function", ["check", "decode"])
def test_ctrl_c_while_increments_are_added(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To add one twice would be to have other parameters for good."""
    with Half(True, "both") as half:
        for _ in range(3):
            half.client.exchange(half.params, half.gradient)
        assert half.short == 2
        real, calls = getattr(OneBit, function), []

        def broken(*given: Any, **named: Any) -> Any:
            calls.append(given)
            if function == "decode":
                real(*given, **named)
            raise KeyboardInterrupt

        before = half.params.arena.data.copy()
        with monkeypatch.context() as patch:
            patch.setattr(OneBit, function, broken)
            with pytest.raises(KeyboardInterrupt):
                half.client.exchange(half.params, half.gradient)
        assert len(calls) == 1
        added = function == "decode"
        assert (half.params.arena.data != before).any() == added
        assert half.params.version == (-1 if added else 3)
        assert half.client._session.pending.by_id == {}
        fetch_anew(half)
        assert half.params.version == 4, "the push is part of the model"
        assert half.params.arena.data.tobytes() == half.replica.current.arena.data.tobytes()
        for _ in range(3):
            half.client.exchange(half.params, half.gradient)
        assert half.params.arena.data.tobytes() == half.replica.current.arena.data.tobytes()


def test_what_is_a_mixture_is_handed_over_as_one() -> None:
    """As by an async client, whose transport has brought the answer when Ctrl-C breaks in."""
    with Half(True, "both") as half:
        for _ in range(3):
            half.client.exchange(half.params, half.gradient)
        steady = steady_of(half)
        buffers = steady.begin(half.params, half.gradient)
        assert buffers is not None
        half.socket.sendmsg(buffers)
        came = half.socket.recv_into(steady.room)
        form = steady.answers[0]
        assert came == form.size
        with pytest.MonkeyPatch.context() as patch:

            def broken(self: CodedAnswer, room: memoryview, into: Any) -> None:
                self.whole.add(self._region(room), into)
                raise KeyboardInterrupt

            patch.setattr(CodedAnswer, "add", broken)
            with pytest.raises(KeyboardInterrupt):
                steady.finish(came)
        assert half.params.version == -1
        request, _unsent, views = half.client._session.hand_over(steady, steady.push_size, came)
        assert steady.begin(half.params, half.gradient) is None, "they are those of no version"
        with pytest.raises(RemoteProtocolError, match="not held here"):
            process(half.client._session, views)
        assert half.params.version == -1
        assert steady.begin(half.params, half.gradient) is None
        half.client._session.abandon(request)


# ---------------------------------------------------------------- forms

LAYOUT = Layout.of(
    {"w": np.zeros(600, np.float32), "b": np.zeros(4, np.float32), "h": np.zeros(600, np.float16)}
)
RAW = Part(2400, LAYOUT.nbytes, "raw", LAYOUT.nbytes - 2400, 7)
PARTS = (Part(0, 2400, "int8", 612, 7), Part(0, 2400, "int8", 612, 7), RAW)


def ack(parts: Any, **changed: Any) -> bytes:
    """Return the header of an answer."""
    found = {"vbar": None, "vbars": b""} | changed
    return encode(Ack(1, 2, 3, True, 0, 0.0, found["vbar"], found["vbars"], parts))


@each_row(
    "parts",
    [
        PARTS,
        PARTS[1:],
        (),
        (Part(0, LAYOUT.nbytes, "raw", LAYOUT.nbytes, 7),),
        (Part(0, 2400, "bf16", 1200, 7), Part(0, 2400, "int8", 612, 7), RAW),
    ],
    ids=len,
)
def test_of_these_there_is_a_form(parts: Any) -> None:
    form = CodedAnswer(LAYOUT, ack(parts), parts)
    assert form.has_form(ack(parts))
    assert not form.has_form(ack((Part(0, 2400, "fp16", 1200, 7), RAW)))
    assert not form.has_vbar


@each_row(
    "parts",
    [
        PARTS[:2],
        PARTS[2:],
        (PARTS[0], RAW, PARTS[1]),
        (PARTS[0], PARTS[1]._replace(version=8), RAW),
        (Part(0, 2400, "topk", 612, 7), RAW),
        (Part(0, 2400, "nothing", 612, 7), RAW),
        (Part(0, 2400, "int8", 611, 7), RAW),
        (Part(0, 1200, "int8", 308, 7), Part(1200, 2400, "raw", 1200, 7), RAW),
        (Part(0, 2416, "int8", 616, 7), Part(2416, 3616, "raw", 1200, 7)),
        (PARTS[0], Part(2400, 2416, "raw", 16, 7), Part(2416, 3616, "int8", 308, 7)),
        (PARTS[0], Part(2400, 2416, "raw", 16, 7), Part(2400, 2416, "raw", 16, 7),
         Part(2416, 3616, "raw", 1200, 7)),
        (PARTS[0], Part(2400, 2416, "raw", 16, 7), Part(2400, 2416, "bf16", 8, 7),
         Part(2416, 3616, "raw", 1200, 7)),
        (PARTS[0], RAW._replace(nbytes=RAW.nbytes - 1)),
        (PARTS[0], RAW._replace(stop=RAW.stop + 2, nbytes=RAW.nbytes + 2)),
        PARTS[:1] * 3 + PARTS,
        (Part(0, 1200, "raw", 1200, 7), Part(1200, 2400, "raw", 1200, 7), RAW),
    ],
    ids=str,
)  # fmt: skip
def test_of_these_there_is_none(parts: Any) -> None:
    with pytest.raises(ValueError, match="length"):
        CodedAnswer(LAYOUT, ack(parts), parts)


def test_statistics() -> None:
    vbars = np.arange(3, dtype="<f4").tobytes()
    form = CodedAnswer(LAYOUT, header := ack(PARTS, vbar=0.5, vbars=vbars), PARTS)
    assert (form.has_vbar, form.has_vbars) == (True, True)
    framed = b"\xce" + len(header).to_bytes(4) + header + b"\xc6" + (612).to_bytes(4)
    assert form.values(framed) == (1, 2, 3, 7, 0, 0.0, 0.5, vbars)
    for path in (("vbar",), ("mean_staleness",)):
        begin, end = next((s.begin, s.end) for s in form.template.slots if s.path == path)
        for value in (np.inf, np.nan):
            assert form.values(framed[:begin] + struct.pack(">d", value) + framed[end:]) is None
    with pytest.raises(ValueError, match="none of the model"):
        CodedAnswer(LAYOUT, ack(PARTS, vbars=vbars), PARTS)


def test_without_versions_of_constant_width_there_is_no_form() -> None:
    for at in range(3):
        parts = [
            part._replace(version=-1 if index == at else 7) for index, part in enumerate(PARTS)
        ]
        with pytest.raises(ValueError, match="integers" if at else "no number"):
            CodedAnswer(LAYOUT, ack(tuple(parts)), PARTS)


TWO = Layout.of({"v": np.zeros(600, np.float32), "w": np.zeros(600, np.float32)})
V, W = Part(0, 2400, "int8", 612, 7), Part(2400, 4800, "int8", 612, 7)
WHOLE_V = Part(0, 2400, "raw", 2400, 7)


@each_row(
    ("parts", "is_one"),
    [
        ((V, W), True),
        ((V, V, W, W), True),
        ((V, W, V, W), False),
        ((V, WHOLE_V, W), False),
        ((WHOLE_V, V, W), False),
        ((W, V), False),
    ],
    ids=str,
)
def test_increments_of_a_tensor_follow_each_other(parts: Any, is_one: bool) -> None:
    """What is raw is received first on the general path, wherever it stands."""
    assert (WholeAnswer.of(TWO, parts) is not None) == is_one


def test_without_unsigned_integers_there_is_no_form() -> None:
    header = ack(PARTS)
    places = [at for at in range(len(header)) if header[at : at + 8] == b"\xcf" + bytes(7)]
    assert len(places) == 7
    for at in places:
        with pytest.raises(ValueError, match="integers"):
            CodedAnswer(LAYOUT, header[:at] + b"\xd3" + header[at + 1 :], PARTS)


@each_row("count", [256, 257])
def test_a_form_has_no_more_parts_than_a_push(count: int) -> None:
    layout = Layout.of({f"{n:03}": np.zeros(300, np.float32) for n in range(count)})
    parts = tuple(Part(1200 * n, 1200 * (n + 1), "bf16", 600, 7) for n in range(count))
    assert (WholeAnswer.of(layout, parts) is not None) == (count == 256)


def test_a_region_is_compared_and_decoded_from_bytes() -> None:
    whole = WholeAnswer.of(LAYOUT, PARTS)
    assert whole is not None
    assert (whole.nbytes, whole.between) == (612 * 2 + RAW.nbytes + 10, 10)
    assert [piece.begin for piece in whole.pieces] == [0, 617, 1234]
