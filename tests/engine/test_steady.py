"""The short way and the general way: the same bytes, bits, statistics and record, whatever comes.

A course is a list of things that happen to a server: pushes of every kind, on connections that are
cut and made again, in pieces and several at a time. It is run twice in virtual time, once without
the short way (`aiops.engine.steady`), and everything that can be seen of the two is compared.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import aiops
from aiops import testing
from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import frames_of
from aiops.codecs import find
from aiops.compiled.loading import COMPILED, core
from aiops.engine.engine import Engine
from aiops.engine.steady import MOST, ROOM, Steady
from aiops.model.layout import Array
from aiops.model.parts import Part
from aiops.net.disk import Disk, SystemDisk
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.server import Server
from aiops.serving.state.kept_state import KeptState
from aiops.state.row_kinds import STRUCTS
from aiops.store.snapshots import Lease
from aiops.wire import messages
from aiops.wire.connection import SMALL
from aiops.wire.encoding import encode
from aiops.wire.messages import Message
from tests import foreign
from tests.peers import define, enclose
from tests.pipes import Piped
from tests.recording import replayed, rows_of
from tests.seeds import examples

MODELS: dict[str, dict[str, Array]] = {
    "one tensor": {"w": np.linspace(-1, 1, 7, dtype=np.float32)},
    "several": {
        "a": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(5, np.float32),
        "c": np.float32(2),
    },
    "mixed": {
        "w": np.linspace(-1, 1, 5, dtype=np.float32),
        "h": np.linspace(-1, 1, 3, dtype=np.float16),
        "d": np.linspace(-1, 1, 2, dtype=np.float64),
    },
    "halves": {"w": np.linspace(-1, 1, 30, dtype=np.float16)},
    "small": {"w": np.linspace(-1, 1, SMALL // 4, dtype=np.float32)},
    "the largest": {"w": np.linspace(-1, 1, MOST // 4, dtype=np.float32)},
    "too large": {"w": np.linspace(-1, 1, MOST // 4 + 1, dtype=np.float32)},
    "coded": {
        "a": np.linspace(-1, 1, 600, dtype=np.float32).reshape(2, 300),
        "b": np.ones(5, np.float32),
        "none": np.zeros((0, 2), np.float32),
        "c": np.float32(2),
        "d": np.linspace(-1, 1, 1100, dtype=np.float32),
    },
    "coded alone": {"w": np.linspace(-1, 1, 300, dtype=np.float32)},
    "coded and large": {"w": np.linspace(-1, 1, MOST // 4, dtype=np.float32)},
}

CODECS = {name: ("int8", "bf16", "fp16") for name in MODELS if name.startswith("coded")}
"""In which a model's tensors of 1 KiB and more are pushed, in turn; the others travel raw."""

KERNELS = ("numpy", "numba") if importlib.util.find_spec("numba") else ("numpy",)

POLICIES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("asgd", {}, {}),
    ("asgd", {"optimizer": "momentum"}, {}),
    ("asgd", {"optimizer": "adam", "schedule": "warmup:4,cosine:20"}, {}),
    (
        "asgd",
        {"schedule": "warmup:40,cosine:200", "schedule_unit": "examples", "mini_batch": 5},
        {},
    ),
    ("fasgd", {"schedule": "cosine:2", "schedule_unit": "seconds"}, {}),
    ("asgd", {"optimizer": "momentum", "per_tensor": "weight_decay=0.1@[wa] lr=0.005@*"}, {}),
    ("asgd", {"clip": 0.5}, {}),
    ("asgd", {"optimizer": "adam", "per_tensor": "clip=0.5@[wa] clip=0.1@*"}, {}),
    ("schedule-free", {}, {}),
    ("sasgd", {}, {}),
    ("fasgd", {}, {}),
    ("fasgd", {}, {"gate": "bfasgd"}),
    ("fasgd", {}, {"gate": "bfasgd:skipped=reapply"}),
    ("fasgd", {}, {"gate": "bfasgd:c_push=15"}),  # a warning is due when v̄ is below 0.79
    ("fasgd", {"eps": 0.8}, {}),  # another one is when v̄ is below 0.984
    ("fasgd", {}, {"fetch_codec": ["int8"]}),
    ("exponential", {"schedule": "step:0.5:3"}, {}),
    ("downpour", {}, {}),
    ("ringmaster", {"r": 2}, {}),
    ("dcasgd", {}, {}),
    ("ssp", {"s": 1}, {"workers": 2}),
    ("softsync", {}, {"workers": 2}),
)


