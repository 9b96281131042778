"""Each condition under which compiled code stores the row of an exchange, and sends its answer.

`tests/engine/test_steady.py` compares the journals of the ways. Here each condition alone is made
to fail: then `KeptState.exchanged`, which is a stand-in, is to be told of the exchange, or the
answer is to be held.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.compiled.loading import core
from aiops.durable.commit_gate import Acks
from aiops.durable.recorder import Recorder
from aiops.durable.rows import check_of
from aiops.engine import compiled_answers
from aiops.net import disk
from aiops.serving.state.kept_state import KeptState
from aiops.state.frames import END, FRAME, FixedFrames
from aiops.state.row_kinds import STEADY_ROW, RowKind
from tests.engine.test_compiled_answers import GENERAL, SIZE, Scene, is_answer, scenes
from tests.rows import each_row

pytestmark = [
    pytest.mark.skipif(core() is None, reason="there was no C compiler"),
    pytest.mark.usefixtures("none_pending"),
]

NBYTES = FRAME + STEADY_ROW.size + 4 * SIZE
AT = 4096


class Lent:
    """What a server with a state has, its segment's memory among it, which is lent for ever."""

    def __init__(self, scene: Scene) -> None:
        self.scene, kept = scene, scene.run_state.kept
        assert isinstance(kept, KeptState)
        self.kept, self.recorder, self.journal = kept, kept.recorder, kept.journal
        writer = self.journal.writer
        assert writer is not None
        self.writer, self.gate = writer, self.recorder._gate
        self.memory = bytearray(b"\xaa" * (1 << 16))
        writer._frames = FixedFrames(RowKind.STEADY, STEADY_ROW, 4 * SIZE)
        writer._memory, writer._at, writer._synced = memoryview(self.memory), AT, 1
        writer._lent_to, writer._lent_until, writer._half = 1 << 16, float("inf"), 1 << 16
        self.told = list[Any]()

    def answer(self) -> bytes | None:
        """Answer a push as the server would."""
        data = self.scene.push()
        self.scene.place(data)
        return self.scene.compiled.answer(len(data))


@pytest.fixture
async def lent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Lent]:
    made = list[Lent]()

    def exchanged(_kept: KeptState, *given: Any) -> None:
        for each in made:
            each.told.append(given)

    monkeypatch.setattr(disk._SystemFile, "map", lambda _file: None)
    async for scene in scenes(monkeypatch, "asgd", state=tmp_path):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeptState, "exchanged", exchanged)
            each = Lent(scene)
            made.append(each)
            before = each.recorder.next, each.writer._at, each.writer._written, each.writer.nbytes
            yield each
            each.recorder.next, each.writer._at, each.writer._written, each.writer.nbytes = before
            each.writer._lent_to = 0
            made.clear()


async def test_of_itself_a_row_is_stored(lent: Lent) -> None:
    """As Python stores it, and nothing is said of it."""
    writer, recorder, scene = lent.writer, lent.recorder, lent.scene
    number, nbytes, synced = recorder.next, writer.nbytes, writer._synced
    assert is_answer(lent.answer())
    end = AT + NBYTES
    assert (lent.told, recorder.next, writer._written) == ([], number + 1, number)
    assert (writer._at, writer.nbytes) == (end, nbytes + NBYTES)
    expected, payload = bytearray(lent.memory), scene.steady.gradient.data.data
    sums = np.zeros(1, np.int64)
    fields = scene.steady.peer, scene.seq, scene.seq, 0, 0, check_of(scene.updates.tickets, sums)
    time = scene.member.answered
    given = fields, payload, writer._salt, number - synced
    writer._frames.store(memoryview(expected), AT, number, time, 0, *given)
    assert lent.memory == expected
    assert lent.memory[end : end + len(END)] == END
    assert set(lent.memory[:AT]) | set(lent.memory[end + len(END) :]) == {0xAA}


