"""Run a job on a Ray cluster: carry out the orders of its `WorkerGroup`, tell it what happens."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any, TypeAlias

import ray
import ray.train
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aiops.common import urls
from aiops.common.launchers import worker_name
from aiops.errors import AiopsError
from aiops.launch.program import Team
from aiops.ray import running_server
from aiops.ray.checkpoint_list import CheckpointList, KeptCheckpoint
from aiops.ray.context import LoopReport
from aiops.ray.data import DealerActor
from aiops.ray.running_server import RunningServer
from aiops.ray.servers import ServerAccess, node_is_alive
from aiops.ray.storage import Storage
from aiops.ray.worker_group import (
    DIED,
    NODE_LOST,
    RAISED,
    RETURNED,
    BeginLoop,
    GroupEvent,
    GroupFinished,
    GroupOrder,
    GroupTick,
    Notify,
    ReleaseWorker,
    RequestWorker,
    ServerDown,
    ServerLost,
    ServerUp,
    WorkerEnded,
    WorkerGroup,
    WorkerPlaced,
)
from aiops.ray.workers import LoopTask, WorkerActor

_log = logging.getLogger("aiops.ray")

_LOOK = 1.0  # seconds between two looks at the server's address
_ANSWER = 10.0  # seconds that an actor that runs has to answer
_TOGETHER = -1  # in place of a rank: the placement group of the first workers

Then: TypeAlias = Callable[[Any, BaseException | None], list[GroupEvent]]


@dataclasses.dataclass
class _WorkerHandle:
    """A worker's actor, and what is awaited of it."""

    handle: Any
    node: str = ""
    polled: Any = None  # the call for its reports
    more: bool = True  # reports may come


