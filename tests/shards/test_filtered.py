"""Filters on several servers: they decide as on one, to the last bit of what they know."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.cli import token as tokens
from aiops.client import Client
from aiops.client.params import Params
from aiops.durable.commit_gate import Acks
from aiops.engine.events import Effect, Options
from aiops.engine.update_queue import UpdateQueue
from aiops.errors import Refused, Restarted
from aiops.filters.screen import SEEDING, PushScreen
from aiops.lab.torture.sharded_engine import ShardedEngine
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Layout
from aiops.shards import measuring
from aiops.store.snapshots import Version
from aiops.wire.messages import Ack, Error
from tests.seeds import seeds
from tests.shards.kept_world import Actor, KeptWorld
from tests.shards.world import World
from tests.support import PATIENCE, ServerThread, server_process

ROWS = (
    ("d", "float64", (31, 3)),
    ("w", "float32", (997, 5)),
    ("empty", "float32", (0, 4)),
    ("one", "float32", ()),
    ("h", "float16", (40,)),
)
LAYOUT = Layout(ROWS)
WORKERS = 6
HOSTILE = 5, 6
FILTERS = ("norm:5", "kardam", "norm:5+kardam", "curvature+agreement", "robust")
POLICIES = ("asgd", "fasgd", "softsync", "hardsync", "fedbuff", "dcasgd")


def servers(shards: int, filter: str, policy: str = "asgd", **more: Any) -> ShardedEngine:
    """Servers with a model and its workers; messages arrive as the number of servers says."""
    more = {"shard_bytes": 1, **more}
    options = Options(workers=WORKERS, backend="numpy", shards=shards, filter=filter, **more)
    settings = {"lr": 0.01} if policy != "fasgd" else {}
    found = ShardedEngine(find(policy).make(settings), options, random.Random(shards))
    data = aligned(LAYOUT.nbytes)
    for view in Arena(LAYOUT, data).views.values():
        view[...] = np.linspace(-1, 1, view.size).reshape(view.shape)
    found.define(ROWS, data)
    for peer in range(1, WORKERS + 1):
        found.join(peer)
    return found


def gradient(turn: int, peer: int, params: bytes) -> Any:
    """The gradient of a quadratic loss with noise, of which hostile workers send another."""
    draw = np.random.default_rng([turn, peer])
    at, data = Arena(LAYOUT), aligned(LAYOUT.nbytes)
    at.data[:] = np.frombuffer(params, np.uint8)
    for (name, view), here in zip(
        Arena(LAYOUT, data).views.items(), at.views.values(), strict=True
    ):
        noise = draw.standard_normal(view.shape)
        view[...] = here.astype(np.float64) + 0.3 * noise
        if peer == HOSTILE[0] and turn % 3 == 0:
            view[...] = view * (1e3 if name != "h" else 20)
        elif peer == HOSTILE[1]:
            view[...] = -view
    return data


def params(engine: ShardedEngine) -> bytes:
    return b"".join(arena.tobytes() for arena in engine.arenas)


def run(engine: ShardedEngine, pushes: int) -> list[Any]:
    """Have workers push in turns; return what they were told."""
    told = list[Any]()
    seqs = dict.fromkeys(range(1, WORKERS + 1), 0)
    draw = random.Random(7)
    for turn in range(pushes):
        peer = draw.randint(1, WORKERS)
        seqs[peer] += 1
        answers = engine.push(peer, seqs[peer], gradient(turn, peer, params(engine)), fetch=False)
        for each in answers:
            assert isinstance(each, Ack | Error)
            said = (each.used, each.why) if isinstance(each, Ack) else (each.code, each.text)
            told.append((turn, each.id, *said))
    return told


def plain(value: Any) -> Any:
    """A state with its arrays as bytes, so that NaN is NaN and -0 is not 0."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def known(engine: ShardedEngine) -> Any:
    training = engine.engine.training
    assert training is not None
    assert training.screen is not None
    return plain(training.screen.state())


