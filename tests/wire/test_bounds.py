"""Numbers as large as MessagePack has them, in every integer of every message.

A header is refused at the door, or what it says is refused, or it is taken; nothing else happens,
and the statistics can be asked for after each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from aiops import errors
from aiops.algorithms.model_support import tables_obstacle
from aiops.averaging.ring_allreduce import Flat, Ring
from aiops.bandwidth.byte_accounting import Ledger
from aiops.bandwidth.tallies import Tally
from aiops.codecs import find as codec
from aiops.engine.events import Received, Reported
from aiops.errors import Refused, RemoteProtocolError
from aiops.model.layout import Layout
from aiops.model.parts import LARGEST, Part
from aiops.model.tables import Table, fetch_parts, push_parts
from aiops.shards.shard import LoadSink
from aiops.wire import encoding, messages, ring_messages, server_messages
from aiops.wire.data_messages import CoverPush, TakeTask
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS
from aiops.wire.fields import LONGEST, MAX_COUNT
from aiops.wire.messages import (
    Ack,
    Error,
    Fetch,
    FetchedParams,
    FetchRows,
    Message,
    Push,
    PushRows,
    Reapply,
    Report,
    Stats,
)
from aiops.wire.state_machine import HANDSHAKE
from tests import headers
from tests.driven import Driven
from tests.engine.test_admission import arrive
from tests.inline import Inline
from tests.peers import Peer, define, enclose, frame, push, serving
from tests.rows import each_row
from tests.shards.test_hostile import done
from tests.shards.world import Actor, World

NUMBERS = (
    *(-(2**63), -1, 2**31, 2**32 - 1, 2**53 - 1, 2**53, 2**56, 2**60, 2**62),
    *(2**63 - 1, 2**63, 2**64 - 1),
)
CODES = {
    found.code
    for found in (getattr(errors, name) for name in errors.__all__)
    if isinstance(found, type) and issubclass(found, Refused)
}


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each integer in a header."""
    if type(value) is int:
        yield ()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ((key, *rest) for rest in places(item))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from ((index, *rest) for rest in places(item))


def changed(value: Any, path: tuple[Any, ...], number: int) -> Any:
    """Return a header with another number at a place."""
    if not path:
        return number
    if isinstance(value, dict):
        return {**value, path[0]: changed(value[path[0]], path[1:], number)}
    at = path[0]
    return (*value[:at], changed(value[at], path[1:], number), *value[at + 1 :])


def variants(header: Any) -> Iterator[tuple[tuple[Any, ...], int, Any]]:
    for path in places(header):
        for number in NUMBERS:
            yield path, number, changed(header, path, number)


