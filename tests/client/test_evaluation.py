"""Parameters for evaluation, from servers of their own processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from aiops.cli.main import app
from aiops.client import AsyncClient, AsyncWorker, Client, Worker
from aiops.serving.safetensors_io import read_model
from tests.peers import eventually, serving
from tests.rows import each_row
from tests.support import assert_same

MODEL = {"w": np.zeros((64, 64), np.float32), "b": np.ones(5, np.float32)}

FLAGS = ("--policy", "schedule-free", "--set", "orthogonal=false", "--set", "schedule=constant")


def gradients(step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    return {n: random.normal(1, 1, a.shape).astype(a.dtype) for n, a in MODEL.items()}


def trained(worker: Worker, steps: int = 5) -> None:
    for step in range(steps):
        worker.step(gradients(step))


@each_row("flags", [(), ("--no-shm",), ("--fetch-codec", "int8"), ("--shards", "2")])
def test_all_clients_are_sent_what_is_saved(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / f"model{len(flags)}{flags[-1:]}.safetensors"
    with serving(*FLAGS, *flags, "--save", str(path)) as server:
        with Worker(server.url, MODEL) as worker, Client(server.url) as client:
            trained(worker)
            mine, theirs = worker.evaluation(), client.fetch(evaluation=True)
            assert mine.version == theirs.version == worker.version == 5
            assert_same(mine, theirs)
            assert all((mine[name] != client.fetch()[name]).any() for name in MODEL)
            asyncio.run(_asked(server.url, mine))
        server.stop()
        assert_same(read_model(path), mine)


@each_row("flags", [(), ("--shards", "2"), ("--acks", "written"), ("--policy", "asgd")])
def test_copies_that_are_saved_at_intervals_are_as_it_is_evaluated(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"{'-'.join(flags).strip('-')}.safetensors"
    given = FLAGS if "asgd" not in flags else ()
    if "written" in flags:
        flags = (*flags, "--state", str(tmp_path / "state"))
    saving = ("--save", str(path), "--save-every", "0.02")
    with serving(*given, *flags, *saving) as server:
        with Worker(server.url, MODEL) as worker:
            trained(worker)
            expected = worker.evaluation()

            def is_saved() -> bool:
                found = read_model(path) if path.exists() else {}
                return bool(found) and all((found[n] == expected[n]).all() for n in MODEL)

            eventually(is_saved, "the newest version is saved")
        server.stop()


async def _asked(url: str, expected: Any) -> None:
    async with AsyncClient(url) as client, AsyncWorker(url, MODEL) as worker:
        found = await asyncio.gather(
            client.fetch(evaluation=True), worker.evaluation(), client.fetch(), client.stats()
        )
        assert_same(found[0], expected)
        assert_same(found[1], expected)


def test_a_later_fetch_brings_the_parameters_to_train() -> None:
    with serving(*FLAGS) as server, Worker(server.url, MODEL) as worker:
        trained(worker)
        with Client(server.url, role="worker") as client:
            params = client.fetch(evaluation=True)
            assert client.fetch(params) is params
            assert_same(params, worker.params)
            assert client.push(params, gradients(0)).used
            again = client.fetch(params, evaluation=True)
            assert again is params
            assert_same(params, worker.evaluation())


def test_a_replay_saves_what_the_server_did(tmp_path: Path) -> None:
    path, record = tmp_path / "model.safetensors", tmp_path / "run"
    with serving(*FLAGS, "--save", str(path), "--record", str(record)) as server:
        with Worker(server.url, MODEL) as worker:
            trained(worker, 3)
            worker.evaluation()
            trained(worker, 3)
        server.stop()
    again = tmp_path / "again.safetensors"
    found = CliRunner().invoke(app, ["replay", str(record), "--save", str(again)])
    assert found.exit_code == 0, found.output
    assert_same(read_model(again), read_model(path))


@each_row("flags", [(), ("--shards", "2")])
def test_a_state_is_exported_as_it_is_evaluated(flags: tuple[str, ...], tmp_path: Path) -> None:
    state, path = tmp_path / f"state{len(flags)}", tmp_path / f"{len(flags)}.safetensors"
    model = {**MODEL, "half": np.ones((4, 4), np.float16)}
    with serving(*FLAGS, *flags, "--state", str(state), "--save", str(path)) as server:
        with Worker(server.url, model) as worker:
            for _ in range(5):
                worker.step({name: np.ones_like(array) for name, array in model.items()})
            expected = worker.evaluation()
        server.stop()
    assert_same(read_model(path), expected)
    for number, more in enumerate([(), ("--at", _last_row(state))]):
        out = tmp_path / f"{len(flags)}-{number}.safetensors"
        found = CliRunner().invoke(app, ["state", "export", str(state), "--out", str(out), *more])
        assert found.exit_code == 0, found.output
        assert_same(read_model(out), expected)


def _last_row(state: Path) -> str:
    folder = state / "shard-0" if (state / "shard-0").exists() else state
    return str(
        max(int(file.name.split("-")[1].split(".")[0]) for file in folder.glob("snapshot-*"))
    )


def test_a_run_of_several_starts_is_replayed_from_its_first_row(tmp_path: Path) -> None:
    """A start has no version for evaluation, though the one before it had made one."""
    state = tmp_path / "state"
    for _ in range(2):
        with serving(*FLAGS, "--keep-journal", "--state", str(state)) as server:
            with Worker(server.url, MODEL) as worker:
                worker.evaluation()
                trained(worker, 3)
                worker.evaluation()
            server.stop()
    found = CliRunner().invoke(app, ["replay", str(state)])
    assert found.exit_code == 0, found.output
    assert "version   6" in found.output