async def test_of_a_version_that_has_readers(lent: Lent) -> None:
    """A row says so, also where leases have ended and are not settled, or will not be."""
    lease = lent.scene.store.lease()
    assert is_answer(lent.answer())
    assert lent.memory[AT + FRAME - 3] == 1
    lease.release()
    assert is_answer(lent.answer())
    assert lent.memory[AT + NBYTES + FRAME - 3] == 0
    lease = lent.scene.store.lease()
    payloads = lease.payloads()
    lease.release()
    del payloads
    assert lent.scene.pool.returned
    assert is_answer(lent.answer())
    assert lent.memory[AT + 2 * NBYTES + FRAME - 3] == 0
    lent.scene.store.current.poisoned = True
    assert is_answer(lent.answer())
    assert lent.memory[AT + 3 * NBYTES + FRAME - 3] == 1
    assert not lent.told


async def test_of_rows_behind_many_that_are_not_synced(lent: Lent) -> None:
    lent.recorder.next = 1 << 33
    assert is_answer(lent.answer())
    assert lent.memory[AT + 40 : AT + 44] == b"\xff" * 4
    assert lent.memory[AT + 16 : AT + 24] == (1 << 33).to_bytes(8, "little")


CONDITIONS: tuple[tuple[str, str, Any], ...] = (
    ("recorder", "recording", False),
    ("recorder", "pending", True),
    ("recorder", "next", 1 << 70),
    ("recorder", "next", 0),
    ("journal", "appended", list),
    ("journal", "writer", None),
    ("journal", "writer", object()),
    ("kept", "journal", object()),
    ("writer", "why", "the disk is full"),
    ("writer", "_waiting", [1]),
    ("writer", "_frames", object()),
    ("writer", "_frames", FixedFrames(RowKind.STEADY, STEADY_ROW, 4 * SIZE + 8)),
    ("writer", "_at", -8),
    ("writer", "_at", None),
    ("writer", "_at", (1 << 16) - NBYTES - len(END) + 8),
    ("writer", "_lent_to", AT + NBYTES + len(END) - 1),
    ("writer", "_lent_until", 0.0),
    ("writer", "_lent_until", float("nan")),
    ("writer", "_half", AT + NBYTES - 1),
    ("writer", "_salt", 1 << 32),
    ("writer", "_synced", 1 << 40),
    ("writer", "_memory", memoryview(bytes(1 << 16))),
    ("writer", "_memory", memoryview(bytearray(AT + NBYTES + len(END) - 1))),
    ("writer", "_memory", None),
)


@each_row(
    ("owner", "name", "value"),
    CONDITIONS,
    ids=[f"{owner}-{name}-{at}" for at, (owner, name, _value) in enumerate(CONDITIONS)],
)
async def test_a_condition(owner: str, name: str, value: Any, lent: Lent) -> None:
    """Nothing is stored, and Python is told; when it holds again a row is stored."""
    lent.told.clear()
    lent.writer._at = AT
    lent.memory[:] = b"\xaa" * len(lent.memory)
    of = getattr(lent, owner)
    kept, number = getattr(of, name), lent.recorder.next
    setattr(of, name, value)
    try:
        assert lent.answer() is not None
        (told,) = lent.told
        time, leased, peer, numbers, gradient, ticket, sums = told
        assert (time, leased) == (lent.scene.member.answered, False)
        assert (peer, ticket) == (lent.scene.steady.peer, lent.scene.updates.tickets)
        assert numbers == (lent.scene.seq, lent.scene.seq, 0, 0)
        assert gradient is lent.scene.steady.gradient
        assert (sums.dtype, sums.tolist()) == (np.int64, [0])
        assert set(lent.memory) == {0xAA}
    finally:
        setattr(of, name, kept)
    assert (lent.recorder.next, lent.writer._at) == (number, AT)
    assert is_answer(lent.answer())
    assert len(lent.told) == 1
    assert (lent.recorder.next, lent.writer._at) == (number + 1, AT + NBYTES)


