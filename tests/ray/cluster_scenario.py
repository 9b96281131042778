"""Jobs on a Ray cluster of several nodes on this machine, of which one is killed.

``test_cluster.py`` runs each group of jobs as a process of its own: Ray leaves threads behind, and
a cluster takes seconds to start, so that the jobs of a group share one. Each node has a loopback
address of its own, so that a server that moves to another has another address.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import ray.train

import aiops
import aiops.ray
from aiops.common import urls
from aiops.errors import UsageError
from aiops.ray import running_server
from aiops.ray.data import DatasetShard
from aiops.ray.servers import node_is_alive
from benchmarks.ray_nodes import RayNodes, ray_nodes
from tests.object_store import KEYS, object_store

PATIENCE = 120.0
"""Seconds: processes of Ray start in a tenth of that where others leave them the processors."""

_SOON = 30.0
"""Seconds for what starts no process; half of a client's time-out, which it is not to wait for."""


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    begin, ever = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() < begin + patience, f"waited in vain until {what}"
        ever.wait(0.05)
    print(f"  {time.monotonic() - begin:.1f} s until {what}", flush=True)


# ---------------------------------------------------------------- a job from begin to end


def zeros() -> dict[str, Any]:
    return {"w": np.zeros(1, np.float32), "rows": np.zeros((2, 20), np.float32)}


def reporting_loop(config: dict[str, Any]) -> dict[str, Any]:
    """See each row of the dataset once, dealt and then shared; fail once, die once; report."""
    context, shard = aiops.ray.get_context(), aiops.ray.get_dataset_shard("numbers")
    rank, given = context.get_world_rank(), Path(config["folder"])
    with aiops.Worker(params=zeros()) as worker:
        while shard.epoch < 2:
            for batch in shard.iter_batches(batch_size=4):
                worker.step({**zeros(), "w": -np.ones(1, np.float32) * len(batch["data"])})
                aiops.ray.report({"seen": len(batch["data"]), "near": worker.near})
                if rank == 1 and not context.restarts:
                    raise ValueError("once")
        share_rows(worker, shard, dies=rank == 1 and context.restarts == 1, marker=given / "dies")
        folder = given / f"from-{rank}"
        folder.mkdir()
        np.savez(folder / "model.npz", **worker.params)
        aiops.ray.report({"done": rank}, ray.train.Checkpoint.from_directory(folder))
        if rank == 0:
            aiops.ray.report({"last": 1.0})
    with aiops.Client() as client:
        rows = client.fetch()["rows"]
    environment = {"url": os.environ["AIOPS_URL"], "threads": os.environ["OMP_NUM_THREADS"]}
    return {**environment, "rows": rows}


def share_rows(worker: aiops.Worker, shard: DatasetShard, *, dies: bool, marker: Path) -> None:
    """Add 1 to the place of each row, for two epochs; one process dies amid a step of a task."""
    if not dies:
        until(marker.exists, "the other one has died")
    batches = aiops.data.batches(worker, shard, batch_size=2, epochs=2, task_size=6)
    for number, batch in enumerate(batches):
        if dies and number == 4:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        grads = zeros()
        grads["rows"][batches.epoch, batch["data"]] = -1
        worker.step(grads)


def a_job(folder: Path) -> None:
    data = ray.data.from_numpy([np.arange(5 * n, 5 * n + 5) for n in range(4)])
    result = aiops.ray.train(
        reporting_loop,
        policy="asgd",
        lr=1.0,
        num_workers=2,
        config={"folder": str(folder)},
        datasets={"numbers": data},
        run_config=ray.train.RunConfig(name="a-job", storage_path=str(folder / "runs")),
    )
    assert result.error is None
    assert result.metrics == {"last": 1.0}
    assert result.return_value["threads"] == "1"
    assert (result.return_value["rows"] == 1).all(), result.return_value["rows"]
    assert not result.return_value["url"].startswith("aiops://127.0.0.1:"), result.return_value
    table = result.metrics_dataframe
    # 40 rows, and again those of the block in whose middle worker 1 failed.
    assert 40 <= table["seen"].sum() <= 45, table
    assert sorted(table["done"].dropna()) == [0, 1]
    assert len(result.best_checkpoints) == 2
    assert result.path == str(folder / "runs" / "a-job")
    with result.checkpoint.as_directory() as copy, np.load(Path(copy) / "model.npz") as model:
        assert 36 <= model["w"][0] <= 45


