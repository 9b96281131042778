"""Each condition of compiled code: where one does not hold, Python's way has the whole exchange.

`tests/engine/test_steady.py` compares the two ways. Here each condition alone is made to fail, and
the way in Python, which is a stand-in, is to be asked.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.codecs import find
from aiops.compiled.loading import core
from aiops.engine import compiled_answers
from aiops.engine.staleness import RecentStaleness
from aiops.engine.steady import Steady
from aiops.errors import UsageError
from aiops.kernels.numba_source import DIRECT
from aiops.model.layout import Array
from aiops.model.parts import LARGEST, Part
from aiops.serving import event_dispatcher
from aiops.serving.server import Server
from aiops.store.parameters import Store
from aiops.wire import messages
from aiops.wire.encoding import encode
from tests.peers import define, enclose
from tests.pipes import Piped

pytestmark = [
    pytest.mark.skipif(core() is None, reason="there was no C compiler"),
    pytest.mark.usefixtures("none_pending"),
]

GENERAL = b"general"
SIZE = 16  # float32
NOW = 5.0
MODEL = {"w": np.zeros(SIZE, np.float32)}


class Scene:
    """A server, a worker on it whose pushes compiled code answers, and its parts."""

    def __init__(self, server: Server, model: Mapping[str, Array] = MODEL) -> None:
        self.server = server
        self.line = Piped(server)
        self.model = model
        self.nbytes = sum(each.nbytes for each in model.values())
        self.line.feed(define(model))
        self.seq = self.updated = 0
        self.begun = False

    def begin(self) -> None:
        """Push until compiled code answers, and name all that it looks at."""
        server, engine = self.server, self.server.engine
        self.line.feed(self.push())
        (self.peer,) = server.connections.peers.values()
        steady = self.peer.steady
        assert steady is not None
        assert steady.compiled is not None
        self.steady, self.compiled, self.wire = steady, steady.compiled, self.peer.link.wire
        self.member, training = steady.member, engine.training
        assert training is not None
        self.store, self.updates = training.store, training.updates
        self.guard, self.pool = self.store.guard, self.store.snapshots
        self.maker, self.held = self.updates.maker, self.updates.held
        self.collected, self.warnings = self.maker.collected, self.updates.warnings
        self.closure, self.traffic = self.updates.closure, self.wire.traffic
        self.current = self.store.current
        self.dispatcher, self.runner = server._dispatcher, server._runner
        self.run_state = server.run_state
        self.begun = True

    def push(self, *, forms: str = "ours", value: float = 0.5, **fields: Any) -> bytes:
        """Return a push, of the first version if ``fields`` say no other."""
        self.seq += 1
        base = fields.pop("base", 0)
        data = fields.pop("data", None)
        part = Part(0, self.nbytes, "raw", self.nbytes, base)
        message = messages.Push(
            fields.pop("id", self.seq), fields.pop("seq", self.seq), True, fields.pop("have", 0),
            (part,), **fields
        )  # fmt: skip
        header = encode(message)
        if forms == "signed":
            header = header.replace(b"\xcf", b"\xd3")
        elif forms == "narrow":  # of the version that it holds
            before, number = header.split(b"\xa4have\xcf")
            header = before + b"\xa4have\xd0" + number[7:]
        if data is None:
            data = np.full(SIZE, 0.5, np.float32)
            data[-1] = value
            data = data if self.nbytes == data.nbytes else np.zeros(self.nbytes, np.uint8)
        return enclose(header, data.tobytes())

    def place(self, data: bytes) -> None:
        """Have bytes lie in the head buffer, as if they had been received."""
        room = self.line.protocol.get_buffer(-1)
        room[: len(data)] = data

    def exchange(self, data: bytes | None = None, record: Any = None) -> bytes | None:
        """Give compiled code a push."""
        data = self.push() if data is None else data
        self.place(data)
        return self.compiled.exchange(len(data), NOW, record)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    async for each in scenes(monkeypatch, "asgd"):
        yield each


async def scenes(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    model: Mapping[str, Array] = MODEL,
    kind: type[Scene] = Scene,
    **settings: Any,
) -> AsyncIterator[Scene]:
    update, made = Store.update, list[Scene]()

    def general(*_given: Any) -> bytes | None:
        return GENERAL if made[0].begun else None  # or all that comes goes the general way

    def counted(self: Store, *arguments: Any) -> Any:
        for each in made:
            each.updated += 1
        return update(self, *arguments)

    monkeypatch.setattr(Store, "update", counted)
    monkeypatch.setattr(Steady, "general", general)
    async with aiops.serve(policy=policy, port=0, **{"kernels": "numpy", **settings}) as server:
        each = kind(server, model)
        made.append(each)
        while not server.warm:  # noqa: ASYNC110  (it is made so on a thread, which sets no event)
            await asyncio.sleep(0.002)
        each.line.feed(each.push())
        each.begin()
        yield each


def is_answer(found: bytes | None, scene: Scene | None = None) -> bool:
    return found is not None and len(found) > (4 * SIZE if scene is None else scene.nbytes + 20)


async def test_of_itself_it_is_answered(scene: Scene) -> None:
    before = scene.compiled.answered
    for forms in ("ours", "ours"):
        assert is_answer(scene.exchange(scene.push(forms=forms)))
    assert scene.compiled.answered == before + 2
    assert scene.current.number == 4


FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("wire", "expected", None),
    ("wire", "_message", object()),
    ("wire", "_whole", 100),
    ("wire", "_whole", 1 << 40),
    ("wire", "state", "closed"),
    ("wire", "state", None),
    ("member", "peer", None),
    ("member", "peer", 77),
    ("member", "excused", True),
    ("member", "covers", {1: None}),
    ("member", "last_seq", 1 << 30),
    ("current", "level", None),
    ("maker", "job", object()),
    ("updates", "_on_applied", print),
    ("updates", "_queue", deque([1])),
    ("held", "pushes", [1]),
    ("collected", "count", 1),
    ("warnings", "due", True),
    ("closure", "why", "paused"),
    ("guard", "_left", 0),
    ("guard", "magnitude", 1e17),
    ("traffic", "kinds_in", {}),
    ("traffic", "kinds_out", {}),
)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    FIELDS,
    ids=[f"{each[0]}-{each[1]}-{n}" for n, each in enumerate(FIELDS)],
)
async def test_a_condition(owner: str, name: str, value: Any, scene: Scene) -> None:
    """Nothing is changed, and when it holds again the same push is answered."""
    kept, before = getattr(getattr(scene, owner), name), scene.compiled.answered
    data = scene.push()
    scene.place(data)
    setattr(getattr(scene, owner), name, value)
    try:
        version, params = scene.store.current.number, scene.store.current.arena.data.tobytes()
        assert scene.compiled.exchange(len(data), NOW, None) == GENERAL
        assert scene.compiled.answered == before
        assert scene.store.current.number == version
        assert scene.store.current.arena.data.tobytes() == params
    finally:
        setattr(getattr(scene, owner), name, kept)
    assert is_answer(scene.compiled.exchange(len(data), NOW, None))


async def test_bytes_before_it(scene: Scene) -> None:
    """It does not begin where the payload would be aligned."""
    data = scene.push()
    scene.place(b"\0" + data)
    scene.wire._begin += 1
    scene.wire._end += 1
    assert scene.compiled.exchange(len(data), NOW, None) == GENERAL


@pytest.mark.parametrize("change", [-1, 1])
async def test_bytes_that_lack_or_follow(change: int, scene: Scene) -> None:
    data = scene.push()
    scene.place(data + b"\xce")
    found = scene.compiled.exchange(len(data) + change, NOW, None)
    assert found == (b"" if change < 0 else GENERAL)


async def test_less_than_a_header(scene: Scene) -> None:
    data = scene.push()
    scene.place(data)
    head = len(data) - 4 * SIZE
    assert scene.compiled.exchange(head - 1, NOW, None) == GENERAL
    before = scene.traffic.bytes_in
    assert scene.compiled.exchange(head, NOW, None) == b""
    assert scene.traffic.bytes_in == before + head
    assert is_answer(scene.compiled.exchange(4 * SIZE, NOW, None))


async def test_more_bytes_than_there_is_room(scene: Scene) -> None:
    scene.place(scene.push())
    for count in (1 << 40, -1, 1 << 70):
        assert scene.compiled.exchange(count, NOW, None) == GENERAL


async def test_each_byte_of_the_form(scene: Scene) -> None:
    """But for those of its four numbers."""
    data = scene.push()
    numbers = scene.steady._template.slots
    inside = {at for slot in numbers for at in range(slot.begin, slot.end)}
    for at in range(len(data) - 4 * SIZE):
        if at not in inside:
            wrong = bytearray(data)
            wrong[at] ^= 0x10
            assert scene.exchange(bytes(wrong)) == GENERAL, at
    assert is_answer(scene.exchange(data))


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, 1e18, -1e18, np.float32(1e18) * np.float32(1 + 2**-23)]
)
async def test_a_value_that_is_unfit(value: float, scene: Scene) -> None:
    assert scene.exchange(scene.push(value=value)) == GENERAL


async def test_the_largest_value_that_is_fit(scene: Scene) -> None:
    assert is_answer(scene.exchange(scene.push(value=float(np.nextafter(np.float32(1e18), np.float32(0))))))  # fmt: skip  # noqa: E501


BAD = (
    {"seq": LARGEST + 1},
    {"id": LARGEST + 1},
    {"have": LARGEST + 1},
    {"base": LARGEST + 1},
    {"seq": 1},
    {"base": 1 << 20},
    {"seq": (1 << 64) - 1},
    {"id": (1 << 64) - 1},
    {"have": (1 << 64) - 1},
    {"base": (1 << 64) - 1},
    {"have": 3},  # the version that it makes
)


def with_numbers(scene: Scene, data: bytes, **numbers: int) -> bytes:
    """Return a push with other numbers."""
    changed = bytearray(data)
    for slot, name in zip(scene.steady._template.slots, ("id", "seq", "have", "base"), strict=True):
        if name in numbers:
            changed[slot.begin : slot.end] = (numbers[name] % (1 << 64)).to_bytes(8)
    return bytes(changed)


@pytest.mark.parametrize("numbers", BAD, ids=str)
async def test_a_number_that_is_none(numbers: dict[str, int], scene: Scene) -> None:
    assert scene.current.number == 2
    data = scene.push()
    assert scene.exchange(with_numbers(scene, data, **numbers)) == GENERAL
    assert is_answer(scene.exchange(data))


@pytest.mark.parametrize(
    "numbers",
    [
        *BAD[:6],
        *({"id": -1}, {"seq": -1}, {"have": -2}, {"base": -1}, {"base": -(1 << 63)}),
        *({"have": -(1 << 63)}, {"have": 3}),
    ],
    ids=str,
)
async def test_a_signed_number_that_is_none(numbers: dict[str, int], scene: Scene) -> None:
    """A client may encode its integers as signed ones."""
    scene.begun = False
    scene.line.feed(scene.push(forms="signed"))
    scene.begun = True
    assert scene.peer.steady is not None
    scene.steady = scene.peer.steady
    assert scene.steady.compiled is not None
    scene.compiled = scene.steady.compiled
    assert {slot.code for slot in scene.steady._template.slots} == {"q"}
    scene.current.number = scene.current.level = 2
    data = scene.push(forms="signed")
    assert scene.exchange(with_numbers(scene, data, **numbers)) == GENERAL
    assert is_answer(scene.exchange(with_numbers(scene, data, have=-1)))


async def test_a_narrow_signed_number(scene: Scene) -> None:
    scene.begun = False
    scene.line.feed(scene.push(forms="narrow"))
    scene.begun = True
    assert scene.peer.steady is not None
    assert scene.peer.steady.compiled is not None
    scene.steady, scene.compiled = scene.peer.steady, scene.peer.steady.compiled
    assert [slot.code for slot in scene.steady._template.slots] == ["Q", "Q", "b", "Q"]
    data = scene.push(forms="narrow")
    at = scene.steady._template.slots[2].begin
    for number, found in ((0xFE, False), (0x80, False), (0x7F, True), (0xFF, True)):
        changed = bytearray(data)
        changed[at] = number
        scene.member.last_seq = 3
        assert is_answer(scene.exchange(bytes(changed))) == found, number


async def test_a_policy_that_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    async for scene in scenes(monkeypatch, "ringmaster", set={"r": 3}):
        assert is_answer(scene.exchange(scene.push(base=0)))
        assert scene.current.number == 3
        assert scene.exchange(scene.push(base=0)) == GENERAL
        assert is_answer(scene.exchange(scene.push(base=3)))


def unproven(scene: Scene) -> list[Any]:
    """Have the proof cover nothing that it is asked; return what it is asked."""
    asked: list[Any] = []

    def covers(steps: Any, scalars: Any, magnitude: float) -> bool:
        asked.append((steps, scalars, magnitude))
        return False

    scene.guard.covers = covers  # type: ignore[method-assign]
    return asked


async def test_rates_without_a_proof(scene: Scene) -> None:
    """The proof is asked for rates beyond its own, which it has not seen."""

    def fresh() -> bytes:
        return scene.push(base=scene.current.number)

    for _ in range(2):
        scene.exchange(fresh())
    asked, (steps, rates) = unproven(scene), scene.maker.numbers.even[0]
    scene.guard._seen.clear()
    assert is_answer(scene.exchange(fresh()))
    left, scene.guard._step = scene.guard._left, float(rates[0]) / 2
    assert not asked
    assert scene.exchange(fresh()) == GENERAL
    assert asked == [(rates, None, 1e18)]
    scene.guard._step = float(rates[0])
    for bad in (-rates, rates * np.nan):
        scene.maker.numbers.even[0] = steps, bad
        assert scene.exchange(fresh()) == GENERAL
    assert scene.guard._left == left
    scene.guard._seen[id(rates)] = rates
    scene.maker.numbers.even[0] = steps, rates
    scene.guard._step = 0.0
    assert is_answer(scene.exchange(fresh())), "they were seen"


async def test_scalars_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    async for scene in scenes(monkeypatch, "schedule-free"):
        for _ in range(3):
            scene.line.feed(scene.push(base=scene.current.number))
        scene.guard._left = 1000
        ends = [(-1e9, 1e9)] * len(scene.store.rule.scalars)
        scene.guard._scalars, scene.guard._step = ends, 1e9
        asked = unproven(scene)
        assert is_answer(scene.exchange())
        assert not asked
        for column in range(len(ends)):
            for bad in ((-1e9, -1e8), (1e8, 1e9)):
                scene.guard._scalars = [*ends[:column], bad, *ends[column + 1 :]]
                assert scene.exchange() == GENERAL
        assert len(asked) == 2 * len(ends)
        scene.guard._scalars = ends
        assert is_answer(scene.exchange())


async def test_a_proof_for_smaller_gradients(scene: Scene) -> None:
    """Where larger ones may come, the largest magnitude of each is compared with the proof's."""
    scene.guard.narrow, scene.guard.magnitude = True, 0.5
    assert is_answer(scene.exchange())
    assert scene.exchange(scene.push(value=-0.50000006)) == GENERAL
    scene.guard.magnitude = 0.49
    assert scene.exchange() == GENERAL


