"""Standbys of servers that rows of tables are spread over: promoted, they have all rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client import Client
from aiops.common import urls
from aiops.common.generations import term
from aiops.model.row_shards import shards_of
from aiops.model.tables import Table
from aiops.wire.standby_messages import Promoted
from tests.serving.standby import test_promote as processes
from tests.serving.standby.test_places import lose
from tests.serving.standby.test_shards import Run, cut_off, promote
from tests.support import PATIENCE

ROWS = 60
TABLES = {"z": Table(ROWS, 1, init="zeros")}
IDS, ONES = np.arange(ROWS), np.ones((ROWS, 1), np.float32)
SHARD = shards_of(IDS, 3)
DENSE: Mapping[str, Any] = {"w": np.zeros(64, np.float32)}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        given = {"shards": 3, "spread_tables": True, "shard_bytes": 1, **settings}
        runs.append(Run(tmp_path, **given))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize("acks", ["written", "durable", "replicated"])
@pytest.mark.parametrize("dense", [DENSE, {}], ids=["tensors", "tables alone"])
def test_a_worker_goes_on_with_the_standbys(acks: str, dense: Any, made: Any) -> None:
    """Each push adds -1 to every row, exactly once, before and after."""
    run = made(acks=acks)
    with aiops.Worker(run.both, dense, tables=TABLES, timeout=30) as worker:
        for push in range(1, 13):
            if push == 7:
                if acks != "replicated":
                    run.caught_up()
                run.stop_primaries()
                found = run.promote()
                assert isinstance(found, Promoted)
                assert term(found.generation) == 1
            receipt, rows = worker.exchange_rows("z", IDS, ONES, IDS)
            assert receipt.version == push
            assert (rows == -push).all()
            if dense:
                worker.step({"w": np.ones(64, np.float32)})
                assert (worker.params["w"] == -push).all()
        assert worker.rolled_back == 0


@pytest.mark.parametrize(
    ("cuts", "left"),
    [
        ({1: 3}, [9, 3, 9]),  # that of a follower: the others have what they have
        ({0: 5}, [5, 9, 9]),
        ({0: 5, 1: 7, 2: 3}, [5, 7, 3]),
    ],
    ids=str,
)
def test_what_the_standby_of_any_server_lacks_is_told(
    cuts: Mapping[int, int], left: list[int], made: Any
) -> None:
    """A push is lost if one server has lost its rows; the next ones count on all."""
    run = made(acks="written")
    standbys = [run.standby, *run.copies]
    with aiops.Worker(run.both, {}, tables=TABLES, timeout=30) as worker:
        for push in range(9):
            servers = [run.lead, *run.followers]
            for number, at in cuts.items():
                if at == push:
                    row = servers[number].call(lambda running: running.run_state.kept.newest)
                    standbys[number].wait(row)
                    standbys[number].call(cut_off)
            worker.push_rows("z", IDS, ONES, version=0)
        for number in {0, 1, 2} - cuts.keys():
            row = servers[number].call(lambda running: running.run_state.kept.newest)
            standbys[number].wait(row)
        run.stop_primaries()
        assert isinstance(run.promote(), Promoted)
        worker.push_rows("z", IDS, ONES, version=0)
        assert worker.rolled_back == 9 - min(left)
        rows = worker.fetch_rows("z", IDS)[:, 0]
        assert [{*(-rows[shard == SHARD]).tolist()} for shard in range(3)] == [
            {count + 1} for count in left
        ]


def test_a_worker_goes_on_with_the_standby_of_one_follower(made: Any) -> None:
    run = made(acks="replicated")
    with aiops.Worker(run.lead.url, {}, tables=TABLES, timeout=30) as worker:
        for push in range(1, 13):
            if push == 7:
                lose(run, 1)
                assert isinstance(promote(run.copies[0].url), Promoted)
            _receipt, rows = worker.exchange_rows("z", IDS, ONES, IDS)
            assert (rows == -push).all()
        assert worker.rolled_back == 0


def test_what_the_standby_of_one_follower_lacks_is_told(made: Any) -> None:
    """Its lead does not know which pushes of rows it has acknowledged."""
    run = made(acks="written")
    with aiops.Worker(run.lead.url, {}, tables=TABLES, timeout=30) as worker:
        for push in range(6):
            if push == 2:
                run.caught_up()
                run.copies[0].call(cut_off)
            worker.push_rows("z", IDS, ONES, version=0)
        lose(run, 1)
        run.copies[0].call(lambda standby: setattr(standby, "_primaries", [run.lead.url]))
        assert isinstance(promote(run.copies[0].url), Promoted)
        worker.push_rows("z", IDS, ONES, version=0)
        assert worker.rolled_back == 4
        rows = worker.fetch_rows("z", IDS)[:, 0]
        assert [{*(-rows[shard == SHARD]).tolist()} for shard in range(3)] == [{7}, {3}, {7}]


@pytest.mark.parametrize("snapshots", [1000.0, 0.05])
def test_a_standby_that_is_started_again_goes_on_with_the_clients_of_its_primary(
    snapshots: float, made: Any
) -> None:
    """Their connections are those that it has read of before."""
    run = made(acks="replicated", snapshot_every=snapshots)
    with aiops.Worker(run.both, {}, tables=TABLES, timeout=30) as worker:
        for push in range(1, 13):
            if push == 5:
                old = run.copies[0]
                old.stop()
                port = urls.parse(old.url)[1]
                run.copies[0] = run.follower_standby("b", 1, port)
            if push == 9:
                run.stop_primaries()
                assert isinstance(run.promote(), Promoted)
            _receipt, rows = worker.exchange_rows("z", IDS, ONES, IDS)
            assert (rows == -push).all()
        assert worker.rolled_back == 0


@pytest.mark.slow
def test_no_push_is_lost_or_counts_twice_when_processes_are_killed(tmp_path: Path) -> None:
    """The lead is killed amid pushes of two workers, and its followers with it (SIGKILL)."""
    flags = (*processes.PLAIN, "--shards", "3", "--spread-tables", "--acks", "replicated")
    servers, counts, over = processes.Pair(tmp_path, *flags), [0, 0], threading.Event()

    def push(number: int) -> None:
        mine = np.arange(number, ROWS, 2)
        with aiops.Worker(servers.both, {}, tables=TABLES, timeout=PATIENCE) as worker:
            while not over.is_set():
                worker.push_rows("z", mine, ONES[mine])
                counts[number] += 1
            assert worker.rolled_back == 0

    threads = [threading.Thread(target=push, args=(number,)) for number in range(2)]
    try:
        processes.until(servers.url, lambda found: found["state"].get("acks") == "replicated")
        for thread in threads:
            thread.start()
        processes.until(servers.url, lambda found: min(counts) > 20)
        servers.primary.kill()
        processes.promote(servers.other)
        reached = [count + 20 for count in counts]
        processes.until(servers.other, lambda found: min(np.subtract(counts, reached)) > 0)
        over.set()
        for thread in threads:
            thread.join()
        with Client(servers.other, timeout=PATIENCE) as client:
            rows = client.fetch_rows("z", IDS)[:, 0]
            [line] = client.stats()["tables"]
        for number in range(2):
            assert (rows[number::2] == -counts[number]).all()
        assert line["version"] == sum(counts)
    finally:
        over.set()
        servers.close()