def broken_loop() -> None:
    raise NameError("misspelt")


def jobs_that_fail() -> None:
    for settings, what in (
        ({"policy": "asgd"}, "NameError: misspelt"),
        ({"policy": "asgd", "set": ["nonsense=1"]}, "asgd has no setting 'nonsense'"),
    ):
        with pytest.raises(ray.train.TrainingFailedError, match=what):
            aiops.ray.train(broken_loop, num_workers=1, **settings)
    with pytest.raises(UsageError, match="standby=True needs state="):
        aiops.ray.train(broken_loop, num_workers=1, standby=True)


# ---------------------------------------------------------------- a node is killed


def acknowledged(folder: Path, rank: int) -> int:
    """Return the number of pushes that a worker of `counting_loop` has had acknowledged."""
    path = folder / f"acks-{rank}"
    return path.stat().st_size if path.exists() else 0


def all_go_on(folder: Path) -> None:
    """Wait until each worker has had a push acknowledged."""
    before = [acknowledged(folder, rank) for rank in range(3)]
    until(
        lambda: all(acknowledged(folder, rank) > before[rank] for rank in range(3)),
        "all workers go on",
    )


def report_model(worker: aiops.Worker, folder: Path) -> None:
    """Report the parameters; a loop that names `ray.train` has each worker import it, for 0.7 s."""
    from ray.train import Checkpoint

    folder.mkdir()
    np.savez(folder / "model.npz", **worker.params)
    aiops.ray.report({"rank": 0}, Checkpoint.from_directory(folder))


def counting_loop(config: dict[str, Any]) -> int:
    """Push a one to the parameter of this rank, and note each that is acknowledged."""
    rank, folder = int(os.environ["RANK"]), Path(config["folder"])
    mine = np.zeros(3, np.float32)
    mine[rank] = -1
    begun = acknowledged(folder, rank)  # by a process before this one
    with (
        aiops.Worker(params={"w": np.zeros(3, np.float32)}) as worker,
        open(folder / f"acks-{rank}", "ab", buffering=0) as acks,
    ):
        while not (folder / "stop").exists():
            worker.step({"w": mine})
            acks.write(b".")
            time.sleep(0.02)  # not to wait: three workers on two cores leave room for Ray
        if config.get("reports") and rank == 0:
            report_model(worker, folder / "model")
        if not begun:
            (folder / f"lost-{rank}").write_text(str(worker.rolled_back))
        return worker.rolled_back


def a_node_is_killed(folder: Path, nodes: RayNodes) -> None:
    folder.mkdir()
    settings: dict[str, Any] = {
        "policy": "asgd",
        "lr": 1.0,
        "name": "counting",
        "detached": True,
        "loop": counting_loop,
        "config": {"folder": str(folder)},
        "run_config": ray.train.RunConfig(storage_path=str(folder / "runs")),
    }
    with ThreadPoolExecutor() as thread:  # nodes are added in the main thread only
        running = thread.submit(
            lambda: aiops.ray.train(
                min_workers=1, max_workers=3, state=folder / "state", **settings
            )
        )
        try:
            all_go_on(folder)
            nodes.kill(aiops.ray.server("counting").node)
            nodes.add()
            all_go_on(folder)
        finally:
            (folder / "stop").touch()
        result = running.result(PATIENCE)
    assert result.error is None
    assert result.return_value == 0  # pushes that were rolled back
    with aiops.ray.server("counting").client() as client:
        model = client.fetch()["w"].tolist()
    for rank in range(3):  # a push that was under way may have been applied, or not
        assert 0 <= model[rank] - acknowledged(folder, rank) <= 2, (rank, model)
    with pytest.raises(UsageError, match=r"has lr=1\.0, not 0\.5: leave such"):
        aiops.ray.train(num_workers=1, **{**settings, "lr": 0.5})
    again = aiops.ray.train(num_workers=1, **settings)
    assert again.return_value == 0
    server = aiops.ray.server("counting")
    assert server.client().fetch()["w"].tolist() == model
    server.stop()
    assert running_server.find("counting") is None


