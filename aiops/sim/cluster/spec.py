"""A cluster in virtual time: the real server, the real workers, simulated machines and links.

::

    cluster = Cluster(
        server=Config(policy="fasgd", lr=0.01),
        workers=64,
        computing=LogNormal(0.1),
        links=StarTopology(worker="1Gbit/s", server="1Gbit/s", latency=0.0002),
        gradients=10_000,
    )
    outcome = simulate(cluster)
    outcome.seconds, outcome.idle, outcome.staleness

gives the time of such a run, the idle time and the staleness of its workers, and their learning
curve. The same `Cluster` gives the same `ClusterResult`, to the last bit of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TypeAlias

from aiops.bandwidth.units import parse_rate
from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.sim.cluster.compute_time import Computing, Fixed
from aiops.sim.cluster.workload import Deadweight, Workload
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.links import SimulatedLink


@dataclass(frozen=True, kw_only=True)
class StarTopology:
    """The links of a server and its workers: each has one of its own to a common switch.

    Parameters
    ----------
    worker, server
        The rate of a worker's link in each direction, and of the server's, which all workers
        share: bytes per second, or text such as ``"1Gbit/s"``
        (`aiops.bandwidth.units.parse_rate`); None: no limit.
    latency
        Seconds that bytes travel between a worker and the server, each way.
    jitter
        Seconds that a message may travel longer, drawn uniformly; the order stays.
    burst
        Seconds of its rate that a link may carry at once after a pause, as a token bucket does.
    """

    worker: float | str | None = None
    server: float | str | None = None
    latency: float = 0.0
    jitter: float = 0.0
    burst: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("latency", "jitter", "burst"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise UsageError(f"{name} is {seconds:g} s: give 0 or more seconds")
        self._link("worker"), self._link("server")

    def host(self, name: str, kind: str) -> Host:
        """Return a worker's host, or the server's."""
        links = (self._link(kind),), (self._link(kind),)
        if kind == "server":
            return Host(name, *links)
        return Host(name, *links, self.latency, self.jitter)

    def _link(self, kind: str) -> SimulatedLink:
        given = getattr(self, kind)
        if given is None:
            return SimulatedLink()
        rate = parse_rate(f"the rate of a {kind}'s link:", given)
        return SimulatedLink(rate, self.burst * rate)


@dataclass(frozen=True)
class Cut:
    """The network of a worker fails: its connection is reset, and it connects again.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    worker
        Its number.
    """

    at: float
    worker: int


@dataclass(frozen=True)
class Silence:
    """Nothing comes from a worker for a while, or reaches it, as when a cable is out.

    Neither end is told. Bytes that are sent meanwhile arrive afterwards, if neither end has closed
    the connection by then.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    worker
        Its number.
    seconds
        Its duration.
    """

    at: float
    worker: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A worker's machine fails; its connection is reset, and it does not come back.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    worker
        Its number.
    """

    at: float
    worker: int


@dataclass(frozen=True)
class Join:
    """More workers join; their numbers follow those of all earlier workers.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    workers
        The number of workers that join.
    """

    at: float
    workers: int = 1


ClusterEvent: TypeAlias = Cut | Silence | Kill | Join


def _as_flag(event: ClusterEvent) -> str:
    """Return an event as a flag of ``aiops cluster``: ``--kill 2:9``."""
    values = ":".join(f"{value:.15g}" for value in astuple(event))
    return f"--{type(event).__name__.lower()} {values}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The settings of a simulated cluster.

    Parameters
    ----------
    server
        The server's settings: policy, learning rate, gate, codecs, budget, deadlines. Its
        ``workers`` is set to that of the cluster.
    workers
        The number of workers at the beginning.
    workload
        What they train; default: a `Deadweight` of 100,000 bytes, which learns nothing.
    computing
        The model of their compute time; default: 0.1 s for each mini-batch.
    links
        Rates and delays; default: no limits and no delays.
    apply_seconds, apply_rate
        The time of an update on the server: a fixed number of seconds, and the bytes that the
        update reads and writes (parameters, the rule's state, the gradient) divided by
        ``apply_rate`` in bytes per second.
    schedule
        Faults and joining workers.
    gradients, seconds
        The end: that number of mini-batches of all workers together, or of virtual seconds of
        training, whichever comes first. One must be given.
    every
        Virtual seconds between two tests of the parameters; None: at the end only.
    overlap
        How many exchanges a worker has under way while it computes, as of `AsyncWorker`; default 0.
    patience
        Virtual seconds that a worker waits for an answer.
    seed
        Of everything that is random.
    pieces
        The most bytes that a protocol is given at once, a random number each time; None: all there
        are. The result does not depend on it.

    Raises
    ------
    UsageError
        When a setting cannot work; the text says what to give instead.
    """

    server: Config = field(default_factory=Config)
    workers: int = 4
    workload: Workload = field(default_factory=partial(Deadweight, 100_000))
    computing: Computing = field(default_factory=partial(Fixed, 0.1))
    links: StarTopology = field(default_factory=StarTopology)
    apply_seconds: float = 0.0
    apply_rate: float = math.inf
    schedule: tuple[ClusterEvent, ...] = ()
    gradients: int | None = None
    seconds: float | None = None
    every: float | None = None
    overlap: int = 0
    patience: float = 600.0
    seed: int = 0
    pieces: int | None = None

    def __post_init__(self) -> None:
        """Check the settings, one by one and together."""
        if self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot train: give 1 or more")
        if self.gradients is None and self.seconds is None:
            raise UsageError("the simulation would never end: give gradients=..., or seconds=...")
        for name in ("gradients", "seconds", "every", "patience", "apply_rate", "pieces"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value:g}: give more than 0")
        if not 0 <= self.apply_seconds < math.inf:
            raise UsageError(f"apply_seconds is {self.apply_seconds:g}: give 0 or more seconds")
        if self.seed < 0:
            raise UsageError(f"the seed is {self.seed}: give a whole number, 0 or more")
        self._check_schedule()

    def _check_schedule(self) -> None:
        there = self.workers
        for event in sorted(self.schedule, key=lambda event: event.at):
            if not 0 <= event.at < math.inf:
                raise UsageError(
                    f"{_as_flag(event)} comes at {event.at:g} s, and training begins at 0 s: give a"
                    " finite number of seconds, 0 or more"
                )
            if isinstance(event, Join):
                if event.workers < 1:
                    raise UsageError(
                        f"{_as_flag(event)} has {event.workers} workers join: give 1 or more"
                    )
                there += event.workers
            elif not 0 <= event.worker < there:
                raise UsageError(
                    f"{_as_flag(event)} is of worker {event.worker}, and there are workers 0 to"
                    f" {there - 1} by then: give one of these"
                )
            if isinstance(event, Silence) and not 0 < event.seconds < math.inf:
                raise UsageError(
                    f"{_as_flag(event)} lasts {event.seconds:g} s: give a finite number of seconds,"
                    " more than 0"
                )

    def apply_time(self) -> Callable[[int], float] | None:
        """Return the seconds of an update as a function of its bytes; None: it takes no time."""
        if not self.apply_seconds and self.apply_rate == math.inf:
            return None
        return lambda nbytes: self.apply_seconds + nbytes / self.apply_rate
