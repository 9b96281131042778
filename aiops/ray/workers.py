"""Workers as Ray actors: each runs the user's loop in its process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from aiops.launch.program import Place
from aiops.net import moved_servers
from aiops.net.cpu_count import run_as_batch
from aiops.ray import context
from aiops.ray.data import DatasetShard
from aiops.ray.servers import ServerAccess
from aiops.ray.storage import Storage

_POLL = 20.0  # seconds after which a call for reports returns without any


@dataclass(frozen=True)
class LoopTask:
    """The loop that a worker is to run, and its surroundings.

    Attributes
    ----------
    loop
        A reference to the user's function and its argument, in a tuple: unpickled by the worker
        when its environment is set.
    place
        Its place in the job.
    accesses
        The server as it was when the job began, which is what its URL says for ever; of a server
        with a standby, both.
    present
        Where they are now.
    name, storage, newest, datasets
        The run's name and storage, the path of its newest checkpoint, and the actors that deal the
        blocks of its datasets.
    """

    loop: tuple[Any]
    place: Place
    accesses: Sequence[ServerAccess]
    present: Sequence[ServerAccess]
    name: str
    storage: Storage
    newest: str | None
    datasets: Mapping[str, Any]


class WorkerActor:
    """One worker; it runs one loop, and is not used again."""

    def __init__(self) -> None:
        self._queue = context.ReportQueue()
        self._first: Sequence[ServerAccess] = ()

    def node(self) -> str:
        """Return the id of its node: it has been placed."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: LoopTask) -> Any:
        """Run the loop; return what it returns."""
        run_as_batch()  # Ray's own processes and 25 threads of this one want the processors, too
        place = task.place
        given = place.variables(os.environ)
        for name in os.environ.keys() - given.keys():  # the place in another job
            del os.environ[name]
        os.environ.update(given)
        os.environ["AIOPS_TOKEN"] = task.accesses[0].token
        self._first = task.accesses
        for index, access in enumerate(task.present):
            self.server_moved(index, access)
        shards = {
            name: DatasetShard(name, dealer, place.rank, place.restarts)
            for name, dealer in task.datasets.items()
        }
        here = context.LoopContext(
            *(place.rank, place.workers, place.local_rank, place.local_workers),
            *(place.restarts, task.name),
        )
        context.enter(
            context.LoopSurroundings(here, task.storage, task.newest, shards, self._queue)
        )
        try:
            loop, config = ray.get(task.loop[0])
            return loop(config) if takes_config(loop) else loop()
        finally:
            context.enter(None)
            self._queue.close()

    def reports(self) -> tuple[list[context.LoopReport], bool]:
        """Return reports as soon as there are some, and whether no more will come."""
        return self._queue.take(_POLL)

    def server_moved(self, index: int, present: ServerAccess) -> None:
        """Connect to a server at another address from here on; ``index``: which of them."""
        for first in self._first[index : index + 1]:
            moved_servers.note((first.host, first.port), (present.host, present.port))


def takes_config(loop: Any) -> bool:
    """Return whether a loop takes an argument."""
    return bool(inspect.signature(loop).parameters)
