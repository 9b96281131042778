"""A cluster in virtual time: the real server, the real workers, simulated machines and links.

::

    cluster = Cluster(
        server=Config(policy="fasgd", lr=0.01),
        workers=64,
        computing=LogNormal(0.1),
        links=Links(worker="1Gbit/s", server="1Gbit/s", latency=0.0002),
        gradients=10_000,
    )
    outcome = simulate(cluster)
    outcome.seconds, outcome.idle, outcome.staleness

answers how long such a run takes, how idle its workers are, what staleness they see, and what they
learn. The same `Cluster` gives the same `Outcome`, to the last bit of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from aiops.bandwidth.units import parse_rate
from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.sim.cluster.computing import Computing, Fixed
from aiops.sim.cluster.workload import Deadweight, Workload
from aiops.sim.virtual.host import Host
from aiops.sim.virtual.sharing import Line


@dataclass(frozen=True, kw_only=True)
class Links:
    """How a server and its workers are connected: each by a link of its own to one switch.

    Parameters
    ----------
    worker, server
        What a worker's link carries each way, and the server's, which all workers share: bytes per
        second, or text such as ``"1Gbit/s"`` (`aiops.bandwidth.units.parse_rate`); None: it is no
        limit.
    latency
        Seconds that anything travels between a worker and the server, each way.
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
        self._line("worker"), self._line("server")

    def host(self, name: str, kind: str) -> Host:
        """Return a worker's host, or the server's."""
        lines = (self._line(kind),), (self._line(kind),)
        if kind == "server":
            return Host(name, *lines)
        return Host(name, *lines, self.latency, self.jitter)

    def _line(self, kind: str) -> Line:
        rate = parse_rate(f"the rate of a {kind}'s link:", getattr(self, kind))
        return Line() if rate is None else Line(rate, self.burst * rate)


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
    """Nothing comes from a worker for a while, or reaches it, and nobody is told: a cable is out.

    What is sent meanwhile arrives afterwards, if nobody has given up on the connection by then.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    worker
        Its number.
    seconds
        For how long.
    """

    at: float
    worker: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A worker's machine ceases to be; its connection is reset, and it never comes back.

    Parameters as `Cut`'s.
    """

    at: float
    worker: int


@dataclass(frozen=True)
class Join:
    """More workers come; their numbers follow those there have been.

    Parameters
    ----------
    at
        Virtual seconds since training began.
    workers
        How many.
    """

    at: float
    workers: int = 1


Happening: TypeAlias = Cut | Silence | Kill | Join


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is to be simulated.

    Parameters
    ----------
    server
        The server's settings: policy, learning rate, gate, codecs, budget, deadlines. Its
        ``workers`` is set to that of the cluster.
    workers
        How many there are at the beginning.
    workload
        What they train; default: a `Deadweight` of 100,000 bytes, which learns nothing.
    computing
        How long their mini-batches take; default: 0.1 s.
    links
        How they are connected; default: at once, and without limits.
    apply_seconds, apply_rate
        What the server takes for an update: so many seconds, and one more for so many bytes that
        the update reads and writes (of the parameters, the rule's state, the gradient).
    schedule
        What happens on the way.
    gradients, seconds
        When it ends: after so many mini-batches of all workers together, or so many virtual
        seconds of training, whichever comes first. One must be given.
    every
        Virtual seconds between two samples of what has been learnt; None: at the end only.
    patience
        Virtual seconds that a worker waits for an answer.
    seed
        Of everything that is random.
    pieces
        See `aiops.sim.virtual.network.Network`; the outcome does not depend on it.

    Raises
    ------
    UsageError
        When something cannot be; the text says what to give instead.
    """

    server: Config = field(default_factory=Config)
    workers: int = 4
    workload: Workload = field(default_factory=partial(Deadweight, 100_000))
    computing: Computing = field(default_factory=partial(Fixed, 0.1))
    links: Links = field(default_factory=Links)
    apply_seconds: float = 0.0
    apply_rate: float = math.inf
    schedule: tuple[Happening, ...] = ()
    gradients: int | None = None
    seconds: float | None = None
    every: float | None = None
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
        for happening in sorted(self.schedule, key=lambda happening: happening.at):
            if not 0 <= happening.at < math.inf:
                raise UsageError(f"{happening} cannot be: training begins at 0 seconds")
            if isinstance(happening, Join):
                if happening.workers < 1:
                    raise UsageError(f"{happening}: nobody joins; give 1 worker or more")
                there += happening.workers
            elif not 0 <= happening.worker < there:
                raise UsageError(
                    f"{happening} cannot be: there are workers 0 to {there - 1} by then"
                )
            if isinstance(happening, Silence) and not 0 < happening.seconds < math.inf:
                raise UsageError(f"{happening} cannot be: give more than 0 seconds")

    def apply_time(self) -> Callable[[int], float] | None:
        """Return the seconds of an update as a function of the bytes it touches; None: none."""
        if not self.apply_seconds and self.apply_rate == math.inf:
            return None
        return lambda nbytes: self.apply_seconds + nbytes / self.apply_rate