@pytest.mark.parametrize("room", [0, 1500])
def test_they_do_where_there_is_no_room_for_what_followers_have_read(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead asks again for what it did not keep."""
    one = servers(1, "robust")
    expected = run(one, 60)
    monkeypatch.setattr(measuring, "SAMPLES", room)
    three = servers(3, "robust")
    assert run(three, 60) == expected
    assert known(three) == known(one)


@pytest.mark.parametrize(
    ("filter", "policy"),
    [  # each filter, and each policy where all of a filter's parts look at a push
        *((filter, "asgd") for filter in FILTERS[:-1]),
        *((FILTERS[-1], policy) for policy in POLICIES),
        *(("kardam", policy) for policy in ("fasgd", "softsync", "dcasgd")),
    ],
)
def test_several_servers_decide_as_one(filter: str, policy: str) -> None:
    one = servers(1, filter, policy)
    expected = run(one, 120)
    refused = [told for told in expected if told[2] is False and "the first 16" not in told[3]]
    assert refused, "the workers are not hostile enough for this to show anything"
    for shards in (2, 3) if policy == "asgd" else (3,):
        many = servers(shards, filter, policy)
        assert run(many, 120) == expected
        assert known(many) == known(one)
        assert params(many) == params(one)


@pytest.mark.parametrize("filter", ["norm:5", "norm:5+curvature", "robust"])
def test_compiled_loops_decide_the_same(filter: str) -> None:
    """Of the lead, from values that it was given, and of one server, which reads them itself."""
    pytest.importorskip("numba")
    plain_one = servers(1, filter)
    expected = run(plain_one, 120)
    for shards in (1, 3):
        many = servers(shards, filter)
        training = many.engine.training
        assert training is not None
        assert training.screen is not None
        training.screen._backend = "numba"
        training.screen.warm()
        assert training.screen._compiled
        assert run(many, 120) == expected
        assert training.screen._loop is not None
        assert known(many) == known(plain_one)


@pytest.mark.parametrize("filter", ["norm:5", "kardam", "robust"])
def test_a_lead_that_holds_all_of_a_small_model_decides_as_one_server(filter: str) -> None:
    one, many = servers(1, filter), servers(3, filter, shard_bytes=1 << 20)
    expected = run(one, 60)
    assert run(many, 60) == expected
    assert known(many) == known(one)
    assert many.rounds == []


@pytest.mark.parametrize("filter", ["norm:5", "robust"])
def test_honest_pushes_are_measured_where_they_arrive(filter: str) -> None:
    """Followers are asked once after the positions are drawn, and then say it unasked."""
    many = servers(3, filter)
    run(many, SEEDING)
    assert many.rounds == []
    many = servers(3, filter)
    run(many, SEEDING + 60)
    assert many.rounds[:2] == ["sample", "sample"]  # of each follower
    assert many.rounds.count("sample") == 2
    assert many.rounds.count("step") > 2 * 30


class Training:
    """Workers that push in turns over connections, to one server or several."""

    def __init__(
        self, shards: int, filter: str, kind: type[World] = World, policy: str = "asgd", **more: Any
    ) -> None:
        self.world = kind(0, shards, policy, {"lr": 0.1}, workers=4, filter=filter, **more)
        self.told: list[Any] = []
        self.actors = [Actor(self.world, f"worker-{n}", lambda actor: None) for n in range(4)]
        self.world.actors = [*self.actors]
        self.params = list[Params]()
        for actor in self.actors:
            actor.done = True
            actor.connect()
            self.world.settle()
            self.ask(actor, actor.requests.define(MODEL))
            assert actor.session.info.layout is not None
            self.params.append(Params(actor.session.info.layout))
            self.ask(actor, actor.requests.fetch(self.params[-1]))

    def ask(self, actor: Actor, request: Any) -> Any:
        actor.ask(request)
        self.world.settle()
        return request.value()

    def run(self, turns: range, *, huge: bool = False) -> None:
        """Push all tensors, or some; the last worker is hostile: it flips signs, or is ``huge``."""
        for turn in turns:
            number = turn % 4
            actor, mine = self.actors[number], self.params[number]
            draw = np.random.default_rng([turn, 5])
            grads = {
                name: (array + 0.3 * draw.standard_normal(array.shape)).astype(array.dtype)
                for name, array in mine.items()
            }
            if number == 3:
                size = -1.0 if turn % 8 == 3 and not huge else 1e3
                grads = {name: (size * array).astype(array.dtype) for name, array in grads.items()}
            if turn % 7 == 5:
                grads = {name: grads[name] for name in ("b", "w")}
            request = actor.requests.push(grads, mine, None if turn % 5 == 4 else mine)
            try:
                receipt = self.ask(actor, request)
            except Refused as error:
                self.told.append((turn, str(error)))
            else:
                self.told.append((turn, receipt.used, receipt.why, receipt.version))

    @property
    def known(self) -> Any:
        """What its filters know."""
        training = self.world.engine.training
        assert training is not None
        assert training.screen is not None
        return plain(training.screen.state())


MODEL = {
    "w": np.linspace(-1, 1, 3000).astype(np.float32).reshape(300, 10),
    "b": np.ones(7, np.float32),
    "v": np.linspace(0, 1, 900).astype(np.float32).reshape(30, 30),
}


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("filter", ["norm:5", "kardam", "robust"])
def test_some_tensors_are_compared_as_on_one_server(filter: str, shards: int) -> None:
    one, many = Training(1, filter), Training(shards, filter)
    for training in (one, many):
        training.run(range(90))
    assert many.told == one.told
    assert many.known == one.known
    assert {each[1] for each in one.told if isinstance(each[1], bool)} == {False, True}


def test_a_worker_that_is_quarantined_is_refused_by_all() -> None:
    many = Training(2, "norm:5")
    many.run(range(100), huge=True)
    assert many.told[-1][0] % 4 == 3
    assert "this worker is quarantined" in many.told[-1][1]
    report = many.world.engine.report()["filter"]
    assert report["quarantined"] == ["worker-3"]
    for host in many.world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"


class Killed(KeptWorld):
    """A world in which servers are killed from the beginning, and snapshots taken."""

    worlds: ClassVar[list[KeptWorld]] = []

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kills, self.dues = 0.004, 0.01
        self.worlds.append(self)


@pytest.mark.parametrize("filter", ["norm:5", "kardam", "robust"])
@pytest.mark.parametrize(("acks", "shards"), [(Acks.WRITTEN, 3), (Acks.DURABLE, 2)])
def test_servers_that_are_killed_go_on_with_what_their_filters_know(
    filter: str, shards: int, acks: Acks
) -> None:
    """From journals and snapshots: the lead has it, and followers are told the positions again."""
    calm, killed = Training(shards, filter), Training(shards, filter, Killed, acks=acks)
    for training in (calm, killed):
        training.run(range(70))
    assert Killed.worlds[-1].killed >= 5
    hosts: Any = killed.world.hosts
    assert sum(host.restored for host in hosts) >= 2
    assert killed.told == calm.told
    assert killed.known == calm.known


class Poisoner:
    """A client that pushes noise, some of it too large, whenever it may."""

    def __init__(self, number: int, pushes: int) -> None:
        self.number, self.left = number, pushes
        self.params: Params | None = None

    def __call__(self, actor: Actor) -> Any:
        talk = actor.session
        if not talk.ready or talk.info.layout is None:
            return actor.requests.define(MODEL)
        if self.params is None:
            self.params = Params(talk.info.layout)
            return actor.requests.fetch(self.params)
        if self.params.version < 0 or (
            actor.request is not None and isinstance(actor.request.error, Restarted)
        ):
            return actor.requests.fetch(self.params)  # none has arrived, or its version is lost
        if not self.left:
            return None
        self.left -= 1
        draw = np.random.default_rng([self.number, self.left])
        size = 1e5 if self.left % 9 == 4 else -1.0 if self.number == 3 else 1.0
        grads = {
            name: (size * (np.clip(array, -10, 10) + draw.standard_normal(array.shape))).astype(
                array.dtype
            )  # what the first ones do to the parameters does not grow with these
            for name, array in self.params.items()
        }
        if self.left % 5 == 2:
            grads = {name: grads[name] for name in ("v", "w")}
        return actor.requests.push(grads, self.params, self.params)


class Reference:
    """One screen that sees whole gradients and versions, and decides again on each push."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.decided = world, list[str | None]()
        self.screen: PushScreen | None = None
        measured = UpdateQueue._measured
        reference = self

        def again(
            queue: UpdateQueue, screen: Any, push: Any, largest: float, *more: Any
        ) -> list[Effect]:
            queue._screen, judge = screen, screen.judge

            def compared(*given: Any, **named: Any) -> str | None:
                why: str | None = judge(*given, **named)
                assert reference.judge(push) == why
                return why

            screen.judge = compared
            try:
                return measured(queue, screen, push, largest, *more)
            finally:
                del screen.judge

        monkeypatch.setattr(UpdateQueue, "_measured", again)

    def judge(self, push: Any) -> str | None:
        """Decide with all bytes, as they lie on the servers now."""
        engine = self.world.engine
        assert engine.store is not None
        layout = engine.store.layout
        screen = self.screen = self.screen or PushScreen(self.world.given.filter, layout, "numpy")
        hosts: Any = self.world.followers
        stores = [engine.store, *(host.coordinator.shard for host in hosts)]
        arenas = [engine.store.current.arena.data, *(each.newest.arena.data for each in stores[1:])]
        whole = Arena(layout, np.concatenate(arenas))
        sinks = [push.sink.take()]
        for host in hosts:
            buffers = host.coordinator._buffers
            if push.sink.number in buffers.complete:
                sinks.append(buffers.gradient(push.sink.number))
        payload = np.concatenate([each.data for each in sinks])
        values = [np.abs(part).max() for part in typed(payload, layout, push.sink.cover)]
        current = engine.store.current
        version = Version(current.number, whole, current.tensor_versions, current.level)
        given = payload, push.sink.cover, float(max(values)), None, version
        self.decided.append(screen.judge(push.member.number, *given))
        return self.decided[-1]


def typed(payload: Any, layout: Layout, cover: Any) -> list[Any]:
    """The tensors of a gradient, from the bytes in which they came."""
    tensors = [layout.tensors[number] for number in cover.tensors]
    starts = cover.starts.tolist()
    return [
        payload[start : start + tensor.nbytes].view(tensor.dtype)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("shards", [2, 4])
def test_in_any_order_of_events_it_is_as_if_one_server_had_read_all(
    seed: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes are announced, cut off, and come again; positions are drawn while some are coming."""
    filter = ("norm:5", "robust", "kardam", "norm:5+kardam")[seed % 4]
    world = World(seed, shards, "asgd", {"lr": 0.01}, filter=filter)
    reference = Reference(world, monkeypatch)
    world.actors = [Actor(world, f"worker-{n}", Poisoner(n, 25)) for n in range(4)]
    world.cuts = 0.002
    world.run()
    world.cuts = 0
    while world.step():  # the last orders arrive
        pass
    assert 90 <= len(reference.decided) <= 100  # those of a worker in quarantine are refused
    assert None in reference.decided
    assert any(why is not None and "first 16" not in why for why in reference.decided)
    assert reference.screen is not None
    assert world.engine.training is not None
    assert world.engine.training.screen is not None
    assert plain(world.engine.training.screen.state()) == plain(reference.screen.state())
    for host in world.hosts:
        assert host.coordinator.pools[0].out == 0, "every buffer has come back"


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
def test_servers_that_lose_power_go_back_to_what_their_filters_knew(seed: int, acks: Acks) -> None:
    """All go on to the end; what the filters know then is what all rows lead to."""
    filter = ("norm:5", "robust", "kardam")[seed % 3]
    world = KeptWorld(seed, 2 + seed % 2, "asgd", {"lr": 0.01}, acks, filter=filter)
    world.actors = [Actor(world, f"worker-{n}", Poisoner(n, 14)) for n in range(4)]
    world.kills, world.dues, world.losses = 0.002, 0.01, 0.003
    world.run()
    world.kills = world.dues = world.losses = 0
    while world.step():
        pass
    before = world.engine.training
    assert before is not None
    assert before.screen is not None
    known = plain(before.screen.state())
    assert before.store.version > 5
    world.kill(range(len(world.hosts)))
    after = world.engine.training
    assert after is not None
    assert after.screen is not None
    assert after is not before
    assert plain(after.screen.state()) == known


def pushed(url: str, token: str, turns: range) -> list[Any]:
    """Have two workers push by turns, one of which is too large now and then."""
    told = list[Any]()
    with (
        Client(url, role="worker", name="a", token=token, timeout=PATIENCE) as one,
        Client(url, role="worker", name="b", token=token, timeout=PATIENCE) as other,
    ):
        clients = [(client, client.define(MODEL)) for client in (one, other)]
        for turn in turns:
            client, params = clients[turn % 2]
            client.fetch(params)
            draw = np.random.default_rng(turn)
            size = 1e5 if turn % 6 == 5 else 1.0
            grads = {
                name: (size * draw.standard_normal(a.shape)).astype(a.dtype)
                for name, a in MODEL.items()
            }
            receipt = client.push(params, grads)
            told.append((turn, receipt.used, receipt.why, receipt.version))
    return told


@pytest.mark.slow
def test_real_processes_filter_for_untrusted_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, as one server does; all are killed with their lead, and go on."""
    file, half = tmp_path / "tokens.toml", 30
    tokens.new(file, "volunteer", "train", untrusted=True)
    token = capsys.readouterr().out.strip()
    with ServerThread(policy="asgd", lr=0.01, kernels="numpy", tokens=file) as server:
        expected = pushed(server.url, token, range(half)) + pushed(
            server.url, token, range(half, 2 * half)
        )
    flags = ("--policy", "asgd", "--lr", "0.01", "--kernels", "numpy", "--tokens", str(file))
    flags += ("--shards", "2", "--shard-bytes", "1", "--state", str(tmp_path / "state"))
    own, told = {"AIOPS_TOKEN": "of the servers"}, list[Any]()
    for turns in (range(half), range(half, 2 * half)):
        with server_process(*flags, env=own) as server, Client(server.url, token=token) as client:
            told += pushed(server.url, token, turns)
            report = client.stats()
            assert report["filter"]["filter"] == "robust"
            assert [row["version"] for row in report["shards"]] == [report["version"]] * 2
            server.signal(signal.SIGKILL)
    assert told == expected
    assert sum("times the usual median" in each[2] for each in told) >= 3
