"""The decisions of the standbys of a sharded model, in worlds that a seed chooses."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from aiops.durable.shard_standbys import FollowerStandbyDesk, ShardCopy, StandbyGroup, check_place
from aiops.engine.events import Drop, Joined, Lost, Order, Received, Reply, Reported
from aiops.errors import UsageError
from aiops.shards.reports import PROMOTED
from aiops.wire.handshake import generation_proof
from aiops.wire.messages import PROTOCOL, Error, Fetch, Message
from aiops.wire.server_messages import KeepSets, LeadHello, ShardState, ShardWelcome
from aiops.wire.standby_messages import Promote, Promoted, StandbyWelcome
from tests.seeds import seeds

RUN, PRIMARY, SECRET = "8c2f", "aiops://a:7171", bytes(range(32))


def hello(*, run: str = RUN, standby: bool = True, secret: bytes = SECRET) -> LeadHello:
    named = PROTOCOL, "f", 1, "lead", run, True, bytes(16), "test", "asgd", {}
    return LeadHello(0, *named, 3, standby, generation_proof(secret, run, 3, lead=True))


class Follower:
    """The standby of a follower: its desk, and a copy that the world changes."""

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.cuts: set[int] = set()
        self.whole, self.promoted = False, False
        self.peer = 0
        self.place = self.led_by = 0
        self.taken = 0  # requests that it takes its place
        self.resumed: int | None = None  # the place in which a lead has looked for it
        self.desk = FollowerStandbyDesk(
            *(self.held, self.keep, PRIMARY, self.promote, self.take, self.resume),
            *(lambda: None, dict),
        )
        self.down: deque[Message] = deque()  # to it
        self.up: deque[Message] = deque()  # from it

    def held(self) -> ShardCopy:
        place = self.shard, self.shards, 7
        facts = self.whole, {"row": 1}, SECRET, self.place, self.led_by
        return ShardCopy(RUN, *place, tuple(sorted(self.cuts)), *facts)

    def take(self, peer: int, id: int) -> None:
        self.taken += 1

    def resume(self, number: int) -> None:
        self.resumed = number

    def keep(self, cuts: Any) -> None:
        assert {*cuts} <= self.cuts
        self.cuts -= {cut for cut in self.cuts if cut < max(cuts) and cut not in cuts}

    def promote(self, peer: int, id: int) -> None:
        assert self.whole
        self.promoted = True
        self.up.append(Promoted(id, 65536, 7))

    def perform(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Reply) and effect.peer == self.peer:
                self.up.append(effect.message)

    def connect(self) -> None:
        """Take another connection of the lead's standby."""
        self.peer += 1
        self.down.clear()
        self.up.clear()
        if self.promoted:  # as a follower answers, see tests/shards
            held = {"snapshots": tuple(sorted(self.cuts)), PROMOTED: True}
            self.up.append(ShardState(0, True, RUN, self.shard, self.shards, 7, 0, False, held))
            return
        self.perform(self.desk.handle(Joined(0.0, self.peer, hello())))


