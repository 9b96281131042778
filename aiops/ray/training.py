"""`train`: check what a job is given, and run it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train

from aiops.errors import ConflictError, UsageError
from aiops.launch.program import Team
from aiops.ray import running_server
from aiops.ray.checkpoint_list import CheckpointList
from aiops.ray.job import RayJob
from aiops.ray.server_settings import AUTO, check_same, choose_servers, server_config
from aiops.ray.storage import Storage
from aiops.ray.worker_group import WorkerGroup


def train(
    loop: Callable[..., Any],
    *,
    policy: str | None = None,
    num_workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    resources: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    config: Any = None,
    datasets: Mapping[str, Any] | None = None,
    run_config: Any = None,
    servers: int | str | None = None,
    standby: bool = False,
    server_resources: Mapping[str, float] | None = None,
    server_restarts: int = -1,
    state: str | Path | None = None,
    name: str | None = None,
    detached: bool = False,
    max_restarts: int = 3,
    patience: float = 600.0,
    seed: int = 0,
    **settings: Any,
) -> ray.train.Result:
    """Train on a Ray cluster: a server and its workers as actors. Return the result.

    ::

        def loop(config):
            with aiops.Worker(params=model.init(seed=0)) as worker:
                for x, y in batches(...):
                    worker.step(gradients(worker.params, x, y))
                aiops.ray.report({"loss": ...})

        result = aiops.ray.train(loop, num_workers=8)

    Each worker runs ``loop`` in its own process, and finds the server by itself, as under ``aiops
    run``: AIOPS_URL, AIOPS_SEED, RANK and WORLD_SIZE are set. Gradients and parameters go from the
    worker to the server directly; Ray does not carry them.

    Parameters
    ----------
    loop
        A function of no argument, or of one: ``config``.
    policy
        The server's algorithm. Default: ``schedule-free``, or that of a server that runs already.
    num_workers
        Workers of a job whose number is fixed.
    min_workers, max_workers
        Of an elastic one: it begins with the first number, and has up to the second as the cluster
        has room. Default: both are ``num_workers``.
    resources
        Of each worker, as Ray counts them. Default: one CPU.
    placement_strategy
        Of the placement group of the first ``min_workers``.
    config
        What the loop is given.
    datasets
        `ray.data.Dataset` by name, for `get_dataset_shard`.
    run_config
        A `ray.train.RunConfig`: name, storage and checkpoints.
    servers
        Servers that the model is spread over. Default: 1, or as many as run already. ``"auto"``: as
        many as its size (``model_size=BYTES``, or that of ``init``) and the nodes make sensible.
    standby
        Run a second server, on another node, that has all that the server has, and takes over when
        its node is lost. It needs a ``state``. Acknowledgements then mean ``replicated``. Several
        servers are on one node then, and as many standbys on another.
    server_resources
        Of each server, and of the standby. Default: one CPU. A server uses as many threads.
    server_restarts
        How often Ray starts each server again, if there is a ``state``. Default -1: without end.
    state
        A folder that all nodes share. The server keeps its state there; if its machine is lost, it
        is started on another, and goes on: nothing that it has acknowledged is lost. Or the URL of
        a store (``s3://bucket/path``), in which copies of the state are kept; then it goes on from
        the newest, and each worker is told how many of its pushes are lost.
    name
        The run's. Default: that of ``run_config``, or one of the time.
    detached
        Leave the server running, under this name. A later call with the same name, of whatever
        program of the cluster, trains at the same server; `aiops.ray.server` finds it. Settings of
        the server that such a call names must be those that it has.
    max_restarts
        How often each worker is replaced after a failure. Lost machines are not counted.
    patience
        Seconds that the job waits for places while it has no worker that runs.
    seed
        AIOPS_SEED of all workers.
    settings
        Further settings of the server, as of `aiops.serve`: ``lr``, ``set``, ``push_codec``...

    Returns
    -------
    ray.train.Result
        ``metrics``: the last that rank 0 reported. ``checkpoint``: the newest. ``path``: the run's
        folder. ``metrics_dataframe``: all reports of all workers, with their ``rank``.
        ``return_value``: what the loop of rank 0 returned. ``error``: set if some workers were
        given up, and others have ended as they should.

    Raises
    ------
    UsageError
        When the settings cannot work.
    ray.train.WorkerGroupError
        When no loop has returned.
    ray.train.ControllerError
        When there was no place for workers, or the server is lost.
    """
    least, most = _counts(num_workers, min_workers, max_workers)
    if servers not in (None, AUTO) and not (isinstance(servers, int) and servers >= 1):
        raise UsageError(f"servers must be 1 or more, or 'auto', not {servers!r}")
    if standby and state is None:
        raise UsageError("standby=True needs state=FOLDER, which all nodes share")
    if not callable(loop) or len(inspect.signature(loop).parameters) > 1:
        raise UsageError("the loop is a function of no argument, or of one: its config")
    run_config = run_config or ray.train.RunConfig()
    run = name or run_config.name or time.strftime("aiops_%Y-%m-%d_%H-%M-%S")
    if detached and not name:
        raise UsageError("detached=True needs a name, under which the server is found again")
    group = WorkerGroup(
        least, most, max_restarts=max_restarts, patience=patience, now=time.monotonic()
    )
    if not ray.is_initialized():
        ray.init()
    of_worker = dict(resources or {"CPU": 1})
    job = RayJob(
        group,
        loop=(ray.put((loop, config)),),
        team=Team(most, 1, 0, seed, max(1, int(of_worker.get("CPU", 1)))),
        resources=of_worker,
        strategy=placement_strategy,
        name=run,
        storage=Storage.of(str(run_config.storage_path), run, run_config.storage_filesystem),
        checkpoints=_checkpoints(run_config.checkpoint_config),
    )
    server_cpus = dict(server_resources or {"CPU": 1})
    named = settings if policy is None else {"policy": policy, **settings}
    given = {"threads": max(1, int(server_cpus.get("CPU", 1))), **named}
    if least == most:
        given.setdefault("workers", most)
    config_of_server = server_config(given, state, standby)
    if config_of_server.state_copy is not None and servers not in (None, 1, AUTO):
        raise ConflictError(
            f"servers={servers} take no state={state!r}: copies that several servers make at"
            " different moments are of no moment of the run. Give a folder that all nodes share, or"
            " one server"
        )
    found = running_server.find(run) if detached else None
    if found is not None:
        check_same(run, named, found.config, servers, found.servers)
        if standby and not found.is_pair:
            raise UsageError(
                f"the server that runs under the name {run!r} was started without a standby: end it"
                f" (aiops.ray.server({run!r}).stop()), and train with standby=True again"
            )
    elif servers == AUTO:
        servers = choose_servers(
            config_of_server,
            [each["Resources"].get("CPU", 0.0) for each in ray.nodes() if each["Alive"]],
            server_cpus.get("CPU", 0.0),
            least * of_worker.get("CPU", 0.0),
            standby,
        )
    start = {
        "servers": servers or 1,
        "resources": server_cpus,
        "restarts": server_restarts,
        "detached": run if detached else None,
        "standby": standby,
    }
    return job.run(found, config_of_server, start, datasets or {})


def _counts(count: int | None, least: int | None, most: int | None) -> tuple[int, int]:
    """Return the least and the most workers."""
    if count is not None and most is not None:
        raise UsageError("num_workers is of a fixed number: give min_workers and max_workers alone")
    most = most if most is not None else count
    if most is None:
        raise UsageError("say how many workers: num_workers, or min_workers and max_workers")
    return (most if least is None else least), most


def _checkpoints(config: Any) -> CheckpointList:
    if config is None:
        return CheckpointList()
    return CheckpointList(
        config.num_to_keep,
        config.checkpoint_score_attribute,
        largest=config.checkpoint_score_order == "max",
    )
