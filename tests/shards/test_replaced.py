"""Each server of a model on shards is killed amid training: it, or its standby, goes on.

The processes of the others go on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aiops.cli.state import app
from aiops.client import Client, Worker
from aiops.common import urls
from aiops.errors import Refused
from aiops.model.tables import Table
from aiops.wire.standby_messages import Promoted
from tests.serving.standby.test_shards import promote
from tests.shards.test_kept_shards import FORKED, Log
from tests.support import PATIENCE, Process

FLAGS = ("--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--shard-bytes", "1")
SHARDS, WORKERS, CELLS = 3, 2, 16
TABLE = Table(WORKERS * CELLS, 1, dtype="float64", init="zeros")
BETWEEN = 20  # pushes from one kill to the next


class Training:
    """Workers that push without a pause: each push adds -1 to all cells that are the worker's.

    Attributes
    ----------
    acknowledged
        By worker, its pushes that were acknowledged, without those that a filter learns from.
    rolled_back
        The pushes of which the workers were told that they are lost.
    """

    def __init__(self, url: str) -> None:
        self.acknowledged, self.rolled_back = [0] * WORKERS, 0
        self._url, self._over, self._more = url, threading.Event(), threading.Condition()
        self._threads = [threading.Thread(target=self._push, args=(n,)) for n in range(WORKERS)]

    def _push(self, number: int) -> None:
        gradient = np.zeros((WORKERS, CELLS))
        gradient[number] = 1
        model = {"w": np.zeros_like(gradient)}
        with Worker(self._url, model, name=f"w{number}", timeout=PATIENCE) as worker:
            while not self._over.is_set():
                used = worker.step({"w": gradient}).used
                with self._more:
                    self.acknowledged[number] += used
                    self._more.notify_all()
            self.rolled_back += worker.rolled_back

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def go_on(self) -> None:
        """Return when each worker has had some more pushes acknowledged."""
        with self._more:
            goals = [count + BETWEEN // WORKERS for count in self.acknowledged]

            def reached() -> bool:
                return all(a >= b for a, b in zip(self.acknowledged, goals, strict=True))

            assert self._more.wait_for(reached, PATIENCE), "pushes are not acknowledged any more"


class RowsTraining(Training):
    """The same of the rows of a table that lie on all servers, whose parts are pushed in turn."""

    def _push(self, number: int) -> None:
        tables, ids = {"t": TABLE}, number + WORKERS * np.arange(CELLS)
        ones = np.ones((CELLS, 1))
        with Worker(self._url, {}, tables=tables, name=f"w{number}", timeout=PATIENCE) as worker:
            while not self._over.is_set():
                worker.push_rows("t", ids, ones)
                with self._more:
                    self.acknowledged[number] += 1
                    self._more.notify_all()
            self.rolled_back += worker.rolled_back


def check_rows(client: Client, stats: Any, acknowledged: list[int]) -> None:
    rows = client.fetch_rows("t", np.arange(WORKERS * CELLS)).reshape(CELLS, WORKERS)
    np.testing.assert_array_equal(rows, -np.tile(np.array(acknowledged, float), (CELLS, 1)))
    [line] = stats["tables"]
    assert (line["made"], line["version"]) == (WORKERS * CELLS, sum(acknowledged))


def check_params(client: Client, stats: Any, acknowledged: list[int], shards: int = SHARDS) -> None:
    params = client.fetch()
    expected = -np.repeat(np.array(acknowledged, float)[:, None], CELLS, 1)
    np.testing.assert_array_equal(params["w"], expected)
    assert [line["version"] for line in stats["shards"]] == [params.version] * shards
    assert params.version == sum(acknowledged)


@pytest.mark.slow
@pytest.mark.parametrize("acks", ["written", "durable"])
@pytest.mark.parametrize("of_rows", [False, True], ids=["tensors", "rows"])
def test_each_server_in_turn(acks: str, of_rows: bool, tmp_path: Path) -> None:
    """Followers are started again by their lead, and the lead, with which they end, by its user."""
    flags = (*FLAGS, "--shards", str(SHARDS), "--state", str(tmp_path), "--acks", acks)
    flags += ("--spread-tables",) if of_rows else ()
    flags += ("--snapshot-every", "0.05")
    lead = Process("-m", "aiops.server", *flags, "--port", "0", env=FORKED)
    try:
        url = lead.line()
        training, log = (RowsTraining if of_rows else Training)(url), Log(lead)
        with training.running():
            training.go_on()
            for shard in range(1, SHARDS):
                before = {each: log.pid(each) for each in range(1, SHARDS)}
                os.kill(before[shard], signal.SIGKILL)
                training.go_on()
                after = {each: log.pid(each) for each in range(1, SHARDS)}
                assert [each for each in after if after[each] != before[each]] == [shard]
                assert lead.popen.poll() is None
            lead.kill()
            port = str(urls.parse(url)[1])
            lead = Process("-m", "aiops.server", *flags, "--port", port, env=FORKED)
            training.go_on()
        with Client(url, timeout=PATIENCE) as client:
            stats = client.stats()
            (check_rows if of_rows else check_params)(client, stats, training.acknowledged)
        assert training.rolled_back == 0
        lead.signal(signal.SIGTERM)
        assert lead.end()[0] == 0
        if of_rows:
            out = tmp_path / "t.npz"
            words = ["export", str(tmp_path), "--table", "t", "--out", str(out)]
            CliRunner().invoke(app, words, catch_exceptions=False)
            with np.load(out) as exported:
                assert exported["ids"].tolist() == list(range(WORKERS * CELLS))
                pushed = -np.tile(np.array(training.acknowledged, float), CELLS)
                np.testing.assert_array_equal(exported["rows"][:, 0], pushed)
    finally:
        lead.kill()


@pytest.mark.slow
@pytest.mark.parametrize("filter", ["off", "norm+curvature"])
def test_the_standby_of_each_follower_in_turn(filter: str, tmp_path: Path) -> None:
    """It takes the place of the one that is killed, which comes back as the standby of that one."""
    with contextlib.ExitStack() as stack:

        def started(name: str, *flags: str) -> Process:
            given = "--policy", "asgd", "--lr", "1", "--kernels", "numpy", "--acks", "replicated"
            state = "--state", str(tmp_path / name), "--snapshot-every", "0.05"
            process = Process(
                *("-m", "aiops.server", "--port", "0", *given, *state, *flags), env=FORKED
            )
            stack.callback(process.kill)
            process.url = process.line()
            Log(process)
            return process

        def standby(name: str, shard: int) -> Process:
            flags = "--follower", "--shard", str(shard), "--standby", lead.url
            return started(name, *flags)

        deadline = "--standby-deadline", "0.2"  # the lead has no standby here
        numbers = range(1, SHARDS)
        followers = {shard: started(f"a{shard}", "--follower") for shard in numbers}
        named = ",".join(each.url.removeprefix("aiops://") for each in followers.values())
        flags = "--filter", filter, "--shard-bytes", "1", *deadline
        lead = started("lead", "--followers", named, *flags)
        standbys = {shard: standby(f"b{shard}", shard) for shard in numbers}
        training = Training(lead.url)
        with training.running():
            for at, (shard, old) in enumerate([(1, "a1"), (2, "a2"), (1, "b1")]):
                training.go_on()
                _fed(lead.url)
                followers[shard].kill()
                found = _promoted(standbys[shard].url)
                assert found.generation >> 36 == 1 + (at == 2)
                training.go_on()
                followers[shard] = standbys[shard]
                standbys[shard] = standby(old, shard)
                others = lead, *followers.values(), *standbys.values()
                assert [each.popen.poll() for each in others] == [None] * len(others)
            training.go_on()
        with Client(lead.url, timeout=PATIENCE) as client:
            stats = client.stats()
            check_params(client, stats, training.acknowledged)
        assert training.rolled_back == 0
        assert [line["port"] for line in stats["shards"]][1:] == [
            urls.parse(followers[shard].url)[1] for shard in numbers
        ]


@pytest.mark.slow
def test_a_follower_that_its_lead_starts_again_is_the_standby_of_its_successor(
    tmp_path: Path,
) -> None:
    """The successor is started again by its own parent, and is the follower again."""
    flags = *FLAGS, "--shards", "2", "--acks", "replicated", "--snapshot-every", "0.05"
    with contextlib.ExitStack() as stack:

        def started(name: str, *more: str) -> tuple[Process, Log]:
            state = "--state", str(tmp_path / name), "--port", "0"
            process = Process("-m", "aiops.server", *flags, *state, *more, env=FORKED)
            stack.callback(process.kill)
            process.url = process.line()
            return process, Log(process)

        lead, log = started("a")
        standby, log_of_standby = started("b", "--standby", lead.url)
        training = Training(lead.url)
        with training.running():
            training.go_on()
            _fed(lead.url)
            while True:  # before its lead has started it again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(log.pid(1), signal.SIGKILL)
                try:
                    promote(log_of_standby.url(1))
                    break
                except Refused as error:
                    if "is there" not in str(error):
                        raise
            training.go_on()
            _fed(lead.url)
            before = log_of_standby.pid(1)
            os.kill(before, signal.SIGKILL)
            training.go_on()
            assert log_of_standby.pid(1) != before
            assert [each.popen.poll() for each in (lead, standby)] == [None, None]
        with Client(lead.url, timeout=PATIENCE) as client:
            check_params(client, client.stats(), training.acknowledged, shards=2)
        assert training.rolled_back == 0


def _fed(url: str) -> None:
    """Return when each follower has a standby that has all rows."""
    for _ in range(int(PATIENCE / 0.05)):
        with Client(url, timeout=PATIENCE) as client:
            states = client.stats()["state"]["shards"]
        if all(s.get("acks") == "replicated" and s["standbys"] for s in states) and states:
            return
        threading.Event().wait(0.05)
    raise AssertionError(states)


def _promoted(url: str) -> Promoted:
    """Have the standby of a follower take its place, once the lead has lost that one."""
    while True:
        try:
            found = promote(url)
        except Refused as error:
            if "is there" not in str(error):
                raise
            continue
        assert isinstance(found, Promoted)
        return found