class World:
    """The standbys of a lead and its followers, and what is on its way between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        shards = self.random.randint(2, 4)
        self.followers = [Follower(shard, shards) for shard in range(1, shards)]
        self.cuts: set[int] = set()  # of the lead's
        self.newest = 0
        names = [f"shard {each.shard}" for each in self.followers]
        self.group = StandbyGroup(RUN, names, lambda: range(shards))
        self.connected: set[int] = set()
        self.common = 0  # the newest cut that all have had

    def send(self, orders: list[Order]) -> None:
        for order in orders:
            if not order.shard:
                assert isinstance(order.message, KeepSets)
                cuts = order.message.cuts
                assert {*cuts} <= self.cuts
                self.cuts -= {cut for cut in self.cuts if cut < max(cuts) and cut not in cuts}
            elif order.shard in self.connected:
                self.followers[order.shard - 1].down.append(order.message)

    def step(self) -> None:
        follower = self.random.choice(self.followers)
        shard = follower.shard
        choice = self.random.choice(("up", "up", "up", "down", "down", "saved", "saved", "cut"))
        if choice == "cut" and self.random.random() < 0.3:
            self.lose(follower)
        elif shard not in self.connected:
            self.connected.add(shard)
            follower.connect()
        elif choice == "up" and follower.up:
            message = follower.up.popleft()
            if isinstance(message, ShardState):
                assert not self.group.refusal(shard, message)
            if not isinstance(message, ShardWelcome):
                self.send(self.group.handle(Reported(0.0, shard, message)))
        elif choice == "down" and follower.down and not follower.promoted:
            message = follower.down.popleft()
            follower.perform(follower.desk.handle(Received(0.0, follower.peer, message)))
        elif choice == "saved":
            self.snapshot(follower)
        self.check()

    def lose(self, follower: Follower) -> None:
        self.connected.discard(follower.shard)
        self.group.handle(Lost(0.0, follower.shard, "cut"))

    def snapshot(self, follower: Follower) -> None:
        """Have the lead's standby reach the next snapshot, or a follower's one that it lacks."""
        if self.random.random() < 0.5:
            self.newest += 1
            self.cuts.add(self.newest)
            self.send(self.group.saved(self.newest))
            return
        later = [cut for cut in range(1, self.newest + 1) if cut > max(follower.cuts, default=0)]
        if later and not follower.promoted:
            cut = later[0] if self.random.random() < 0.8 else later[-1]  # the disk was busy
            follower.cuts.add(cut)
            follower.perform(follower.desk.saved(cut))

    def check(self) -> None:
        """Once there was a moment of which all have snapshots, there is one for ever."""
        common = self.cuts.intersection(*(each.cuts for each in self.followers))
        if common:
            self.common = max(self.common, *common)
        assert not self.common or common


@pytest.mark.parametrize("seed", seeds(15))
def test_there_is_always_a_snapshot_of_one_moment(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step()
    for each in world.followers:  # and what is older goes, once all have heard of it
        if each.shard not in world.connected:
            world.connected.add(each.shard)
            each.connect()
    for _ in range(3):
        world.newest += 1
        for each in world.followers:
            each.cuts.add(world.newest)
            each.perform(each.desk.saved(world.newest))
        world.cuts.add(world.newest)
        world.send(world.group.saved(world.newest))
        settle(world)
    assert len(world.cuts) <= 3
    assert all(len(each.cuts) <= 3 for each in world.followers)


def settle(world: World) -> None:
    """Deliver all messages."""
    while any(each.up or (each.down and not each.promoted) for each in world.followers):
        for each in world.followers:
            while each.up:
                message = each.up.popleft()
                if not isinstance(message, ShardWelcome):
                    world.send(world.group.handle(Reported(0.0, each.shard, message)))
            while each.down and not each.promoted:
                message = each.down.popleft()
                each.perform(each.desk.handle(Received(0.0, each.peer, message)))
        world.check()


@pytest.mark.parametrize("seed", seeds(15))
def test_all_are_promoted_or_none_begins(seed: int) -> None:
    """One that is away, or has no whole state, is named, and no other has been promoted."""
    world = World(seed)
    for _ in range(50):
        world.step()
    for each in world.followers:
        each.whole = each.whole or world.random.random() < 0.7
    world.send(world.group.ask())
    settle(world)
    assert world.group.answered
    why = world.group.why_not
    good = [each.whole and each.shard in world.connected for each in world.followers]
    assert bool(why) != all(good)
    if why:
        assert f"shard {1 + good.index(False)} " in why
        assert not any(each.promoted for each in world.followers)
        return
    world.send(world.group.promote())
    lost = world.random.choice([None, *world.followers])
    if lost is not None:  # its answer is lost with its connection, or the request is
        if world.random.random() < 0.5 and lost.down:
            message = lost.down.popleft()
            lost.perform(lost.desk.handle(Received(0.0, lost.peer, message)))
        lost.up.clear()
        lost.down.clear()
        world.lose(lost)
    settle(world)
    assert world.group.decided
    assert bool(world.group.not_promoted) == (lost is not None)
    if lost is not None:  # it is tried again
        assert f"shard {lost.shard} was not promoted: cut" in world.group.not_promoted
        world.connected.add(lost.shard)
        lost.connect()
        settle(world)
        world.send(world.group.ask())
        settle(world)
        assert not world.group.why_not
        world.send(world.group.promote())
        settle(world)
    assert world.group.decided
    assert not world.group.not_promoted
    assert all(each.promoted for each in world.followers)


def test_a_request_that_is_refused_is_told() -> None:
    world = World(0)
    for each in world.followers:
        each.whole = True
        world.connected.add(each.shard)
        each.connect()
    settle(world)
    first = world.followers[0].shard
    world.group.handle(Reported(0.0, first, Error(1, "refused", "no whole state", {}, False)))
    assert "shard 1 was not promoted: no whole state" in world.group.not_promoted


class TestDesk:
    def test_only_the_standby_of_a_lead_is_welcomed(self) -> None:
        for greeting, text in (
            (hello(standby=False), f"its lead is {PRIMARY}"),
            (hello(run="ffff"), "run 8c2f, and its lead's has run ffff"),
            (hello(secret=bytes(32)), "without a proof of it that is right"),
        ):
            found = Follower(1, 2).desk.handle(Joined(0.0, 1, greeting))
            [reply, drop] = found
            assert isinstance(reply, Reply)
            assert isinstance(reply.message, Error)
            assert text in reply.message.text
            assert isinstance(drop, Drop)

    def test_orders_of_another_connection_are_refused(self) -> None:
        follower = Follower(1, 2)
        follower.connect()
        follower.connect()
        follower.cuts = {1, 2, 3}
        for message in (KeepSets(0, (3,)), Fetch(1, -1)):
            [effect] = follower.desk.handle(Received(0.0, 1, message))
            assert isinstance(effect, Reply)
            assert isinstance(effect.message, Error)
        assert follower.cuts == {1, 2, 3}
        follower.desk.handle(Received(0.0, 2, KeepSets(0, (3,))))
        assert follower.cuts == {3}

    def test_it_is_promoted_with_the_others_by_their_lead_alone(self) -> None:
        follower = Follower(1, 2)
        follower.whole = True
        follower.connect()
        follower.desk.handle(Received(0.0, 9, Promote(1)))
        assert not follower.promoted
        assert follower.taken == 1  # it takes its follower's place, if the lead gives it

    @pytest.mark.parametrize(
        ("held", "wanted", "led_by", "lead", "secret", "resumes"),
        [
            (2, 2, 3, 3, SECRET, 2),
            (2, 0, 3, 1 << 36, SECRET, 2),
            (0, 1, 3, 3, SECRET, 1),  # it ended before it knew that it has the place
            (0, 0, 3, 4, SECRET, None),
            (0, 0, 3, 1 << 36, SECRET, 0),  # it was promoted with that lead
            (2, 2, 4, 3, SECRET, None),  # a lead of before
            (2, 2, 3, 3, bytes(32), None),
        ],
    )
    def test_a_lead_that_looks_for_the_follower_that_it_was(
        self, held: int, wanted: int, led_by: int, lead: int, secret: bytes, resumes: int | None
    ) -> None:
        """It was started with the flags of a standby again, and goes on in the place it has."""
        follower = Follower(1, 2)
        follower.place, follower.led_by = held, led_by
        proof = generation_proof(secret, RUN, lead, lead=True)
        greeting = replace(hello(standby=False), generation=lead, lead_proof=proof, place=wanted)
        reply, _drop = follower.desk.handle(Joined(0.0, 1, greeting))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Error)
        assert follower.resumed == resumes
        assert (reply.message.code == "unavailable") == (resumes is not None)  # it tries again


@pytest.mark.parametrize(
    ("has", "shard", "shards", "text"),
    [
        ((0, 3), 0, 2, "leads 3 shards, and this standby is to be that of 2: start it with --sh"),
        ((0, 1), 0, 2, "has all of its model, .* start it without --shards"),
        ((0, 3), 0, 1, "leads 3 shards, and this standby is to be that of 1"),
        ((2, 3), 1, None, "has shard 2 of 3, and this standby is to be that of shard 1"),
        ((0, 3), 1, None, "has a lead's part, and this standby is to be that of shard 1"),
        ((1, 3), 0, 3, "has shard 1 of 3"),
    ],
)
def test_the_standby_of_another_part(
    has: tuple[int, int], shard: int, shards: int | None, text: str
) -> None:
    welcome = StandbyWelcome(0, PROTOCOL, b"", RUN, 1, 0, 0, {}, b"", *has)
    with pytest.raises(UsageError, match=text):
        check_place(welcome, shard, shards, PRIMARY)


def test_the_standby_of_its_part() -> None:
    for has, shard, shards in (((0, 1), 0, 1), ((0, 3), 0, 3), ((2, 3), 2, None)):
        welcome = StandbyWelcome(0, PROTOCOL, b"", RUN, 1, 0, 0, {}, b"", *has)
        check_place(welcome, shard, shards, PRIMARY)
