"""Coded answers of steady exchanges in compiled code: each condition, and each form of an answer.

`tests/engine/test_steady.py` compares the ways on whole courses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from aiops.codecs import find
from aiops.compiled.loading import core
from aiops.engine.coded_answers import CodedAnswers
from aiops.store.delta_replica import Increment
from aiops.wire.decoding import decode
from aiops.wire.messages import Ack
from tests.engine.test_compiled_answers import GENERAL, NOW, Scene, made_of, scenes
from tests.rows import each_row

pytestmark = [
    pytest.mark.skipif(core() is None, reason="there was no C compiler"),
    pytest.mark.usefixtures("none_pending"),
]

MODEL = {"w": np.zeros(700, np.float32), "b": np.zeros(3, np.float32)}


class CodedScene(Scene):
    """A worker that fetches coded parameters, and pushes raw gradients."""

    def push(self, *, forms: str = "ours", value: float = 0.5, **fields: Any) -> bytes:
        replica = self.server.engine.replica
        fields.setdefault("have", 0 if replica is None else replica.current.number)
        fields.setdefault("data", np.full(703, value, np.float32))
        return super().push(forms=forms, coded=True, **fields)

    def begin(self) -> None:
        super().begin()
        replies = self.steady.coded
        assert replies is not None
        self.coded, self.delta = replies, replies.replies
        self.replica = self.delta.replica

    @property
    def version(self) -> int:
        return self.replica.current.number


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CodedScene]:
    pytest.importorskip("numba")
    settings = {"kernels": "numba", "fetch_codec": ["int8"], "fetch_lag": 1}
    async for each in scenes(monkeypatch, "asgd", MODEL, CodedScene, **settings):
        yield cast(CodedScene, each)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The answers that Python makes: the version that each reader holds."""
    seen, answer = list[int](), CodedAnswers.answer

    def noted(self: CodedAnswers, *given: Any) -> bytes:
        seen.append(given[4])
        return answer(self, *given)

    monkeypatch.setattr(CodedAnswers, "answer", noted)
    return seen


def header_of(found: bytes | None) -> Ack:
    assert found is not None
    assert found != GENERAL
    ack = decode(found[5 : 5 + int.from_bytes(found[1:5])])
    assert isinstance(ack, Ack)
    return ack


async def test_python_makes_the_first_answer_of_each_form(
    asked: list[int], scene: CodedScene
) -> None:
    """A form is a number of increments: as many as the versions since the reader's."""
    for _ in range(6):
        scene.exchange()
    asked.clear()
    for steps in (3, 2, 1, 3, 2, 1):
        found = scene.exchange(scene.push(have=scene.version + 1 - steps))
        ack = header_of(found)
        assert (ack.version, ack.current) == (scene.store.version, scene.version)
        names = [part.codec for part in ack.parts]
        assert names == ["int8"] * steps + ["raw"]
        assert {part.version for part in ack.parts} == {scene.replica.current.level}
    assert len(asked) == 2


async def test_increments_lead_to_the_replica(scene: CodedScene) -> None:
    held = scene.replica.current.arena.views["w"].copy()
    codec = find("int8")
    for value in (0.5, -2.0, 1e-3):
        found = scene.exchange(scene.push(value=value))
        ack = header_of(found)
        assert found is not None
        begin = len(found) - sum(part.nbytes + 5 for part in ack.parts)
        for part in ack.parts:
            assert found[begin : begin + 5] == b"\xc6" + part.nbytes.to_bytes(4)
            payload = np.frombuffer(found, np.uint8)[begin + 5 :][: part.nbytes]
            if part.codec == "int8":
                type(codec).decode(payload, (700,), held, add=True)
            else:
                assert payload.tobytes() == scene.replica.current.arena.views["b"].tobytes()
            begin += 5 + part.nbytes
        assert begin == len(found)
        assert held.tobytes() == scene.replica.current.arena.views["w"].tobytes()


async def test_a_replica_that_is_near_enough_takes_no_step(scene: CodedScene) -> None:
    scene.replica._lag = 3
    before, tickets = scene.version, scene.updates.tickets
    for steps in range(3):
        ack = header_of(scene.exchange())
        near = steps < 2
        assert ack.current == (before if near else before + 3)
        assert len(ack.parts) == (0 if near else 2)
        assert scene.updates.tickets == tickets + steps + 1 + (not near)
    ledger = scene.member.ledger.report()
    assert ledger["fetched"]["times"]["not_modified"] == 2