HALVES = np.array([0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x8001, 0xFBFF], np.uint16)


@pytest.mark.parametrize("bits", HALVES.tolist(), ids=hex)
async def test_the_magnitude_of_a_half(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"h": np.zeros(4, np.float16)}
    value = np.array([0, bits, 0, 0], np.uint16)
    largest = abs(float(value.view(np.float16)[1]))
    async for scene in scenes(monkeypatch, "asgd", model=model):
        scene.guard._left, scene.guard._step = 100, 1.0
        for limit, found in ((largest, True), (float(np.nextafter(largest, 0)), False)):
            scene.guard.narrow, scene.guard.magnitude = True, limit
            assert is_answer(scene.exchange(scene.push(data=value)), scene) == found


async def test_a_proof_is_used_up(scene: Scene) -> None:
    before = scene.guard._left
    scene.exchange()
    assert scene.guard._left == before - 1


def leased(scene: Scene) -> None:
    scene.lease = scene.store.lease()  # type: ignore[attr-defined]


def returned(scene: Scene) -> None:
    lease = scene.store.lease()
    views = lease.payloads()
    lease.release()
    del views  # it has ended, and the pool has yet to be told


PLACES: tuple[tuple[str, Callable[[Scene], Any]], ...] = (
    ("leased", leased),
    ("returned", returned),
    ("poisoned", lambda scene: setattr(scene.current, "poisoned", True)),
    ("frozen", lambda scene: setattr(scene.store, "_leased", True)),
    ("window", lambda scene: setattr(scene.pool, "_until", 1)),
    ("another", lambda scene: setattr(scene.pool, "current", scene.current.following(scene.current.room))),  # noqa: E501
)  # fmt: skip


