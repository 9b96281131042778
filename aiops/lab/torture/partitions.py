"""Workers and a server on two networks, which are parted again and again for a while.

Seen from outside: in ``/proc`` of each process, how long its connection outlives a cut; in the
workers' logs, how soon after the cut each push is acknowledged again; at the end, in the saved
model, that each acknowledged push counts once.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiops.common.closing import Closing
from aiops.errors import AiopsError
from aiops.lab.torture.checker import CellRange, ClientView, violations
from aiops.lab.torture.pusher import MODEL, PusherPlan, push_on
from aiops.lab.torture.routed_network import CUTS, RoutedNetwork, inside
from aiops.lab.torture.server_group import last_line
from aiops.lab.torture.spawner import Forked, Spawner, run_server
from aiops.lab.torture.trial_series import TrialSeries
from aiops.serving.safetensors_io import read_model

_PORT = 7171
_WORKERS = 2
"""A `Worker`, whose thread answers while it computes, and a client without a thread."""

_CELLS = 1000  # of each worker
_PAUSE = 0.03  # seconds between pushes
_LOOK = 0.01  # seconds between looks
_PATIENCE = 60.0
_RIDES_OUT = 3600.0  # seconds that a worker waits for the network
_TOKEN = "partitions"

_ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The plan of one server's partitions.

    Attributes
    ----------
    seed
        That it was drawn from.
    variant
        How the network is cut, one of `CUTS`.
    cuts
        Seconds that each partition lasts.
    pauses
        Seconds of peace before each.
    """

    seed: int
    variant: str
    cuts: tuple[float, ...]
    pauses: tuple[float, ...]


def draw_partitions(seed: int, names: Sequence[str]) -> PartitionPlan:
    """Draw a plan: of ten partitions nine take 1 to 12 s, and one in a hundred up to 10 minutes."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(10):
        chance = rng.random()
        shortest, longest = (1, 12) if chance < 0.9 else (12, 60) if chance < 0.99 else (60, 600)
        lengths.append(round(math.exp(rng.uniform(math.log(shortest), math.log(longest))), 3))
    pauses = tuple(round(rng.uniform(0.1, 1.5), 3) for _ in lengths)
    return PartitionPlan(seed, rng.choice(list(names)), tuple(lengths), pauses)


@dataclass(slots=True)
class PartitionResult:
    """The findings about one server's partitions.

    Attributes
    ----------
    plan
        The trial's.
    partitions
        Those that were made and healed.
    server_noticed, worker_noticed
        Seconds after which the server, and each worker, had given up a connection, if it had.
    healed
        Seconds after each cut until all workers had an acknowledgement again.
    acknowledged
        Pushes.
    wrong
        What contradicts the promise, one sentence each.
    """

    plan: PartitionPlan
    partitions: int = 0
    server_noticed: list[float] = field(default_factory=list)
    worker_noticed: list[float] = field(default_factory=list)
    healed: list[float] = field(default_factory=list)
    acknowledged: int = 0
    wrong: list[str] = field(default_factory=list)


class Lane(Closing):
    """The helper of one job: a network, and the process that forks those on its sides."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.network = RoutedNetwork(f"{os.getpid() % 100_000}.{next(self._numbers)}")
        try:
            self.spawner = Spawner()
            self.spawner.rehearse()
        except BaseException:
            self.network.close()
            raise

    def close(self) -> None:
        """End the process, and remove the network."""
        self.spawner.close()
        self.network.close()


