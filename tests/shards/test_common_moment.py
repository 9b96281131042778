"""Shards that lose power go back to the newest moment that all of them have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.client import Client
from aiops.client.params import Params
from aiops.durable.commit_gate import Acks
from aiops.errors import NotReady, Restarted
from aiops.model.parts import LARGEST
from aiops.net.disk import SystemDisk
from aiops.shards.common_moment import CommonMoment, History
from aiops.state.directory import StateListing, journal_name
from aiops.state.frames import SegmentScan
from aiops.wire.server_messages import ShardState
from tests.rows import each_row
from tests.seeds import seeds
from tests.shards.kept_world import Actor, KeptWorld
from tests.shards.test_kept_shards import MODEL as SMALL
from tests.shards.test_kept_shards import gradients, undisturbed
from tests.shards.test_orders_of_events import MODEL, Checker, final
from tests.shards.test_policies import model
from tests.support import PATIENCE, ServerThread, assert_same


def state(reached: int, history: History, update: int = 9) -> ShardState:
    """What a follower says that has done all updates up to one, and has portion 7."""
    holds = {"reached": reached, "history": history, "portions": (7,)}
    return ShardState(0, True, "run", 1, 2, 5, update, False, holds)


class TestHistories:
    """The lead's generation 3 began behind row 60, generation 5 behind row 50."""

    mine = ((1, 0), (3, 60), (5, 50))

    @each_row(
        ("reached", "theirs", "newest", "ahead", "end"),
        [
            (80, mine, 80, {}, LARGEST),  # of the same start
            (95, mine, 95, {1: 90}, LARGEST),
            (50, mine[:2], 50, {}, LARGEST),  # of an earlier one
            (80, mine[:2], 50, {1: 50}, LARGEST),
            (80, mine[:1], 50, {1: 50}, LARGEST),
            (80, (*mine, (6, 70)), 70, {1: 70}, 70),  # of a later one
            (65, (*mine, (6, 70)), 65, {}, 70),
            (80, (*mine, (6, 70), (7, 40)), 40, {1: 40}, 40),
            (80, (*mine[:2], (6, 70)), 50, {1: 50}, 50),  # of neither: both begin with 3
            (80, (), 80, {}, LARGEST),  # of a release that noted none
        ],
        ids=str,
    )
    def test_a_follower_counts_up_to_where_its_history_is_the_leads(
        self, reached: int, theirs: History, newest: int, ahead: dict[int, int], end: int
    ) -> None:
        moment = CommonMoment({1: state(reached, theirs)}, self.mine)
        assert (moment.newest([1]), moment.ahead(90), moment.end) == (newest, ahead, end)
        assert not moment.strange

    def test_what_was_done_in_another_history_is_not_done(self) -> None:
        """Updates and pushes have the same numbers in both."""
        moment = CommonMoment({1: state(80, self.mine[:2])}, self.mine)
        for row, there in ((50, True), (51, False), (80, False)):
            assert moment.has_done(row, [1], 4, measured=False) == there
            assert moment.has_portions(row, [1], 7) == there
        moment = CommonMoment({1: state(50, self.mine[:2])}, self.mine)
        assert moment.has_done(60, [1], 9, measured=False)
        assert not moment.has_done(60, [1], 10, measured=False)
        assert moment.has_portions(60, [1], 7)

    def test_a_follower_of_which_no_generation_is_known_is_told(self) -> None:
        states = {1: state(80, self.mine), 2: state(80, ((2, 0), (4, 7)))}
        assert CommonMoment(states, self.mine).strange == [2]
        assert not CommonMoment(states).strange


class Loser(Checker):
    """A client that pushes again what it computed with parameters that the servers have lost."""

    def __call__(self, actor: Actor) -> Any:
        error = None if actor.request is None else actor.request.error
        if error is not None:
            assert isinstance(error, Restarted | NotReady), error
            if self.asked == "push":
                self.sent -= self.number
                self.left += 1
            actor.request = self.params = None
            if isinstance(error, NotReady):
                self.asked = "define"
                return actor.requests.define(self.model)
        return super().__call__(actor)


def losing(
    seed: int, shards: int, acks: Acks, dues: float, fulls: float = 0
) -> tuple[KeptWorld, list[Loser]]:
    """Return a world whose servers have lost their power now and then, and its clients.

    ``fulls``: how likely a step is that a disk is full, so that a journal has ended.
    """
    world = KeptWorld(seed, shards, acks=acks)
    clients = [Loser(8.0**n, 6) for n in range(3)]
    world.actors = [Actor(world, f"worker-{n}", c) for n, c in enumerate(clients)]
    world.losses, world.kills, world.dues, world.fulls = 0.004, 0.001, dues, fulls
    world.run()
    world.losses = world.kills = world.dues = world.fulls = 0
    for actor, client in zip(world.actors, clients, strict=True):
        actor.done, actor.request, client.params = False, None, None  # to be told
    world.run()
    return world, clients


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("dues", [0, 0.02])
@pytest.mark.parametrize("acks", [Acks.APPLIED, Acks.WRITTEN, Acks.DURABLE])
@pytest.mark.parametrize("shards", [2, 4])
def test_what_is_lost_is_told(shards: int, acks: Acks, dues: float, seed: int) -> None:
    """Some servers lose power at any row, or all: what clients are told is what is missing."""
    world, clients = losing(seed, shards, acks, dues)
    told = [actor.session.restarts.rolled_back for actor in world.actors]
    total = sum(c.sent - c.number * n for c, n in zip(clients, told, strict=True))
    params = final(world, MODEL)
    assert {float(v) for a in params.values() for v in a.reshape(-1)} == {-total}
    assert params.version == 18 - sum(told)
    assert acks is not Acks.DURABLE or not sum(told)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("dues", [0, 0.02])