@pytest.mark.parametrize(("name", "arrange"), PLACES, ids=[each[0] for each in PLACES])
async def test_a_version_that_may_not_be_overwritten(
    name: str, arrange: Callable[[Scene], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool says where the next one is written, and all of it is as by `Store.update`."""
    pytest.importorskip("numba")
    async for scene in scenes(monkeypatch, "asgd", kernels="numba"):
        scene.updated = 0
        assert is_answer(scene.exchange())
        assert scene.updated == 0, "numba's kernels are called without it"
        before, direct = scene.current.arena.data.tobytes(), scene.compiled.direct
        number = scene.current.number
        arrange(scene)
        assert is_answer(scene.exchange())
        current = scene.store.current
        assert scene.updated == (name == "another")
        assert scene.compiled.direct == direct + (name != "another")
        assert (current is scene.current) == (name in ("returned", "window"))
        assert scene.pool.current is current
        assert (current.number, current.level) == (number + 1, number + 1)
        assert not scene.store._leased
        assert not scene.store.busy
        if current is not scene.current and name != "another":
            assert scene.current.number == number
            assert scene.current.arena.data.tobytes() == before
        assert current.arena.data.tobytes() != before
        assert is_answer(scene.exchange())
        assert scene.store.current is current, "no one reads this one"


async def test_an_older_version_that_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease ended where the pool was not told: the next exchange settles that."""
    pytest.importorskip("numba")
    async for scene in scenes(monkeypatch, "asgd", kernels="numba"):
        lease = scene.store.lease()
        assert is_answer(scene.exchange())
        views = lease.payloads()
        lease.release()
        del views
        assert scene.pool.returned
        assert is_answer(scene.exchange())
        assert not scene.pool.returned
        assert (len(scene.pool.versions), scene.pool.spare) == (1, 1)


async def test_a_kernel_that_is_not_compiled(scene: Scene) -> None:
    scene.updated = 0
    assert is_answer(scene.exchange())
    assert scene.updated == 1


class TestKernelsByTheirAddresses:
    """Where something is of another form, they are called as Python calls them."""

    @pytest.fixture(params=["sgd", "adam"])
    async def scene(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Scene]:
        pytest.importorskip("numba")
        chosen = {"optimizer": request.param}
        async for scene in scenes(monkeypatch, "asgd", kernels="numba", set=chosen):
            yield scene

    async def test_of_itself_it_is_called_so(self, scene: Scene) -> None:
        before = scene.compiled.direct
        assert is_answer(scene.exchange())
        assert scene.compiled.direct == before + 1

    async def test_one_without_an_address(self, scene: Scene) -> None:
        (kernel,) = scene.store.updater.kernels
        other = copy.copy(kernel)
        other.direct = 0  # type: ignore[attr-defined]
        scene.store.updater.kernels[0] = other
        before = scene.compiled.direct
        assert is_answer(scene.exchange())
        assert scene.compiled.direct == before
        scene.store.updater.kernels[0] = kernel
        assert is_answer(scene.exchange())
        assert scene.compiled.direct == before + 1

    async def test_one_that_does_not_say_that_it_has_run(self, scene: Scene) -> None:
        """It has raised an error: that is one of the server, as it would be in Python."""
        (kernel,) = scene.store.updater.kernels
        other = copy.copy(kernel)
        pointers = [ctypes.c_void_p] * len(DIRECT)
        silent = ctypes.CFUNCTYPE(None, *pointers)(lambda *_given: None)
        other.direct = ctypes.cast(silent, ctypes.c_void_p).value  # type: ignore[attr-defined]
        scene.store.updater.kernels[0] = other
        with pytest.raises(ValueError, match="kernel do not fit"):
            scene.exchange()

    @pytest.mark.parametrize("count", [0, 2])
    async def test_rates_of_another_length(self, count: int, scene: Scene) -> None:
        steps, scalars = np.full(count, 1e-3), scene.maker.whole(0, NOW)[1]
        await self._refused(scene, steps, scalars)

    async def test_rates_that_are_no_float64(self, scene: Scene) -> None:
        steps = np.full(2, 1e-3, np.float32)[:2].view(np.int64)  # as long, and small as floats
        await self._refused(scene, steps, scene.maker.whole(0, NOW)[1])

    async def test_scalars_of_another_number(self, scene: Scene) -> None:
        steps, scalars = scene.maker.whole(0, NOW)
        if scalars is None:
            pytest.skip("the rule has none")
        await self._refused(scene, steps, np.concatenate([scalars, scalars]))

    async def _refused(self, scene: Scene, steps: Array, scalars: Array | None) -> None:
        before, params = scene.compiled.direct, scene.store.current.arena.data.tobytes()
        if scalars is None:
            scene.maker.numbers.even[2] = (scene.maker.numbers.even[2][0], steps)
        else:
            scene.maker.whole = lambda _staleness, _now: (steps, scalars)  # type: ignore[method-assign]
        with pytest.raises((TypeError, ValueError)):
            scene.exchange()
        assert scene.compiled.direct == before
        assert scene.store.current.arena.data.tobytes() == params

    async def test_rates_that_have_changed(self, scene: Scene) -> None:
        """A view of them is kept: of the same array alone."""
        if scene.store.rule.scalars:
            pytest.skip("its rates are made each time")
        even, seen = scene.maker.numbers.even, [scene.store.current.arena.data.view(np.float32)[0]]
        for base in (0, 1):  # of staleness 2 both
            assert is_answer(scene.exchange(scene.push(base=base)))
            seen.append(scene.store.current.arena.data.view(np.float32)[0])
            even[2] = (even[2][0], 2 * even[2][1])
        assert np.isclose(seen[2] - seen[1], 2 * (seen[1] - seen[0]), rtol=1e-3)

    async def test_a_state_of_another_length(self, scene: Scene) -> None:
        state = scene.store.updater.state
        if not state[0]:
            pytest.skip("the rule has none")
        state[0] = (state[0][0][:-1], *state[0][1:])
        before, params = scene.compiled.direct, scene.store.current.arena.data.tobytes()
        with pytest.raises((ValueError, UsageError)):
            scene.exchange()
        assert scene.compiled.direct == before
        assert scene.store.current.arena.data.tobytes() == params

    async def test_other_arguments_than_compiled_code_gives(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (kernel,) = scene.store.updater.kernels
        kernel.direct = 0  # type: ignore[attr-defined]
        monkeypatch.setattr(compiled_answers, "DIRECT", (*DIRECT[1:], DIRECT[0]))
        compiled_answers.enter_kernels(scene.store.updater)
        assert kernel.direct == 0  # type: ignore[attr-defined]
        monkeypatch.undo()
        compiled_answers.enter_kernels(scene.store.updater)
        assert kernel.direct != 0  # type: ignore[attr-defined]


class TestNoted:
    """What an exchange leaves behind, beside the parameters."""

    async def test_the_answers_that_are_remembered(self, scene: Scene) -> None:
        for _ in range(messages.REMEMBERED + 3):
            assert is_answer(scene.exchange())
        assert [*scene.member.answers] == [
            *range(scene.seq - messages.REMEMBERED + 1, scene.seq + 1)
        ]
        fields = scene.member.answers[scene.seq]
        version = scene.current.number
        assert fields == (version, True, version - 1, float(version - 1), None, b"", "")

    @pytest.mark.parametrize(
        ("level", "least"),
        [(1023, 1023), (1024, 1024), (1025, 1024), (5000, 4096), (1 << 40, 1 << 40)],
    )
    async def test_the_bin_of_a_staleness(self, level: int, least: int, scene: Scene) -> None:
        used = scene.maker.staleness
        before = used.total
        scene.current.number = scene.current.level = level
        scene.exchange()
        scene.current.number = scene.current.level = level
        scene.exchange()
        assert used.bins[least] == 2
        assert used.total == before + 2 * level

    async def test_the_mean_of_staleness(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One of thousands of updates counts as few, and the mean has a memory of 64."""
        async for scene in scenes(monkeypatch, "schedule-free"):
            for _ in range(3):
                scene.line.feed(scene.push(base=scene.current.number))
            scene.guard._left, scene.guard._step = 1000, 1e9
            scene.guard._scalars = [(-1e9, 1e9)] * len(scene.store.rule.scalars)
            recent, twin = scene.maker.numbers.recent_staleness, RecentStaleness()
            twin.restore(recent.state())
            scene.current.number = scene.current.level = 6000
            for number in range(80):
                staleness = 5000 if number in (3, 75) else number % 7
                data = scene.push(base=scene.current.number - staleness)
                assert is_answer(scene.exchange(data))
                twin.note(staleness)
                assert recent.state() == twin.state()

    async def test_a_worker_that_held_nothing_before(self, scene: Scene) -> None:
        scene.begun = False
        scene.line.feed(scene.push(forms="signed"))
        assert scene.peer.steady is not None
        assert scene.peer.steady.compiled is not None
        scene.steady, scene.compiled = scene.peer.steady, scene.peer.steady.compiled
        ledger = scene.member.ledger
        before = ledger._batches, ledger._exchanges
        data = scene.push(forms="signed")
        assert is_answer(scene.exchange(with_numbers(scene, data, have=-1)))
        assert (ledger._batches, ledger._exchanges) == (before[0] + 1, before[1] + 1)
        assert is_answer(scene.exchange(scene.push(forms="signed")))
        assert (ledger._batches, ledger._exchanges) == (before[0] + 1, before[1] + 2)
        assert ledger._settled == scene.seq

    async def test_a_statistic_that_has_fallen(self, scene: Scene) -> None:
        """A warning may be due."""
        scene.exchange()
        assert not scene.warnings.due
        scene.warnings.total = scene.store.total
        assert is_answer(scene.exchange())
        assert scene.warnings.due
        assert scene.exchange() == GENERAL


async def test_what_was_found_out_of_a_version_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The version written in its place has other numbers."""
    pytest.importorskip("numba")
    async for scene in scenes(monkeypatch, "asgd", kernels="numba"):
        current, scene.store._making = scene.current, True
        assert [len(each) for each in (current.changed, current.tensor_versions)] == [1, 1]
        scene.member.ledger._last = ()
        scene.updated = 0
        assert is_answer(scene.exchange())
        assert scene.updated == 0
        assert current._changed is current._each is None
        assert list(current.changed) == list(current.tensor_versions) == [current.number]
        assert not scene.store._making
        assert scene.member.ledger._last == scene.steady.parts


@pytest.mark.parametrize(("count", "known"), [(8, True), (9, False)])
async def test_a_rule_of_many_arrays_is_pythons(count: int, known: bool, scene: Scene) -> None:
    """Else the first update would find out, which ends the server."""
    steady, state = scene.steady, scene.store.updater.state
    state[0] = tuple(np.zeros(SIZE, np.float32) for _ in range(count))
    given = steady._template, steady._answer, scene.wire, scene.updates
    assert (compiled_answers.compiled_answers(steady, *given) is not None) == known


def made_of(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], list[Any]]:
    """Return what makes an `Answers`, and all that it is given for a scene."""
    library, seen, steady = core(), list[Any](), scene.steady
    assert library is not None
    make = library.Answers
    monkeypatch.setattr(library, "Answers", lambda *given: seen.extend(given) or make(*given))
    given = steady._template, steady._answer, scene.wire, scene.updates
    assert compiled_answers.compiled_answers(steady, *given) is not None
    return make, seen


WRONG: tuple[tuple[str, int, Any], ...] = (
    ("a form without a head of its own", 2, lambda head: head[:64]),
    ("another mask", 4, lambda varies: varies[1:]),
    ("too few numbers", 6, lambda pushed: pushed[:3]),
    ("a number of no bytes", 6, lambda pushed: ((pushed[0][0], 0, False), *pushed[1:])),
    ("a number of nine bytes", 6, lambda pushed: ((pushed[0][0], 9, False), *pushed[1:])),
    ("a number before the form", 6, lambda pushed: ((-1, 8, False), *pushed[1:])),
    ("a number behind the form", 6, lambda pushed: ((1 << 20, 8, False), *pushed[1:])),
    ("too few values", 7, lambda answered: answered[:5]),
    ("values in another order", 7, lambda answered: answered[::-1]),
    ("a value behind the answer", 7, lambda answered: (*answered[:-1], 1 << 20)),
    ("a model in no section", 8, lambda sections: ()),
    ("five sections", 8, lambda sections: sections * 5),
    ("another size", 8, lambda sections: ((32, *sections[0][1:]),)),
    ("elements of three bytes", 8, lambda sections: ((sections[0][0], 3, *sections[0][2:]),)),
    ("a section of less than nothing", 8, lambda s: ((-4, *s[0][1:]), (s[0][0] + 4, *s[0][1:]))),
    ("a part of an element", 8, lambda s: ((2, *s[0][1:]), (s[0][0] - 2, *s[0][1:]))),
    ("a mask with a sign", 8, lambda s: ((*s[0][:2], 0xFFFFFFFF, s[0][3]),)),
    ("a model of nothing", 9, lambda nbytes: 0),
    ("no parameters", 12, lambda parameters: 0),
)


@pytest.mark.parametrize(("name", "at", "wrong"), WRONG, ids=[each[0] for each in WRONG])
async def test_what_are_no_parts_of_it(
    name: str, at: int, wrong: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, seen = made_of(scene, monkeypatch)
    with pytest.raises(ValueError, match="not the parts of a steady exchange"):
        make(*seen[:at], wrong(seen[at]), *seen[at + 1 :])


PARTS: tuple[tuple[str, Any], ...] = (
    *(("even", ()), ("kernels", ()), ("masters", ()), ("states", ()), ("spans", [])),
    *(("spans", ()), ("spans", (7,)), ("spans", ((1, 2),))),
    *(("recorded", None), ("recorded", (b"",)), ("recorded", (b"", "parts", False))),
    ("recorded", (b"", b"", False, 0)),
    *((name, object()) for name in ("wire", "member", "store", "pool", "updates", "held")),
    *((name, object()) for name in ("maker", "collected", "warnings", "closure", "guard")),
    *((name, object()) for name in ("histogram", "pace", "gradient", "recent")),
)


@pytest.mark.parametrize(
    ("name", "value"), PARTS, ids=[f"{part[0]}-{at}" for at, part in enumerate(PARTS)]
)
async def test_a_part_of_another_kind(
    name: str, value: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code looks into it where those of the right kind have their fields."""
    make, seen = made_of(scene, monkeypatch)
    setattr(seen[0], name, value)
    with pytest.raises(ValueError, match="not the parts of a steady exchange"):
        make(*seen)


class TestServer:
    """`Answers.answer` does what `EventDispatcher.exchange` does."""

    def answer(self, scene: Scene) -> bytes | None:
        data = scene.push()
        scene.place(data)
        return scene.compiled.answer(len(data))

    async def test_of_itself_it_answers(self, scene: Scene) -> None:
        scene.server.connections.busy_poll.idle = False
        scene.server.connections.busy_poll.received = False
        assert is_answer(self.answer(scene))
        assert scene.server.connections.busy_poll.received

    @pytest.mark.parametrize(
        ("owner", "name", "value"),
        [
            ("dispatcher", "_handling", True),
            ("dispatcher", "broken", True),
            ("runner", "at_once", 1),
        ],
    )
    async def test_a_condition(self, owner: str, name: str, value: Any, scene: Scene) -> None:
        kept = getattr(getattr(scene, owner), name)
        setattr(getattr(scene, owner), name, value)
        assert self.answer(scene) is None
        setattr(getattr(scene, owner), name, kept)
        assert is_answer(self.answer(scene))

    async def test_a_state_is_the_dispatchers(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held: list[Any] = []
        recorder = SimpleNamespace(hold=lambda *given: held.append(given) or True)
        noted = SimpleNamespace(exchanged=lambda *given: None)
        kept = SimpleNamespace(record=noted, recorder=recorder)
        scene.run_state.kept = kept  # type: ignore[assignment]
        assert self.answer(scene) == b""
        scene.run_state.kept = None
        ((peer, answer),) = held
        assert peer == scene.steady.peer
        assert is_answer(answer)

    async def test_a_record_is_told(self, scene: Scene) -> None:
        seen: list[Any] = []
        files = scene.server._persistence
        assert files is not None
        files.exchanges = SimpleNamespace(exchanged=lambda *given: seen.append(given))  # type: ignore[assignment]
        assert is_answer(self.answer(scene))
        files.exchanges = None
        ((time, is_leased, peer, numbers, gradient, ticket, sums, followed),) = seen
        assert isinstance(time, float)
        assert (is_leased, peer, ticket) == (False, scene.steady.peer, scene.updates.tickets)
        assert numbers == (scene.seq, scene.seq, 0, 0)
        assert gradient is scene.steady.recorded
        assert sums.dtype == np.int64
        assert followed is None

    async def test_an_error_is_the_servers(self, scene: Scene) -> None:
        errors: list[BaseException] = []
        data = {"dispatcher": scene.dispatcher, "runner": scene.runner, "exchange": None}
        parts = SimpleNamespace(
            **data, run_state=scene.run_state, persistence=None, clock=lambda: NOW,
            busy_poll=scene.server.connections.busy_poll, failed=errors.append,
        )  # fmt: skip
        scene.compiled.connect(parts)
        scene.updates.pace.due = NOW

        def broken(*_given: Any) -> None:
            raise ValueError("a bug")

        scene.updates.pace.note = broken  # type: ignore[method-assign]
        assert self.answer(scene) == b""
        assert [str(error) for error in errors] == ["a bug"]

    async def test_it_takes_the_parts_of_a_server_alone(self, scene: Scene) -> None:
        with pytest.raises(AttributeError):
            scene.compiled.connect(object())
        parts = dict.fromkeys(
            ("dispatcher", "runner", "run_state", "persistence", "busy_poll", "clock", "exchange")
        )
        with pytest.raises(ValueError, match="not the parts of a server"):
            scene.compiled.connect(SimpleNamespace(**parts, failed=None))
        with pytest.raises(RuntimeError, match="not connected"):
            scene.compiled.answer(1)


def test_every_class_is_learnt() -> None:
    """Each room learns those that it knows, and all of the table are learnt."""
    library = core()
    assert library is not None
    from aiops.client.sync import compiled_exchange
    from aiops.durable.commit_gate import CommitGate
    from aiops.durable.recorder import Recorder
    from aiops.net import socket_poller
    from aiops.net.busy_poll import BusyPoll
    from aiops.net.transport import MessageTransport
    from aiops.serving.effects import EffectRunner
    from aiops.serving.event_dispatcher import EventDispatcher
    from aiops.serving.persistence import Persistence
    from aiops.serving.run_state import RunState
    from aiops.serving.state.journal_writer import JournalWriter
    from aiops.serving.state.kept_state import KeptState
    from aiops.serving.state.running_journal import RunningJournal
    from aiops.state.frames import FixedFrames

    others = (
        *(BusyPoll, CommitGate, EffectRunner, EventDispatcher, FixedFrames, JournalWriter),
        *(KeptState, MessageTransport, Persistence, Recorder, RunState, RunningJournal),
    )
    learnt = *compiled_answers.LEARNT, *compiled_exchange.LEARNT, *others
    names = {each.__name__ for each in learnt}
    assert names == set(library.CLASSES)
    event_dispatcher._learn(library)
    socket_poller._learn(library)


def test_a_field_has_a_place_of_its_own() -> None:
    library = core()
    assert library is not None

    class Pace:
        due = 0.0

    with pytest.raises(LookupError, match="due is not in the __slots__"):
        library.learn_fields({"Pace": Pace})
    with pytest.raises(TypeError, match="a class is wanted"):
        library.learn_fields({"Pace": 7})
    library.learn_fields({})
    compiled_answers._learn.__wrapped__(library)  # as they were


# ---------------------------------------------------------------- coded gradients

CODED = {
    "a": np.zeros(300, np.float32),
    "b": np.zeros(3, np.float32),
    "c": np.zeros(400, np.float32),
}
PLACES = {"a": (0, 1200, "int8", 308), "b": (1200, 1212, "raw", 12), "c": (1212, 2812, "bf16", 800)}
"""Of each: the bytes of the model, the codec, and the bytes of the payload."""


class TestCoded:
    """Gradients in several payloads, two of them coded."""

    @pytest.fixture
    async def scene(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
        monkeypatch.setattr(Scene, "push", self.push)
        others = {"kernels": "auto", "push_codec": ["int8", "bf16@c"]}
        async for each in scenes(monkeypatch, "asgd", CODED, **others):
            assert each.steady.whole is not None
            self.region = each.steady.whole.nbytes
            yield each

    @staticmethod
    def push(
        scene: Scene,
        *,
        bases: tuple[int, int, int] = (0, 0, 0),
        values: Mapping[str, Array] | None = None,
        payloads: Mapping[str, bytes] | None = None,
        **_others: Any,
    ) -> bytes:
        scene.seq += 1
        values = values or {name: np.full_like(array, 0.5) for name, array in CODED.items()}
        found, parts = [], []
        for (name, place), base in zip(PLACES.items(), bases, strict=True):
            codec = find(place[2]) if place[2] != "raw" else None
            array = values[name]
            payload = (
                array.tobytes()
                if codec is None
                else bytes(codec.encoder(array.shape, feedback=False).encode(array))
            )
            found.append((payloads or {}).get(name, payload))
            parts.append(Part(*place, base))
        message = messages.Push(scene.seq, scene.seq, True, 0, tuple(parts))
        return enclose(encode(message), *found)

    async def test_it_is_answered(self, scene: Scene) -> None:
        before = scene.compiled.answered
        assert is_answer(scene.exchange(), scene)
        assert scene.compiled.answered == before + 1
        assert scene.compiled.direct == scene.compiled.answered
        pushed = list(scene.steady.gradient.views.values())
        assert [bytes(each) for each in pushed] == [
            np.full_like(array, 0.5).tobytes() for array in CODED.values()
        ]

    async def test_pushes_of_another_form_are_counted_as_these(self, scene: Scene) -> None:
        ledger, raw = scene.member.ledger, (Part(0, scene.nbytes, "raw", scene.nbytes, 0),)
        messages, whole = ledger.pushed.messages, ledger.pushed.sent.whole
        assert is_answer(scene.exchange(), scene)
        scene.seq += 1
        ledger.exchanged(scene.seq, fetched=True, parts=raw, count=5)
        for _ in range(2):
            assert is_answer(scene.exchange(), scene)
        assert ledger.pushed.messages - messages == 8
        assert ledger.pushed.sent.whole - whole == 5

    async def test_each_byte_of_a_prefix_between_payloads(self, scene: Scene) -> None:
        data = scene.push()
        head = len(data) - self.region
        for at in (*range(308, 313), *range(325, 330)):
            wrong = bytearray(data)
            wrong[head + at] ^= 0x01
            assert scene.exchange(bytes(wrong)) == GENERAL, at
        assert is_answer(scene.exchange(data), scene)

    @pytest.mark.parametrize("number", [1, 2])
    async def test_tensors_of_several_versions(self, number: int, scene: Scene) -> None:
        bases = [scene.current.number] * 3
        bases[number] -= 1
        assert scene.exchange(scene.push(bases=tuple(bases))) == GENERAL
        assert is_answer(scene.exchange(), scene)

    @pytest.mark.parametrize(
        ("name", "payload"),
        [
            ("a", b"\xff\xff\xff\x7f" + bytes(304)),
            ("a", np.float32(-1).tobytes() + bytes(304)),
            ("a", bytes(4) + np.float32(1e17).tobytes() + bytes(300)),
            ("b", np.array([0, np.nan, 0], np.float32).tobytes()),
            ("b", np.array([0, 0, -1e18], np.float32).tobytes()),
            ("c", bytes(798) + b"\x80\x7f"),
            ("c", bytes(798) + b"\x5f\xdd"),
        ],
    )
    async def test_a_payload_that_is_none(self, name: str, payload: bytes, scene: Scene) -> None:
        version = scene.current.number
        assert scene.exchange(scene.push(payloads={name: payload})) == GENERAL
        assert scene.current.number == version
        assert is_answer(scene.exchange(), scene)

    async def test_a_proof_for_smaller_gradients(self, scene: Scene) -> None:
        scene.guard.narrow, scene.guard.magnitude = True, 0.4
        assert scene.exchange() == GENERAL
        scene.guard.magnitude = 0.6
        assert is_answer(scene.exchange(), scene)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda ages, pieces, *rest: (ages, pieces),
            lambda ages, pieces, *rest: (ages, (), *rest),
            lambda ages, pieces, *rest: (ages, (7,), *rest),
            lambda ages, pieces, *rest: ((-1,), pieces, *rest),
            lambda ages, pieces, *rest: ((1 << 20,), pieces, *rest),
            lambda ages, pieces, *rest: (ages, pieces[1:] + pieces[:1], *rest),
            lambda ages, pieces, room, *rest: (ages, pieces, room[1:], *rest),
            lambda ages, pieces, room, *rest: (ages, pieces, b"", *rest),
            lambda ages, pieces, room, nbytes, between: (ages, pieces, room, nbytes - 1, between),
            lambda ages, pieces, room, nbytes, between: (ages, pieces, room, 1 << 20, between),
            lambda ages, pieces, room, nbytes, between: (ages, pieces, room, nbytes, -1),
            lambda ages, pieces, room, nbytes, between: (ages, pieces, room, nbytes, nbytes),
            *(
                lambda ages, pieces, *rest, at=at, name=name, value=value: (
                    ages,
                    tuple(
                        (*piece[:name], value, *piece[name + 1 :]) if number == at else piece
                        for number, piece in enumerate(pieces)
                    ),
                    *rest,
                )
                for at, name, value in (
                    *(
                        (0, 0, "1"),
                        (0, 1, -1),
                        (0, 2, 0),
                        (0, 3, -4),
                        (0, 4, 1 << 20),
                        (0, 4, 1199),
                    ),
                    *((0, 5, -1), (0, 5, 309), (1, 2, 11), (1, 3, 1212), (2, 1, 1 << 40)),
                )
            ),
        ],
    )
    async def test_what_are_no_parts_of_it(
        self, wrong: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library, seen, steady = core(), list[Any](), scene.steady
        assert library is not None
        make = library.Answers
        monkeypatch.setattr(library, "Answers", lambda *given: seen.extend(given) or make(*given))
        given = steady._template, steady._answer, scene.wire, scene.updates
        assert compiled_answers.compiled_answers(steady, *given) is not None
        with pytest.raises((ValueError, TypeError, BufferError)):
            make(*seen[:-1], wrong(*seen[-1]))
