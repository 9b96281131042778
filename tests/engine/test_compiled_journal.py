"""Each condition under which compiled code stores the row of an exchange, and sends its answer.

`tests/engine/test_steady.py` compares the journals of the ways. Here each condition alone is made
to fail: then `KeptState.exchanged`, which is a stand-in, is to be told of the exchange, or the
answer is to be held.
"""

from __future__ import annotations

import os
import resource
import signal
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
from aiops.net.mapped_file import SHORT
from aiops.serving.state.journal_writer import JournalWriter
from aiops.serving.state.kept_state import KeptState
from aiops.state.frames import END, FRAME, FixedFrames
from aiops.state.row_kinds import CODED_ROW, STEADY_ROW, RowKind
from aiops.store.snapshots import SnapshotPool
from tests.engine.test_compiled_answers import GENERAL, SIZE, Scene, is_answer, scenes
from tests.rows import each_row

pytestmark = [
    pytest.mark.skipif(core() is None, reason="there was no C compiler"),
    pytest.mark.usefixtures("none_pending"),
]


class OtherFrames:
    """Of another class, with the payload's length wherever that of `FixedFrames` may lie."""

    __slots__ = ("a", "b", "c", "d", "e", "f", "g", "h")

    def __init__(self) -> None:
        for slot in self.__slots__:
            setattr(self, slot, 4 * SIZE)


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
        self.lend()

    def lend(self) -> None:
        """Lend new memory for ever, none of whose bytes are 0, as an older segment's may be."""
        writer = self.writer
        self.memory, self.told = bytearray(b"\xaa" * (1 << 16)), list[Any]()
        writer._frames = FixedFrames(RowKind.STEADY, STEADY_ROW, 4 * SIZE)
        writer._memory, writer._at, writer._synced = memoryview(self.memory), AT, 1
        writer._lent_to, writer._lent_until, writer._half = 1 << 16, float("inf"), 1 << 16
        writer._size = 1 << 16

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
            kept = scene.run_state.kept
            assert isinstance(kept, KeptState)
            writer = kept.journal.writer
            assert writer is not None
            before = (kept.recorder.next, writer._at, writer._written, writer.nbytes), writer._size
            each = Lent(scene)
            made.append(each)
            yield each
            made.clear()
        (each.recorder.next, each.writer._at, each.writer._written, each.writer.nbytes), size = (
            before
        )
        each.writer._size, each.writer._lent_to = size, 0


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