@pytest.mark.parametrize("shards", [2, 4])
def test_what_full_disks_lose_is_told(shards: int, dues: float, seed: int) -> None:
    """The journals of servers that are killed then have ended at different moments."""
    world, clients = losing(seed, shards, Acks.WRITTEN, dues, 0.01)
    told = [actor.session.restarts.rolled_back for actor in world.actors]
    total = sum(c.sent - c.number * n for c, n in zip(clients, told, strict=True))
    params = final(world, MODEL)
    assert {float(v) for a in params.values() for v in a.reshape(-1)} == {-total}
    assert params.version == 18 - sum(told)


def test_worlds_lose_pushes() -> None:
    """The test above is of something."""
    world, _clients = losing(0, 2, Acks.WRITTEN, 0)
    assert world.undone
    assert sum(actor.session.restarts.rolled_back for actor in world.actors)


def in_lockstep(world: KeptWorld, steps: int) -> dict[str, Any]:
    """Train with one worker, whose gradients follow from the version; return the parameters."""
    actor = Actor(world, "worker", lambda actor: None)
    actor.done, world.actors = True, [actor]
    actor.connect()
    world.settle()

    def asked(make: Callable[[], Any]) -> Any:
        request = make()
        actor.flush()
        while not request.done:
            if not actor.lines:
                actor.connect()
            world.settle()
        return request

    asked(lambda: actor.requests.define(model()))
    assert actor.session.info.layout is not None
    params, current = Params(actor.session.info.layout), False
    while not current or params.version < steps:
        if params.version >= steps:
            world.losses = world.kills = world.dues = 0
        random = np.random.default_rng(max(0, params.version))
        grads = {name: random.normal(size=a.shape).astype(a.dtype) for name, a in params.items()}
        if current and params.version < steps:
            request = asked(partial(actor.requests.push, grads, params, params))
        else:
            request = asked(partial(actor.requests.fetch, params))
        current = request.error is None and (params.version < steps or not world.losses)
        assert request.error is None or isinstance(request.error, Restarted | NotReady)
        if isinstance(request.error, NotReady):
            asked(lambda: actor.requests.define(model()))
    return params.numpy()


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("fasgd", {"lr": 0.01, "clip": 1}),
        ("dcasgd", {"lr": 0.1}),
        ("gap-aware", {"lr": 0.1}),
        ("asgd", {"lr": 0.1, "optimizer": "adam"}),
        ("asgd", {"lr": 0.1, "optimizer": "momentum", "clip": 1}),
        ("asgd", {"lr": 0.1, "clip": 9, "per_tensor": "clip=1@*"}),
    ],
)
def test_the_same_bits_as_if_it_had_never_been(policy: str, settings: dict[str, Any]) -> None:
    """What was lost is computed again, to the same bits as in a run that has lost nothing."""
    expected = in_lockstep(KeptWorld(0, 3, policy, settings), 14)
    undone = 0
    for seed in range(2):
        world = KeptWorld(seed, 3, policy, settings)
        world.losses, world.kills, world.dues = 0.006, 0.001, 0.02
        assert_same(in_lockstep(world, 14), expected)
        undone += world.undone
    assert undone


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 14)


def cut(folder: Path, keep: float) -> int:
    """Lose the last rows of a journal, as a loss of power does; return the rows that are left."""
    listing = StateListing(path.name for path in folder.iterdir())
    rows = []
    for first in listing.segments:
        path = folder / journal_name(first)
        data = bytearray(path.read_bytes())
        scan = SegmentScan(data, path.name, until=listing.until(first))
        rows += [(path, frame.number, frame.at) for frame in scan]
    path, last, at = rows[int(keep * (len(rows) - 1))]
    for first in listing.segments:
        if first > last:
            (folder / journal_name(first)).unlink()
    data = bytearray(path.read_bytes())
    data[at:] = bytes(len(data) - at)
    path.write_bytes(data)
    return last - 1


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    "kept", [{0: 0.5}, {1: 0.6}, {2: 0.3, 1: 0.9}, {0: 0.4, 1: 0.8, 2: 0.6}, {1: 0.02}]
)
def test_real_files_are_cut(kept: dict[int, float], tmp_path: Path) -> None:
    """To the last bit as in a run that never had what was lost, and told is lost."""
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "shards": 3}
    steps, taken = 8, dict[int, Any]()
    client = None
    with ServerThread(**settings, state=tmp_path / "state") as server:
        port = int(server.url.rpartition(":")[2])
        client = Client(server.url, role="worker", name="w", timeout=PATIENCE)
        params = client.define(SMALL)
        for step in range(steps):
            taken[step] = {name: array.copy() for name, array in params.numpy().items()}
            client.exchange(params, gradients(step))
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
    for shard, share in kept.items():
        cut(tmp_path / "copy" / f"shard-{shard}", share)
    with ServerThread(**settings, state=tmp_path / "copy", port=port), client:
        params = client.fetch()
        assert params.version + client.rolled_back == steps
        assert client.rolled_back
        assert_same(params.numpy(), taken[params.version])
        for step in range(params.version, steps):
            client.exchange(params, gradients(step))
        assert_same(params.numpy(), undisturbed(steps)[0])
        assert [line["version"] for line in client.stats()["shards"]] == [steps] * 3
