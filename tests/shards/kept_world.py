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
from aiops.durable.follower_recorder import (
    BeginShard,
    FollowerRecorder,
    FollowerReplayer,
    NoteLead,
)
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
    JournalEnded,
    Order,
    Resumed,
    SnapshotDue,
    SnapshotWritten,
)
from aiops.errors import RolledBack
from aiops.shards.common_moment import CommonMoment
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.state.directory import GenerationFile
from aiops.state.frames import JournalFrame
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader, SnapshotPlan
from aiops.wire.server_messages import ShardState
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
        self.resumed_after = 0  # the row from which it went on
        self.synced = 0  # rows that a loss of power leaves
        self.hidden: int | None = None  # the first row of a journal that is none yet
        self.generations = GenerationFile(0).started(0, [])
        self.recorder = self.recorded(1)

    def recorded(self, first: int) -> Any:
        world: Any = self.world
        given, recording = (CommitGate(world.acks), first), world.acks > Acks.APPLIED
        if isinstance(self.coordinator, Lead):
            self.coordinator.readmission.history = self.generations.history
            return LeadRecorder(self.coordinator, *given, self.generations, recording=recording)
        return FollowerRecorder(self.coordinator, *given, recording=recording)

    @property
    def generation(self) -> int:
        """The number of its starts."""
        return self.generations.generation

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
                self.hidden = effect.first
            elif isinstance(effect, Order) and not self.orders:
                pass  # no follower is connected yet
            elif not isinstance(effect, BeginShard | NoteLead):
                super().perform([effect])

    def commit(self) -> None:
        """The disk has synced all rows that are written."""
        self.synced = self.rows
        if self.world.acks >= Acks.DURABLE:  # type: ignore[attr-defined]
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
        found.read_rows()
        numbers = effect.row, self.generation, "run", found.versions
        plan = SnapshotPlan(
            SnapshotHeader(*numbers, found.settings, {}, found.owners), found.arrays
        )
        data = bytearray(plan.length)
        for at, buffers in plan.pieces():
            whole = b"".join(buffers)
            data[at : at + len(whole)] = whole
        self.snapshots[effect.row] = bytes(data)
        self.hidden = None
        self.rows = max(self.rows, effect.row)  # without a journal
        self.synced = max(self.synced, effect.row)  # the journal's rows come first
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

    @property
    def files(self) -> tuple[Any, ...]:
        """What it has kept."""
        return {**self.journal}, {**self.snapshots}, self.rows, self.synced, self.generations

    @files.setter
    def files(self, found: tuple[Any, ...]) -> None:
        self.journal, self.snapshots, self.rows, self.synced, self.generations = found

    def lose_rows(self) -> None:
        """Lose a part of what is not on the disk."""
        world: Any = self.world
        if not self.journal:  # snapshots are synced before they have a name
            return
        self.end_after(world.random.randint(self.synced, self.rows))
        self.synced = self.rows

    def end_after(self, row: int) -> None:
        """Have nothing of later rows."""
        self.rows, self.synced = row, min(self.synced, row)
        self.journal = {each: self.journal[each] for each in self.journal if each <= row}
        self.snapshots = {each: self.snapshots[each] for each in self.snapshots if each <= row}

    def restart(
        self, coordinator: Any, moment: CommonMoment | None = None, back_to: int | None = None
    ) -> None:
        """Begin again from the journal, up to the moment that the followers, or the lead, have."""
        world: Any = self.world
        if self.hidden is not None:
            self.journal = {row: self.journal[row] for row in self.journal if row < self.hidden}
            self.rows = self.synced = max([0, *self.journal, *self.snapshots])
            self.hidden = None
        if world.acks >= Acks.DURABLE and back_to is None:
            self.lose_rows()  # it has told of none of these
        if len(self.snapshots) > 2 and world.random.random() < world.damages:
            del self.snapshots[max(self.snapshots)]  # no set needs it alone
        self.captured = None
        self.coordinator, self.lines, self.ended = coordinator, {}, None
        self.kernels.clear()
        self.events.clear()
        replayer: Any
        if isinstance(coordinator, Lead):
            replayer = LeadReplayer(coordinator, moment=moment)
        else:
            replayer = FollowerReplayer(coordinator, "run", back_to=back_to)
        base = 0
        for row in sorted(self.snapshots, reverse=True):
            file = self.read(row)
            if replayer.begins_with(row, file.header):
                base = row
                self.restored += 1
                queued = {row: self.journal[row] for row in needed_rows(file.header.owners)}
                replayer.restore(base, file.header, file.array, queued)
                break
        last = self.resumed_after = base
        row = base
        while (row := row + 1) in self.journal:  # up to its end, or to a gap
            frame = self.journal[row]
            if not replayer.goes_on_with(frame):
                break
            last = self.resumed_after = row
            if frame.kind == 1:
                replayer.begin(frame)
            else:
                replayer.feed(frame)
        world.undone += self.rows - last
        self.end_after(last)
        self.synced = last
        recovered = replayer.finish()
        versions = list[int]()
        if isinstance(coordinator, Lead) and coordinator.engine.training is not None:
            tables = [table.version for table in coordinator.engine.tables]
            versions = [coordinator.engine.version, *tables]
        self.generations = self.generations.started(last, versions)
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
        At ``DURABLE`` a step of the world is that a disk has synced. At ``APPLIED`` there are
        snapshots, and no rows.
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
        self.losses = 0.0  # how likely a step is that servers lose their power
        self.killed = self.undone = 0
        self.behind = False  # a follower is behind its lead, which is to begin again
        self.dues = 0.0  # how likely a step is that a snapshot is due
        self.fulls = 0.0  # how likely a step is that a disk is full, or that a lead's has room
        self.damages = 0.5  # how likely a newest snapshot is not whole that no set needs
        super().__init__(seed, shards, policy, settings, **options)

    def host(self, coordinator: Any) -> Host:
        return KeptHost(self, coordinator)

    def coordinators(self, shards: int) -> tuple[Engine, Any, list[Follower]]:
        algorithm = find(self.algorithm.name).make(self.algorithm.settings())
        engine = Engine(algorithm, self.given)
        lead = Lead(engine, [("", 7000 + n) for n in range(1, shards)], kept=True)
        return engine, lead, [Follower(algorithm, self.given, kept=True) for _ in range(1, shards)]

    def may_lead(self, shard: int, state: ShardState) -> bool:
        error = self.lead_brain.readmission.refusal(shard, state)
        self.behind = isinstance(error, RolledBack)
        assert self.behind == (error is not None), str(error)
        return error is None

    def kill(self, numbers: Iterable[int], *, power: bool = False) -> None:
        """Kill servers (0: the lead), and start them again from what they have kept.

        ``power``: what is not on their disks is lost.
        """
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
        for number in dead if power else ():
            hosts[number].lose_rows()
        for number in dead:
            if number:
                hosts[number].restart(followers[number - 1])
        if 0 in dead:
            self.engine, self.lead_brain = engine, lead
            hosts[0].orders = []
            states = {n: host.coordinator.state() for n, host in enumerate(self.followers, 1)}
            moment, files = CommonMoment(states, hosts[0].generations.history), hosts[0].files
            hosts[0].restart(lead, moment)
            for number, row in moment.ahead(hosts[0].resumed_after).items():
                [*_others, followers] = self.coordinators(len(hosts))
                hosts[number].restart(followers[number - 1], back_to=row)
                if (
                    self.losses and self.random.random() < self.losses * 20
                ):  # before the lead has changed its own
                    hosts[0].files = files
                    self.kill(range(len(hosts)), power=power)
                    return
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
            if self.behind or self.random.random() < self.kills:
                self.kill_some()
            if self.losses and self.random.random() < self.losses:
                self.kill_some(power=True)
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
        if self.fulls and self.random.random() < self.fulls:
            self.fill_a_disk()
            return True
        if self.behind or self.random.random() < self.kills:
            self.kill_some()
            return True
        if self.losses and self.random.random() < self.losses:
            self.kill_some(power=True)
            return True
        return super().step()

    def fill_a_disk(self) -> None:
        """Have a server's journal end, or the lead begin another; followers do with a snapshot."""
        lead: Any = self.lead
        host: Any = self.random.choice(self.hosts)
        if not lead.recorder.recording:
            if not (lead.captured or lead.recorder.capturing or lead.recorder.resuming):
                lead.perform([lead.recorder.resume()])
        elif host.recorder.recording:
            host.post(JournalEnded(self.now, "the disk is full"))

    def kill_some(self, *, power: bool = False) -> None:
        """Kill some servers, or all; a lead that has a follower behind it ends."""
        count, behind, self.behind = len(self.hosts), self.behind, False
        most = self.random.choice((1, 1, 1, count))
        self.kill([0] if behind else self.random.sample(range(count), most), power=power)

    def choices(self, *, whole: bool = False) -> list[Callable[[], Any]]:
        found = super().choices(whole=whole)
        hosts: list[Any] = [self.lead, *self.followers]
        syncs = self.acks >= Acks.DURABLE
        if syncs or (self.losses and self.losses > self.random.random() / 4):
            found += [host.commit for host in hosts if host.synced < host.rows]
        found += [host.save for host in hosts if host.captured is not None and host.may_save]
        for actor in self.actors:
            if actor.lines and actor.session.pending.refused is not None:
                found.append(partial(self.ask_refused, actor))
        return found

    def ask_refused(self, actor: Actor) -> None:
        actor.session.ask_refused()
        actor.flush()


__all__ = ["Actor", "Apply", "KeptWorld"]