class PartitionTrial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    folder
        An empty folder.
    lane
        Where.
    flags
        Further flags of the server.
    """

    def __init__(
        self, plan: PartitionPlan, folder: Path, lane: Lane, flags: Sequence[str] = ()
    ) -> None:
        self.result, self._plan, self._folder = PartitionResult(plan), plan, folder
        self._network, self._spawner, self._flags = lane.network, lane.spawner, flags
        self._cells = [CellRange(_CELLS * number, _CELLS) for number in range(_WORKERS)]
        self._processes: list[Forked] = []

    def run(self) -> PartitionResult:
        """Carry it out."""
        try:
            server = self._start_server()
            workers = [self._start_worker(number) for number in range(_WORKERS)]
            for seconds, pause in zip(self._plan.cuts, self._plan.pauses, strict=True):
                self._await_pushes("before a partition")
                time.sleep(pause)
                self._part(server, workers, seconds)
            self._end(server, workers)
        except AiopsError as error:
            self.result.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            for process in self._processes:
                process.kill()
        return self.result

    def _start_server(self) -> Forked:
        flags = ["--host", "0.0.0.0", "--port", str(_PORT), "--token", _TOKEN, "--policy", "asgd"]
        flags += ["--set", "lr=1", "--save", str(self._saved), *self._flags]
        server = self._start("server", self._network.server, run_server, flags)
        for _ in _looks("the server does not listen"):
            if "aiops://" in server.text():
                break
        return server

    def _start_worker(self, number: int) -> Forked:
        plan = PusherPlan(
            url=f"aiops://{RoutedNetwork.SERVER}:{_PORT}",
            name=f"worker-{number}",
            size=_CELLS * _WORKERS,
            cells=self._cells[number],
            scale=1.0,
            pause=_PAUSE,
            own=True,
            log=str(self._log(number)),
            timeout=_RIDES_OUT,
            plain=number > 0,
        )
        return self._start(plan.name, self._network.workers, push_on, plan)

    def _start(self, name: str, side: str, target: Any, *arguments: Any) -> Forked:
        environment = {"AIOPS_TOKEN": _TOKEN}
        process = self._spawner.start(
            inside, self._folder / name, side, target, *arguments, environment=environment
        )
        self._processes.append(process)
        return process

    def _part(self, server: Forked, workers: Sequence[Forked], seconds: float) -> None:
        """Cut the network for some seconds, look who notices, and see that all go on."""
        plan, result = self._plan, self.result
        began = time.monotonic()
        self._network.cut(plan.variant)
        watched = {"server": server.pid, **{f"worker-{n}": w.pid for n, w in enumerate(workers)}}
        noticed: dict[str, float] = {}
        while (now := time.monotonic() - began) < seconds:
            for name, pid in watched.items():
                if name not in noticed and not connections(pid):
                    noticed[name] = now
            time.sleep(min(_LOOK, seconds - now))
        self._network.heal(plan.variant)
        since = time.monotonic()
        self._await_pushes(f"after {seconds:g} s of {plan.variant}")
        result.healed.append(round(time.monotonic() - since, 3))
        result.server_noticed += [round(noticed[name], 3) for name in noticed if name == "server"]
        result.worker_noticed += [round(noticed[name], 3) for name in noticed if name != "server"]
        result.partitions += 1

    def _await_pushes(self, when: str) -> None:
        """Wait until each worker has had an acknowledgement from now on."""
        before = [self._size(number) for number in range(_WORKERS)]
        for _ in _looks(f"no push is acknowledged {when}"):
            if all(self._size(number) > size for number, size in enumerate(before)):
                return
            ended = [each for each in self._processes if each.wait(0) is not None]
            if ended:
                raise AiopsError(f"a process ended {when}: {last_line(ended[0])}")

    def _end(self, server: Forked, workers: Sequence[Forked]) -> None:
        """Have all end, and compare the saved model with what the workers saw."""
        for process in (*workers, server):
            process.signal(signal.SIGTERM)
            if process.wait(_PATIENCE) != 0:
                raise AiopsError(f"a process did not end well: {last_line(process)}")
        views = []
        for number, cells in enumerate(self._cells):
            view = ClientView.parse(f"worker-{number}", cells, self._log(number).read_bytes())
            self.result.acknowledged += len(view.acknowledged)
            views.append(view)
        model = np.array(read_model(self._saved)[MODEL])
        self.result.wrong += violations(model, views)

    @property
    def _saved(self) -> Path:
        return self._folder / "model.safetensors"

    def _log(self, number: int) -> Path:
        return self._folder / f"log-{number}"

    def _size(self, number: int) -> int:
        log = self._log(number)
        return log.stat().st_size if log.exists() else 0


def connections(pid: int) -> int:
    """Return the TCP connections to or from the server's port that a process's network has."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    port, count = f":{_PORT:04X}", 0
    for line in lines:
        _number, local, remote, state, *_rest = line.split()
        count += state == _ESTABLISHED and (local.endswith(port) or remote.endswith(port))
    return count


def _looks(what: str) -> Iterator[None]:
    """Yield again and again; after `_PATIENCE` raise an error that says what did not happen."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        yield
        time.sleep(_LOOK)
    raise AiopsError(f"{what} within {_PATIENCE:g} s")


@dataclass(slots=True)
class PartitionCampaign(TrialSeries[PartitionResult, Lane]):
    """Partitions until there are enough, or the time is over.

    Attributes
    ----------
    flags
        Further flags of the servers.
    """

    names: tuple[str, ...] = CUTS
    flags: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        """The partitions so far."""
        return sum(result.partitions for result in self.results)

    @property
    def variants(self) -> tuple[str, ...]:
        """All ways to cut."""
        return CUTS

    @property
    def progress(self) -> str:
        """A few words about what is done so far."""
        return f"{self.counted:,} partitions, {len(self.failures)} failures"

    def helper(self) -> Lane:
        """Return a network and a process that forks, for one job."""
        return Lane()

    def try_seed(self, seed: int, helper: Lane) -> PartitionResult:
        """Carry out the trial of a seed."""
        with tempfile.TemporaryDirectory(prefix=f"torture-{seed}-") as folder:
            plan = draw_partitions(seed, self.names)
            return PartitionTrial(plan, Path(folder), helper, self.flags).run()

    def findings(self, results: list[PartitionResult]) -> dict[str, Any]:
        """Return what the report says of results."""
        kinds: Counter[str] = Counter()
        for result in results:
            kinds[result.plan.variant] += result.partitions
        return {
            "tried": self.counted,
            "partitions_by_kind": dict(sorted(kinds.items())),
            "acknowledged": sum(result.acknowledged for result in results),
            "cut_seconds": _spread(cut for result in results for cut in result.plan.cuts),
            "server_noticed_seconds": _spread(s for r in results for s in r.server_noticed),
            "worker_noticed_seconds": _spread(s for r in results for s in r.worker_noticed),
            "healed_seconds": _spread(s for r in results for s in r.healed),
        }


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Return the number of values, their median, the one that 1 % exceed, and the largest."""
    found = sorted(values)
    if not found:
        return {"count": 0}
    return {
        "count": len(found),
        "median": round(statistics.median(found), 3),
        "p99": found[min(len(found) - 1, int(0.99 * len(found)))],
        "longest": found[-1],
    }
