"""Messages about rows in the short way and in the general way: the same bytes, rows and accounts.

A course is a list of things that happen to a server. It is run twice in virtual time, once without
the short way (`aiops.engine.steady_rows`), and everything that can be seen of the two is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import aiops
from aiops import testing
from aiops.engine import steady_rows
from aiops.engine.engine import Engine
from aiops.engine.steady_rows import SteadyRows
from aiops.model.tables import Table, Tables, fetch_parts, push_parts
from aiops.serving.server import Server
from aiops.wire import messages
from aiops.wire.encoding import encode
from tests import foreign
from tests.peers import enclose, frame
from tests.pipes import Piped
from tests.recording import replayed
from tests.seeds import examples

TABLES = {
    "bounded": Table(300, 2, max_rows=40, max_age=30),
    "wide": Table(1000, 5, "float64", init="normal"),
    "words": Table(50_000, 3, scale=0.5),
}
ORDER = [named.table for named in Tables(TABLES).each]


@dataclass(frozen=True)
class Op:
    """Something that happens: what, to which worker, and how."""

    what: str
    worker: int = 0
    seed: int = 0
    table: int = 2
    pushed: int = 5
    wanted: int = 5
    lag: int = 0  # pushes since the rows were fetched; negative: they are of a later version
    bad: float | None = None  # a gradient that must be refused
    row: int | None = None  # a row that the table may not have
    most: int | None = None  # bytes that arrive at a time
    share: float = 0.5  # what of a message arrives before the connection is cut


@dataclass
class Worker:
    """One client over its connections."""

    number: int
    ours: bool  # whether it writes headers as this library does
    line: Piped
    epoch: int = 1
    seq: int = 0
    id: int = 0
    last: bytes = b""
    said: list[bytes] = field(default_factory=list)

    def again(self, server: Server) -> None:
        """Connect again; the connection is lost before."""
        self.line.pipe.abort()
        self.said.append(self.line.written)
        self.epoch += 1
        self.line = Piped(server, f"{self.number}" * 32, self.epoch)

    def written(self, message: messages.Message, *payloads: bytes) -> bytes:
        header = encode(message)
        if not self.ours:
            header = foreign.pack(msgpack.unpackb(header))
        return enclose(header, *payloads)


def message(worker: Worker, op: Op, stores: Sequence[Any]) -> bytes:
    """Return the bytes of a worker's next message about rows."""
    draw, table = np.random.default_rng(op.seed), ORDER[op.table]
    ids, wanted = (draw.integers(0, table.rows, count) for count in (op.pushed, op.wanted))
    for some in (ids, wanted):
        if op.row is not None and len(some):
            some[-1] = op.row
    worker.id += 1
    if op.what == "fetch":
        parts = fetch_parts(table, len(wanted))
        asked = messages.FetchRows(worker.id, op.table, parts)
        return worker.written(asked, *([wanted.tobytes()] if len(wanted) else []))
    grads = draw.normal(size=(len(ids), table.width)).astype(table.dtype)
    if op.bad is not None and len(ids):
        grads[0, -1] = op.bad
    worker.seq += 1
    version = max(0, stores[op.table].version - op.lag)
    parts = push_parts(table, len(ids), len(wanted))
    push = messages.PushRows(worker.id, worker.seq, op.table, version, parts)
    payloads = [each.tobytes() for each in (ids, wanted, grads) if len(each)]
    worker.last = worker.written(push, *payloads)
    return worker.last


async def happen(server: Server, workers: list[Worker], op: Op) -> None:
    worker, stores = workers[op.worker % len(workers)], server.engine.tables
    if op.what in ("fetch", "push"):
        worker.line.feed(message(worker, op, stores), op.most)
    elif op.what == "repeat":
        worker.line.feed(worker.last, op.most)
    elif op.what == "two":
        worker.line.feed(message(worker, op, stores) + message(worker, op, stores), op.most)
    elif op.what == "ping":
        worker.id += 1
        ping = frame(messages.Ping(worker.id))
        worker.line.feed(ping + message(worker, op, stores), op.most)
    elif op.what == "cut":
        data = message(worker, op, stores)
        worker.line.feed(data[: int(op.share * len(data))], op.most)
        worker.again(server)
        await asyncio.sleep(0.01)
        worker.line.feed(data)
    await asyncio.sleep(0.01)


def run(policy: str, chosen: dict[str, Any], ops: Sequence[Op], *, short: bool) -> tuple[Any, int]:
    """Run a course; return all that is to be seen, and how many messages went the short way."""
    count, exchange, steady = 0, SteadyRows.exchange, Engine.steady_rows

    def counted(self: SteadyRows, *arguments: Any) -> Any:
        nonlocal count
        answer = exchange(self, *arguments)
        count += bool(answer)
        return answer

    async def main() -> Any:
        given = {"policy": policy, "set": chosen, "port": 0, "kernels": "numpy"}
        async with aiops.serve(**given) as server:
            while not server.warm:  # noqa: ASYNC110  (virtual time)
                await asyncio.sleep(0.01)
            workers = [
                Worker(number, ours, Piped(server, f"{number}" * 32))
                for number, ours in enumerate((True, True, False))
            ]
            described = Tables(TABLES).described
            for worker in workers:
                worker.line.feed(frame(messages.Define(1 << 20, (), (), described)))
            while not server.warm:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for op in ops:
                await happen(server, workers, op)
            engine = server.engine
            report = {key: value for key, value in engine.report().items() if key != "memory"}
            for what in ("receive", "rows"):  # the short way needs no buffers of a pool
                del report[f"{what}_bytes"], report[f"{what}_bytes_peak"]
            said = [b"".join([*worker.said, worker.line.written]) for worker in workers]
            tables = [(store.digest(), store.state()) for store in engine.tables]
            assert engine.training is not None
            members = [member.state(lambda lease: 0) for member in engine.membership]
            return said, tables, report, members, engine.training.updates.tickets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteadyRows, "exchange", counted)
        patch.setattr(Engine, "steady_rows", steady if short else lambda *_arguments: None)
        return testing.run(main()), count