def header_of(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(encoding.encode(message), use_list=False)
    return found


# ---------------------------------------------------------------- at the door


def speakers(kind: str) -> list[tuple[str, str]]:
    """Return in which states which side may say it."""
    return [
        (state, side)
        for state, says in HANDSHAKE.items()
        for side in ("client", "server")
        if kind in says[side]
    ]


@each_row("kind", KINDS)
def test_a_header_is_a_message_within_the_bounds_or_names_what_is_not(kind: str) -> None:
    state, side = speakers(kind)[0]
    for path, number, header in variants(headers.header(kind)):
        wire = Driven("server" if side == "client" else "client", lambda message: None)
        wire.state, why = state, ""
        try:
            heard = list(arrive(wire, enclose(msgpack.packb(header)), 1 << 16))
        except RemoteProtocolError as error:
            why, heard = str(error), []
        assert not why or why.startswith((f"{kind}.{path[0]}", "memory can be shared")), why
        wire.lost()
        for message, _sink in heard:
            assert decode(encoding.encode(message)) == message
        assert why or number <= LARGEST or len(path) > 1, f"{kind}.{path[0]}"


def test_no_integer_of_a_message_is_unbounded() -> None:
    """Whatever the field: one more than the wire holds, or less than it has a sense for."""
    for kind in KINDS:
        for path in places(headers.header(kind)):
            for number in (-(2**63), 2**63):
                header = changed(headers.header(kind), path, number)
                if len(path) > 1 and isinstance(headers.header(kind)[path[0]], dict):
                    continue  # plain values are MessagePack's; who reads them looks at them
                with pytest.raises(RemoteProtocolError, match=rf"{kind}\.{path[0]}"):
                    decode(msgpack.packb(header))


def test_what_cannot_be_packed_leaves_nothing_before_the_next_message() -> None:
    with pytest.raises(OverflowError):
        encoding.encode(Report(1, {"a": 1, "b": 2**64}))
    assert decode(encoding.encode(Stats(2))) == Stats(2)


# ---------------------------------------------------------------- an engine

MODEL = {"v": np.zeros(300, np.float32), "w": np.zeros((4, 100), np.float32)}
LAYOUT = Layout.of(MODEL)
TABLE = Table(50, 3)
V, END = LAYOUT.tensors[0].nbytes, LAYOUT.nbytes


class Shell:
    """An engine behind wires, in memory."""

    def __init__(self, policy: str, **options: Any) -> None:
        self.inline = Inline(policy, backend="numpy", **options)
        self.peers = 0
        self.heard = 0
        definer = self.connect()
        self.say(definer, *self.offer())
        self.leave(definer)
        self.honest = self.connect("observer")

    @property
    def tables(self) -> tuple[Any, ...]:
        has = tables_obstacle(self.inline.engine.algorithm) is None
        return (("t", 50, 3, "float32", "zeros", 0.0, 7),) if has else ()

    def offer(self) -> tuple[dict[str, Any], list[bytes]]:
        rows = tuple((t.name, t.dtype.name, t.shape) for t in LAYOUT.tensors)
        part = Part(0, END, "raw", END, 0)
        return header_of(messages.Define(1, rows, (part,), self.tables)), [bytes(END)]

    def connect(self, role: str = "worker") -> tuple[int, Driven]:
        self.peers += 1
        peer, engine = self.peers, self.inline.engine
        wire = Driven("server", engine.sinks_of(peer))
        wire.state = "open"
        self.inline.join(peer, role)
        return peer, wire

    def say(
        self, line: tuple[int, Driven], header: dict[str, Any], payloads: list[bytes]
    ) -> list[Message] | str:
        """Have a message come; return what is answered, or why the connection was closed."""
        peer, wire = line
        before = len(self.inline.said.get(peer, []))
        try:
            for message, sink in arrive(wire, enclose(msgpack.packb(header), *payloads), 1 << 16):
                self.inline.post(Received(self.inline.now, peer, message, sink))
        except RemoteProtocolError as error:
            wire.lost()
            self.inline.leave(peer)
            return str(error)
        answers = self.inline.said.get(peer, [])[before:]
        self.inline.release()
        for answer in answers:  # it can be sent
            assert decode(encoding.encode(answer)).id == answer.id
        return answers

    def leave(self, line: tuple[int, Driven]) -> None:
        line[1].lost()
        self.inline.leave(line[0])

    def stats(self) -> dict[str, Any]:
        self.inline.receive(self.honest[0], Stats(1))
        report = self.inline.said[self.honest[0]].pop()
        assert isinstance(report, Report)
        again = decode(encoding.encode(report))
        assert isinstance(again, Report)
        return dict(again.report)


def requests(shell: Shell) -> list[tuple[Message, list[bytes]]]:
    """Return good requests of each kind, which get as far as there is to go."""
    whole = (Part(0, END, "raw", END, 0),)
    half = (Part(0, V, "raw", V, 0),)
    encoder = codec("int8").encoder((4, 100), feedback=False, backend="numpy")
    packed = bytes(encoder.encode(np.ones(400, np.float32)))
    coded = (*half, Part(V, END, "int8", len(packed), 0))
    wants = ((0, 1, 0), (1, 2, -1))
    digest, nonce = LAYOUT.digest, bytes(16)
    offer, values = shell.offer()
    found: list[tuple[Message, list[bytes]]] = [
        (decode(msgpack.packb(offer)), values),
        (messages.Describe(2), []),
        (Push(2, 1, True, 0, whole, (), False, 3), [bytes(END)]),
        (Push(2, 1, True, 0, half, wants, False, 3), [bytes(V)]),
        (Push(2, 1, True, 0, coded, wants, True, 3), [bytes(V), packed]),
        (Reapply(2, 1, True, 0, wants, True), []),
        (Fetch(2, 0), []),
        (Fetch(2, -1, wants, True), []),
        (messages.Ping(2), []),
        (messages.Pong(2), []),
        (Stats(2), []),
        (ring_messages.JoinRound(2, "10.0.0.1", 7171, 1, digest, nonce), []),
        (ring_messages.JoinRound(2, "10.0.0.1", 0, 1, digest, nonce), []),
        (ring_messages.SettleRound(2, 1, True, ((1, 0, 8),)), []),
        (TakeTask(2, "d", 100, 1, 0, 0, 3, 32, True, "", (1,), ((1, 0, 8),)), []),
        (TakeTask(2, "d", 100, 1, 0, 0, 3, 0, False, "", (1,), ()), []),
        (CoverPush(2, 1, ((1, 0, 8), (1, 8, 16))), []),
        (messages.Release(2), []),
    ]
    if shell.tables:
        ids = np.arange(2).tobytes()
        rows = push_parts(TABLE, 2, 2)
        found += [
            (FetchRows(2, 0, fetch_parts(TABLE, 2)), [ids]),
            (PushRows(2, 1, 0, 0, rows), [ids, ids, bytes(2 * TABLE.row_bytes)]),
        ]
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "fasgd": {},
    "asgd": {"push_codec": ("int8",), "fetch_codec": ("int8",)},
    "easgd": {"workers": 2},
    "hardsync": {"workers": 2},
    "dcasgd": {},
    "average": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_survives_any_number(policy: str) -> None:
    shell = Shell(policy, **POLICIES[policy])
    outcomes = {"closed": 0, "refused": 0, "taken": 0, "waiting": 0}
    for message, payloads in requests(shell):
        for turn, (_path, _number, header) in enumerate(variants(header_of(message))):
            line = shell.connect()
            answers = shell.say(line, header, payloads)
            if isinstance(answers, str):
                assert answers.startswith((f"{message.kind}.", "payload", "memory")), answers
                outcomes["closed"] += 1
            else:
                faults = [a for a in answers if isinstance(a, Error)]
                assert all(fault.code in CODES and not fault.fatal for fault in faults)
                took = "refused" if faults else "taken" if answers else "waiting"
                outcomes[took] += 1
                shell.leave(line)
            if turn % 60 == 0:  # it adds up the accounts of all clients
                shell.stats()
    assert min(outcomes["closed"], outcomes["refused"], outcomes["taken"]) > 50, outcomes
    report = shell.stats()
    assert report["receive_bytes"] == 0
    assert report["ledger"]["pushed"]["skipped"] <= 4 * MAX_COUNT * END * len(NUMBERS)
    line = shell.connect()
    assert shell.say(line, header_of(messages.Ping(9)), []) == [messages.Pong(9)]


@each_row("policy", ["fasgd", "asgd", "easgd", "hardsync"])
@each_row("stop", [V, END])
def test_pushes_of_as_many_batches_as_may_be(policy: str, stop: int) -> None:
    shell = Shell(policy, workers=1)
    line = shell.connect()
    for seq in range(1, 101):
        part = Part(0, stop, "raw", stop, shell.inline.version if policy == "hardsync" else 0)
        message = Push(seq, seq, False, -1, (part,), count=MAX_COUNT)
        shell.say(line, header_of(message), [bytes(stop)])
    skipped = shell.stats()["ledger"]["pushed"]["skipped"]
    acks = len(shell.inline.acks(line[0]))
    assert acks > 0
    assert skipped == acks * (MAX_COUNT - 1) * stop


def test_a_push_that_is_repeated_may_not_ask_for_what_there_is_not() -> None:
    """The first is checked when it comes; the second takes its place while it waits."""
    inline = Inline("asgd", hold=True, backend="numpy")
    inline.define(MODEL)
    inline.join(1)
    whole = (Part(0, END, "raw", END, 0),)
    inline.receive(1, Push(1, 1, True, 0, whole), bytes(END))
    beyond = ((0, LARGEST, 0),)
    again = Push(2, 1, True, 0, whole, beyond)
    refused = inline.receive(1, again, bytes(END))
    assert isinstance(refused, Error)
    assert (refused.id, refused.code) == (2, "bad-push")
    inline.run_kernel()
    assert [ack.id for ack in inline.acks(1)] == [1]
    inline.receive(1, Push(3, 2, True, 0, whole), bytes(END))  # overwrites what would be read
    refused = inline.receive(1, Reapply(4, 1, True, 0, beyond))
    assert isinstance(refused, Error)
    assert refused.code == "bad-push"
    inline.run_kernel()
    assert [ack.id for ack in inline.acks(1)] == [1, 3]
    assert inline.engine.admission.pool.out == 0


def test_a_mean_staleness_of_billions_of_updates_and_bytes() -> None:
    inline = Inline("asgd", backend="numpy")
    inline.define(MODEL)
    inline.join(1)
    store = inline.engine.store
    assert store is not None
    store.layout.nbytes_each = store.layout.nbytes_each << 31  # as if it were a large model
    store.current._each = np.full(2, 1 << 40, np.int64)
    store.current.level = None
    ack = inline.push(1, {"v": MODEL["v"]}, 0)
    assert isinstance(ack, Ack)
    assert ack.mean_staleness == ack.staleness == 1 << 40


# ---------------------------------------------------------------- the sums


def test_a_tally_is_exact_however_much_it_counts() -> None:
    layout = Layout([(n, "float32", (size,)) for n, size in (("a", 1), ("b", 1 << 48), ("c", 3))])
    mine, into = Tally(), Tally()
    sums = [0, 0, 0]
    for turn in range(40):
        for index, nbytes in ((0, 4 << turn), (1, 1 << 62), (2, 1 << 90 if turn == 7 else 12)):
            mine.room(layout, nbytes)[index] += nbytes
            sums[index] += nbytes
        if turn == 20:
            mine.settle(into)
    mine.whole += 10**9
    total = Tally()
    for tally in (mine, into):
        total.add(tally)
    sums = [n + 10**9 * each for n, each in zip(sums, layout.nbytes_each.tolist(), strict=True)]
    assert total.by_tensor(layout).tolist() == sums
    assert total.nbytes(layout) == sum(sums)
    assert mine.nbytes(layout) == sum(sums)


HUGE = Layout([("a", "float32", (1 << 47,)), ("b", "float32", (1 << 49,)), ("c", "float32", (5,))])
A, B = 1 << 49, 1 << 51


@each_row("kind", ["skipped", "reapplied", "not_modified", "not_wanted"])
def test_a_ledger_says_no_more_than_a_message_can_carry(kind: str) -> None:
    ledger, total = Ledger(HUGE), Ledger(HUGE)
    parts = (Part(0, A, "raw", 0, 0), Part(A, A + B, "raw", 0, 0))
    for tally in (ledger.reapplied, ledger.not_modified, ledger.not_wanted):
        tally.whole = 1 << 20
    answer = Ack(1, 1, 1, True, 0, 0.0, None, b"")
    for seq in range(1, 50):
        request: Message = Push(1, seq, False, 0, parts, count=MAX_COUNT)
        reply: Message = answer
        if kind == "reapplied" and seq > 1:
            request = Reapply(1, seq, False, 0)
        elif kind == "not_modified":
            request, reply = Fetch(1, 0, ((0, 1, 0),)), FetchedParams(1, 1)
        elif kind == "not_wanted":
            request, reply = Fetch(1, 0, ((0, 1, 0),)), FetchedParams(1, 1, parts[:1])
        ledger.asked(request)
        ledger.answered(reply)
    total.add(ledger)
    for each in (ledger, total):
        report = each.report()
        encoding.encode(Report(1, report))
        found = {**report["pushed"], **report["fetched"]}
        assert found[kind] == LONGEST
        assert each.tensors()[kind][:2] == sorted(each.tensors()[kind][:2])
        assert min(min(each.tensors()[kind]), found[kind]) >= 0


# ---------------------------------------------------------------- shards


def orders() -> list[Message]:
    """Return what a lead may tell a follower that has begun, and what a client may."""
    work = {"factor": 1.0, "round": "step", "sent": 0, "spare": True, "touched": None}
    work["steps"] = np.ones(1).tobytes()
    measure = {"round": "measure", "limits": np.ones(2).tobytes(), "groups": bytes(8)}
    run = ((512, 520, 0),)
    return [
        server_messages.LoadShard(0, {"push_codecs": ()}, LAYOUT.rows, (("", 7001, 1400),), 1),
        server_messages.ExpectPush(9, "c", 1, 3, run),
        server_messages.RunUpdate(9, 0, 0, work),
        server_messages.RunUpdate(9, 0, 0, {**work, "scales": np.ones(1).tobytes()}),
        server_messages.RunUpdate(9, 0, 0, {**work, **measure}),
        server_messages.RunUpdate(9, 0, 0, {"factor": 1.0, "round": "measure", "sent": 0}),
        server_messages.RunUpdate(9, 0, 0, {"replica": 1}),
        server_messages.RunUpdate(9, 1, 0, {**work, "weights": np.ones(1).tobytes()}),
        server_messages.SendParams(9, "", 1, 0, run),
        server_messages.SendParams(9, "c", 1, 0, run),
        server_messages.SendIncrements(9, "", 1, 0, (), run),
        server_messages.HoldVersion(9, 0, True, False),
        server_messages.NoteHistory(9, (1, 2), (0, 7), 7),
        server_messages.RollBack(9, 0),
        server_messages.FinishPush(9, False),
        server_messages.CountTraffic(9),
        server_messages.SendRows(9),
        server_messages.ClosePushes(9, "it ends"),
        server_messages.SendAway(9, "c", "it was sent away"),
        server_messages.PaceClients(9, 1, 1, {"c": 2.0}),
        messages.Ping(9),
        server_messages.ShardParts(9, 0, (Part(1400, 1408, "raw", 8, 0),)),
    ]


@pytest.mark.parametrize("place", range(len(orders())))
def test_a_follower_takes_refuses_or_ends(place: int) -> None:
    """Its lead is one of its own, and may end it; that is said, and is no crash."""
    for _path, _number, header in variants(header_of(orders()[place])):
        try:
            message = decode(msgpack.packb(header))
        except RemoteProtocolError:
            continue
        world = begun()
        follower, leash = world.followers[0], world.lead.orders[0]
        follower.post(Received(world.now, leash.line.number, message, None))
        while follower.kernels:
            follower.run()


@each_row("name", ["push_codecs", "fetch_codec", "spread_tables", "rows"])
@each_row("value", [1, 0.5, True, b"x", "x", (1,), ((1, 2),), {"a": 1}])
def test_a_follower_refuses_a_plan_that_makes_no_sense(name: str, value: Any) -> None:
    """Codecs that were no list ended it with an error of its own."""
    world = begun()
    follower, leash = world.followers[0], world.lead.orders[0]
    held = follower.coordinator.shard
    order = replace(held.order, plan={"push_codecs": (), name: value}, parts=())
    follower.coordinator.shard = None
    sink = LoadSink([held.store.layout.nbytes])
    follower.post(Received(world.now, leash.line.number, order, sink))
    refused = leash.line.wire.state == "closed"
    assert refused != (follower.coordinator.shard is not None)


@each_row("spare", [False, True])
@each_row("which", ["run_update", "send_params", "hold_version"])
def test_a_follower_refuses_orders_about_a_version_that_is_over(which: str, spare: bool) -> None:
    """They ended it with an assertion, and so with the log of an error of its own."""
    work = {"factor": 1.0, "round": "step", "sent": 0, "spare": spare, "touched": None}
    work["steps"] = np.ones(1).tobytes()
    start, stop = begun().followers[0].coordinator.shard.store.layout.begin, LAYOUT.nbytes
    order = {
        "run_update": server_messages.RunUpdate(10, 0, 0, work),
        "send_params": server_messages.SendParams(10, "c", 1, 0, ((start, stop, 0),)),
        "hold_version": server_messages.HoldVersion(10, 0, True, False),
    }[which]
    world = begun()
    follower, leash = world.followers[0], world.lead.orders[0]
    for each in (server_messages.RunUpdate(9, 0, 0, work), order):
        assert not leash.line.dead
        follower.post(Received(world.now, leash.line.number, each, None))
        while follower.kernels:
            follower.run()
    refused = leash.line.wire.state == "closed"
    assert refused == (which == "run_update" or not spare)


def test_a_lead_takes_what_a_follower_says_or_loses_it() -> None:
    counted = {"c": (1, 1, 1, 1, {"push": (1, 1, 1)}, {})}
    for message in (
        server_messages.PushArrived(1, {}),
        server_messages.UpdateDone(1, bytes(8), bytes(24)),
        server_messages.TrafficCounted(1, counted, {}, {}),
        server_messages.BudgetUsed(1, 1, 1, 1, 1, True),
        server_messages.StoredRows(1, 0, 0, (Part(0, 1, "raw", 12, 0),)),
        messages.Error(1, "protocol", "no", {"n": 1}, True, 1),
        messages.Pong(1),
        server_messages.ShardParts(1, 1, (Part(1400, 1408, "raw", 8, 0),)),
    ):
        for _path, _number, header in variants(header_of(message)):
            world = begun()
            line = world.lead.accept(None)
            line.joined = True
            line.wire.state = "open"
            world.lead.coordinator._clients[line.number] = "c", 1
            world.lead.post(Received(world.now, line.number, Stats(5)))
            try:
                message = decode(msgpack.packb(header))
            except RemoteProtocolError:
                continue
            world.lead.post(Reported(world.now, 1, message))
            world.lead.post(Received(world.now, line.number, Stats(6)))
            world.settle()


def begun() -> World:
    """Return a lead and a follower that hold a model."""
    world = World(0, 2)
    actor = Actor(world, "c", lambda actor: None)
    actor.done = True
    world.actors.append(actor)
    actor.connect()
    world.settle()
    done(world, actor, actor.requests.define(MODEL))
    return world


# ---------------------------------------------------------------- the workers of a round


def test_a_chunk_that_is_no_chunk_of_the_ring() -> None:
    flat = Flat(LAYOUT)
    ring = Ring(0, (True, True), flat)
    good = (flat.data.nbytes // 2, flat.data.nbytes, 1)
    assert len(ring.room(*good)) == flat.data.nbytes // 2
    for path, number, (start, stop, hop) in variants(good):
        if number != good[path[0]]:
            with pytest.raises(RemoteProtocolError, match="not what is expected next"):
                ring.room(start, stop, hop)


# ---------------------------------------------------------------- a server


@pytest.mark.parametrize("policy", ["fasgd", "asgd", "easgd", "hardsync"])
def test_a_server_outlives_a_push_of_any_count(policy: str) -> None:
    """As it was found: one push ended the server, or the statistics that were asked for next."""
    flags = ("--workers", "1") if policy in ("easgd", "hardsync") else ()
    whole, nbytes = push(END, 1), 300 * 4
    with serving("--policy", policy, "--log-level", "error", *flags) as process:
        with Peer(process.url) as definer:
            definer.send(define(MODEL))
            assert isinstance(definer.receive(), messages.Model)
        for count in (2**56, 2**60, 2**63 - 1, 2**64 - 1, -1, 0):
            for message, size in ((whole, END), (push(nbytes, 1), nbytes)):
                with Peer(process.url) as peer:
                    header = {**header_of(message), "count": count}
                    with contextlib.suppress(ConnectionError):
                        peer.send(enclose(msgpack.packb(header), bytes(size)))
                    assert peer.dropped()
        with Peer(process.url, "observer") as observer:
            for _ in range(3):
                assert isinstance(observer.ask(Stats(1)), Report)
            with Peer(process.url) as peer:
                for seq in range(1, 41):
                    message = push(nbytes, seq)
                    message.count = MAX_COUNT  # type: ignore[misc]
                    peer.send(frame(message, bytes(nbytes)))
                    assert isinstance(peer.receive(), Ack | Error)
                assert isinstance(observer.ask(Stats(2)), Report)
        assert process.popen.poll() is None
        assert process.stderr() == ""
        assert process.stop() == 0
