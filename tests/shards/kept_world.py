"""The world of `tests.shards.world` with a journal for each server, any of which may be killed.

The journals are lists in memory: a row is in its list before the effects of its event are carried
out. What else a server had is lost when it is killed, as is all that was on its way to or from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiops.algorithms import find
from aiops.durable.commit_gate import Acks, CommitGate
from aiops.durable.follower_recorder import BeginShard, FollowerRecorder, FollowerReplayer
from aiops.durable.lead_recorder import LeadRecorder, LeadReplayer
from aiops.durable.recorder import AppendRow
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, Committed, Order, Resumed
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from tests.shards.world import Actor, Host, Leash, World


class KeptHost(Host):
    """A server's shell, with a journal."""

    def __init__(self, world: World, coordinator: Any) -> None:
        super().__init__(world, coordinator)
        self.journal: list[JournalFrame] = []
        self.synced = 0  # rows that are committed, with acks durable
        self.generation = 1
        self.recorder = self.recorded(1)

    def recorded(self, first: int) -> Any:
        kind: Any = LeadRecorder if isinstance(self.coordinator, Lead) else FollowerRecorder
        return kind(self.coordinator, CommitGate(self.world.acks), first)  # type: ignore[attr-defined]

    def handled(self, event: Any) -> Any:
        return self.recorder.handle(event)

    def perform(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            if isinstance(effect, AppendRow):
                row = effect.row
                payload = b"" if row.payload is None else bytes(row.payload)
                given = row.kind, row.time, row.flags, row.row, memoryview(payload), 0, 0, 0
                assert effect.number == len(self.journal) + 1
                self.journal.append(JournalFrame(effect.number, *given))
                if effect.pinned is not None and not effect.later:
                    effect.pinned.unpin()
            elif isinstance(effect, Order) and not self.orders:
                pass  # no follower is connected yet
            elif not isinstance(effect, BeginShard):
                super().perform([effect])

    def commit(self) -> None:
        """The disk has synced all rows that are written."""
        self.synced = len(self.journal)
        self.post(Committed(self.world.now, self.synced))

    def restart(self, coordinator: Any) -> None:
        """Begin again from the journal."""
        world: Any = self.world
        if world.acks >= Acks.DURABLE:  # of what the disk's thread had not written, a part is lost
            del self.journal[world.random.randint(self.synced, len(self.journal)) :]
            self.synced = len(self.journal)
        self.coordinator, self.lines, self.ended = coordinator, {}, None
        self.kernels.clear()
        self.events.clear()
        self.generation += 1
        replayer: Any
        if isinstance(coordinator, Lead):
            replayer = LeadReplayer(coordinator)
        else:
            replayer = FollowerReplayer(coordinator, "run")
        for frame in self.journal:
            if frame.kind == 1:
                replayer.begin(frame)
            else:
                replayer.feed(frame)
        recovered = replayer.finish()
        self.recorder = self.recorded(len(self.journal) + 1)
        if isinstance(coordinator, Lead):
            resumed = Resumed(self.world.now, self.generation)
            self.perform(self.recorder.resumed(resumed, recovered.outstanding))


class KeptWorld(World):
    """A world whose servers are killed, and come back.

    Parameters
    ----------
    seed, shards, policy, settings, options
        As of `World`.
    acks
        At ``DURABLE`` a step of the world is that a disk has synced.
    """

    def __init__(
        self,
        seed: int,
        shards: int,
        policy: str = "asgd",
        settings: Any = None,
        acks: Acks = Acks.WRITTEN,
        **options: Any,
    ) -> None:
        self.acks = acks
        self.made: Callable[[], Lead] = lambda: self.lead_brain
        self.kills = 0.0  # how likely a step is to kill servers
        self.killed = 0
        super().__init__(seed, shards, policy, settings, **options)

    def host(self, coordinator: Any) -> Host:
        return KeptHost(self, coordinator)

    def coordinators(self, shards: int) -> tuple[Engine, Any, list[Follower]]:
        algorithm = find(self.algorithm.name).make(self.algorithm.settings())
        engine = Engine(algorithm, self.given)
        lead = Lead(engine, [("", 7000 + n) for n in range(1, shards)], kept=True)
        return engine, lead, [Follower(algorithm, self.given, kept=True) for _ in range(1, shards)]

    def kill(self, numbers: Iterable[int]) -> None:
        """Kill servers (0: the lead), and start them again from what they have kept."""
        dead = sorted(set(numbers))
        self.killed += len(dead)
        hosts: Any = self.hosts
        engine, lead, followers = self.coordinators(len(hosts))
        leashes = self.lead.orders
        for line in [line for number in dead for line in hosts[number].lines.values()]:
            line.dead = line.up.closed = line.down.closed = True  # and its server notes nothing
            line.up.bytes.clear()
            line.down.bytes.clear()
        for actor in self.actors:
            lost = [line for _talk, line in actor.lines if line.host in [hosts[n] for n in dead]]
            if lost or 0 in dead:
                actor.hang_up()
        for leash in leashes:
            if 0 in dead or leash.shard in dead:
                leash.line.cut()
                leash.gone = True
        if 0 in dead:
            self.engine, self.lead_brain = engine, lead
            hosts[0].orders = []
            hosts[0].restart(lead)
        for number in dead:
            if number:
                hosts[number].restart(followers[number - 1])
        if 0 in dead:
            self.lead.orders = [Leash(self, n, host) for n, host in enumerate(self.followers, 1)]
        for number in dead:
            if number and 0 not in dead:
                leashes[number - 1].lost()
                leashes[number - 1] = Leash(self, number, hosts[number])

    def settle(self) -> None:
        """As `World.settle`, with a kill now and then, after which clients connect again."""
        began = [actor for actor in self.actors if actor.lines]
        while True:
            self.now += 0.001
            if self.random.random() < self.kills:
                count = len(self.hosts)
                self.kill(self.random.sample(range(count), self.random.choice((1, 1, count))))
            while self.doomed:
                self.step_doomed()
            found = self.choices()
            if not found:
                found = [actor.connect for actor in began if not actor.lines]
            if not found:
                return
            found[0]()

    def step(self) -> bool:
        if self.random.random() < self.kills:
            count = len(self.hosts)
            self.kill(self.random.sample(range(count), self.random.choice((1, 1, 1, count))))
            return True
        return super().step()

    def choices(self) -> list[Callable[[], Any]]:
        found = super().choices()
        hosts: list[Any] = self.hosts
        if self.acks >= Acks.DURABLE:
            found += [host.commit for host in hosts if host.synced < len(host.journal)]
        for actor in self.actors:
            if actor.lines and actor.session.pending.refused is not None:
                found.append(partial(self.ask_refused, actor))
        return found

    def ask_refused(self, actor: Actor) -> None:
        actor.session.ask_refused()
        actor.flush()


__all__ = ["Actor", "Apply", "KeptWorld"]