def end_process_at(url: str) -> None:
    """Kill the server's process that was told to listen at the port of this URL."""
    flag = f"--port={urls.parse(url)[1]}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if flag in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                return
    raise AssertionError(f"no process listens at {url}")


def a_node_is_killed_and_the_state_is_in_a_store(folder: Path, nodes: RayNodes) -> None:
    """Nodes share no folder: what the server goes on from has been in S3."""
    folder.mkdir()

    def stats() -> Any:
        with aiops.ray.server("stored").client() as client:
            return client.stats()

    with object_store() as store, ThreadPoolExecutor() as thread:
        running = thread.submit(
            lambda: aiops.ray.train(
                counting_loop,
                policy="asgd",
                lr=1.0,
                min_workers=1,
                max_workers=3,
                state=store.url("stored"),
                snapshot_every=0.5,
                name="stored",
                detached=True,
                config={"folder": str(folder), "reports": True},
                run_config=ray.train.RunConfig(storage_path=store.url("runs")),
            )
        )
        try:
            all_go_on(folder)
            where = aiops.ray.server("stored").url
            end_process_at(where)
            all_go_on(folder)
            assert aiops.ray.server("stored").url == where, "it is started again on its node"
            assert stats()["state"]["rolled_back"] == 0
            before = [acknowledged(folder, rank) for rank in range(3)]
            version = stats()["version"]
            until(lambda: stats()["state"]["copy"]["version"] >= version, "there is a copy")
            home = aiops.ray.server("stored").node
            first = stats()["state"]
            nodes.kill(home)
            nodes.add()
            killed = time.monotonic()
            until(lambda: aiops.ray.server("stored").node != home, "the server is elsewhere")
            print(f"it serves elsewhere after {time.monotonic() - killed:.1f} s", flush=True)
            all_go_on(folder)
            print(f"all workers go on after {time.monotonic() - killed:.1f} s", flush=True)
            second = stats()["state"]
            assert second["folder"] != first["folder"]
            assert second["run"] == first["run"]
            assert second["generation"] > first["generation"]
        finally:
            (folder / "stop").touch()
        result = running.result(PATIENCE)
        assert result.error is None
        with result.checkpoint.as_directory() as copy, np.load(Path(copy) / "model.npz") as kept:
            assert kept["w"].shape == (3,)
        assert store.names("runs/stored"), "the checkpoint is in S3"
        server = aiops.ray.server("stored")
        with server.client() as client:
            model = client.fetch()["w"].tolist()
        server.stop()
    assert all(model[rank] >= before[rank] for rank in range(3)), (model, before)
    told = {rank: folder / f"lost-{rank}" for rank in range(3)}
    there = {rank: int(path.read_text()) for rank, path in told.items() if path.exists()}
    assert there, "a worker has lived through it"
    for rank, lost in there.items():  # a push that was under way may have been applied, or not
        left = acknowledged(folder, rank) - lost
        assert abs(model[rank] - left) <= 2, (rank, model, left)


def a_standby_takes_over(folder: Path, nodes: RayNodes) -> None:
    """Kill the servers' node: the standbys take over, and have standbys. Then kill both actors."""
    folder.mkdir()

    def has_standby() -> bool:
        return aiops.ray.server("guarded").has_standby

    with ThreadPoolExecutor() as thread:
        running = thread.submit(
            lambda: aiops.ray.train(
                counting_loop,
                policy="asgd",
                lr=1.0,
                min_workers=1,
                max_workers=3,
                state=folder / "state",
                standby=True,
                servers=2,
                server_resources={"CPU": 0.5},
                shard_bytes=4,
                name="guarded",
                detached=True,
                config={"folder": str(folder)},
                run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
            )
        )
        try:
            all_go_on(folder)
            until(has_standby, "there is a standby")
            home = aiops.ray.server("guarded").node
            nodes.kill(home)
            until(lambda: aiops.ray.server("guarded").node != home, "the standby takes over")
            nodes.add()
            until(has_standby, "the one that took over has a standby")
            all_go_on(folder)
            for head in aiops.ray.server("guarded").heads:
                ray.kill(head, no_restart=False)
            all_go_on(folder)
            until(has_standby, "there is a standby after both have been started again")
        finally:
            (folder / "stop").touch()
        result = running.result(PATIENCE)
    assert result.error is None
    assert result.return_value == 0
    server = aiops.ray.server("guarded")
    with server.client() as client:
        model = client.fetch()["w"].tolist()
        assert len(client.stats()["state"]["shards"]) == 1
    server.stop()
    assert running_server.find("guarded") is None
    for rank in range(3):
        assert 0 <= model[rank] - acknowledged(folder, rank) <= 2, (rank, model)