@dataclass(frozen=True)
class Op:
    """Something that happens: what, to which worker, and how."""

    what: str
    worker: int = 0
    seed: int = 0
    bad: float | None = None  # a value of the gradient that must be refused
    lag: int = 0  # versions that the gradient's base is behind the newest; negative: ahead of it
    have: int = 0  # the same of the version held; 99: none is held
    fetch: bool = True
    count: int = 1
    wants: bool = False
    coded: bool = False
    most: int | None = None  # bytes that arrive at a time
    share: float = 0.5  # what of a message arrives before the connection is cut


@dataclass
class Worker:
    """One client over its connections, and how it writes headers."""

    number: int
    style: str
    line: Piped
    epoch: int = 1
    seq: int = 0
    id: int = 0
    last: messages.Push | None = None
    data: bytes = b""
    held: int = 0  # the version of the delta replica that its last coded answer brought
    said: list[bytes] = field(default_factory=list)

    @property
    def client(self) -> str:
        return f"{self.number}" * 32

    def again(self, server: Server, *, silently: bool = False) -> None:
        """Connect again; the old connection is lost before, or (silently) replaced."""
        if not silently:
            self.line.pipe.abort()
        self.said.append(self.line.written)
        self.epoch += 1
        self.line = Piped(server, self.client, self.epoch)

    def written(self, message: Message, data: bytes = b"") -> bytes:
        """Return a message's bytes, as this client writes them."""
        header = encode(message)
        if self.style != "ours":
            fields = msgpack.unpackb(header)
            header = foreign.pack(fields) if self.style == "short" else turned(fields)
        payloads, at = list[bytes](), 0
        for part in getattr(message, "parts", ()):
            payloads.append(data[at : at + part.nbytes])
            at += part.nbytes
        return enclose(header, *payloads)


def turned(header: dict[str, Any]) -> bytes:
    """Write a header from its last key to its first, what varies in it in four bytes."""
    out = bytes([0x80 + len(header)])
    for key in reversed(header):
        value = header[key]
        out += foreign.pack(key)
        if key in ("id", "seq", "have") and value >= 0:
            out += b"\xce" + value.to_bytes(4, "big")
        elif key == "parts" and value:
            out += bytes([0x90 + len(value)])
            for part in value:
                out += b"\x95" + b"".join(map(foreign.pack, part[:4]))
                out += b"\xce" + part[4].to_bytes(4, "big")
        else:
            out += foreign.pack(value)
    return out


@dataclass
class Seen:
    """Everything that a course came to."""

    said: list[bytes]
    parameters: bytes
    state: list[bytes]
    report: dict[str, Any]
    short: int  # exchanges that went the short way
    compiled: int  # and of those, the ones in compiled code
    direct: int = 0  # and of those, the ones by the addresses of kernels
    pool: str = ""  # as `Course.pool`