async def test_an_answer_that_waits(scene: CodedScene) -> None:
    """It has its turn first."""
    data = scene.push()
    scene.place(data)
    scene.delta.waiting = [(99, Ack(1, 1, 1, True, 0, 0.0, None, b""), None, None)]  # type: ignore[list-item]
    version = scene.store.version
    assert scene.compiled.exchange(len(data), NOW, None) == GENERAL
    assert scene.store.version == version
    scene.delta.waiting = []
    assert header_of(scene.compiled.exchange(len(data), NOW, None)).version == version + 1


async def test_python_answers_what_is_of_no_usual_form(asked: list[int], scene: CodedScene) -> None:
    """The update has been made, and is counted once."""
    for _ in range(6):
        scene.exchange()
    asked.clear()
    for what, have in (("of long ago", 0), ("to come", scene.version + 7)):
        answered = scene.compiled.answered
        ack = header_of(scene.exchange(scene.push(have=have)))
        assert [part.codec for part in ack.parts] == ["raw"], what
        assert asked.pop() == have
        assert scene.compiled.answered == answered + 1
    scene.replica._increments[-1].region = None  # as of a step that left a tensor out
    ack = header_of(scene.exchange(scene.push(have=scene.version - 1)))
    assert [part.codec for part in ack.parts] == ["int8", "int8", "raw"]
    assert len(asked) == 1


async def test_tensors_of_several_versions(asked: list[int], scene: CodedScene) -> None:
    """There is no one version that the parts of an answer could have."""
    scene.exchange()
    asked.clear()
    step, current = scene.replica.step, scene.replica.current

    def odd(model: Any) -> Any:
        found = step(model)
        each = current.tensor_versions.copy()
        each[0] -= 1
        current.level, current._each = None, each
        return found

    scene.replica.step = odd  # type: ignore[method-assign]
    scene.delta.replica = scene.replica
    ack = header_of(scene.exchange())
    assert len({part.version for part in ack.parts}) == 2
    assert len(asked) == 1


async def test_an_increment_of_another_length(scene: CodedScene) -> None:
    scene.exchange()
    scene.replica._lag = 1
    data, points = scene.push(), scene.replica._increments
    scene.place(data)
    step = scene.replica.step

    def shorter(model: Any) -> Any:
        found = step(model)
        last = points.pop()
        points.append(Increment(last.number, last.coded, last.nbytes, b"short"))
        return found

    scene.replica.step = shorter  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="an increment has another length"):
        scene.compiled.exchange(len(data), NOW, None)


async def test_a_reader_of_the_replica(scene: CodedScene) -> None:
    """The step goes into another arena, and the reader's stays as it is."""
    lease = scene.replica.lease()
    before = lease.version.arena.data.tobytes()
    header_of(scene.exchange())
    assert lease.version.arena.data.tobytes() == before
    assert scene.replica.current is not lease.version
    lease.release()
    header_of(scene.exchange())


async def test_a_difference_that_cannot_be_encoded(scene: CodedScene) -> None:
    """The tensor is sent whole, and so to those that hold an earlier version."""
    scene.exchange()
    before = scene.version
    scene.replica.current.arena.views["w"][5] = np.nan
    ack = header_of(scene.exchange())
    assert [part.codec for part in ack.parts] == ["raw"]
    served, held = scene.store.current.arena.data, scene.replica.current.arena.data
    assert held.tobytes() == served.tobytes()
    ack = header_of(scene.exchange(scene.push(have=before)))
    assert [part.codec for part in ack.parts] == ["raw"]
    ack = header_of(scene.exchange())
    assert [part.codec for part in ack.parts] == ["int8", "raw"]