class RayJob:
    """One run, from its first actor to its result."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        loop: tuple[Any],
        team: Team,
        resources: dict[str, float],
        strategy: str,
        name: str,
        storage: Storage,
        checkpoints: CheckpointList,
    ) -> None:
        self._group, self._loop, self._team = group, loop, team
        self._resources, self._strategy = resources, strategy
        self._name, self._storage, self._checkpoints = name, storage, checkpoints
        self._awaited: dict[Any, Then] = {}  # by reference, what follows from its value or error
        self._actors: dict[int, _WorkerHandle] = {}
        self._errors: dict[int, Exception] = {}
        self._places: dict[int, Any] = {}  # placement groups; -1: that of the first workers
        self._dealers: dict[str, Any] = {}
        self._server: RunningServer | None = None
        self._present: list[ServerAccess] = []  # of each head of the server
        self._look_at: list[float] = []  # inf: it has been asked, and has not answered
        self._look_at_nodes = 0.0
        self._lost: set[int] = set()  # heads that Ray does not start again
        self._reports: list[LoopReport] = []
        self._value: Any = None

    def run(
        self,
        found: RunningServer | None,
        config: Any,
        start: dict[str, Any],
        datasets: Mapping[str, Any],
    ) -> ray.train.Result:
        """Run it at the server that was found, or at one that is started; return its result."""
        detached, started = start["detached"], list[Any]()
        try:
            self._server = found or _started(config, start, started)
            self._present = [*self._server.present]
            self._look_at = [0.0] * len(self._present)
            for name, dataset in datasets.items():
                self._dealers[name] = ray.remote(DealerActor).options(num_cpus=0).remote(dataset)
            end = self._supervised()
            result = self._result(end)
            if not detached:
                self._server.stop()
            return result
        except BaseException:
            if not detached:
                for actor in started:
                    ray.kill(actor)
            raise
        finally:
            for rank in [*self._actors]:
                self._release(rank, forgo=True)
            for place in self._places.values():
                remove_placement_group(place)
            for dealer in self._dealers.values():
                ray.kill(dealer)

    # ------------------------------------------------------------ events and orders

    def _supervised(self) -> GroupFinished:
        orders = self._group.begin()
        while True:
            for order in orders:
                if isinstance(order, GroupFinished):
                    return order
                self._carry_out(order)
            orders = []
            for event in self._next_events():
                orders += self._group.handle(event)

    def _next_events(self) -> Iterator[GroupEvent]:
        self._look()
        wait = min(self._group.wake_at - time.monotonic(), _LOOK)
        ready, _ = ray.wait(
            [*self._awaited], num_returns=1, timeout=max(0.0, wait), fetch_local=False
        )
        if not ready:
            yield GroupTick(time.monotonic())
        for reference in ready:
            then = self._awaited.pop(reference)
            try:
                value, error = ray.get(reference), None
            except Exception as raised:
                value, error = None, raised
            yield from then(value, error)

    def _carry_out(self, order: GroupOrder) -> None:
        match order:
            case RequestWorker(rank, together):
                self._request(rank, together)
            case BeginLoop():
                self._begin(order)
            case ReleaseWorker(rank, forgo):
                self._release(rank, forgo)
            case Notify(text):
                _log.warning("%s: %s", self._name, text)

    # ------------------------------------------------------------ the server

    def _look(self) -> None:
        """Ask where the server is, and its standby, if it is time."""
        assert self._server is not None
        for index, head in enumerate(self._server.heads):
            if time.monotonic() >= self._look_at[index]:
                self._look_at[index] = inf
                self._awaited[head.access.remote()] = partial(self._seen, index)
        if len(self._present) > 1 and time.monotonic() >= self._look_at_nodes:
            self._look_at_nodes = time.monotonic() + _LOOK
            alive = [node_is_alive(access.node) for access in self._present]
            for index, is_alive in enumerate(alive):
                if not is_alive and any(alive):  # until it is started elsewhere, there is the other
                    self._note(index, self._present[alive.index(True)])

    def _note(self, index: int, access: ServerAccess) -> None:
        """Tell workers where a server is now."""
        self._present[index] = access
        for actor in self._actors.values():
            actor.handle.server_moved.remote(index, access)

    def _seen(self, index: int, access: Any, error: BaseException | None) -> list[GroupEvent]:
        now = time.monotonic()
        if error is not None:
            text = f"the server is lost: {_sentence(error)}"
            if isinstance(error, ray.exceptions.RayActorError):
                text += (
                    " (with state=, a folder that all nodes share or a store, it is started again)"
                )
            self._lost.add(index)
            return [ServerLost(now, text)] if len(self._lost) == len(self._present) else []
        self._look_at[index] = now + _LOOK
        if access != self._present[index]:
            _log.warning("%s: a server has moved to %s", self._name, access.url)
            self._note(index, access)
        return [ServerUp(now)]

    def _has_joined(self, rank: int) -> bool:
        """Return whether the server has known a worker; True if it does not answer."""
        assert self._server is not None
        try:
            names = ray.get(self._server.lead.joined.remote(), timeout=_ANSWER)
        except (ray.exceptions.RayError, AiopsError):
            return True
        return worker_name(rank) in names

    # ------------------------------------------------------------ workers

    def _request(self, rank: int, together: bool) -> None:
        place, bundle = self._place(rank, together)
        custom = {k: v for k, v in self._resources.items() if k not in ("CPU", "GPU")}
        handle = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=self._resources.get("CPU", 0),
                num_gpus=self._resources.get("GPU", 0),
                resources=custom,
                max_concurrency=4,  # the loop, a call for reports, and the server's moves
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=place, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )
        self._actors[rank] = actor = _WorkerHandle(handle)

        def placed(node: Any, error: BaseException | None) -> list[GroupEvent]:
            if self._actors.get(rank) is not actor:
                return []
            if error is not None:
                return self._ended(rank, actor, error)
            actor.node = node
            return [WorkerPlaced(time.monotonic(), rank, node)]

        self._awaited[handle.node.remote()] = placed

    def _place(self, rank: int, together: bool) -> tuple[Any, int]:
        """Return the placement group of a worker, and its bundle there.

        The first workers have one in common, so that they have room together or not at all. Each
        other worker has one of its own: those that find no room are what Ray's autoscaler sees.
        """
        key = _TOGETHER if together else rank
        if key not in self._places:
            count = self._group.least if together else 1
            self._places[key] = placement_group(
                [self._resources] * count, strategy=self._strategy if together else "PACK"
            )
        return self._places[key], rank if together else 0

    def _begin(self, order: BeginLoop) -> None:
        assert self._server is not None
        rank, actor = order.rank, self._actors[order.rank]
        accesses = self._server.accesses
        url = urls.write_all(urls.ServerAddress(each.host, each.port) for each in accesses)
        newest = self._checkpoints.newest
        team = dataclasses.replace(self._team, local_workers=order.local_workers)
        task = LoopTask(
            loop=self._loop,
            place=team.place(rank, order.restarts, url, order.local_rank),
            accesses=accesses,
            present=tuple(self._present),
            name=self._name,
            storage=self._storage,
            newest=None if newest is None else newest.path,
            datasets=self._dealers,
        )

        def ended(value: Any, error: BaseException | None) -> list[GroupEvent]:
            if self._actors.get(rank) is not actor:
                return []
            if error is not None:
                return self._ended(rank, actor, error)
            if rank == 0:
                self._value = value
            self._drain(actor)
            return [WorkerEnded(time.monotonic(), rank, RETURNED)]

        self._awaited[actor.handle.run.remote(task)] = ended
        self._poll(rank, actor)

    def _ended(self, rank: int, actor: _WorkerHandle, error: BaseException) -> list[GroupEvent]:
        """Return the events of a worker's failure."""
        self._errors[rank] = error if isinstance(error, Exception) else RuntimeError(str(error))
        for dealer in self._dealers.values():
            dealer.lost.remote(rank)
        now, how, joined, found = time.monotonic(), DIED, True, list[GroupEvent]()
        if isinstance(error, ray.exceptions.RayTaskError):
            how, joined = RAISED, self._has_joined(rank)
            self._drain(actor)
        elif not node_is_alive(actor.node):
            how = NODE_LOST
            # Of a pair, the other takes over.
            if [actor.node] == [access.node for access in self._present]:
                found.append(ServerDown(now))
        return [*found, WorkerEnded(now, rank, how, _sentence(error), joined)]

    def _release(self, rank: int, forgo: bool) -> None:
        actor = self._actors.pop(rank, None)
        if actor is not None:
            ray.kill(actor.handle)
        if forgo and rank in self._places:
            remove_placement_group(self._places.pop(rank))

    # ------------------------------------------------------------ reports

    def _poll(self, rank: int, actor: _WorkerHandle) -> None:
        def polled(value: Any, error: BaseException | None) -> list[GroupEvent]:
            if error is None:
                self._take(actor, value)
                if actor.more and self._actors.get(rank) is actor:
                    self._poll(rank, actor)
            return []

        actor.polled = actor.handle.reports.remote()
        self._awaited[actor.polled] = polled

    def _drain(self, actor: _WorkerHandle) -> None:
        """Take the last reports of a worker whose loop has ended."""
        with contextlib.suppress(ray.exceptions.RayError):
            while actor.more:
                self._awaited.pop(actor.polled, None)
                self._take(actor, ray.get(actor.polled, timeout=_ANSWER))
                actor.polled = actor.handle.reports.remote()

    def _take(self, actor: _WorkerHandle, value: tuple[list[LoopReport], bool]) -> None:
        reports, over = value
        actor.more = not over
        for report in reports:
            self._reports.append(report)
            if report.checkpoint is None:
                continue
            for path in self._checkpoints.add(KeptCheckpoint(report.checkpoint, report.metrics)):
                try:
                    self._storage.delete(path)
                except OSError as failed:
                    _log.warning("%s: %s cannot be deleted: %s", self._name, path, failed)

    # ------------------------------------------------------------ the result

    def _result(self, end: GroupFinished) -> ray.train.Result:
        failures = {rank: self._errors[rank] for rank in end.failures}
        error = None
        if failures:
            lines = [f"worker {rank}: {why}" for rank, why in end.failures.items()]
            error = ray.train.WorkerGroupError("\n".join(lines), failures)
        if end.error and failures:
            raise ray.train.WorkerGroupError(end.error, failures)
        if end.error:
            raise ray.train.ControllerError(AiopsError(end.error))
        import pandas

        rows = [{"rank": each.rank, **each.metrics} for each in self._reports]
        newest = self._checkpoints.newest
        return ray.train.Result(
            metrics=next((dict(r.metrics) for r in reversed(self._reports) if r.rank == 0), None),
            checkpoint=None if newest is None else self._storage.checkpoint(newest.path),
            error=error,
            path=self._storage.folder,
            metrics_dataframe=pandas.DataFrame(rows) if rows else None,
            best_checkpoints=[
                (self._storage.checkpoint(kept.path), dict(kept.metrics))
                for kept in self._checkpoints.kept
            ],
            return_value=self._value,
            _storage_filesystem=self._storage.filesystem,
        )


def _started(config: Any, start: dict[str, Any], started: list[Any]) -> RunningServer:
    """Start the server; ``started``: gets its actors, even if one of them fails."""
    try:
        return running_server.start(config, **start, notify=started.append)
    except (AiopsError, ray.exceptions.RayError) as error:
        for actor in started:  # detached ones too: their name would lead to a server that is none
            ray.kill(actor)
        text = f"the server did not start: {_sentence(error)}"
        raise ray.train.ControllerError(AiopsError(text)) from None


def _sentence(error: BaseException) -> str:
    """Return an error's text on one line, without Ray's account of where it was raised."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if cause is None and isinstance(error, ray.exceptions.RayActorError) and len(lines) > 1:
        return lines[-1]
    return " ".join(lines) or type(error).__name__
