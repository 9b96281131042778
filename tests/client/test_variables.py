"""The variables that clients read where they are given nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.errors import UsageError
from tests.support import ServerThread

PARAMS = {"w": np.zeros(3, np.float32)}


def names(server: ServerThread) -> set[str]:
    with aiops.Client(server.url) as client:
        return {row["name"] for row in client.stats()["workers"]}


def test_a_worker_finds_its_server_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def train() -> None:
        async with aiops.AsyncWorker(params=PARAMS) as worker:
            await worker.step(PARAMS)

    with ServerThread(policy="asgd") as server:
        monkeypatch.setenv("AIOPS_URL", server.url)
        monkeypatch.setenv("AIOPS_NAME", "worker 5")
        with aiops.Worker(params=PARAMS) as worker:
            worker.step(PARAMS)
            assert worker.url == server.url
        assert names(server) == {"worker 5"}
        monkeypatch.setenv("AIOPS_NAME", "worker 6")
        asyncio.run(train())
        with aiops.Worker(server.url, PARAMS, name="mine"):
            assert {"worker 6", "mine"} <= names(server)


def test_what_is_given_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPS_URL", "aiops://127.0.0.1:1")
    with ServerThread(policy="asgd") as server, aiops.Client(server.url) as client:
        assert client.url == server.url


@pytest.mark.parametrize(
    "make",
    [
        lambda: aiops.Client(),
        lambda: aiops.AsyncClient(),
        lambda: aiops.Worker(params=PARAMS),
        lambda: aiops.client.AsyncModelAverager(params=PARAMS),
    ],
)
def test_without_either(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOPS_URL", raising=False)
    with pytest.raises(
        UsageError, match="no server is named: give its URL, start the program with"
    ):
        make()


@pytest.mark.parametrize(
    ("params", "given"), [(None, "nothing"), ([np.zeros(3)], "list"), (np.zeros(3), "ndarray")]
)
def test_parameters_without_names(params: Any, given: str) -> None:
    with pytest.raises(UsageError, match=f"params are arrays by name, as .*, not {given}"):
        aiops.Worker("aiops://127.0.0.1:1", params)
    with pytest.raises(UsageError, match=f"params are arrays by name, as .*, not {given}"):
        aiops.AsyncWorker("aiops://127.0.0.1:1", params)


def test_parameters_in_the_place_of_the_url() -> None:
    with pytest.raises(UsageError, match=r"is a string, not dict; .* Worker\(params=\.\.\.\)"):
        aiops.Worker(PARAMS, PARAMS)  # type: ignore[arg-type]
