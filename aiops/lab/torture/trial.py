"""One trial: servers, their workers, the kills, and what was found at the end."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aiops.client.sync.client import Client
from aiops.client.sync.worker import Worker
from aiops.errors import AiopsError
from aiops.lab.torture.checker import (
    ClientView,
    mean_violations,
    touched_violations,
    uncertain,
    violations,
)
from aiops.lab.torture.plan import KillMoment, TrialPlan
from aiops.lab.torture.pusher import MODEL, PusherPlan, push_on
from aiops.lab.torture.server_group import (
    PATIENCE,
    RunServer,
    ServerGroup,
    TrialFailed,
    copy_state,
    last_line,
    looks,
)
from aiops.lab.torture.spawner import Forked, Spawner, run_server
from aiops.model.layout import Array

_TIMEOUT = 900.0  # a worker's: it may find the server gone at each of its attempts
_LINE = 14  # bytes of a line of a log, roughly


@dataclass(slots=True)
class TrialResult:
    """The findings of a trial.

    Attributes
    ----------
    plan
        The trial's.
    kills, early
        The processes killed, and those of them before they were ready.
    cuts
        The cuts of the line between a lead and its follower.
    points
        Those that ended themselves, by the point of ``AIOPS_FAULTS``.
    acknowledged, lost
        The pushes that a client saw acknowledged, and those of which it was told that they are
        lost.
    uncertain, applied
        The clients that were killed, and those of them whose last push is part of the model all the
        same.
    slowest
        Seconds that servers which were asked to end took to do so, at most.
    wrong
        What contradicts the promise, one sentence each.
    seconds
        The time that it took.
    """

    plan: TrialPlan
    kills: int = 0
    early: int = 0
    cuts: int = 0
    points: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: int = 0
    uncertain: int = 0
    applied: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """A plan that is carried out.

    Parameters
    ----------
    plan
        What to do.
    folder
        An empty folder.
    spawner
        Forks the processes.
    run_server
        Runs a server with these flags.
    """

    def __init__(
        self, plan: TrialPlan, folder: Path, spawner: Spawner, run_server: RunServer = run_server
    ) -> None:
        self.result = TrialResult(plan)
        self._plan, self._folder, self._spawner = plan, folder, spawner
        self._servers = ServerGroup(plan, folder, spawner, run_server)
        self._workers: list[tuple[Forked, str, int]] = []  # the process, its name, its life
        self._offered = False  # a server has lost all, and is offered a worker's parameters

    def kill_servers(self) -> TrialResult:
        """Kill or end servers again and again, and see that their workers notice nothing."""
        return self._carry_out(self._while_servers_die)

    def kill_workers(self) -> TrialResult:
        """Kill workers again and again, and see that the server counts as it promised."""
        return self._carry_out(self._while_workers_die)

    def _carry_out(self, what: Callable[[], None]) -> TrialResult:
        began = time.monotonic()
        try:
            what()
        except AiopsError as error:
            self.result.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self._servers.close()
            for process, *_ in self._workers:
                process.kill()
        self.result.seconds = time.monotonic() - began
        return self.result

    # -------------------------------------------------------------- the two scenes

    def _while_servers_die(self) -> None:
        servers, moments = self._servers, self._plan.moments
        servers.begin(_faults(moments[0]))
        for moment, following in zip(moments, (*moments[1:], None), strict=True):
            if self._await(moment):
                self.result.points[moment.point] += 1
            if moment.cut is not None:
                servers.cut(moment.cut)
                self.result.cuts += 1
                continue
            self.result.kills += moment.kills
            self._strike(moment.targets)
            self._offered |= self._plan.lossy and not servers.have_snapshots
            servers.recover(moment.targets, _faults(following), moment.second)
        servers.ready()
        self._start_workers()
        self._wait_for_progress(1)
        self._stop_workers()
        self._flush()
        before = self._fetch(servers.port)
        self._check(*before)
        self._compare(before)

    def _strike(self, targets: Collection[int]) -> None:
        """Kill servers, or have them end."""
        if self._plan.orderly:
            seconds = self._servers.end_together(targets)
            self.result.slowest = max(self.result.slowest, seconds)
        else:
            self._servers.strike(targets)

    def _await(self, moment: KillMoment) -> bool:
        """Wait for the moment at which a server is to be killed; return whether it has ended."""
        server = self._servers.current
        if moment.early:
            time.sleep(moment.seconds)
            self.result.early += "aiops://" not in server.text()
            return False
        try:
            self._servers.ready()
            self._start_workers()
            self._servers.wait_for_standbys()
            if self._plan.lossy:
                self._wait_for_snapshot()
            self._wait_for_progress(moment.pushes, server if moment.point else None)
            time.sleep(moment.seconds)
        except TrialFailed:
            if not (moment.point and server.wait(0) == -signal.SIGKILL):
                raise
        return bool(moment.point) and server.wait(0) == -signal.SIGKILL

    def _while_workers_die(self) -> None:
        plan = self._plan
        self._servers.begin()
        self._servers.ready()
        self._start_workers()
        running = list(range(plan.workers))
        due: dict[int, float] = {}
        last = time.monotonic()
        while running:
            now = time.monotonic()
            for life in tuple(running):
                moment = plan.moments[life]
                if life not in due and (moment.early or self._pushed(life) >= moment.pushes):
                    due[life] = now + moment.seconds
                if life not in due or now < due[life]:
                    continue
                self._workers[life][0].kill()
                self.result.kills += 1
                self.result.early += not self._log(life).exists()
                self._start_worker(len(self._workers))
                running.remove(life)
                if len(self._workers) <= plan.kills:
                    running.append(len(self._workers) - 1)
                last = now
            if now > last + PATIENCE:
                raise TrialFailed(f"no worker pushed for {PATIENCE:g} s")
            time.sleep(min(0.05, max(0.002, (now - last) / 10)))
        self._wait_for_progress(1)
        self._stop_workers(plan.kills)
        self._flush()
        self._check(*self._fetch(self._servers.port))
        self._servers.end()

    # -------------------------------------------------------------- processes

    def _start_workers(self) -> None:
        """Start the first workers, if that was not done."""
        for life in range(len(self._workers), self._plan.workers):
            self._start_worker(life)

    def _start_worker(self, life: int) -> None:
        plan, name = self._plan, f"worker-{life}"
        orders = PusherPlan(
            url=self._servers.url,
            name=name,
            size=plan.size,
            cells=plan.cells_of(life),
            scale=plan.checked.scale,
            pause=plan.pauses[life],
            own=plan.checked.own,
            log=str(self._log(life)),
            timeout=_TIMEOUT,
            plain=plan.checked.plain,
            dtype=plan.checked.dtype,
        )
        process = self._spawner.start(push_on, self._folder / name, orders)
        self._workers.append((process, name, life))

    def _stop_workers(self, first: int = 0) -> None:
        """Have the workers from ``first`` on end after the push that they make."""
        for process, _name, _life in self._workers[first:]:
            process.signal(signal.SIGTERM)
        for process, name, _life in self._workers[first:]:
            status = process.wait(PATIENCE + 5)
            if status is None:
                self.result.wrong.append(f"{name} does not end")
            elif status not in (0, -signal.SIGTERM):  # the latter: it had not begun
                self.result.wrong.append(f"{name} ended with status {status}: {last_line(process)}")

    def _wait_for_progress(self, pushes: int, server: Forked | None = None) -> None:
        """Wait until ``pushes`` more are acknowledged, or all workers, or a server, have ended.

        A push has a line of some `_LINE` bytes in a log.
        """
        goal = self._written() + _LINE * pushes - _LINE // 2
        for _ in looks(f"{pushes} pushes were not acknowledged"):
            if self._written() >= goal or (server is not None and server.wait(0) is not None):
                return
            if all(process.wait(0) is not None for process, *_ in self._workers):
                return

    def _wait_for_snapshot(self) -> None:
        """Wait until there is a snapshot: a server without one would begin with no model."""
        for _ in looks("no snapshot was written"):
            if self._servers.have_snapshots:
                return
            if self._servers.current.wait(0) is not None:
                raise TrialFailed(f"a server ended: {last_line(self._servers.current)}")

    def _written(self) -> int:
        logs = (self._log(life) for _process, _name, life in self._workers)
        return sum(log.stat().st_size for log in logs if log.exists())

    def _pushed(self, life: int) -> int:
        """Return the pushes that a worker saw acknowledged; -1: it has not begun."""
        log = self._log(life)
        return log.read_bytes().count(b"\n") if log.exists() else -1

    def _log(self, life: int) -> Path:
        return self._folder / f"log-{life}"

    # -------------------------------------------------------------- what is found

    def _fetch(self, port: int) -> tuple[int, Array]:
        """Return the version and the parameters of a server."""
        with Client(f"aiops://127.0.0.1:{port}", timeout=PATIENCE) as client:
            params = client.fetch()
            return params.version, np.array(params[MODEL], np.float64)

    def _flush(self) -> None:
        """Complete a sum of pushes that waits for more: pushes of zeros change nothing else."""
        if self._plan.checked.scale <= 1:
            return
        zeros = {MODEL: np.zeros(self._plan.size, self._plan.checked.dtype)}
        with Worker(self._servers.url, zeros, name="flush", timeout=PATIENCE) as worker:
            for _ in range(self._plan.checked.scale - 1):
                worker.step(zeros)

    def _check(self, version: int, model: Array) -> None:
        """Compare the model with what the clients saw."""
        plan, views = self._plan, []
        for process, name, life in self._workers:
            log = self._log(life)
            data = log.read_bytes() if log.exists() else b""
            view = ClientView.parse(name, plan.cells_of(life), data, lossy=plan.lossy)
            if process.wait(0) == 0 and not view.ended and not view.told:
                view.told.append("it ended without a word")
            self.result.acknowledged += len(view.acknowledged)
            self.result.lost += view.rolled_back
            if plan.checked.touched and not view.ended:
                self.result.uncertain += 1
                self.result.applied += uncertain(model, view)
            views.append(view)
        if plan.checked.additive:
            scaled = plan.checked.scaled
            self.result.wrong += violations(
                model, views, scaled=scaled, lossy=plan.lossy, offered=self._offered
            )
        elif plan.checked.means:
            self.result.wrong += mean_violations(model, version, views)
        else:
            touched = plan.checked.touched
            self.result.wrong += touched_violations(model, version, views, cells=touched)

    def _compare(self, before: tuple[int, Array]) -> None:
        """Compare the servers after a restart, and one on a copy of a folder, with the last."""
        servers, plan = self._servers, self._plan
        everyone, orderly = range(plan.shards), plan.lossy or plan.orderly
        if plan.sites > 1:
            servers.wait_for_standbys()
            self._strike(everyone)  # the standbys have all
            servers.recover(everyone)
            self._same(before, servers.port, "promoted")
        elif plan.shards > 1 and orderly:
            servers.end_all()  # they write snapshots
            servers.begin()
            servers.ready()
            self._same(before, servers.port, "restarted")
            servers.end_all()
            return
        elif plan.shards > 1:
            servers.strike(everyone)
            servers.recover(everyone)
            servers.ready()
            self._same(before, servers.port, "restarted")
        elif orderly:
            servers.end()  # it writes a snapshot
            servers.start()
            servers.ready()
            self._same(before, servers.port, "restarted")
            servers.end()
            return
        else:
            servers.current.kill()
            copy_state(servers.state, self._folder / "copy")
            servers.start()
            other, port = servers.copied("copy")
            servers.ready()
            self._same(before, servers.port, "restarted")
            servers.end()
            servers.ready(other)
            self._same(before, port, "copied")
            servers.end(other)
        self.result.kills += plan.shards

    def _same(self, before: tuple[int, Array], port: int, what: str) -> None:
        version, model = self._fetch(port)
        if version != before[0]:
            self.result.wrong.append(f"version {before[0]} is {version} when {what}")
        elif model.tobytes() != before[1].tobytes():
            self.result.wrong.append(f"the parameters of version {version} differ when {what}")


def _faults(moment: KillMoment | None) -> str:
    """Return ``AIOPS_FAULTS`` of a server that is to be killed at a moment."""
    return f"crash={moment.point}:{moment.count}" if moment and moment.point else ""
