"""Standbys of a sharded model's servers, promoted together, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common import urls
from aiops.model.layout import Array
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.standby.link import ask
from aiops.wire.messages import Message
from aiops.wire.standby_messages import Promote, Promoted
from tests.serving.standby.test_standby import StandbyThread
from tests.support import PATIENCE, ServerThread

ONES: Mapping[str, Array] = {"w": np.ones(64, np.float32)}
ZEROS: Mapping[str, Array] = {"w": np.zeros(64, np.float32)}

PLAIN = {"policy": "asgd", "lr": 1.0, "kernels": "numpy"}


class Run:
    """A lead and its followers, and a standby of each."""

    def __init__(self, folder: Path, shards: int = 2, **settings: Any) -> None:
        self._stack, self._folder = contextlib.ExitStack(), folder
        self.settings = {**PLAIN, "snapshot_every": 1000.0, **settings}
        self.numbers = range(1, shards)
        self.followers = [self.follower("a", shard) for shard in self.numbers]
        self.lead = self.leading("a", self.followers)
        self.copies = [self.follower_standby("b", shard) for shard in self.numbers]
        self.standby = self.standing("b", self.copies)

    def _enter(self, kind: Any, state: str, **settings: Any) -> Any:
        given = {"shards": 1, **self.settings, **settings}
        return self._stack.enter_context(kind(state=self._folder / state, **given))

    def follower(self, state: str, shard: int) -> ServerThread:
        return self._enter(ServerThread, f"{state}/shard-{shard}", follower=True)

    def leading(self, state: str, followers: list[Any]) -> ServerThread:
        named = [each.url.removeprefix("aiops://") for each in followers]
        return self._enter(ServerThread, state, followers=named)

    def follower_standby(self, state: str, shard: int) -> StandbyThread:
        given = {"follower": True, "shard": shard, "standby": self.lead.url}
        return self._enter(StandbyThread, f"{state}/shard-{shard}", **given)

    def standing(self, state: str, followers: list[Any]) -> StandbyThread:
        named = [each.url.removeprefix("aiops://") for each in followers]
        given = {"followers": named, "shard_bytes": 1, "standby": self.lead.url}
        return self._enter(StandbyThread, state, **given)

    @property
    def both(self) -> str:
        return urls.write_all([*urls.parse_all(self.lead.url), *urls.parse_all(self.standby.url)])

    def caught_up(self) -> None:
        """Wait until each standby has all rows of its server."""
        servers = [self.lead, *self.followers]
        for server, standby in zip(servers, [self.standby, *self.copies], strict=True):
            standby.wait(server.call(lambda running: running._state.newest))

    def stop_primaries(self) -> None:
        for server in (self.lead, *self.followers):
            server.stop()

    def promote(self) -> Message:
        return promote(self.standby.url)

    def close(self) -> None:
        self._stack.close()


def promote(url: str) -> Message:
    """Promote a standby, as ``aiops promote`` does."""
    env = CURRENT_ENVIRONMENT.get()
    return asyncio.run(ask(env, url, None, lambda local: Promote(1), PATIENCE))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize("acks", ["written", "durable", "replicated"])
def test_a_worker_goes_on_with_the_standbys(acks: str, made: Any) -> None:
    """Each step adds -1 to every parameter, exactly once, before and after."""
    run = made(acks=acks)
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for step in range(1, 13):
            if step == 7:
                if acks != "replicated":
                    run.caught_up()
                run.stop_primaries()
                found = run.promote()
                assert isinstance(found, Promoted)
                assert found.version == 6
                assert found.generation >> 16 == 1
            receipt = worker.step(ONES)
            assert receipt.used
            assert receipt.version == step
            assert (worker.params["w"] == -step).all()
        report = worker.stats()
        assert [line["version"] for line in report["shards"]] == [12, 12]