class Course:
    """One run of a course."""

    def __init__(
        self,
        server: Server,
        model: dict[str, Array],
        styles: Sequence[str],
        codecs: Sequence[str] = (),
    ) -> None:
        self.server, self.codecs = server, codecs
        self.workers = [
            Worker(number, style, Piped(server, f"{number}" * 32))
            for number, style in enumerate(styles)
        ]
        self.observer = Piped(server, "o" * 32, role="observer")
        self.held: list[tuple[Lease, bytes]] = []  # by readers, and what they read first
        self.workers[0].line.feed(define(model, id=1 << 20))
        for worker in self.workers[1:]:
            worker.line.feed(define(model, id=1 << 20))

    @property
    def nbytes(self) -> int:
        assert self.server.engine.store is not None
        return self.server.engine.store.layout.nbytes

    def gradient(self, op: Op) -> bytes:
        """Return a gradient's bytes."""
        assert self.server.engine.store is not None
        layout = self.server.engine.store.layout
        draw = np.random.default_rng(op.seed)
        sections = [
            draw.normal(size=(s.stop - s.start) // s.dtype.itemsize).astype(s.dtype)
            for s in layout.sections
        ]
        if op.bad is not None:
            sections[0][-1] = op.bad
        return b"".join(section.tobytes() for section in sections)

    def push(self, worker: Worker, op: Op) -> bytes:
        """Return the bytes of a worker's next push."""
        store = self.server.engine.store
        assert store is not None
        level = store.current.level or 0
        worker.seq += 1
        worker.id += 1
        base = max(0, level - op.lag)
        parts, worker.data = self.payloads(op, base)
        newest = worker.held if op.coded else store.version
        have = -1 if op.have == 99 else max(-1, newest - op.have)
        wants = ((0, len(store.layout.tensors), max(have, 0)),) if op.wants else ()
        worker.last = messages.Push(
            worker.id, worker.seq, op.fetch, have, parts, wants, op.coded, op.count
        )
        return worker.written(worker.last, worker.data)

    def payloads(self, op: Op, base: int) -> tuple[tuple[Part, ...], bytes]:
        """Return the parts of a push, and their payloads."""
        data = self.gradient(op)
        if not self.codecs:
            return (Part(0, self.nbytes, "raw", self.nbytes, base),), data
        assert self.server.engine.store is not None
        layout = self.server.engine.store.layout
        parts, found, names = list[Part](), list[bytes](), cycle(self.codecs)
        for tensor in layout.tensors:
            start, stop = tensor.offset, tensor.offset + tensor.nbytes
            piece = data[start:stop]
            codec = find(next(names)) if tensor.nbytes >= 1024 else None
            if codec is not None:
                values = np.nan_to_num(np.frombuffer(piece, np.float32), posinf=0, neginf=0) % 100
                piece = bytes(codec.encoder((tensor.size,), feedback=False).encode(values))
                piece = piece if op.bad is None or op.seed % 2 else b"\xff\x7f" * 2 + piece[4:]
                parts.append(Part(start, stop, codec.name, len(piece), base))
            elif parts and parts[-1].codec == "raw":
                before = parts.pop()
                parts.append(Part(before.start, stop, "raw", stop - before.start, base))
            elif piece:
                parts.append(Part(start, stop, "raw", len(piece), base))
            found.append(piece)
        if op.lag == 5 and len(parts) > 1:  # of several versions
            parts[-1] = parts[-1]._replace(version=max(0, base - 1))
        return tuple(parts), b"".join(found)

    def repeated(self, worker: Worker) -> bytes:
        """Return the bytes of a worker's last push, as another request."""
        if worker.last is None:
            return b""
        worker.id += 1
        worker.last.id = worker.id
        return worker.written(worker.last, worker.data)

    async def happen(self, op: Op) -> None:
        """Have it happen."""
        worker = self.workers[op.worker % len(self.workers)]
        if op.what == "push":
            worker.line.feed(self.push(worker, op), op.most)
        elif op.what == "repeat":
            worker.line.feed(self.repeated(worker), op.most)
        elif op.what == "two":
            worker.line.feed(self.push(worker, op) + self.push(worker, op), op.most)
        elif op.what == "cut":
            data = self.push(worker, op)
            worker.line.feed(data[: int(op.share * len(data))], op.most)
            worker.again(self.server)
            await asyncio.sleep(0.01)
            worker.line.feed(self.repeated(worker), op.most)
        elif op.what == "replace":
            worker.again(self.server, silently=True)
            worker.line.feed(self.repeated(worker))
        elif op.what == "full":  # it does not read its answers for a while
            worker.line.protocol.pause_writing()
            worker.line.feed(self.push(worker, op))
            worker.line.feed(self.push(worker, op))
            worker.line.protocol.resume_writing()
        elif op.what == "fetch":
            worker.id += 1
            worker.line.feed(worker.written(messages.Fetch(worker.id, -1)))
        elif op.what == "watch":
            self.observer.feed(enclose(encode(messages.Fetch(1, op.seed - 1))))
        elif op.what == "ping":
            worker.id += 1
            ping = worker.written(messages.Ping(worker.id))
            worker.line.feed(ping + self.push(worker, op), op.most)
        elif op.what in ("hold", "give back", "abandon", "let go"):
            self.read(op)
        await asyncio.sleep(0.3 if op.what == "wait" else 0.01)
        replica = self.server.engine.replica
        if replica is not None and op.coded and op.fetch:
            worker.held = replica.current.number
        for lease, data in self.held:
            assert lease.version.arena.data.tobytes() == data, "a reader's version has changed"

    @property
    def pool(self) -> str:
        """The versions alive, those who read them, and what is kept for those to come."""
        store = self.server.engine.store
        assert store is not None
        pool = store.snapshots
        alive = [(v.number, v.level, v.poisoned, len(v.readers)) for v in pool.versions]
        kept = pool.spare, pool.alive, pool._until, store.current is pool.current
        return repr((alive, kept, store.total, store.sums.tolist(), store.busy))

    def read(self, op: Op) -> None:
        """Have a reader come, or one of those that read go."""
        store = self.server.engine.store
        assert store is not None
        if op.what == "hold":
            self.held.append((store.lease(), store.current.arena.data.tobytes()))
        elif self.held:
            lease, _data = self.held.pop(op.seed % len(self.held))
            if op.what == "abandon":
                lease.abandon()
            elif op.what == "give back":
                lease.release()
            else:  # it ends where the pool is not told
                views = lease.payloads()
                lease.release()
                del views

    def seen(self) -> tuple[list[bytes], bytes, list[bytes], dict[str, Any]]:
        """Return what can be seen of it now."""
        engine = self.server.engine
        assert engine.store is not None
        said = [b"".join([*worker.said, worker.line.written]) for worker in self.workers]
        state = [array.tobytes() for arrays in engine.store.state for array in arrays]
        state += [array.tobytes() for array in engine.store.masters if array is not None]
        if engine.replica is not None:
            state += [
                engine.replica.current.arena.data.tobytes(),
                *map(bytes, engine.replica.payloads()),
            ]
            state.append(repr(engine.replica.state()).encode())
        report = engine.report()
        for key in ("receive_bytes", "receive_bytes_peak"):  # the short way needs none of them
            del report[key]
        del report["memory"]["resident"]  # that of the whole process
        parameters = engine.store.current.arena.data.tobytes()
        return [*said, self.observer.written], parameters, state, report


class RealFiles(SystemDisk):
    """The system's files, which may lend memory, and the threads of virtual time."""

    def __init__(self, virtual: Disk) -> None:
        self.thread, self.queue = virtual.thread, virtual.queue  # type: ignore[method-assign]


def run(
    policy: tuple[str, dict[str, Any], dict[str, Any]],
    model: str,
    styles: Sequence[str],
    ops: Sequence[Op],
    record: Path | None,
    *,
    short: bool = True,
    compiled: bool = False,
    kernels: str = "numpy",
    **kept: Any,
) -> Seen:
    """Run a course in virtual time; ``kept``: how the server keeps its state."""
    name, chosen, others = policy
    count = 0
    steady, general, make = Engine.steady, Steady.general, Steady.__init__
    made: list[Steady] = []

    def counted(self: Steady, *arguments: Any) -> bytes | None:
        nonlocal count
        answer = general(self, *arguments)
        count += bool(answer)
        return answer

    def noted(self: Steady, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(self)

    async def main() -> Any:
        if kept:
            env = CURRENT_ENVIRONMENT.get()
            CURRENT_ENVIRONMENT.set(replace(env, disk=RealFiles(env.disk)))
        async with aiops.serve(
            policy=name, set=chosen, port=0, kernels=kernels, record=record, **kept,
            **{"push_codec": [*CODECS.get(model, ())], **others},
        ) as server:  # fmt: skip
            while not server.warm:  # noqa: ASYNC110  (virtual time)
                await asyncio.sleep(0.01)
            course = Course(server, MODELS[model], styles, CODECS.get(model, ()))
            while not server.warm:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for op in ops:
                await course.happen(op)
            return course.seen(), course.pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steady, "general", counted)
        patch.setattr(Steady, "__init__", noted)
        if not compiled:
            patch.setenv(COMPILED, "0")
        patch.setattr(Engine, "steady", steady if short else lambda *_arguments: None)
        seen, pool = testing.run(main())
    ways = [each.compiled for each in made if each.compiled is not None]
    in_c, direct = sum(each.answered for each in ways), sum(each.direct for each in ways)
    return Seen(*seen, count + in_c, in_c, direct, pool)


def compare(*course: Any, folder: Path, kernels: str = "numpy") -> Seen:
    """Run a course all ways, and compare everything; return what came of it the short way.

    That is the way in compiled code, if there is any, without a record: which has no version
    written in place, and no kernel called by its address.
    """
    ways = [(False, False, kernels), (True, False, kernels)]
    if core() is not None:
        ways += [(True, True, each) for each in (KERNELS if kernels == "numpy" else [kernels])]
    paths = [Path(tempfile.mkdtemp(dir=folder)) / "record" for _way in ways]
    given: list[tuple[bool, bool, str, Path | None]] = [
        (*way, path) for way, path in zip(ways, paths, strict=True)
    ]
    if core() is not None:
        given.append((True, True, KERNELS[-1], None))
    general, *others = (
        run(*course, path, short=short, compiled=compiled, kernels=kernels)
        for short, compiled, kernels, path in given
    )
    assert general.short == others[0].compiled == 0
    for other in others:
        assert other.said == general.said
        assert other.parameters == general.parameters
        assert other.state == general.state
        for report in (other.report, general.report):
            report.pop("kernels", None)
        assert other.report == general.report
        assert other.short == others[0].short
        assert other.pool == others[0].pool
    for path in paths:
        again = replayed(path, "numpy")
        assert again.complete
        assert again.engine.store is not None
        assert again.engine.store.current.arena.data.tobytes() == general.parameters
        assert again.engine.report()["warnings"] == general.report["warnings"]
    return others[-1]


def journalled(
    *course: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, acks: str = "written"
) -> tuple[Seen, int]:
    """Run a course all ways on a server with a state, and compare everything, the journals too.

    Returns what came of it in compiled code, and the rows that this stored by itself.
    """
    ways = [(False, False, "numpy"), (True, False, "numpy")]
    ways += [(True, True, each) for each in KERNELS if core() is not None]
    paths = [Path(tempfile.mkdtemp(dir=folder)) / "state" for _way in ways]
    told, seen = 0, list[Seen]()
    exchanged = KeptState.exchanged

    def counted(self: KeptState, *given: Any) -> None:
        nonlocal told
        told += 1
        exchanged(self, *given)

    monkeypatch.setattr(KeptState, "exchanged", counted)
    for (short, compiled, kernels), path in zip(ways, paths, strict=True):
        told = 0
        kept: dict[str, Any] = {"state": path, "keep_journal": True, "acks": acks}
        seen.append(run(*course, None, short=short, compiled=compiled, kernels=kernels, **kept))
    frames = [[*frames_of(StateFolder(path), 1, [])] for path in paths]
    general = seen[0]
    for each, rows, path in zip(seen, frames, paths, strict=True):
        each.report.pop("kernels", None)
        for name in ("row", "journal_bytes", "folder", "run"):  # the general way has more rows
            del each.report["state"][name]
        assert each.said == general.said
        assert (each.parameters, each.state) == (general.parameters, general.state)
        assert each.report == general.report
        again = replayed(path, "numpy")
        assert again.engine.store is not None
        assert again.engine.store.current.arena.data.tobytes() == general.parameters
        assert again.engine.report()["warnings"] == general.report["warnings"]
        if each is not general:
            assert each.short == seen[1].short
            assert each.pool == seen[1].pool
            assert rows_of(rows[1:]) == rows_of(frames[1][1:])  # the first has the run's name
            assert sum(row.kind in STRUCTS for row in rows) == each.short
    return seen[-1], seen[-1].short - told


usual = st.builds(
    Op,
    what=st.just("push"),
    worker=st.integers(0, 2),
    seed=st.integers(0, 9),
    lag=st.sampled_from([0, 0, 1, 2]),
    have=st.sampled_from([0, 0, 1, 3]),
    most=st.sampled_from([None, None, 100, 1000]),
)
odd = st.builds(
    Op,
    what=st.sampled_from(
        [
            "push",
            "push",
            "repeat",
            "two",
            "cut",
            "replace",
            "full",
            "fetch",
            "watch",
            "ping",
            "wait",
        ]
    ),
    worker=st.integers(0, 2),
    seed=st.integers(0, 9),
    bad=st.sampled_from([None] * 4 + [float("nan"), float("inf"), -1e18]),
    lag=st.sampled_from([0, 0, 1, 5, -1]),
    have=st.sampled_from([0, 0, 1, 99, -1, -2]),
    fetch=st.sampled_from([True] * 5 + [False]),
    count=st.sampled_from([1] * 5 + [2]),
    wants=st.sampled_from([False] * 5 + [True]),
    coded=st.sampled_from([False] * 5 + [True]),
    most=st.sampled_from([None, None, 1, 7, 100, 1000]),
    share=st.floats(0, 1),
)
bad_only = st.builds(
    Op,
    what=st.just("push"),
    worker=st.integers(0, 2),
    bad=st.sampled_from([None, None, float("nan")]),
    lag=st.sampled_from([0, -1]),
    have=st.sampled_from([-1, -1, -2, 99]),
)
LEARN = [Op("push", worker=number % 3, seed=number) for number in range(6)]
"""After these every worker whose integers have one width is on the short way."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


def courses(count: int) -> settings:
    """Return the settings of a test that takes this many courses."""
    return settings(
        max_examples=examples(count),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],  # a course takes too long to be shrunk
    )


@pytest.mark.slow
@courses(30)
@given(
    policy=st.sampled_from(POLICIES),
    model=st.sampled_from(["one tensor", "several", "mixed", "coded", "coded alone"]),
    styles=st.lists(st.sampled_from(["ours", "turned", "ours", "short"]), min_size=2, max_size=3),
    course=st.lists(st.one_of(usual, odd, bad_only), min_size=8, max_size=20),
)
def test_both_ways_are_one(
    policy: Any, model: str, styles: list[str], course: list[Op], folder: Path
) -> None:
    compare(policy, model, styles, [*LEARN, *course], folder=folder)


@pytest.mark.slow
@courses(20)
@given(
    policy=st.sampled_from(POLICIES),
    model=st.sampled_from(["one tensor", "several", "mixed", "coded", "coded alone"]),
    styles=st.lists(st.sampled_from(["ours", "turned", "ours", "short"]), min_size=2, max_size=3),
    course=st.lists(st.one_of(usual, odd, bad_only), min_size=8, max_size=20),
)
def test_both_ways_keep_one_journal(
    policy: Any, model: str, styles: list[str], course: list[Op], folder: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        journalled(policy, model, styles, [*LEARN, *course], folder=folder, monkeypatch=patch)


USUAL = [Op("push", worker=n % 2, seed=n, lag=n % 3 and 1) for n in range(12)]


MODELS_IN_ROWS = ["one tensor", "several", "mixed", "halves", "small", "coded", "coded alone"]


@pytest.mark.parametrize("model", MODELS_IN_ROWS)
def test_rows_are_stored_by_compiled_code(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for them is lent to Python, for 0.05 s: of six pushes one asks for it."""
    course = [*USUAL, Op("watch", seed=3), Op("fetch", worker=1), *USUAL, *USUAL]
    given = POLICIES[0], model, ["ours", "turned"], course
    seen, stored = journalled(*given, folder=folder, monkeypatch=monkeypatch)
    assert seen.short == 3 * len(USUAL) - 2
    if core() is not None:
        assert seen.compiled == seen.short
        assert stored >= len(USUAL) or not lends(folder) or model == "small"


@pytest.mark.parametrize("acks", ["written", "durable"])
def test_answers_of_long_rows_and_of_rows_that_wait(
    acks: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[1], "the largest" if acks == "written" else "several", ["ours"], USUAL
    seen, stored = journalled(*given, folder=folder, monkeypatch=monkeypatch, acks=acks)
    assert seen.short > 8
    if core() is not None:
        assert stored == (seen.short - 1 if acks == "written" else 0)  # but for the first


def lends(folder: Path) -> bool:
    """Return whether the file system of a folder lends memory."""
    file = SystemDisk().create(folder / "lends", 1 << 16)
    file.map()
    lent = file.lend(0, 1)
    file.close()
    (folder / "lends").unlink()
    return lent is not None


def test_a_push_that_is_repeated_on_its_own_connection(folder: Path) -> None:
    """It is answered from memory, and not applied again."""
    course = [*USUAL, Op("repeat", worker=0), Op("repeat", worker=1), *USUAL]
    seen = compare(POLICIES[0], "several", ["ours", "turned"], course, folder=folder)
    assert seen.report["version"] == 2 * len(USUAL)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_who_goes_the_short_way(policy: Any, folder: Path) -> None:
    """All that follow a worker's first push; none where the policy, or a setting, asks more.

    Where a warning is due, one goes the general way.
    """
    seen = compare(policy, "several", ["ours", "ours"], USUAL, folder=folder)
    short = seen.short
    warned = sum(text.startswith("at version") for text in seen.report["warnings"])
    name, chosen, others = policy
    never = name in ("dcasgd", "ssp", "softsync") or "clip" in str(chosen)
    never = never or "reapply" in others.get("gate", "")
    # 1 − c is 0 in the first update alone, so the second needs another proof that it is finite.
    proven = name == "schedule-free"
    assert short == (0 if never else len(USUAL) - 2 - warned - proven)
    if core() is not None:  # which leaves a clock in examples or seconds to Python
        assert seen.compiled == (0 if "schedule_unit" in chosen else short)
        assert seen.direct == (seen.compiled if len(KERNELS) > 1 else 0)
    assert warned == ("c_push" in others.get("gate", "") or "eps" in chosen)


FETCHED: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("asgd", {}, {"fetch_codec": ["int8"]}),
    ("fasgd", {}, {"fetch_codec": ["bf16@[aw]", "onebit"]}),
    ("asgd", {"optimizer": "momentum"}, {"fetch_codec": ["fp16"], "fetch_lag": 1}),
    ("asgd", {}, {"fetch_codec": ["int8"], "fetch_lag": 3}),
    ("downpour", {}, {"fetch_codec": ["onebit"]}),
    ("asgd", {"optimizer": "momentum"}, {"fetch_codec": ["topk:0.2"]}),
)
"""With answers that are coded. Those of the last vary in length."""

CODED = [replace(op, coded=True) for op in USUAL]


@pytest.mark.parametrize("policy", FETCHED, ids=str)
@pytest.mark.parametrize("model", ["one tensor", "mixed", "coded", "coded alone"])
def test_coded_answers_go_the_short_way(model: str, policy: Any, folder: Path) -> None:
    """All that follow a worker's first push, whether or not the replica takes a step."""
    behind = [Op("push", worker=n % 3, seed=n, coded=True, have=n % 4) for n in range(9)]
    raw = [Op("push", worker=n % 3, seed=n, coded=n % 2 > 0) for n in range(4)]
    course = [*CODED, *behind, *CODED, *raw, Op("watch", seed=3)]
    seen = compare(policy, model, ["ours", "turned", "short"], course, folder=folder)
    assert len(course) - 12 < seen.short < len(course)
    if core() is not None and len(KERNELS) > 1:
        assert seen.compiled == (0 if "topk" in str(policy) and "coded" in model else seen.short)


def test_coded_answers_of_differences_that_cannot_be_encoded(folder: Path) -> None:
    """Their tensor is sent whole, and increments lead on from there."""
    far = [Op("push", worker=n % 2, seed=n, coded=True, bad=9e17) for n in range(4)]
    policy = "asgd", {"lr": 1.0}, {"fetch_codec": ["int8"], "fetch_lag": 1}
    course = [*CODED, *far, *CODED]
    seen = compare(policy, "coded alone", ["ours", "ours"], course, folder=folder)
    assert seen.short > 20


@pytest.mark.slow
@courses(20)
@given(
    policy=st.sampled_from(FETCHED),
    model=st.sampled_from(["one tensor", "several", "mixed", "coded", "coded alone"]),
    styles=st.lists(st.sampled_from(["ours", "turned", "ours", "short"]), min_size=2, max_size=3),
    course=st.lists(st.one_of(usual, odd, bad_only), min_size=8, max_size=20),
    raw=st.integers(0, 3),
)
def test_both_ways_keep_one_journal_of_coded_answers(
    policy: Any, model: str, styles: list[str], course: list[Op], raw: int, folder: Path
) -> None:
    course = [replace(op, coded=op.seed % 4 >= raw) for op in course]
    with pytest.MonkeyPatch.context() as patch:
        given = policy, model, styles, [*CODED[:6], *course, *CODED]
        journalled(*given, folder=folder, monkeypatch=patch)


def test_a_rate_rises_on_the_short_way(folder: Path) -> None:
    """After 20 updates, by a doubling in 16: pushes that are all alike go straight on."""
    course = [Op("push", seed=7) for _ in range(40)]
    policy = "schedule-free", {}, {}
    seen = compare(policy, "one tensor", ["ours"], course, folder=folder)
    assert seen.short > 34
    assert seen.report["rate_gain"] == 2 ** (20 / 16)


@pytest.mark.parametrize(
    ("model", "answered"),
    [
        *(("one tensor", 10), ("several", 10), ("mixed", 10), ("halves", 10), ("small", 10)),
        *(("the largest", 10), ("too large", 0)),
        *(("coded", 10), ("coded alone", 10), ("coded and large", 10)),
    ],
)
def test_models_that_go_the_short_way(model: str, answered: int, folder: Path) -> None:
    seen = compare(POLICIES[5], model, ["ours", "turned"], USUAL, folder=folder)
    assert seen.short == answered
    if core() is not None:
        assert seen.compiled == answered


async def test_head_buffers_of_larger_models_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection for which there is no room goes the general way, until another has left it."""
    model = {"w": np.zeros(SMALL // 4 + 16, np.float32)}
    nbytes = SMALL + 64
    async with aiops.serve(policy="asgd", port=0, kernels="numpy") as server:
        course = Course(server, model, ["ours", "ours", "ours"])
        shared = server.engine.short_way
        assert shared is not None
        assert shared.room == ROOM
        shared.room = 2 * nbytes
        for worker in course.workers:
            worker.line.feed(course.push(worker, Op("push")))
            while not server.engine.training.updates.idle:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        peers = {peer.steady is not None: peer for peer in server.connections.peers.values()}
        ways = [peer.steady for peer in server.connections.peers.values() if peer.steady]
        assert (len(ways), shared.room, len(peers)) == (2, 0, 2)
        worker = course.workers[0]
        worker.style = "turned"  # another form: the room is the connection's
        worker.line.feed(course.push(worker, Op("push")))
        assert shared.room == 0
        worker.again(server)
        await asyncio.sleep(0)
        assert shared.room == nbytes
        course.workers[1].again(server)
        await asyncio.sleep(0)
        assert shared.room == 2 * nbytes


@pytest.mark.parametrize("text", ["robust", "norm:3"])
def test_filters_decide_alike_on_both_ways(text: str, folder: Path) -> None:
    """A push that passes goes the short way; what is refused, and a quarantined worker, do not."""
    pytest.importorskip("numba")
    taught = [Op("push", worker=n % 3, seed=n, lag=n % 2) for n in range(40)]
    mixed = [
        Op("push", worker=n % 3, seed=n, bad=1e15 if n % 3 == 2 or n == 30 else None)
        for n in range(72)
    ]
    cut = [Op("cut", worker=0, seed=1), Op("repeat", worker=0), Op("push", worker=1, most=7)]
    course = [*taught, *mixed, *cut, *taught[:6]]
    policy = ("fasgd", {}, {"filter": text})
    seen = compare(
        policy, "mixed", ["ours", "turned", "ours"], course, folder=folder, kernels="numba"
    )
    found = seen.report["filter"]
    assert found["refused"] > 16
    assert len(found["quarantined"]) == 1
    assert 40 < seen.short < seen.report["version"]
