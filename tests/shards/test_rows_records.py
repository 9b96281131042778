"""Runs with rows of tables on all servers that are recorded, and replayed from their first rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import aiops
from aiops.client import Worker
from aiops.durable.commit_gate import Acks
from aiops.durable.lead_recorder import LeadReplayer
from aiops.durable.run_record import replay_on
from aiops.durable.shards_replay import PartReplay
from aiops.errors import AiopsError
from aiops.model.tables import Table
from aiops.net.disk import SystemDisk
from aiops.state.directory import StateListing
from tests.seeds import by_turns, seeds
from tests.shards.kept_world import Actor, KeptWorld
from tests.shards.test_kept_shards import FORKED, Log
from tests.shards.test_records import replayed
from tests.shards.test_replaced import FLAGS, TABLE, RowsTraining
from tests.support import PATIENCE, assert_same, server_process

TABLES = {"a": Table(1000, 4, init="normal"), "b": Table(1 << 20, 2, "float64", max_age=48)}
DENSE = {"w": np.arange(12, dtype=np.float32).reshape(6, 2)}
COMMON: dict[str, Any] = {"kernels": "numpy", "shard_bytes": 1, "lr": 0.1, "port": 0}
SPREAD = {**COMMON, "shards": 3, "spread_tables": True}


async def train(
    url: str, seed: int, dense: Any, *, steps: int = 12, some: asyncio.Event | None = None
) -> None:
    """Push rows of both tables, and now and then the tensors; ``some``: set after some steps."""
    draw = np.random.default_rng(seed)
    async with aiops.AsyncWorker(url, dense, tables=TABLES, timeout=1) as worker:
        for step in range(steps):
            name, width = ("a", 4) if step % 2 else ("b", 2)
            ids = draw.integers(0, 1000, 30)
            grads = draw.normal(size=(30, width)).astype(TABLES[name].dtype)
            await worker.exchange_rows(name, ids, grads, draw.integers(0, 1000, 5))
            if some is not None and step == 40:
                some.set()
            if dense and step % 3 == 0:
                await worker.step({"w": np.ones((6, 2), np.float32)})


async def until_it_ends(url: str, seed: int, dense: Any, some: asyncio.Event) -> None:
    """Push as long as the server takes anything; ``some``: set when it has taken some."""
    with pytest.raises(AiopsError):
        await train(url, seed, dense, some=some, steps=1 << 20)


# Of a table each optimiser has its own state, beside tensors or not.
@pytest.mark.parametrize(("policy", "dense"), by_turns(["asgd", "fasgd", "adam"], [DENSE, {}]))
def test_a_record_is_replayed_to_the_bits_that_were_saved(
    policy: str, dense: Any, tmp_path: Path
) -> None:
    """It ends amid pushes: after the lead has begun to, no follower takes one."""
    record, save = tmp_path / "run", tmp_path / "save.safetensors"
    chosen = (
        {"policy": policy} if policy != "adam" else {"policy": "asgd", "set": {"optimizer": "adam"}}
    )

    async def run() -> None:
        async with aiops.serve(**SPREAD, **chosen, record=record, save=save) as server:
            some = asyncio.Event()
            given = [(server.url, n, dense, some) for n in range(3)]
            pushing = [asyncio.ensure_future(until_it_ends(*each)) for each in given]
            await some.wait()
        await asyncio.gather(*pushing)

    asyncio.run(run())
    found = replayed(record)
    assert found["complete"]
    assert len(found["model"]["tables/a/ids"]) > 500
    assert_same(found["model"], load_file(save))


def test_the_digest_is_that_of_one_server(tmp_path: Path) -> None:
    """The same pushes give the same rows and the same state of them, on however many servers."""

    async def run(**settings: Any) -> None:
        async with aiops.serve(policy="fasgd", **settings) as server:
            await train(server.url, 0, DENSE)

    asyncio.run(run(**SPREAD, record=tmp_path / "three"))
    asyncio.run(run(**COMMON, record=tmp_path / "one"))
    assert replayed(tmp_path / "three")["sha256"] == replayed(tmp_path / "one")["sha256"]


def test_rows_before_snapshots_are_kept_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several starts, and with journals that begin with snapshots."""
    monkeypatch.setattr(SystemDisk, "segment", 1 << 13)
    for keep in (True, False):
        state, save = tmp_path / f"state-{keep}", tmp_path / f"{keep}.safetensors"
        given = {**SPREAD, "state": state, "save": save, "keep_journal": keep}

        async def run(seed: int, given: Any = given) -> None:
            async with aiops.serve(policy="asgd", **given) as server:
                await train(server.url, seed, DENSE, steps=30)

        for seed in range(4):
            asyncio.run(run(seed))
        found = replayed(state)
        assert found["complete"]
        assert_same(found["model"], load_file(save))
        for shard in range(3):
            names = [path.name for path in (state / f"shard-{shard}").iterdir()]
            assert (StateListing(names).segments[0] == 1) == keep