def a_node_falls_silent(folder: Path, nodes: RayNodes) -> None:
    """All processes of the server's node stop: its connections stay open, and nothing answers."""
    folder.mkdir()

    def has_standby() -> bool:
        return aiops.ray.server("silent").has_standby

    stopped: list[int] = []
    with ThreadPoolExecutor() as thread:
        running = thread.submit(
            lambda: aiops.ray.train(
                counting_loop,
                policy="asgd",
                lr=1.0,
                min_workers=1,
                max_workers=3,
                state=folder / "state",
                standby=True,
                name="silent",
                detached=True,
                config={"folder": str(folder)},
                run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
            )
        )
        try:
            all_go_on(folder)
            until(has_standby, "there is a standby")
            home = aiops.ray.server("silent").node
            stopped = nodes.stop(home)
            silent, before = time.monotonic(), [acknowledged(folder, rank) for rank in range(3)]

            def going() -> list[int]:
                return [r for r in range(3) if acknowledged(folder, r) > before[r] + 1]

            until(lambda: not node_is_alive(home), "Ray knows it")
            print(f"Ray knows it after {time.monotonic() - silent:.1f} s", flush=True)
            until(going, "a worker goes on", _SOON)
            print(f"a worker goes on after {time.monotonic() - silent:.1f} s", flush=True)
            nodes.add()
            until(lambda: len(going()) == 3, "all workers go on")
            assert aiops.ray.server("silent").node != home
            print(f"all workers go on after {time.monotonic() - silent:.1f} s", flush=True)
            # The old server wakes, and must change nothing. Its machine's workers do not: it might
            # acknowledge pushes of theirs before it is told, which are lost then.
            for process in stopped:
                with contextlib.suppress(OSError):
                    title = Path(f"/proc/{process}/cmdline").read_bytes()
                    os.kill(process, signal.SIGKILL if b"WorkerActor" in title else signal.SIGCONT)
            until(has_standby, "the one that took over has a standby")
            all_go_on(folder)
        finally:
            (folder / "stop").touch()
            for process in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
        result = running.result(PATIENCE)
    assert result.error is None
    server = aiops.ray.server("silent")
    with server.client() as client:
        model = client.fetch()["w"].tolist()
    server.stop()
    for rank in range(3):
        assert 0 <= model[rank] - acknowledged(folder, rank) <= 2, (rank, model)


def groups(folder: Path, nodes: RayNodes) -> dict[str, dict[str, Callable[[], None]]]:
    """Return the jobs by name, in groups that take about as long as each other."""
    stored = a_node_is_killed_and_the_state_is_in_a_store
    return {
        "restarts": {
            "a_job": lambda: a_job(folder),
            "jobs_that_fail": jobs_that_fail,
            "a_node_is_killed": lambda: a_node_is_killed(folder / "restarted", nodes),
            stored.__name__: lambda: stored(folder / "stored", nodes),
        },
        "standbys": {
            "a_node_falls_silent": lambda: a_node_falls_silent(folder / "silent", nodes),
            "a_standby_takes_over": lambda: a_standby_takes_over(folder / "standby", nodes),
        },
    }


def main(folder: Path) -> None:
    begin = time.monotonic()
    os.environ.update(KEYS)
    folder.mkdir(exist_ok=True)
    with ray_nodes(2, 3, folder) as nodes:
        of = groups(folder, nodes)
        for wanted in sys.argv[2:] or of:
            for group, parts in of.items():
                for name, part in parts.items():
                    if wanted in (group, name):
                        print(f"{time.monotonic() - begin:.1f} s: {name}", flush=True)
                        part()
    print(f"all is well after {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