@pytest.mark.parametrize("name", ["increments", "delta", "replica"])
async def test_a_part_of_another_kind(
    name: str, scene: CodedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, seen = made_of(scene, monkeypatch)
    setattr(seen[0], name, object())
    with pytest.raises(ValueError, match="not the parts of a steady exchange"):
        make(*seen)


PIECE = (0, 0, 12, 0, 0, 0)
HEADER = b"\xce" + bytes(100)
NUMBERS = (5, 13, 21, 29, 37)


class TestIncrements:
    """The type alone, given what does not fit."""

    @staticmethod
    def made(*pieces: tuple[int, ...], nbytes: int = 64, region: int = 20) -> Any:
        library = core()
        assert library is not None
        return library.Increments(pieces, nbytes, region)  # type: ignore[arg-type]

    WRONG: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("before the model", (0, -4, 12, 0, 0, 0)),
        ("behind the model", (0, 0, 68, 0, 0, 0)),
        ("backwards", (0, 16, 12, 0, 0, 0)),
        ("part of an element", (1, 0, 13, 0, 8, 4)),
        ("before the increment", (1, 0, 12, -1, 8, 4)),
        ("behind the increment", (1, 0, 12, 13, 8, 4)),
        ("longer than the increment", (1, 0, 12, 0, 21, 4)),
        ("empty", (1, 0, 12, 0, 0, 0)),
        ("a second section before the first", (1, 0, 12, 0, 8, -1)),
        ("a second section behind the payload", (1, 0, 12, 0, 8, 9)),
        ("an address that is none", ("x", 0, 12, 0, 8, 4)),
        ("too few numbers", (1, 0, 12)),
    )

    @each_row(("what", "piece"), WRONG)
    def test_a_piece(self, what: str, piece: tuple[Any, ...]) -> None:
        with pytest.raises((ValueError, TypeError)):
            self.made(PIECE, piece)

    @each_row("wrong", [{"nbytes": 0}, {"region": -1}, {"region": 64}])
    def test_a_model(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="not the pieces of a replica"):
            self.made(PIECE, **wrong)

    def test_too_many_pieces(self) -> None:
        for count in (0, 257):
            with pytest.raises(ValueError, match="not the pieces of a replica"):
                self.made(*[PIECE] * count)
        assert self.made(*[PIECE] * 256) is not None

    @each_row("at", range(4))
    def test_arrays_of_other_lengths(self, at: int) -> None:
        given: list[Any] = [*np.zeros((2, 64), np.uint8), np.zeros(1, np.int64), np.zeros(1, bool)]
        made = self.made(PIECE)
        assert len(made.step(*given)) == 20
        for wrong in (given[at][:-1], np.zeros(len(given[at]) + 1, given[at].dtype)):
            with pytest.raises(ValueError, match="not arrays of the replica"):
                made.step(*given[:at], wrong, *given[at + 1 :])
        if at:
            given[at].flags.writeable = False
            with pytest.raises((ValueError, BufferError)):
                made.step(*given)
        with pytest.raises(TypeError):
            made.step(*given[:-1])

    FORMS: tuple[tuple[str, int, Any], ...] = (
        ("less than no increments", 0, -1),
        ("too many increments", 0, 257),
        ("a header that is no bytes", 1, "header"),
        ("too few numbers", 2, NUMBERS[:4]),
        ("too many numbers", 2, (*NUMBERS, 45)),
        ("a number before the header", 2, (-1, *NUMBERS[1:])),
        ("a number behind the header", 2, (94, *NUMBERS[1:])),
        ("a version behind the header", 3, (94, 55)),
        ("more versions than parts", 3, (45, 55, 65)),
        ("a payload of a later increment", 4, ((1, 0, 4), (-1, 0, 8))),
        ("a payload before an increment", 4, ((0, -1, 4), (-1, 0, 8))),
        ("a payload behind an increment", 4, ((0, 17, 4), (-1, 0, 8))),
        ("a payload behind the replica", 4, ((0, 0, 4), (-1, 57, 8))),
        ("a payload longer than the replica", 4, ((0, 0, 4), (-1, 0, 65))),
        ("an empty payload", 4, ((0, 0, 0), (-1, 0, 8))),
        ("a payload that is none", 4, (7, (-1, 0, 8))),
        ("parts that are none", 6, None),
    )

    @each_row(("what", "at", "wrong"), FORMS)
    def test_a_form(self, what: str, at: int, wrong: Any) -> None:
        made = self.made(PIECE)
        given: list[Any] = [1, HEADER, NUMBERS, (45, 55), ((0, 0, 4), (-1, 0, 8)), 0, ()]
        given[at] = wrong
        with pytest.raises((ValueError, TypeError)):
            made.learn(*given)
        assert not made.knows(1)

    def test_a_form_with_statistics(self) -> None:
        made = self.made(PIECE)
        for width, at in ((-1, 53), (8, 94), (1 << 40, 53)):
            with pytest.raises(ValueError, match="no form of an answer"):
                made.learn(0, HEADER, (*NUMBERS, 45, at), (), (), width, ())
        made.learn(0, HEADER, (*NUMBERS, 45, 93), (), (), 8, ())
        assert made.knows(0)
        assert [made.knows(steps) for steps in (-1, 1, 256, 257, 1 << 40)] == [False] * 5
        made.learn(0, HEADER, NUMBERS, (), (), 0, ())  # instead of the one before
        assert made.knows(0)