@pytest.mark.slow
def test_processes_that_were_killed_replay_to_the_same_bits(tmp_path: Path) -> None:
    """A follower is killed, then the lead, and at last all end under workers that push."""
    state, save = tmp_path / "state", tmp_path / "save.safetensors"
    flags = (*FLAGS, "--shards", "3", "--spread-tables", "--state", str(state), "--keep-journal")
    flags += ("--snapshot-every", "0.05", "--save", str(save), "--port")
    acknowledged, port = np.zeros(2), "0"
    for start in range(2):
        with server_process(*flags, port, env=FORKED) as server:
            training, log = RowsTraining(server.url), Log(server)
            with training.running():
                training.go_on()
                if not start:
                    os.kill(log.pid(1), signal.SIGKILL)
                    training.go_on()
            acknowledged += training.acknowledged
            server.signal(signal.SIGTERM if start else signal.SIGKILL)
            assert start == 0 or server.popen.wait(PATIENCE) == 0
    found = replayed(state)
    assert found["complete"], found
    assert_same(found["model"], load_file(save))
    rows = found["model"]["tables/t/rows"].reshape(-1, 2)
    assert (rows == -acknowledged).all()
    assert len(found["model"]["tables/t/ids"]) == TABLE.rows


@pytest.mark.slow
def test_a_record_of_processes_that_end_amid_pushes(tmp_path: Path) -> None:
    record, save = tmp_path / "record", tmp_path / "save.safetensors"
    flags = (*FLAGS, "--shards", "3", "--spread-tables", "--record", str(record))
    with server_process(*flags, "--save", str(save), env=FORKED) as server:
        ids, ones = np.arange(TABLE.rows), np.ones((TABLE.rows, 1))
        count = 0
        with (
            contextlib.suppress(AiopsError),
            Worker(server.url, {}, tables={"t": TABLE}, timeout=2) as worker,
        ):
            while True:
                worker.push_rows("t", ids, ones)
                count += 1
                if count == 50:
                    server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    found = replayed(record)
    assert found["complete"]
    assert_same(found["model"], load_file(save))
    assert (found["model"]["tables/t/rows"] <= -count).all()


# ---------------------------------------------------------------- simulated worlds


def replays(world: KeptWorld) -> list[Any]:
    """Replay the journals of all servers from their first rows; return the tables of each."""
    rows, *others = [[*host.journal.values()] for host in world.hosts]  # type: ignore[attr-defined]
    engine, lead, _followers = world.coordinators(3)
    ended = replay_on(engine, LeadReplayer(lead), rows, 0)
    found = [engine.tables]
    for frames in others:
        part = PartReplay(engine, "run", ended.last, 0)
        part.go_on(frames)
        found.append(part.tables)
    return found


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("acks", [Acks.WRITTEN, Acks.DURABLE])
def test_journals_of_servers_killed_at_any_step_are_replayed(seed: int, acks: Acks) -> None:
    """Each has what its server had, state of the optimiser included."""
    world = KeptWorld(seed, 3, "fasgd", {"lr": 0.1}, acks=acks, spread_tables=True)
    world.cuts, world.kills = 0.01, 0.004
    world.losses = 0.001 * (acks is Acks.DURABLE)
    actors = [Actor(world, name, pushing(n)) for n, name in enumerate("abc")]
    world.actors += actors
    world.run()
    assert world.killed
    world.settle()
    hosts = [world.engine.tables, *(h.coordinator.rows.engine.tables for h in world.followers)]
    for there, again in zip(hosts, replays(world), strict=True):
        for table, other in zip(there, again, strict=True):
            assert table.digest() == other.digest()
            assert table.version == other.version


def pushing(seed: int) -> Any:
    """A client that pushes to both tables in turn."""
    draw = np.random.default_rng(seed)

    def script(actor: Actor) -> Any:
        if actor.request is None:
            return actor.ask(actor.requests.define({}, TABLES))
        step = actor.state["step"] = actor.state.get("step", 0) + 1
        if step > 12:
            return None
        name, width = ("a", 4) if step % 2 else ("b", 2)
        ids, grads = draw.integers(0, 60, 9), draw.normal(size=(9, width))
        return actor.ask(actor.requests.push_rows(name, ids, grads.astype(TABLES[name].dtype)))

    return script
