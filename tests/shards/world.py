"""A lead, its followers and its clients in one memory: bytes move, and kernels run, as a seed says.

Nothing here waits. `World.step` does one thing of all that could happen next: some bytes of some
connection arrive, a kernel is done, a connection is cut, a client asks for the next thing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from aiops.algorithms import find
from aiops.client.requests import Requests
from aiops.client.session import Session
from aiops.client.shard_channel import ShardChannel
from aiops.engine.engine import Engine
from aiops.engine.events import (
    Applied,
    Apply,
    Collected,
    Collection,
    Drop,
    End,
    Event,
    Joined,
    Left,
    Lost,
    Options,
    Order,
    Received,
    Reply,
    Reported,
)
from aiops.errors import AiopsError, ConnectionLost, Unavailable
from aiops.shards.follower import Follower
from aiops.shards.lead import Lead
from aiops.wire.handshake import Admitted, ServerHandshake
from aiops.wire.messages import PROTOCOL, Error
from aiops.wire.server_messages import LeadHello, ShardState, ShardWelcome
from tests.driven import Driven


class Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.closed = False

    def say(self, buffers: Any) -> None:
        if not self.closed:
            for buffer in buffers:
                self.bytes += bytes(buffer)


class Line:
    """One connection, as its server sees it; ``far`` is who made it."""

    def __init__(self, host: Host, number: int, far: Any) -> None:
        self.host, self.number, self.far = host, number, far
        self.up, self.down = Pipe(), Pipe()  # towards the server, and from it
        self.wire = Driven("server", lambda message: host.sink_for(self, message))
        self.handshake = ServerHandshake(
            None, bytes(16), follower=isinstance(host.coordinator, Follower)
        )
        self.joined = self.dead = False

    def cut(self) -> None:
        """Both ends find that it is gone; what was on its way is lost."""
        if self.dead:
            return
        self.dead = self.up.closed = self.down.closed = True
        self.up.bytes.clear()
        self.down.bytes.clear()
        self.host.lost(self)

    def resume(self) -> bool:
        if self.dead or not self.wire.waiting:
            return True
        whole = self.wire.resume()
        if self.wire.waiting and not whole:
            return False
        self.host.heard(self, whole)
        if self.wire.waiting:
            self.host.coordinator.wait(self.resume)
        return True


class Host:
    """A server's shell."""

    def __init__(self, world: World, coordinator: Any) -> None:
        self.world, self.coordinator = world, coordinator
        self.lines: dict[int, Line] = {}
        self.kernels: deque[Apply] = deque()
        self.events: deque[Event] = deque()
        self.handling = False
        self.ended: str | None = None
        self.orders: list[Any] = []  # links to followers
        self.collections: list[Collection] = []
        self.numbers = 0

    def accept(self, far: Any) -> Line:
        self.numbers += 1
        line = self.lines[self.numbers] = Line(self, self.numbers, far)
        return line

    def sink_for(self, line: Line, message: Any) -> Any:
        if not isinstance(self.coordinator, Lead):
            return self.coordinator.sinks_of(line.number)(message)
        sink, orders = self.coordinator.sink_for(line.number, message)
        self.perform(orders)
        return sink

    def arrive(self, line: Line, count: int) -> None:
        """Some bytes have come from the other side."""
        buffer = line.wire.next_buffer()
        count = min(count, len(buffer), len(line.up.bytes))
        buffer[:count] = line.up.bytes[:count]
        del line.up.bytes[:count]
        self.heard(line, line.wire.take(count))
        if line.wire.waiting:
            self.coordinator.wait(line.resume)

    def heard(self, line: Line, whole: Any) -> None:
        for message, sink in whole:
            if line.joined:
                self.post(Received(self.world.now, line.number, message, sink))
                continue
            answer = line.handshake.receive(message)
            if not isinstance(answer, Admitted):
                line.down.say(line.wire.send(answer))
                continue
            line.joined = True
            self.post(Joined(self.world.now, line.number, *answer[:2]))

    def lost(self, line: Line) -> None:
        self.lines.pop(line.number, None)
        line.wire.lost()
        if line.joined:
            self.post(Left(self.world.now, line.number))

    def post(self, event: Event) -> None:
        self.events.append(event)
        if self.handling:
            return
        self.handling = True
        while self.events:
            self.perform(self.handled(self.events.popleft()))
        self.handling = False

    def handled(self, event: Event) -> Any:
        return self.coordinator.handle(event)

    def perform(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.reply(effect)
            elif isinstance(effect, Apply):
                self.kernels.append(effect)
            elif isinstance(effect, Order):
                self.orders[effect.shard - 1].order(effect)
            elif isinstance(effect, End):
                self.ended = effect.why
            elif isinstance(effect, Collected):
                self.collections.append(effect.collection)
            elif isinstance(effect, Drop):
                line = self.lines.get(effect.peer)
                if line is not None:
                    self.world.doomed.append(line)

    def reply(self, effect: Reply) -> None:
        line = self.lines.get(effect.peer)
        lease = effect.lease
        rows = effect.rows
        if line is None or line.wire.state == "closed":
            if lease is not None:
                lease.release()
            if rows is not None:
                rows.free()
            return
        if rows is not None:
            parts = effect.message.parts  # type: ignore[attr-defined]
            payloads = [[rows.answer] if part.nbytes else [] for part in parts]
            line.down.say(line.wire.send(effect.message, payloads))
            rows.free()
            return
        if lease is None:
            line.down.say(line.wire.send(effect.message))
            return
        parts = effect.message.parts  # type: ignore[attr-defined]
        line.down.say(line.wire.send(effect.message, lease.borrowed_views(parts)))
        lease.release()

    def run(self) -> None:
        """The first kernel's turn."""
        effect = self.kernels.popleft()
        self.post(Applied(self.world.now, effect.ticket, effect.run()))


class Leash:
    """The lead's link to one follower."""

    def __init__(self, world: World, shard: int, host: Host) -> None:
        self.world, self.shard = world, shard
        self.line = host.accept(self)
        self.attached = self.gone = False
        lead = world.lead_brain
        self.wire = Driven("client", lambda message: lead.sink_for_follower(shard, message))
        rule = world.engine.algorithm
        generation = getattr(world.lead, "generation", 0)
        said = "lead", 1, "lead", "run", True, bytes(16), "", rule.name, rule.settings(), generation
        hello = LeadHello(0, PROTOCOL, *said)
        self.line.up.say(self.wire.send(hello))

    def order(self, effect: Order) -> None:
        if self.attached:
            self.line.up.say(self.wire.send(effect.message, effect.payloads))

    def arrive(self, count: int) -> None:
        buffer, pipe = self.wire.next_buffer(), self.line.down
        count = min(count, len(buffer), len(pipe.bytes))
        buffer[:count] = pipe.bytes[:count]
        del pipe.bytes[:count]
        for message, sink in self.wire.take(count):
            if isinstance(message, ShardWelcome):
                continue
            if isinstance(message, ShardState):
                if not self.world.may_lead(self.shard, message):
                    return
                self.attached = True
                self.world.lead.post(Reported(self.world.now, self.shard, message, sink))
            else:
                assert not isinstance(message, Error), message
                self.world.lead.post(Reported(self.world.now, self.shard, message, sink))

    def lost(self) -> None:
        self.world.lead.post(Lost(self.world.now, self.shard, f"shard {self.shard} is gone"))


class Actor:
    """A client; ``script`` is asked for its next request whenever none is open."""

    def __init__(self, world: World, name: str, script: Callable[[Actor], Any]) -> None:
        self.world, self.name, self.script = world, name, script
        self.session = Session(
            name,
            client=name,
            name=name,
            role="worker",
            token=None,
            nonce=lambda: bytes(16),
            pongs=False,
        )
        self.requests = Requests(self.session)
        self.lines: list[tuple[Any, Line]] = []
        self.request: Any = None
        self.done = False
        self.state: dict[str, Any] = {}

    def connect(self) -> None:
        line = self.world.lead.accept(self)
        self.lines = [(self.session, line)]
        line.up.say(self.session.connected())

    def hang_up(self) -> None:
        for _session, line in self.lines:
            line.cut()
        self.lines = []
        self.session.lost()

    def flush(self) -> None:
        for branch in self.session.shards.channels[len(self.lines) - 1 :] if self.lines else ():
            line = self.world.followers[branch.shard - 1].accept(self)
            self.lines.append((branch, line))
            line.up.say(branch.connected())
        for talk, line in self.lines:
            line.up.say(talk.outgoing())

    def arrive(self, talk: Session | ShardChannel, line: Line, count: int) -> None:
        buffer, pipe = talk.next_buffer(), line.down
        count = min(count, len(buffer), len(pipe.bytes))
        buffer[:count] = pipe.bytes[:count]
        del pipe.bytes[:count]
        try:
            talk.received(count)
        except (ConnectionLost, Unavailable):
            self.hang_up()
            return
        self.flush()

    def ask(self, request: Any) -> Any:
        """Send what is asked; return it."""
        self.flush()
        return request

    def act(self) -> None:
        if self.request is None or self.request.done:
            self.request = self.script(self)
            self.done = self.request is None
        if self.done:
            self.hang_up()
        self.flush()


class World:
    """All of it.

    Parameters
    ----------
    seed
        Of what happens when.
    shards, policy, settings, options
        How the servers are run.
    """

    def __init__(
        self, seed: int, shards: int, policy: str = "asgd", settings: Any = None, **options: Any
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.algorithm = find(policy).make({"lr": 1} if settings is None else settings)
        options.setdefault("shard_bytes", 1)  # the models here are small
        self.given = Options(**{"shards": shards, "backend": "numpy", "run": "run", **options})
        self.engine, self.lead_brain, followers = self.coordinators(shards)
        self.lead = self.host(self.lead_brain)
        self.followers = [self.host(follower) for follower in followers]
        self.actors: list[Actor] = []
        self.lead.orders = [Leash(self, n, host) for n, host in enumerate(self.followers, 1)]
        self.doomed: list[Line] = []
        self.cuts = 0.0  # how likely a step is to cut a connection
        self.most = 1 << 16  # bytes that arrive at once
        while not all(leash.attached for leash in self.lead.orders):
            self.step()

    def host(self, coordinator: Any) -> Host:
        return Host(self, coordinator)

    def coordinators(self, shards: int) -> tuple[Engine, Any, list[Follower]]:
        """Return an engine, what decides about it, and followers that have begun nothing."""
        engine = Engine(self.algorithm, self.given)
        if shards == 1:
            return engine, engine, []
        lead = Lead(engine, [("", 7000 + n) for n in range(1, shards)])
        return engine, lead, [Follower(self.algorithm, self.given) for _ in range(1, shards)]

    def may_lead(self, shard: int, state: ShardState) -> bool:
        """Whether the lead goes on with a follower in this state."""
        assert self.lead_brain.readmission.refusal(shard, state) is None
        return True

    @property
    def hosts(self) -> list[Host]:
        return [self.lead, *self.followers]

    def choices(self, *, whole: bool = False) -> list[Callable[[], Any]]:
        """What could happen next; ``whole``: bytes arrive as they were sent."""
        found: list[Callable[[], Any]] = []  # made at each step: most of what a test does
        size = self.most if whole else self.random.choice((1, 7, 100, self.most))
        lead, brain, orders = self.lead, self.lead_brain, self.lead.orders
        listens = not isinstance(brain, Lead) or brain.lost or all(o.attached for o in orders)
        for host in (lead, *self.followers):
            if host.kernels:
                found.append(host.run)
            if host is not lead or listens:
                found += [
                    partial(host.arrive, line, size)
                    for line in host.lines.values()
                    if line.up.bytes and line.wire.pending is None
                ]
        found += [partial(leash.arrive, size) for leash in orders if leash.line.down.bytes]
        for actor in self.actors:
            for talk, line in actor.lines:
                if line.down.bytes and talk.wire.pending is None:
                    found.append(partial(actor.arrive, talk, line, size))
            if not actor.done:
                if actor.request is None or actor.request.done:
                    found.append(actor.act)
                if not actor.lines:
                    found.append(actor.connect)
        return found

    def step_doomed(self) -> None:
        """Cut a connection that a server has dropped."""
        line = self.doomed.pop()
        line.cut()
        if isinstance(line.far, Actor) and any(line is other for _t, other in line.far.lines):
            line.far.hang_up()

    def step(self) -> bool:
        """Do one thing; return whether there was one."""
        self.now += 0.001
        while self.doomed:
            self.step_doomed()
        alive = [actor for actor in self.actors if actor.lines]
        if alive and self.random.random() < self.cuts:
            actor = self.random.choice(alive)
            self.random.choice(actor.lines)[1].cut()  # the server of one notices first
            if self.random.random() < 0.5:
                actor.hang_up()
            else:  # the client notices, the other servers do not yet
                left, actor.lines = actor.lines, []
                actor.session.lost()
                for line in [line for _session, line in left if not line.dead]:
                    line.up.closed = line.down.closed = True
                    line.down.bytes.clear()
            return True
        found = self.choices()
        if not found:
            return False
        self.random.choice(found)()
        return True

    def settle(self) -> None:
        """Have everything happen that comes of what was asked, in the same order each time."""
        while True:
            found = self.choices(whole=True)
            if not found:
                return
            self.now += 0.001
            found[0]()

    def run(self, most: int = 200_000) -> None:
        """Go on until all clients are done."""
        for _ in range(most):
            if all(actor.done for actor in self.actors):
                return
            assert self.step(), self.stuck()
        raise AssertionError(f"after {most} steps: {self.stuck()}")

    def stuck(self) -> str:
        """Say who waits for what."""
        return "; ".join(
            f"{actor.name} waits for {actor.session.waiting_for}"
            for actor in self.actors
            if not actor.done
        )


__all__ = ["Actor", "AiopsError", "World"]