async def test_a_peer_whose_number_is_too_long(lent: Lent) -> None:
    """It would not fit its row; `KeptState.exchanged` is told, and raises."""
    scene = lent.scene
    library, seen = core(), list[Any]()
    assert library is not None
    scene.member.peer = 1 << 32
    scene.steady.peer = 1 << 32
    with pytest.MonkeyPatch.context() as patch:
        make = library.Answers
        patch.setattr(library, "Answers", lambda *given: seen.append(given) or make(*given))
        given = scene.steady._template, scene.steady._answer, scene.wire, scene.updates
        made = compiled_answers.compiled_answers(scene.steady, *given)
    assert made is not None
    data = scene.push()
    scene.place(data)
    assert is_answer(made.exchange(len(data), 1.0, lent.kept))
    assert [told[2] for told in lent.told] == [1 << 32]


class TestAnswers:
    """An answer that promises its row waits for it: `Recorder.hold` is asked."""

    async def test_it_leaves_when_its_row_is_written(
        self, lent: Lent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Recorder, "hold", None)
        lent.recorder._later = lent.recorder.next - 1
        assert is_answer(lent.answer())

    async def test_it_waits_for_its_row(self, lent: Lent) -> None:
        lent.recorder.pending = True
        lent.recorder._later = lent.recorder.next - 1
        assert lent.answer() == b""
        (held,) = lent.gate.held()
        assert is_answer(held.data)  # type: ignore[union-attr]
        assert held.peer == lent.scene.steady.peer  # type: ignore[union-attr]
        lent.gate.committed(lent.recorder._later)
        lent.recorder.pending = False

    async def test_it_waits_for_nothing_where_it_promises_nothing(
        self, lent: Lent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lent.recorder.pending = True
        lent.recorder._later = lent.recorder.next - 1
        lent.gate.level = Acks.APPLIED
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "hold", None)
            assert is_answer(lent.answer())
        lent.gate.level = lent.gate.wanted
        lent.recorder.pending = False

    @each_row(("owner", "name"), [("kept", "recorder"), ("recorder", "_gate")])
    async def test_what_is_not_known_is_asked(self, owner: str, name: str, lent: Lent) -> None:
        """A recorder or a gate of another kind may wait for what compiled code does not know."""
        asked, kept = list[Any](), getattr(getattr(lent, owner), name)

        class Other:
            __slots__ = ("a", "b", "c", "d", "e", "f", "g", "h")  # one of them where the level is

            def __init__(self) -> None:
                for slot in self.__slots__:
                    setattr(self, slot, 0)

            level = 3

            def hold(self, *given: Any) -> bool:
                asked.append(given)
                return True

            def hold_reply(self, *given: Any) -> None:
                asked.append(given)

        lent.recorder.pending = True
        lent.recorder._later = lent.recorder.next - 1
        setattr(getattr(lent, owner), name, Other())
        try:
            assert lent.answer() == b""
        finally:
            setattr(getattr(lent, owner), name, kept)
            lent.recorder.pending = False
        assert asked[0][0] == lent.scene.steady.peer
        assert is_answer(asked[0][1])

    async def test_one_of_pythons_way_waits_too(self, lent: Lent) -> None:
        lent.scene.warnings.due = True
        lent.recorder._later = lent.recorder.next - 1
        assert lent.answer() == b""
        (held,) = lent.gate.held()
        assert held.data == GENERAL  # type: ignore[union-attr]
        lent.gate.committed(lent.recorder._later)
        lent.scene.warnings.due = False

    async def test_a_state_of_another_kind_is_the_dispatchers(self, lent: Lent) -> None:
        class Other:
            record, recorder = None, lent.recorder

        lent.scene.run_state.kept = Other()  # type: ignore[assignment]
        assert is_answer(lent.answer())
        lent.scene.run_state.kept = lent.kept
        assert not lent.told


@each_row("size", [*range(1, 40), 63, 64, 65, 127, 128, 129, 191, 1000, 4099, 65_536])
def test_checksums(size: int) -> None:
    library = core()
    assert library is not None
    data = np.random.default_rng(size).bytes(size)
    for before in (0, 1, 0xFFFFFFFF, 0x12345678):
        assert library.crc32(data, before) == zlib.crc32(data, before)
