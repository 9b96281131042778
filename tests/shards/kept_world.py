"""The world of `tests.shards.world` with a state for each server, any of which may be killed.

A state is in memory: a row is in the journal before the effects of its event are carried out, and a
snapshot is among the snapshots at a step of its own. What else a server had is lost when it is
killed, as is all that was on its way to or from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiops.algorithms import find
from aiops.durable.commit_gate import Acks, CommitGate
from aiops.durable.follower_recorder import BeginShard, FollowerRecorder, FollowerReplayer
from aiops.durable.lead_recorder import LeadRecorder, LeadReplayer
from aiops.durable.recorder import (
    WAITS,
    AppendRow,
    BeginJournal,
    KeepSnapshots,
    SnapshotFailed,
    WriteSnapshot,
)
from aiops.engine.capture import needed_rows
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Apply,
    Committed,
    Order,
    Resumed,
    SnapshotDue,
    SnapshotWritten,
)
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.frames import JournalFrame
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader, SnapshotPlan
from tests.shards.world import Actor, Host, Leash, World


class KeptHost(Host):
    """A server's shell, with a journal."""

    def __init__(self, world: World, coordinator: Any) -> None:
        super().__init__(world, coordinator)
        self.journal: dict[int, JournalFrame] = {}  # by row
        self.rows = 0
        self.snapshots: dict[int, bytes] = {}  # files, by row
        self.captured: WriteSnapshot | None = None  # to be written
        self.restored = 0  # how often it went on from a snapshot
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
                assert effect.number == self.rows + 1
                self.rows = effect.number
                self.journal[self.rows] = JournalFrame(effect.number, *given)
                if effect.pinned is not None and not effect.later:
                    effect.pinned.unpin()
            elif isinstance(effect, WriteSnapshot):
                assert self.captured is None
                self.captured = effect
            elif isinstance(effect, KeepSnapshots):
                self.keep(effect.rows)
            elif isinstance(effect, SnapshotFailed):
                assert effect.why == WAITS
            elif isinstance(effect, BeginJournal):
                self.rows = self.synced = effect.first - 1
            elif isinstance(effect, Order) and not self.orders:
                pass  # no follower is connected yet
            elif not isinstance(effect, BeginShard):
                super().perform([effect])

    def commit(self) -> None:
        """The disk has synced all rows that are written."""
        self.synced = self.rows
        self.post(Committed(self.world.now, self.synced))

    @property
    def may_save(self) -> bool:
        """Whether the disk may have the snapshot that is being written."""
        lacks = getattr(self.recorder, "lacks", lambda row: False)
        return self.captured is not None and not lacks(self.captured.row)

    def save(self) -> None:
        """The disk has the snapshot."""
        effect, self.captured = self.captured, None
        assert effect is not None
        found = effect.capture
        numbers = effect.row, self.generation, "run", found.versions
        plan = SnapshotPlan(
            SnapshotHeader(*numbers, found.settings, {}, found.owners), found.arrays
        )
        data = bytearray(plan.length)
        for at, buffers in plan.pieces():
            whole = b"".join(buffers)
            data[at : at + len(whole)] = whole
        self.snapshots[effect.row] = bytes(data)
        if isinstance(self.coordinator, Lead):
            found.release()
        self.post(SnapshotWritten(self.world.now, effect.row))

    def keep(self, rows: tuple[int, ...]) -> None:
        """Remove what is not needed for these snapshots, or later ones."""
        assert {*rows} <= {*self.snapshots}
        for row in [row for row in self.snapshots if row < rows[-1] and row not in rows]:
            del self.snapshots[row]
        needed = {row for each in rows for row in needed_rows(self.read(each).header.owners)}
        for row in [row for row in self.journal if row <= rows[0] and row not in needed]:
            del self.journal[row]

    def read(self, row: int) -> SnapshotFile:
        data = memoryview(self.snapshots[row])

        def read(at: int, into: memoryview) -> int:
            part = data[at : at + len(into)]
            into[: len(part)] = part
            return len(part)

        return SnapshotFile(read, len(data), f"snapshot {row}")

    def restart(self, coordinator: Any) -> None:
        """Begin again from the journal."""
        world: Any = self.world
        if world.acks >= Acks.DURABLE:  # of what the disk's thread had not written, a part is lost
            self.rows = world.random.randint(self.synced, self.rows)
            self.synced = self.rows
            self.journal = {row: self.journal[row] for row in self.journal if row <= self.rows}
        if len(self.snapshots) > 2 and world.random.random() < world.damages:
            del self.snapshots[max(self.snapshots)]  # no set needs it alone
        self.captured = None
        self.coordinator, self.lines, self.ended = coordinator, {}, None
        self.kernels.clear()
        self.events.clear()
        self.generation += 1
        replayer: Any
        if isinstance(coordinator, Lead):
            replayer = LeadReplayer(coordinator)
        else:
            replayer = FollowerReplayer(coordinator, "run")
        base = max(self.snapshots, default=0)
        if base:
            self.restored += 1
            file = self.read(base)
            queued = {row: self.journal[row] for row in needed_rows(file.header.owners)}
            replayer.restore(base, file.header, file.array, queued)
        for row in [row for row in sorted(self.journal) if row > base]:
            frame = self.journal[row]
            if frame.kind == 1:
                replayer.begin(frame)
            else:
                replayer.feed(frame)
        recovered = replayer.finish()
        self.recorder = self.recorded(self.rows + 1)
        if isinstance(coordinator, Lead):
            coordinator.sets.holds(0, self.snapshots)
        else:
            cuts = {self.read(row).header.owners["cut"]: row for row in self.snapshots}
            coordinator.snapshots.update(cuts)
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
        self.dues = 0.0  # how likely a step is that a snapshot is due
        self.damages = 0.5  # how likely a newest snapshot is not whole that no set needs
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
            if self.random.random() < self.dues:
                self.take_snapshot()
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

    def take_snapshot(self) -> bool:
        """Have a snapshot be due, unless one is on its way."""
        lead: Any = self.lead
        recorder = lead.recorder
        busy = recorder.capturing or lead.captured or self.lead_brain.sets.writing
        if busy or self.lead_brain.lost or recorder.engine.training is None:
            return False
        self.lead.post(SnapshotDue(self.now, recorder.next))
        return True

    def step(self) -> bool:
        if self.random.random() < self.dues and self.take_snapshot():
            return True
        if self.random.random() < self.kills:
            count = len(self.hosts)
            self.kill(self.random.sample(range(count), self.random.choice((1, 1, 1, count))))
            return True
        return super().step()

    def choices(self) -> list[Callable[[], Any]]:
        found = super().choices()
        hosts: list[Any] = self.hosts
        if self.acks >= Acks.DURABLE:
            found += [host.commit for host in hosts if host.synced < host.rows]
        found += [host.save for host in hosts if host.may_save]
        for actor in self.actors:
            if actor.lines and actor.session.pending.refused is not None:
                found.append(partial(self.ask_refused, actor))
        return found

    def ask_refused(self, actor: Actor) -> None:
        actor.session.ask_refused()
        actor.flush()


__all__ = ["Actor", "Apply", "KeptWorld"]