async def test_readers_that_end_before_the_update(
    lent: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made in another place all the same, as the row says."""
    target, asked = SnapshotPool.target, list[bool]()

    def ask(pool: SnapshotPool, spare: bool = False) -> Any:
        asked.append(spare)
        return target(pool, spare)

    monkeypatch.setattr(SnapshotPool, "target", ask)
    lease = lent.scene.store.lease()
    assert is_answer(lent.answer())
    lease.release()
    assert is_answer(lent.answer())
    assert asked == [True, False]


async def test_while_a_version_is_made_it_has_no_readers(lent: Lent) -> None:
    store = lent.scene.store
    lease, store._making = store.lease(), True
    assert is_answer(lent.answer())
    assert lent.memory[AT + FRAME - 3] == 0
    lease.release()


async def test_of_a_row_that_passes_the_middle(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next segment's file is made ready, once."""
    told = list[Any]()
    monkeypatch.setattr(JournalWriter, "_do_chores", lambda _writer, time: told.append(time))
    lent.writer._half = AT + NBYTES
    assert is_answer(lent.answer())
    assert not told
    assert is_answer(lent.answer())
    assert told == [lent.scene.member.answered]
    assert lent.writer._half == lent.writer._size
    assert is_answer(lent.answer())
    assert (len(told), lent.told) == (1, [])


async def test_memory_is_borrowed(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not lent, or not any more."""
    given = list[Any]()

    def borrow(writer: JournalWriter, *time_and_payload: Any) -> bool:
        given.append(time_and_payload)
        writer._lent_to, writer._lent_until = 1 << 16, float("inf")
        return True

    monkeypatch.setattr(JournalWriter, "borrow", borrow)
    for name, value in (("_lent_to", AT), ("_lent_until", 0.0)):
        setattr(lent.writer, name, value)
        assert is_answer(lent.answer())
        time, gradient = given.pop()
        assert time == lent.scene.member.answered
        assert gradient is lent.scene.steady.recorded
    assert lent.writer._at == AT + 2 * NBYTES
    assert not lent.told
    assert not given


async def test_memory_that_is_borrowed_is_looked_at_again(
    lent: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment may have begun meanwhile, or the journal have ended."""
    for name, value in (("_lent_to", 0), ("why", "the disk is full"), ("_at", (1 << 16) - 8)):
        lent.lend()
        lent.writer._lent_until = 0.0
        kept = getattr(lent.writer, name)

        def borrow(
            writer: JournalWriter, *_given: Any, name: str = name, value: Any = value
        ) -> bool:
            writer._lent_until = float("inf")
            setattr(writer, name, value)
            return True

        monkeypatch.setattr(JournalWriter, "borrow", borrow)
        assert lent.answer() is not None
        assert len(lent.told) == 1, name
        assert set(lent.memory) == {0xAA}
        setattr(lent.writer, name, kept)


async def test_an_error_of_borrowing_is_the_servers(
    lent: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def borrow(*_given: Any) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(JournalWriter, "borrow", borrow)
    lent.writer._lent_to = 0
    data = lent.scene.push()
    lent.scene.place(data)
    with pytest.raises(ValueError, match="a bug"):
        lent.scene.compiled.exchange(len(data), 1.0, lent.kept)
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
    ("writer", "_frames", OtherFrames()),
    ("writer", "_frames", FixedFrames(RowKind.STEADY, STEADY_ROW, 4 * SIZE + 8)),
    ("writer", "_frames", FixedFrames(RowKind.STEADY, STEADY_ROW, 4 * SIZE, b"\x91")),
    ("writer", "_frames", FixedFrames(RowKind.CODED, CODED_ROW, 4 * SIZE)),
    ("writer", "_at", -8),
    ("writer", "_at", None),
    ("writer", "_at", (1 << 16) - NBYTES - len(END) + 8),
    ("writer", "_lent_to", AT + NBYTES + len(END) - 1),
    ("writer", "_lent_until", 0.0),
    ("writer", "_lent_until", float("nan")),
    ("writer", "_size", AT + NBYTES + len(END) - 1),
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
    lent.lend()
    of = getattr(lent, owner)
    kept, number = getattr(of, name), lent.recorder.next
    setattr(of, name, value)
    try:
        assert lent.answer() is not None
        (told,) = lent.told
        time, leased, peer, numbers, gradient, ticket, sums, followed = told
        assert (time, leased) == (lent.scene.member.answered, False)
        assert (peer, ticket) == (lent.scene.steady.peer, lent.scene.updates.tickets)
        assert numbers == (lent.scene.seq, lent.scene.seq, 0, 0)
        assert gradient is lent.scene.steady.recorded
        assert (sums.dtype, sums.tolist(), followed) == (np.int64, [0], None)
        assert set(lent.memory) == {0xAA}
    finally:
        setattr(of, name, kept)
    assert (lent.recorder.next, lent.writer._at) == (number, AT)
    lent.lend()
    assert is_answer(lent.answer())
    assert not lent.told
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


LENGTHS = [*range(1, 40), 63, 64, 65, 127, 128, 129, 191, 1000, 4099, 65_536, 131_072, 131_073]
LENGTHS += [131_072 + 255, (1 << 20) - 1, 1 << 20, (1 << 20) + 311]


LONG = {"w": np.zeros((SHORT >> 2) + 9, np.float32)}


@pytest.fixture
async def long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Long]:
    async for scene in scenes(monkeypatch, "asgd", LONG, state=tmp_path / "s"):
        with pytest.MonkeyPatch.context() as patch:
            each = Long(scene, tmp_path / "file", patch)
            yield each
        each.end()


class Long:
    """A server with a state whose rows are too long for memory to be lent, and its segment."""

    def __init__(self, scene: Scene, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = scene.run_state.kept
        assert isinstance(kept, KeptState)
        writer = kept.journal.writer
        assert writer is not None
        self.scene, self.kept, self.writer = scene, kept, writer
        self.payload = scene.nbytes
        self.nbytes = FRAME + STEADY_ROW.size + scene.nbytes + 4  # to a multiple of 8
        self.head = self.nbytes - self.payload + len(END)
        names = "_at", "_written", "nbytes", "_size", "_half", "_descriptor", "_synced"
        self._before = {name: getattr(writer, name) for name in names}
        self._next = kept.recorder.next
        self.told = list[Any]()
        monkeypatch.setattr(KeptState, "exchanged", lambda _kept, *given: self.told.append(given))
        path.write_bytes(b"\xaa" * (1 << 20))
        self.file, self.path = os.open(path, os.O_RDWR), path
        self.reset()

    def reset(self) -> None:
        """Have the next row be the first of a segment."""
        writer = self.writer
        self.told.clear()
        writer._frames = FixedFrames(RowKind.STEADY, STEADY_ROW, self.payload)
        writer._at, writer._half, writer._size, writer._synced = AT, 1 << 20, 1 << 20, 1
        writer._descriptor, writer._room = self.file, bytearray(b"\xaa" * self.head)

    def end(self) -> None:
        """Have the journal be as it was."""
        for name, value in self._before.items():
            setattr(self.writer, name, value)
        self.kept.recorder.next = self._next
        os.close(self.file)

    def answer(self) -> bytes | None:
        data = self.scene.push()
        self.scene.place(data)
        return self.scene.compiled.answer(len(data))


class TestLongRows:
    """A row is written by one call where no memory is lent for it."""

    async def test_it_is_written_as_python_would(self, long: Long) -> None:
        writer, scene = long.writer, long.scene
        expected = memoryview(bytearray(b"\xaa" * (1 << 20)))
        for count in range(3):  # at other places of a line
            number = long.kept.recorder.next
            assert is_answer(long.answer(), scene)
            at = AT + count * long.nbytes
            check = check_of(scene.updates.tickets, np.zeros(1, np.int64))
            fields = scene.steady.peer, scene.seq, scene.seq, 0, 0, check
            given = scene.steady.gradient.data.data, writer._salt, number - writer._synced
            time = scene.member.answered
            writer._frames.store(expected, at, number, time, 0, fields, *given)
            assert (writer._at, long.kept.recorder.next) == (at + long.nbytes, number + 1)
            assert writer._written == number
            assert long.path.read_bytes() == expected
        assert not long.told

    @each_row(
        ("name", "value"),
        [
            ("_descriptor", -1),
            ("_descriptor", "beyond"),
            ("_descriptor", None),
            ("_descriptor", "read"),
            ("_room", bytes(1 << 17)),
            ("_room", bytearray()),
            ("_room", "short"),
            ("_size", "short"),
            ("_frames", FixedFrames(RowKind.STEADY, STEADY_ROW, 8)),
        ],
    )
    async def test_a_condition(self, name: str, value: Any, long: Long) -> None:
        """Python is told, and writes it, or finds out why it cannot be written."""
        long.reset()
        long.path.write_bytes(b"\xaa" * (1 << 20))
        if value == "beyond":
            value = (1 << 32) + long.file
        elif value == "read":
            value = os.open(long.path, os.O_RDONLY)
        elif name == "_room" and value == "short":
            value = bytearray(long.head - 1)
        elif value == "short":
            value = AT + long.nbytes + len(END) - 1
        setattr(long.writer, name, value)
        number = long.kept.recorder.next
        long.answer()
        (told,) = long.told
        assert told[4] is long.scene.steady.recorded
        assert (long.kept.recorder.next, long.writer._at) == (number, AT)
        assert set(long.path.read_bytes()) == {0xAA}
        long.reset()
        assert is_answer(long.answer(), long.scene)
        assert not long.told

    async def test_a_disk_that_takes_a_part(self, long: Long) -> None:
        """Python writes all of it again."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (AT + long.nbytes // 2, before[1]))
        try:
            long.answer()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, kept)
        assert len(long.told) == 1
        assert long.writer._at == AT


@each_row("size", LENGTHS)
def test_checksums(size: int) -> None:
    library = core()
    assert library is not None
    data = np.random.default_rng(size).bytes(size)
    for before in (0, 1, 0xFFFFFFFF, 0x12345678):
        assert library.crc32(data, before) == zlib.crc32(data, before)
    room = memoryview(bytearray(b"\xaa" * (size + 144)))
    for at in (0, 8, 24, 56, 63, 64, 72):
        found = library.copy_crc32(room[at : at + size], data)
        assert found == zlib.crc32(data)
        assert room[at : at + size] == data
        assert set(room[:at]) <= {0xAA}
        assert set(room[at + size :]) == {0xAA}
        room[:] = b"\xaa" * (size + 144)
    with pytest.raises(ValueError, match="as long"):
        library.copy_crc32(room, data)