def compare(
    ops: Sequence[Op], policy: str = "asgd", chosen: dict[str, Any] | None = None
) -> tuple[Any, int]:
    general, none = run(policy, chosen or {}, ops, short=False)
    found, short = run(policy, chosen or {}, ops, short=True)
    assert none == 0
    for one, other in zip(found, general, strict=True):
        assert one == other
    return found, short


LEARN = [Op("fetch", worker=number) for number in range(3)]
"""After these the workers whose headers are ours are on the short way."""

usual = st.builds(
    Op,
    what=st.sampled_from(["fetch", "push", "push"]),
    worker=st.integers(0, 2),
    seed=st.integers(0, 9),
    table=st.integers(0, 2),
    pushed=st.integers(1, 60),
    wanted=st.sampled_from([0, 1, 9]),
    lag=st.integers(0, 3),
    most=st.sampled_from([None, None, 100, 1000]),
)
odd = st.builds(
    Op,
    what=st.sampled_from(["fetch", "push", "repeat", "two", "ping", "cut"]),
    worker=st.integers(0, 2),
    seed=st.integers(0, 9),
    table=st.integers(0, 2),
    pushed=st.sampled_from([0, 1, 30, 3000]),
    wanted=st.sampled_from([0, 1, 30, 3000]),
    lag=st.sampled_from([0, 1, -1]),
    bad=st.sampled_from([None, None, float("nan"), 1e18, 1e17]),
    row=st.sampled_from([None, None, -1, 299, 300, 1 << 40]),
    most=st.sampled_from([None, None, 1, 7, 5000]),
    share=st.floats(0, 1),
)


@settings(
    max_examples=examples(5),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    policy=st.sampled_from(
        [
            ("asgd", {}),
            ("asgd", {"optimizer": "adam", "schedule": "warmup:4,cosine:20"}),
            ("fasgd", {}),
            ("exponential", {}),
            ("asgd", {"schedule": "cosine:2", "schedule_unit": "seconds"}),
            ("asgd", {"optimizer": "adagrad", "per_tensor": "weight_decay=0.1@w* lr=0.5@words"}),
        ]
    ),
    course=st.lists(st.one_of(usual, odd), min_size=8, max_size=20),
)
def test_both_ways_are_one(policy: tuple[str, dict[str, Any]], course: list[Op]) -> None:
    compare([*LEARN, *course], *policy)


def test_which_messages_go_the_short_way() -> None:
    """All of a worker of ours but its first; none that is refused, repeated or not alone."""
    alone = [Op("fetch"), Op("push"), Op("push", wanted=0), Op("push", most=7), Op("push", lag=2)]
    other = [
        *(Op("push", bad=float("inf")), Op("push", bad=1e18), Op("push", lag=-1)),
        *(Op("push", row=50_000), Op("fetch", row=-1), Op("repeat"), Op("push", pushed=0)),
        *(Op("fetch", wanted=0), Op("two"), Op("ping"), Op("push", worker=2)),
    ]
    found, short = compare([*LEARN, *alone, *other, *alone])
    assert short == 2 * len(alone)
    assert found[1][2][1]["version"] == 8 + 2 + 1 + 1


@pytest.mark.parametrize(("wanted", "goes"), [(20_000, 1), (22_000, 0)])
def test_how_large_messages_may_be(wanted: int, goes: int) -> None:
    """Of more than 256 KiB the rows take the time."""
    assert compare([*LEARN, Op("fetch", wanted=wanted)])[1] == goes


def test_connections_that_have_no_room_for_larger_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go the general way, as far as they do not fit; the room of those that end is used."""
    monkeypatch.setattr(steady_rows, "ROOM", 20_000)
    large = [Op("push", pushed=1000, most=5000), Op("push", worker=1, pushed=1000, most=5000)]
    assert compare([*LEARN, *large])[1] == 1
    ended = [Op("cut", share=0.0), Op("fetch")]
    assert compare([*LEARN, large[0], *ended, large[1]])[1] == 3


def test_a_record_keeps_messages_from_the_short_way(tmp_path: Path) -> None:
    async def main() -> None:
        given = {"policy": "asgd", "port": 0, "kernels": "numpy", "record": tmp_path / "record"}
        tables = {"t": Table(9, 2)}
        async with (
            aiops.serve(**given) as server,
            aiops.AsyncWorker(server.url, {}, tables=tables) as worker,
        ):
            for _ in range(3):
                await worker.push_rows("t", [1], np.ones((1, 2), np.float32))

    testing.run(main())
    assert replayed(tmp_path / "record", "numpy").engine.tables[0].version == 3
