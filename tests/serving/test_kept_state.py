"""``--state``: a server that is killed goes on where it was, to the last bit."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.algorithms import find
from aiops.algorithms.asgd import ASGD
from aiops.engine import statistics
from aiops.engine.engine import Engine
from aiops.engine.journal import digest
from aiops.errors import AiopsError, ConflictError, UsageError
from aiops.model.layout import Array
from aiops.net import disk
from aiops.net.disk import SystemDisk
from aiops.serving import state_files
from aiops.serving.config import Config
from aiops.serving.state_files import Clock, StateFiles
from tests.support import Process, ServerThread

START: Mapping[str, Array] = {
    "wide": np.linspace(-1, 1, 96).reshape(8, 12).astype(np.float32),
    "narrow": np.linspace(0, 1, 5).astype(np.float16),
}
PLAIN: Mapping[str, Array] = {"w": np.zeros(64, np.float32)}

RUNS: Mapping[str, dict[str, Any]] = {
    "asgd": {"policy": "asgd"},
    "sasgd": {"policy": "sasgd", "set": {"modulate": "exponential"}},
    "fasgd": {"policy": "fasgd", "set": {"gamma": 0.9}},
    "softsync": {"policy": "softsync", "set": {"n": 2}, "workers": 2},
    "hardsync": {"policy": "hardsync", "set": {"admission": "wait"}, "workers": 2},
    "momentum": {"policy": "asgd", "set": {"optimizer": "momentum"}},
    "adam": {"policy": "asgd", "set": {"optimizer": "adam"}},
    "coded": {"policy": "asgd", "push_codec": "topk:0.25", "fetch_codec": "int8"},
    "gated": {"policy": "fasgd", "gate": "bfasgd:c_push=0.5,c_fetch=0.5"},
}


def copy(server: ServerThread, folder: Path, to: Path) -> tuple[str, dict[str, Any]]:
    """Copy a server's folder between two events; return its digest and its report then."""

    def copied(running: Any) -> tuple[str, dict[str, Any]]:
        running._state._snapshots.wait()  # a copy takes a while, and it may rename meanwhile
        shutil.copytree(folder, to)
        return digest(running.engine), statistics.decided(running.engine.report())

    found: tuple[str, dict[str, Any]] = server.call(copied)
    return found


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads whole segments, which are of 64 MiB in use and nearly empty in these tests."""
    monkeypatch.setattr(state_files, "SEGMENT", 1 << 16)


def recovered(folder: Path, settings: Mapping[str, Any]) -> Engine:
    """Return a fresh engine, brought to the state that a copy of a folder holds."""
    chosen = {**settings}
    chosen["set"] = [f"{key}={value}" for key, value in chosen.get("set", {}).items()]
    for name in ("push_codec", "fetch_codec"):
        if name in chosen:
            chosen[name] = [chosen[name]]
    config = Config(**chosen)
    engine = Engine(find(config.policy).make(config.settings()), config.options())
    files = StateFiles(folder, SystemDisk(), "a test", "0" * 16, lambda: 1)
    files.recover(engine, config.policy)
    files.close()
    return engine


def train(url: str, start: Mapping[str, Array], seed: int, steps: int) -> None:
    """Take steps with pseudo-random gradients."""
    rng = np.random.default_rng(seed)
    with aiops.Worker(url, start) as worker:
        for _ in range(steps):
            worker.step(
                lambda params: {
                    name: (0.01 * rng.standard_normal(array.shape)).astype(array.dtype)
                    for name, array in params.items()
                }
            )


@pytest.mark.parametrize("every", [0.02, 1000.0], ids=["snapshots", "journal"])
@pytest.mark.parametrize("run", RUNS)
def test_what_is_kept_is_what_was(run: str, every: float, tmp_path: Path) -> None:
    """At any moment a copy of the folder brings an engine to the same state."""
    settings, start = RUNS[run], PLAIN if run == "coded" else START
    with ServerThread(state=tmp_path / "state", snapshot_every=every, **settings) as server:
        threads = [
            threading.Thread(target=train, args=(server.url, start, seed, 12)) for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected, report = copy(server, tmp_path / "state", tmp_path / "copy")
    engine = recovered(tmp_path / "copy", settings)
    assert digest(engine) == expected
    found = statistics.decided(engine.report())
    for key in ("staleness", "refused", "ignored", "version"):
        assert found.get(key) == report.get(key), key


def test_every_prefix_is_a_state(tmp_path: Path) -> None:
    """A crash leaves a prefix of the rows, and perhaps a torn one: the versions only rise."""
    with ServerThread(policy="fasgd", state=tmp_path / "kept") as server:
        train(server.url, PLAIN, 1, 6)
        copy(server, tmp_path / "kept", tmp_path / "state")
    [journal] = (tmp_path / "state").glob("journal-*")
    whole, versions = journal.read_bytes(), []
    used = len(whole.rstrip(b"\0"))
    for cut in np.linspace(64, used, 16).astype(int):
        journal.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        versions.append(recovered(tmp_path / "state", {"policy": "fasgd"}).version)
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[-1] == 6


@pytest.mark.parametrize(
    ("acks", "near", "every"),
    [("written", True, 1000.0), ("written", False, 0.01), ("durable", True, 0.01)],
)
def test_a_worker_does_not_notice_that_its_server_was_killed(
    acks: str, near: bool, every: float, tmp_path: Path
) -> None:
    """Each step adds -1 to every parameter, exactly once, over three kills."""
    flags = ["--policy", "asgd", "--set", "lr=1", "--state", str(tmp_path / "s"), "--acks", acks]
    flags += [f"--snapshot-every={every}", *([] if near else ["--no-shm"])]
    server = Process("-m", "aiops.server", "--port", "0", *flags)
    try:
        url = server.line()
        port = url.rpartition(":")[2]
        with aiops.Worker(url, PLAIN, timeout=30) as worker:
            gradient = {"w": np.ones(64, np.float32)}
            for step in range(1, 61):
                if step % 16 == 0:
                    server.kill()
                    server = Process("-m", "aiops.server", "--port", port, *flags)
                    assert server.line() == url
                receipt = worker.step(gradient)
                assert receipt.used
                assert receipt.version == step
                assert (worker.params["w"] == -step).all()
            assert worker.stats()["state"]["acks"] == acks
    finally:
        server.kill()


def test_it_ends_in_good_order_and_goes_on(tmp_path: Path) -> None:
    flags = ["--policy", "fasgd", "--port", "0", "--state", str(tmp_path / "s")]
    for generation in (1, 2, 3):
        server = Process("-m", "aiops.server", *flags)
        try:
            url = server.line()
            train(url, START, generation, 3)
            with aiops.Client(url) as client:
                found = client.stats()
                assert found["state"]["generation"] == generation
                assert found["version"] == 3 * generation
            server.signal(signal.SIGTERM)
            status, _out, err = server.end()
            assert status == 0, err
            assert "Traceback" not in err
        finally:
            server.kill()


def test_settings_that_cannot_work_leave_the_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(ConflictError, match="waits for a known number"),
        ServerThread(policy="softsync", state=tmp_path / "s"),
    ):
        pass
    with ServerThread(policy="softsync", workers=1, state=tmp_path / "s"):
        pass


def test_a_server_is_killed_before_its_first_client(tmp_path: Path) -> None:
    """The journal is its first row alone, which the next start must not write over."""
    flags = ["--policy", "asgd", "--port", "0", "--state", str(tmp_path / "s")]
    for generation in (1, 2, 3):
        server = Process("-m", "aiops.server", *flags)
        try:
            url = server.line()
            if generation > 1:
                train(url, PLAIN, generation, 3)
        finally:
            server.kill()
    assert recovered(tmp_path / "s", {"policy": "asgd"}).version == 6


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        ServerThread(policy="asgd", state=tmp_path / "s"),
        pytest.raises(UsageError, match="is in use by process"),
        ServerThread(policy="asgd", state=tmp_path / "s"),
    ):
        pass
    with ServerThread(policy="asgd", state=tmp_path / "s"):
        pass


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": "fasgd"}, "policy='asgd', and this one has policy='fasgd'"),
        ({"set": {"lr": 0.5}}, "lr=0.1, and this one has lr=0.5"),
        ({"workers": 3}, "workers=None, and this one has workers=3"),
    ],
)
def test_other_settings_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = {"policy": "asgd", "set": {"lr": 0.1}, "state": tmp_path / "s"}
    with ServerThread(**settings) as server:
        train(server.url, PLAIN, 1, 2)
    with pytest.raises(UsageError, match=said), ServerThread(**{**settings, **changed}):
        pass
    with ServerThread(**settings, heartbeat=3.0, max_connections=7) as server:  # these may change
        train(server.url, PLAIN, 2, 2)


def test_a_model_to_begin_with_is_for_a_new_state(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", save=tmp_path / "m.safetensors") as server:
        train(server.url, PLAIN, 1, 2)
    settings = {"policy": "asgd", "state": tmp_path / "s", "init": tmp_path / "m.safetensors"}
    with ServerThread(**settings) as server:
        train(server.url, PLAIN, 1, 2)
    with pytest.raises(UsageError, match="is for a new state"), ServerThread(**settings):
        pass
    settings.pop("init")
    with ServerThread(**settings) as server, aiops.Client(server.url) as client:
        assert client.fetch().version == 2


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "s"
    with pytest.raises(UsageError, match="needs --state"):
        Config(acks="durable")
    with pytest.raises(UsageError, match="applied, written"):
        Config(acks="sure", state=state)
    with pytest.raises(ConflictError, match="shards"):
        Config(state=state, shards=2)
    with pytest.raises(ConflictError, match="relaxed"):
        Config(state=state, consistency="relaxed")
    with pytest.raises(ConflictError, match="drop --record"):
        Config(state=state, record=tmp_path / "r")
    state.mkdir()
    (state / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'thesis.tex'"), ServerThread(state=state):
        pass
    assert (state / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("acks", ["written", "durable"])
def test_a_full_disk_ends_the_journal_and_not_the_run(
    acks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ServerThread(policy="asgd", state=tmp_path / "s", acks=acks) as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        gradient = {"w": np.ones(64, np.float32)}
        for _ in range(4):
            worker.step(gradient)

        def full(*_given: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk._SystemFile, "write" if acks == "written" else "sync", full)
        for _ in range(4):
            worker.step(gradient)
        found = worker.stats()
        assert found["version"] == 8
        assert found["state"]["acks"] == "applied"
        assert "No space left on device" in found["state"]["ended"]
        monkeypatch.undo()
    assert recovered(tmp_path / "s", {"policy": "asgd"}).version >= 4


class Opaque(ASGD):
    """A policy with an attribute that no file can hold."""

    name = "opaque"

    def policy(self, workers: int | None) -> Any:
        """Return one with a lock in it."""
        made = super().policy(workers)
        made.guard = threading.Lock()
        return made


def test_a_policy_that_cannot_be_kept_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="guard"),
        ServerThread(policy=f"{__name__}:Opaque", state=tmp_path / "s"),
    ):
        pass
    with ServerThread(policy="asgd", state=tmp_path / "s"):  # it left the folder
        pass


def test_a_failed_update_is_in_no_snapshot(tmp_path: Path) -> None:
    """The journal ends before it, so the next start is at the version before."""

    def failing(running: Any) -> None:
        running._failed(RuntimeError("an update failed midway"))

    server = ServerThread(policy="asgd", state=tmp_path / "s")
    with server:
        train(server.url, PLAIN, 1, 3)
        server.call(failing)
        with pytest.raises(RuntimeError, match="midway"):
            server.__exit__()
        server._error = None
    assert not list((tmp_path / "s").glob("snapshot-*"))
    assert recovered(tmp_path / "s", {"policy": "asgd"}).version == 3


def test_after_a_full_disk_a_snapshot_keeps_what_the_journal_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room comes back before the end: nothing is lost then."""
    with (
        ServerThread(policy="asgd", state=tmp_path / "s") as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        gradient = {"w": np.ones(64, np.float32)}
        worker.step(gradient)

        def full(*_given: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk._SystemFile, "write", full)
            worker.step(gradient)
        for _ in range(4):
            worker.step(gradient)
        assert worker.stats()["state"]["acks"] == "applied"
    assert recovered(tmp_path / "s", {"policy": "asgd"}).version == 6


def test_a_snapshot_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nothing has happened since."""
    failed, room, written, real = (
        *(threading.Event(), threading.Event(), threading.Event()),
        SystemDisk.rename,
    )

    def rename(system: SystemDisk, path: Path, to: Path) -> None:
        if to.name.startswith("snapshot-") and not room.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(system, path, to)
        if to.name.startswith("snapshot-"):
            written.set()

    monkeypatch.setattr(SystemDisk, "rename", rename)
    with ServerThread(policy="asgd", state=tmp_path / "s", snapshot_every=0.01) as server:
        train(server.url, PLAIN, 1, 3)
        while server.call(lambda running: running.connections.peers):
            pass
        failed.clear()
        assert failed.wait(20)
        room.set()
        assert written.wait(20)


def test_the_pools_have_their_bounds_after_a_start(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", state=tmp_path / "s") as server:
        train(server.url, {"w": np.zeros(12 << 20, np.float32)}, 1, 1)
        copy(server, tmp_path / "s", tmp_path / "copy")
        bounds = server.call(lambda running: [pool.bound for pool in running.engine.pools])
    engine = recovered(tmp_path / "copy", {"policy": "asgd"})
    assert [pool.bound for pool in engine.pools] == bounds


def test_an_acknowledgement_that_waits_for_the_disk_is_sent_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ServerThread(policy="asgd", state=tmp_path / "s", acks="durable") as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        gradient = {"w": np.ones(64, np.float32)}
        worker.step(gradient)
        synced, may_go, real = threading.Event(), threading.Event(), disk._SystemFile.sync

        def slow(file: Any) -> None:
            synced.set()
            assert may_go.wait(20)
            real(file)

        monkeypatch.setattr(disk._SystemFile, "sync", slow)
        receipts: list[Any] = []
        stepping = threading.Thread(target=lambda: receipts.append(worker.step(gradient)))
        stepping.start()
        assert synced.wait(20)
        server.call(lambda running: running.stop())
        may_go.set()
        stepping.join(20)
        assert [receipt.version for receipt in receipts] == [2]


def test_damage_is_refused(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", state=tmp_path / "s") as server:
        train(server.url, PLAIN, 1, 5)
        copy(server, tmp_path / "s", tmp_path / "once")  # as after a kill
    with ServerThread(policy="asgd", state=tmp_path / "once") as server:
        train(server.url, PLAIN, 2, 5)
        copy(server, tmp_path / "once", tmp_path / "twice")
    first = sorted((tmp_path / "twice").glob("journal-*"))[0]
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.write_bytes(data)
    with (
        pytest.raises(AiopsError, match=f"{first.name} is damaged at row"),
        ServerThread(policy="asgd", state=tmp_path / "twice"),
    ):
        pass


def test_a_damaged_snapshot_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """Two stay, and the journal from the older one on."""
    for seed in (1, 2, 3):
        with ServerThread(policy="fasgd", state=tmp_path / "s") as server:
            train(server.url, START, seed, 4)
    older, newest = sorted((tmp_path / "s").glob("snapshot-*"))
    whole = recovered(tmp_path / "s", {"policy": "fasgd"})
    assert whole.version == 12
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    again = recovered(tmp_path / "s", {"policy": "fasgd"})
    assert digest(again) == digest(whole)
    assert (
        statistics.decided(again.report())["staleness"]
        == (statistics.decided(whole.report())["staleness"])
    )
    assert older.exists()


def test_the_journal_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """After each start a segment of its own; those that two snapshots cover are gone."""
    for seed in range(5):
        with ServerThread(policy="asgd", state=tmp_path / "s") as server:
            train(server.url, PLAIN, seed, 3)
    assert len(list((tmp_path / "s").glob("snapshot-*"))) == 2
    assert len(list((tmp_path / "s").glob("journal-*"))) <= 2


class TestClock:
    def test_it_is_the_machines_at_first(self) -> None:
        assert Clock(lambda: 7.0)() == 7.0

    @pytest.mark.parametrize(("booted", "goes_on"), [(0.0, 120.0), (5000.0, 5000.0)])
    def test_it_is_never_before_the_last_start(self, booted: float, goes_on: float) -> None:
        """The machine has booted meanwhile, or has not."""
        machine = [booted]
        clock = Clock(lambda: machine[0])
        clock.go_on(120.0)
        assert clock() == goes_on
        machine[0] += 2.5
        assert clock() == goes_on + 2.5
