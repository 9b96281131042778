"""A sharded model that ends in good order writes a last set of snapshots."""

from __future__ import annotations

import errno
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from aiops.client import Client
from aiops.net.disk import SystemDisk
from aiops.state.directory import StateListing
from tests.shards.test_gaps import snapshot_of_all, until
from tests.shards.test_kept_shards import FLAGS, MODEL, gradients, undisturbed
from tests.support import PATIENCE, Process, ServerThread, assert_same

SETTINGS: dict[str, Any] = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "shards": 3}
NO_SET = "no last set of snapshots"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 14)


def newest(folder: Path) -> int:
    return max([0, *StateListing(path.name for path in folder.iterdir()).snapshots])


@pytest.mark.parametrize("acks", ["applied", "written", "durable"])
def test_a_start_after_it_replays_no_update(
    acks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiops.server")
    expected, _report = undisturbed(9)
    folders = [tmp_path / f"shard-{shard}" for shard in range(3)]
    client, port, before = None, 0, [0, 0, 0]
    for start in range(3):
        caplog.clear()
        with ServerThread(**SETTINGS, acks=acks, state=tmp_path, port=port) as server:
            port = int(server.url.rpartition(":")[2])
            client = client or Client(server.url, role="worker", name="w", timeout=PATIENCE)
            params = client.fetch() if start else client.define(MODEL)
            for step in range(3 * start, 3 * start + 3):
                client.exchange(params, gradients(step))
        assert NO_SET not in caplog.text
        rows = [int(found) for found in re.findall(r"(\d+) rows since", caplog.text)]
        assert len(rows) == 3 * (start > 0)
        assert all(row <= 2 for row in rows), "that a capture is done, and that a client left"
        after = [*map(newest, folders)]
        assert all(new > old for new, old in zip(after, before, strict=True))
        before = after
    assert client is not None
    assert client.rolled_back == 0
    client.close()
    assert_same(params.numpy(), expected)


def test_if_the_newest_set_has_all_there_is_no_other(tmp_path: Path) -> None:
    folders = [tmp_path / f"shard-{shard}" for shard in range(3)]
    with ServerThread(**SETTINGS, state=tmp_path) as server:
        with Client(server.url, role="worker") as client:
            client.exchange(client.define(MODEL), gradients(0))
        until(lambda: not server.call(lambda running: running.connections.peers))
        snapshot_of_all(server, folders)
        written = [*map(newest, folders)]
        until(lambda: server.call(lambda running: running.run_state.kept._mark.row) == written[0])
    assert [*map(newest, folders)] == written


def test_a_server_that_cannot_write_its_own_delays_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = SystemDisk.create

    def refused(disk: SystemDisk, path: Path, nbytes: int = 0) -> Any:
        if path.parent.name == "shard-1" and path.name.startswith("snapshot"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path, nbytes)

    with ServerThread(**SETTINGS, state=tmp_path, drain_deadline=PATIENCE) as server:
        with Client(server.url, role="worker") as client:
            params = client.define(MODEL)
            client.exchange(params, gradients(0))
        monkeypatch.setattr(SystemDisk, "create", refused)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE / 2
    assert f"{NO_SET} (a server has not written its own, or not in time)" in caplog.text
    assert "replays the journals from there" in caplog.text
    monkeypatch.undo()
    with (
        ServerThread(**SETTINGS, state=tmp_path) as server,
        Client(server.url, role="worker") as client,
    ):
        assert_same(client.fetch().numpy(), params.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_gone_delays_the_end_by_the_grace_period_at_most(
    number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has ended, by nothing; one that does not answer, by `--drain-deadline`."""
    follower = Process(
        *("-m", "aiops.server", "--port", "0", "--follower", *FLAGS),
        *("--state", str(tmp_path / "follower")),
    )
    try:
        urls = [follower.line().removeprefix("aiops://")]
        given = {**SETTINGS, "shards": 2, "followers": urls, "state": tmp_path / "lead"}
        # `ServerThread` waits for the end for less than the longer one.
        grace = 10 * PATIENCE if number is signal.SIGKILL else 1.0
        with ServerThread(**given, drain_deadline=grace, failure_timeout=PATIENCE) as lead:
            with Client(lead.url, role="worker") as client:
                client.exchange(client.define(MODEL), gradients(0))
            follower.signal(number)
            if number is signal.SIGKILL:
                until(lambda: bool(lead.call(lambda running: running.coordinator.lost)))
            began = time.monotonic()
        if number is signal.SIGSTOP:
            assert time.monotonic() - began >= grace
        assert NO_SET in caplog.text
    finally:
        follower.kill()
