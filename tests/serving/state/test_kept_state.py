"""``--state``: a server that is killed goes on where it was, to the last bit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.algorithms import find
from aiops.algorithms.asgd import ASGD
from aiops.client import Client
from aiops.common.generations import generation_text
from aiops.durable import recovery, snapshot_rule
from aiops.durable.commit_gate import Acks
from aiops.engine import statistics
from aiops.engine.capture import needed_rows
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Reply
from aiops.engine.update_queue import UpdateQueue
from aiops.errors import AiopsError, ConflictError, DamagedState, UsageError
from aiops.kernels.parallel import ParallelMap, serial_map
from aiops.model.layout import Array
from aiops.net import disk
from aiops.net.disk import SystemDisk
from aiops.net.thread_pool import pool_of
from aiops.net.update_thread import UpdateThread
from aiops.serving.config import Config
from aiops.serving.draining import Draining
from aiops.serving.main import run
from aiops.serving.shard_processes import ShardProcesses
from aiops.serving.state import kept_state
from aiops.serving.state.snapshot_writer import SnapshotWriter
from aiops.serving.state.state_files import Clock, StateFiles
from aiops.state.directory import journal_name
from aiops.state.frames import SegmentScan
from aiops.state.snapshot_file import SnapshotHeader
from aiops.store.parameters import UpdateJob
from aiops.store.resources import Resources
from tests.durable.test_recorder import Recorded
from tests.engine.seeded_run import Case
from tests.peers import eventually
from tests.stats_text import shown
from tests.support import PATIENCE, Process, ServerThread, server_process

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
    "examples": {
        "policy": "asgd",
        "set": {"schedule": "cosine:900", "schedule_unit": "examples", "mini_batch": 10},
    },
    "seconds": {"policy": "asgd", "set": {"schedule": "linear:9", "schedule_unit": "seconds"}},
    "momentum": {"policy": "asgd", "set": {"optimizer": "momentum"}},
    "adam": {"policy": "asgd", "set": {"optimizer": "adam"}},
    "coded": {"policy": "asgd", "push_codec": "topk:0.25", "fetch_codec": "int8"},
    "gated": {"policy": "fasgd", "gate": "bfasgd:c_push=0.5,c_fetch=0.5"},
}


def copy(server: ServerThread, folder: Path, to: Path) -> tuple[str, dict[str, Any]]:
    """Copy a server's folder between two events; return its digest and its report then."""

    def copied(running: Any) -> tuple[str, dict[str, Any]]:
        # A copy takes a while, and it may rename meanwhile.
        running.run_state.kept._snapshots.wait()
        shutil.copytree(folder, to)
        return digest(running.engine), statistics.decided(running.engine.report())

    found: tuple[str, dict[str, Any]] = server.call(copied)
    return found


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads whole segments, which are of 64 MiB in use and nearly empty in these tests."""
    monkeypatch.setattr(SystemDisk, "segment", 1 << 16)


def recovered(
    folder: Path,
    settings: Mapping[str, Any],
    kernels: Callable[[], object] | None = None,
    parallel_map: ParallelMap = serial_map,
) -> Engine:
    """Return a fresh engine, brought to the state that a copy of a folder holds."""
    chosen = {**settings}
    chosen["set"] = [f"{key}={value}" for key, value in chosen.get("set", {}).items()]
    for name in ("push_codec", "fetch_codec"):
        if name in chosen:
            chosen[name] = [chosen[name]]
    config = Config(**chosen)
    machine = Resources(parallel_map=parallel_map)
    engine = Engine(find(config.policy).make(config.settings()), config.options(), machine)
    files = StateFiles(folder, SystemDisk(), "a test", "0" * 16, lambda: 1)
    files.recover(engine, config.policy, kernels=kernels)
    files.close()
    return engine


@pytest.mark.parametrize(("elements", "waits"), [(1 << 19, 1), (64, 0)])
def test_a_replay_of_a_large_model_waits_for_its_kernels(
    elements: int, waits: int, tmp_path: Path
) -> None:
    """Once, before the first row of the model: NumPy takes several times as long for each."""
    model = {"w": np.zeros(elements, np.float32)}
    with (
        ServerThread(policy="asgd", state=tmp_path / "s", snapshot_every=1000.0) as server,
        aiops.Worker(server.url, model) as worker,
    ):
        for _ in range(2):
            worker.step({"w": np.ones(elements, np.float32)})
        copy(server, tmp_path / "s", tmp_path / "state")
    waited = list[int]()
    engine = recovered(tmp_path / "state", {"policy": "asgd"}, lambda: waited.append(1))
    assert engine.version == 2
    assert len(waited) == waits


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_reading_of_a_state(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one takes long; it is as it was, and the next start reads it whole."""
    settings: dict[str, Any] = {"policy": "asgd", "state": tmp_path / "s"}
    with (
        ServerThread(**settings, snapshot_every=1000.0) as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        for _ in range(5):
            worker.step({"w": np.ones(64, np.float32)})
        copy(server, tmp_path / "s", tmp_path / "state")
    fed, feed = list[int](), recovery.Replayer.feed

    def signalled(replayer: recovery.Replayer, frame: Any) -> None:
        feed(replayer, frame)
        fed.append(frame.number)
        signal.raise_signal(number)

    monkeypatch.setattr(recovery.Replayer, "feed", signalled)
    urls = list[str]()
    asyncio.run(run(Config(policy="asgd", state=tmp_path / "state"), urls.append))
    assert len(fed) == 1
    assert not urls
    monkeypatch.undo()
    assert recovered(tmp_path / "state", {"policy": "asgd"}).version == 5


def read_first(pieces: Sequence[Callable[[], Any]]) -> None:
    for piece in reversed(pieces):
        piece()


async def push_together(url: str, model: Mapping[str, Array]) -> None:
    """Define a model, and push five gradients while the first is applied."""
    gradients = [{"w": np.full_like(model["w"], 0.01 * number)} for number in range(1, 6)]
    async with aiops.AsyncWorker(url, model), aiops.AsyncClient(url, role="worker") as client:
        params = await client.fetch()
        await asyncio.gather(*(client.push(params, gradient) for gradient in gradients))


@pytest.fixture
def an_update_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of a small model have a thread, too; the first one waits until a push is queued."""
    waiting, pushes = threading.Event(), count(1)
    push, run = UpdateQueue.push, UpdateJob.run

    def queued(queue: UpdateQueue, *given: Any) -> Any:
        if next(pushes) == 2:
            waiting.set()
        return push(queue, *given)

    def held(job: UpdateJob) -> Any:
        assert waiting.wait(PATIENCE), "no push came while another was applied"
        return run(job)

    monkeypatch.setattr(UpdateQueue, "push", queued)
    monkeypatch.setattr(UpdateJob, "run", held)
    monkeypatch.setattr(UpdateThread, "at_once", 0.0)
    monkeypatch.setattr(recovery, "SMALL", 0)


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
@pytest.mark.usefixtures("an_update_that_waits")
def test_a_row_that_is_read_while_another_is_replayed(torn: bool, tmp_path: Path) -> None:
    """Its memory is another, also where a row is not whole and the rest is searched for more."""
    settings = {"policy": "fasgd", "kernels": "numpy"}
    model = {"w": np.zeros(1 << 18, np.float32)}  # a row is read in several pieces
    with ServerThread(**settings, state=tmp_path / "s", snapshot_every=1000.0) as server:
        asyncio.run(push_together(server.url, model))
        expected, _report = copy(server, tmp_path / "s", tmp_path / "state")
    pushes = [
        (path, row)
        for path in sorted((tmp_path / "state").glob("journal-*"))
        for row in SegmentScan(path.read_bytes(), path.name)
        if len(row.payload) == model["w"].nbytes
    ][1:]
    numbers = [row.number for _path, row in pushes]
    assert len(numbers) == 5
    assert numbers[0] + 1 in numbers, "one was received while another was applied"
    if torn:
        path, row = pushes[-1]
        with path.open("r+b") as file:
            file.seek(row.end - 5)
            file.write(bytes(byte ^ 1 for byte in row.payload[-5:]))
    engines = []
    for number, parallel_map in enumerate((serial_map, read_first, pool_of(2).all)):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "state", folder)
        engines.append(recovered(folder, settings, None, parallel_map))
    assert len({digest(engine) for engine in engines}) == 1
    assert (digest(engines[0]) == expected) is not torn


def train(url: str, start: Mapping[str, Array], seed: int, steps: int) -> None:
    """Take steps with pseudo-random gradients."""
    rng = np.random.default_rng(seed)
    with aiops.Worker(url, start) as worker:
        for _ in range(steps):
            worker.step(partial(gradients, rng))


def gradients(rng: np.random.Generator, params: Mapping[str, Array]) -> dict[str, Array]:
    """Return small pseudo-random gradients."""
    return {
        name: (0.01 * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in params.items()
    }


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


@pytest.mark.parametrize("acks", ["written", "durable"])
@pytest.mark.parametrize("every", [0.02, 1000.0], ids=["snapshots", "journal"])
@pytest.mark.parametrize("run", ["fasgd", "softsync", "coded", "gated"])
def test_the_bytes_of_open_connections_are_kept(
    run: str, every: float, acks: str, tmp_path: Path
) -> None:
    """Each message counts once in the statistics, whether a row or a snapshot tells of it."""
    start = PLAIN if run == "coded" else START
    state = tmp_path / "state"
    settings = {"acks": acks, "snapshot_every": every, "no_shm": True, **RUNS[run]}
    with ServerThread(state=state, **settings) as server:  # segments are announced in no row
        trained, leave = threading.Barrier(3), threading.Event()

        def work(seed: int) -> None:
            with aiops.Worker(server.url, start) as worker:
                for _ in range(12):
                    worker.step(partial(gradients, np.random.default_rng(seed)))
                trained.wait(PATIENCE)
                leave.wait(PATIENCE)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        trained.wait(PATIENCE)
        # Answers to fetches, which acknowledge nothing, do not wait for their rows.
        recorder = server.call(lambda running: running.run_state.kept.recorder)
        eventually(lambda: not recorder.lag, "the rows of the last fetches are synced")
        live = server.call(lambda running: running.engine.membership.ledger())
        copy(server, state, tmp_path / "copy")
        leave.set()
        for thread in threads:
            thread.join()
    kept = recovered(tmp_path / "copy", RUNS[run]).membership.ledger()
    for way in ("pushed", "fetched"):
        for key in ("messages", "payload", "model", "other"):
            assert kept[way][key] == live[way][key], (way, key)


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
                assert generation_text(found["state"]["generation"]) == str(generation)
                assert found["version"] == 3 * generation
            server.signal(signal.SIGTERM)
            status, _out, err = server.end()
            assert status == 0, err
            assert "Traceback" not in err
        finally:
            server.kill()


def test_a_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    """Of examples, after a server that was killed; each gradient of 1 takes off the rate."""
    flags = ["--policy", "asgd", "--port", "0", "--state", str(tmp_path / "s"), "--lr", "1"]
    flags += ["--acks", "written", "--set", "schedule=warmup:1000"]
    flags += ["--set", "schedule_unit=examples", "--set", "mini_batch=100"]
    value = 0.0
    for start in range(3):
        server = Process("-m", "aiops.server", *flags)
        try:
            with aiops.Worker(server.line(), {"w": np.zeros(1)}) as worker:
                for step in range(2):
                    worker.step({"w": np.ones(1)})
                    value -= (2 * start + step + 1) * 100 / 1000
                    np.testing.assert_allclose(worker.params["w"], value)
        finally:
            server.kill()


def test_a_folder_whose_lock_was_removed_is_still_locked(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", state=tmp_path / "s"):
        (tmp_path / "s" / "LOCK").unlink()
        with (
            pytest.raises(UsageError, match="is in use by"),
            ServerThread(policy="asgd", state=tmp_path / "s"),
        ):
            pass


def test_the_states_of_shards_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "s" / "shard-0").mkdir(parents=True)
    with (
        pytest.raises(UsageError, match="start it with --shards"),
        ServerThread(policy="asgd", state=tmp_path / "s"),
    ):
        pass
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["shard-0"]


def test_a_state_that_lacks_its_generations_is_damaged(tmp_path: Path) -> None:
    """It would begin with generation 1 again, which clients have seen."""
    with ServerThread(policy="asgd", state=tmp_path / "s") as server:
        train(server.url, PLAIN, 1, 2)
    (tmp_path / "s" / "generation").unlink()
    with (
        pytest.raises(DamagedState, match="no file of its generations"),
        ServerThread(policy="asgd", state=tmp_path / "s"),
    ):
        pass


def test_shards_are_not_begun_beside_another_state(tmp_path: Path) -> None:
    """A mistake in --shards leaves the folder as it was."""
    with ServerThread(policy="asgd", state=tmp_path / "s"):
        pass
    names = sorted(path.name for path in (tmp_path / "s").iterdir())
    config = Config(policy="asgd", shards=2, state=tmp_path / "s")
    with pytest.raises(UsageError, match="start it without --shards"):
        asyncio.run(ShardProcesses(config).connect())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == names


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


def test_a_server_that_is_killed_again_and_again_takes_a_snapshot_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start begins a segment, of which a small model needs little: a disk would fill."""
    monkeypatch.setattr(snapshot_rule, "_JOURNAL", 6 * SystemDisk.segment)
    settings = {"policy": "asgd", "snapshot_every": 1000.0}
    most = 0
    for start in range(20):
        folder, copied = tmp_path / f"s{start}", tmp_path / f"s{start + 1}"
        with ServerThread(**settings, state=folder) as server:
            if not start:
                train(server.url, PLAIN, start, 3)
            until = time.monotonic() + PATIENCE
            while (
                server.call(lambda running: running.run_state.kept._earlier)
                > 6 * SystemDisk.segment
                and time.monotonic() < until
            ):
                time.sleep(0.005)
            copy(server, folder, copied)
        most = max(most, len(list(copied.glob("journal-*"))))
        shutil.rmtree(folder)
    assert most <= 2 * 7 + 1
    assert recovered(copied, {"policy": "asgd"}).version == 3


def test_a_file_of_the_state_that_is_damaged_says_what_to_do(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", state=tmp_path / "s") as server:
        train(server.url, PLAIN, 1, 2)
    for name, said in (("identity", "put back any copy of it"), ("generation", "the whole folder")):
        path = tmp_path / "s" / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedState, match=f"{path} is damaged: .*{said}.*aiops state export"):
            StateFiles(tmp_path / "s", SystemDisk(), "a test", "0" * 16, lambda: 1)
        path.write_bytes(data)
    (tmp_path / "s" / "identity").unlink()
    with pytest.raises(DamagedState, match="no file 'identity': put back any copy"):
        StateFiles(tmp_path / "s", SystemDisk(), "a test", "0" * 16, lambda: 1)


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
    with ServerThread(
        **settings, failure_timeout=3.0, max_connections=7
    ) as server:  # these may change
        train(server.url, PLAIN, 2, 2)


def test_a_model_to_begin_with_is_for_a_new_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same command goes on with the state that it began, whatever became of the file."""
    with ServerThread(policy="asgd", save=tmp_path / "m.safetensors") as server:
        train(server.url, PLAIN, 1, 2)
    settings = {"policy": "asgd", "state": tmp_path / "s", "init": tmp_path / "m.safetensors"}
    with ServerThread(**settings) as server:
        train(server.url, PLAIN, 1, 2)
    (tmp_path / "m.safetensors").unlink()
    with ServerThread(**settings) as server, aiops.Client(server.url) as client:
        assert client.fetch().version == 2
    assert "has a model already, at version 2, and goes on with it: --init" in caplog.text


def test_a_mistake_in_the_model_to_begin_with_begins_no_state(tmp_path: Path) -> None:
    with ServerThread(policy="asgd", save=tmp_path / "m.safetensors") as server:
        train(server.url, PLAIN, 1, 2)
    settings = {"policy": "asgd", "state": tmp_path / "s"}
    with (
        pytest.raises(UsageError, match="No such file"),
        ServerThread(**settings, init=tmp_path / "n.safetensors"),
    ):
        pass
    with ServerThread(**settings):  # a state without a model, which can still be given one
        pass
    init = tmp_path / "m.safetensors"
    with ServerThread(**settings, init=init) as server, aiops.Client(server.url) as client:
        assert sum(abs(values).sum() for values in client.fetch().values())


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "s"
    with pytest.raises(UsageError, match="needs --state"):
        Config(acks="durable")
    with pytest.raises(UsageError, match="applied, written"):
        Config(acks="sure", state=state)
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
    # Memory that has been lent has its room on the disk already.
    monkeypatch.setattr(disk._SystemFile, "map", lambda *_given: None)
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


@pytest.mark.parametrize("acks", ["applied", "written"])
def test_an_end_that_keeps_less_than_was_trained_says_so(
    acks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no journal, or no longer, and the disk has no room for a last snapshot."""
    server = ServerThread(policy="asgd", state=tmp_path / "s", acks=acks)
    with (  # noqa: PT012
        pytest.raises(UsageError, match=r"lacks what was trained at last, as .*No space left"),
        server,
    ):
        train(server.url, PLAIN, 1, 3)

        def full(*_given: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk._SystemFile, "write", full)
        monkeypatch.setattr(SystemDisk, "free", lambda *_given: 0)
        if acks == "written":
            train(server.url, PLAIN, 2, 3)


@pytest.mark.slow
def test_sigterm_ends_with_status_74_when_the_last_snapshot_has_no_room(tmp_path: Path) -> None:
    flags = "--policy=asgd", "--acks=applied", f"--state={tmp_path / 's'}"
    with server_process(*flags) as server:
        train(server.url, PLAIN, 1, 3)
        eventually(lambda: any((tmp_path / "s").glob("snapshot-*")), "a first snapshot")
        train(server.url, PLAIN, 2, 3)
        _soft, hard = resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (16, hard))
        server.signal(signal.SIGTERM)
        status, _out, err = server.end()
    assert status == 74, err
    assert "lacks what was trained at last, as" in err
    assert "tells the workers how many of their pushes are lost" in err
    assert "training goes on" not in err
    assert "Traceback" not in err


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


@pytest.mark.parametrize("steady", [True, False], ids=["steady", "general"])
def test_no_answer_leaves_before_it_is_said_that_the_journal_has_ended(
    steady: bool, tmp_path: Path
) -> None:
    """A thread of the journal has failed, and its event is not handled yet."""
    promised = list[Acks]()
    settings = {} if steady else {"set": {"clip": 9.0}}
    with (
        ServerThread(policy="asgd", state=tmp_path / "s", **settings) as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        gradient = {"w": np.ones(64, np.float32)}
        for _ in range(3):
            worker.step(gradient)

        def fail(running: Any) -> None:
            runner, state = running._runner, running.run_state.kept
            [peer] = running.connections.peers.values()
            assert (peer.link.shortcut is not None) is steady
            shortcut, reply = peer.link.shortcut, runner.actions[Reply]

            def answered(nbytes: int) -> bytes | None:
                answer: bytes | None = shortcut(nbytes)
                if answer:
                    promised.append(state.recorder.acks)
                return answer

            def replied(effect: Reply) -> None:
                promised.append(state.recorder.acks)
                reply(effect)

            peer.link.shortcut = answered if steady else None
            runner.actions[Reply] = replied
            state.journal.writer._ended(0.0, OSError(errno.EIO, "Input/output error"))

        server.call(fail)
        worker.step(gradient)
        assert worker.stats()["state"]["ended"].endswith("Input/output error")
    assert set(promised) == {Acks.APPLIED}


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


@pytest.mark.parametrize("acks", ["written", "durable"])
def test_the_better_promise_is_taken_up_again_when_there_is_room(
    acks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_state, "_RETRY", 0.02)
    monkeypatch.setattr(kept_state, "_MINUTE", 0.05)
    settings = {"policy": "fasgd", "acks": acks}
    with ServerThread(state=tmp_path / "s", **settings) as server:

        def told() -> Any:
            return server.call(lambda running: running.run_state.kept.report())

        def acknowledged(level: str) -> None:
            until = time.monotonic() + 20
            while told()["acks"] != level and time.monotonic() < until:
                time.sleep(0.01)
            assert told()["acks"] == level

        train(server.url, PLAIN, 1, 3)
        for why in ("write", "sync"):

            def fails(*_given: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(disk._SystemFile, why, fails)
                patch.setattr(SystemDisk, "free", lambda *_given: 0)
                train(server.url, PLAIN, 2, 5)
                if why == "sync" and acks == "written":
                    continue  # it waits for none
                acknowledged("applied")
                assert told()["wanted"] == acks
                assert "No space left on device" in told()["ended"]
                with Client(server.url) as observer:
                    text = shown(observer.stats())
                assert f"acknowledgements mean 'applied', and not '{acks}'" in text
                assert "No space left on device" in text
                eventually(lambda: "journal there are 0 B of room" in caplog.text, "said again")
            acknowledged(acks)
            assert told()["ended"] == ""
            with Client(server.url) as observer:
                assert "acknowledgements" not in shown(observer.stats())
            train(server.url, PLAIN, 3, 4)
            copied = tmp_path / why
            expected, _report = copy(server, tmp_path / "s", copied)
            assert digest(recovered(copied, {"policy": "fasgd"})) == expected
    assert "acknowledgements still mean 'applied': for another journal there" in caplog.text
    assert f"there is a journal again: acknowledgements mean {acks!r} from row" in caplog.text


def test_a_server_answers_while_it_begins_another_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end the last one and to make a file takes a disk its time."""
    monkeypatch.setattr(kept_state, "_RETRY", 0.0)
    beginning, go_on = threading.Event(), threading.Event()
    begin_again = StateFiles.begin_again

    def slowly(files: StateFiles, *given: Any) -> Any:
        beginning.set()
        assert go_on.wait(60)
        return begin_again(files, *given)

    monkeypatch.setattr(StateFiles, "begin_again", slowly)
    gradient = {"w": np.ones(64, np.float32)}
    with (
        ServerThread(policy="asgd", state=tmp_path / "s") as server,
        aiops.Worker(server.url, PLAIN, timeout=20) as worker,
    ):
        try:
            worker.step(gradient)
            server.call(
                lambda running: running.post(
                    running.run_state.kept.journal.writer._ended(
                        0.0, OSError(errno.EIO, "Input/output error")
                    )
                )
            )
            assert beginning.wait(20)
            assert worker.step(gradient).version == 2
        finally:
            go_on.set()
        until = time.monotonic() + 20
        while worker.stats()["state"]["acks"] == "applied" and time.monotonic() < until:
            time.sleep(0.01)
        assert worker.step(gradient).version == 3
        assert worker.stats()["state"]["acks"] == "written"
        copy(server, tmp_path / "s", tmp_path / "copy")
    assert recovered(tmp_path / "copy", {"policy": "asgd"}).version == 3


def test_if_the_snapshot_over_a_gap_is_damaged_the_rows_before_it_are_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal had ended, and was taken up again behind the snapshot."""
    monkeypatch.setattr(kept_state, "_RETRY", 0.0)
    with ServerThread(policy="asgd", state=tmp_path / "s") as server:
        train(server.url, PLAIN, 1, 3)

        def told() -> Any:
            return server.call(lambda running: running.run_state.kept.report())

        def full(*_given: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk._SystemFile, "write", full)
            patch.setattr(SystemDisk, "free", lambda *_given: 0)
            train(server.url, PLAIN, 2, 2)
            assert told()["acks"] == "applied"
        until = time.monotonic() + 20
        while told()["acks"] == "applied" and time.monotonic() < until:
            time.sleep(0.01)
        train(server.url, PLAIN, 3, 4)
        copy(server, tmp_path / "s", tmp_path / "copy")
    assert recovered(tmp_path / "copy", {"policy": "asgd"}).version == 9
    snapshots = [*(tmp_path / "copy").glob("snapshot-*")]
    assert snapshots  # one may be of the time when there was no journal
    for snapshot in snapshots:
        data = bytearray(snapshot.read_bytes())
        data[100] ^= 1
        snapshot.write_bytes(data)
    for _ in range(2):  # the second start finds nothing that is damaged
        with (
            ServerThread(policy="asgd", state=tmp_path / "copy") as server,
            aiops.Client(server.url) as client,
        ):
            assert client.stats()["version"] == 3
    assert caplog.text.count("the newest snapshot is damaged, and the journal before it ended") == 1


def test_what_was_begun_again_is_no_journal_before_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed then comes back with what it had before the disk was full."""
    monkeypatch.setattr(kept_state, "_RETRY", 0.02)
    with ServerThread(policy="asgd", acks="written", state=tmp_path / "s") as server:
        train(server.url, PLAIN, 1, 3)

        def full(*_given: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk._SystemFile, "write", full)
            patch.setattr(SystemDisk, "free", lambda *_given: 0)
            train(server.url, PLAIN, 2, 1)
            until = time.monotonic() + 20
            while not server.call(
                lambda running: running.run_state.kept.report()["snapshot_error"]
            ):
                assert time.monotonic() < until
                time.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotWriter, "begin", lambda *_, **_given: None)  # slowly
            until = time.monotonic() + 20
            while not list((tmp_path / "s").glob("journal-*.part")) and time.monotonic() < until:
                time.sleep(0.01)
            train(server.url, PLAIN, 3, 5)
            shutil.copytree(tmp_path / "s", tmp_path / "copy")
    assert list((tmp_path / "copy").glob("journal-*.part"))
    assert recovered(tmp_path / "copy", {"policy": "asgd"}).version in (3, 4)


def test_starts_without_a_model_take_little_room(tmp_path: Path) -> None:
    """They have no snapshot that would cover what each leaves behind."""
    for _ in range(3):
        with ServerThread(policy="asgd", acks="written", state=tmp_path / "s"):
            pass
    segments = [each.stat().st_size for each in (tmp_path / "s").glob("journal-*")]
    assert len(segments) == 3
    assert sum(segments) < 1 << 20


def test_a_snapshot_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nothing has happened since."""
    failed, room, written, real = (
        *(threading.Event(), threading.Event(), threading.Event()),
        SystemDisk.rename,
    )

    def rename(system: SystemDisk, path: Path, to: Path, *, synced: bool = True) -> None:
        if to.name.startswith("snapshot-") and not room.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(system, path, to, synced=synced)
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


def push_again_and_again(
    url: str, start: Mapping[str, Array], seed: int, done: threading.Event
) -> None:
    """Push until the server is gone; before that, an answer may take long on a busy machine."""
    rng = np.random.default_rng(seed)
    gradient = {
        name: (0.01 * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in start.items()
    }
    while not done.is_set():
        with contextlib.suppress(AiopsError), aiops.Worker(url, start, timeout=3) as worker:
            while not done.is_set():
                worker.step(gradient)


@pytest.mark.slow
def test_a_server_that_is_never_idle_gets_its_snapshots(tmp_path: Path) -> None:
    """Its journal stays bounded, and after SIGKILL any snapshot leads to the same state."""
    folder, older = tmp_path / "s", tmp_path / "older"
    flags = ["--policy", "fasgd", "--port", "0", "--state", str(folder), "--acks", "written"]
    start = {"w": np.zeros(3 << 20, np.float32)}  # its updates take 72 MiB: they have a thread
    server = Process("-m", "aiops.server", *flags, "--snapshot-every=0.3")
    threads, done = list[threading.Thread](), threading.Event()
    try:
        url = server.line()
        for seed in (1, 2, 3):
            pushing = threading.Thread(target=push_again_and_again, args=(url, start, seed, done))
            threads.append(pushing)
            pushing.start()
        seen = set[str]()
        while len(seen) < 4 or (folder / journal_name(1)).exists():
            seen |= {path.name for path in folder.glob("snapshot-*[0-9]")}
            time.sleep(0.01)
    finally:
        done.set()
        server.kill()
        for thread in threads:
            thread.join()
    snapshots = sorted(folder.glob("snapshot-*[0-9]"))
    assert 2 <= len(snapshots) <= 3  # a kill may leave one to be removed
    shutil.copytree(folder, older)
    for newer in snapshots[1:]:
        (older / newer.name).unlink()
    found = recovered(folder, {"policy": "fasgd"})
    replayed = recovered(older, {"policy": "fasgd"})
    assert found.version == replayed.version > len(seen)
    assert digest(found) == digest(replayed)
    report = statistics.decided(found.report())
    assert report["staleness"] == statistics.decided(replayed.report())["staleness"]
    with ServerThread(policy="fasgd", state=folder) as again:
        train(again.url, start, 1, 1)


def push_rows(url: str, table: aiops.Table, seed: int, done: threading.Event) -> None:
    rng = np.random.default_rng(seed)
    with aiops.Worker(url, {}, tables={"t": table}) as worker:
        while not done.is_set():
            ids = rng.integers(0, table.rows, 512)
            grads = rng.standard_normal((512, table.width)).astype(np.float32)
            worker.push_rows("t", ids, grads)


@pytest.mark.slow
def test_snapshots_of_a_table_are_written_while_its_rows_are_pushed(tmp_path: Path) -> None:
    """Each is the state at its row: the newest leads to the same bits as the one before it."""
    table, settings = aiops.Table(40_000, 16), {"policy": "asgd", "set": {"optimizer": "adagrad"}}
    threads, done, older = list[threading.Thread](), threading.Event(), tmp_path / "older"
    with ServerThread(state=tmp_path / "s", snapshot_every=0.05, **settings) as server:
        for seed in (1, 2):
            pushing = threading.Thread(target=push_rows, args=(server.url, table, seed, done))
            threads.append(pushing)
            pushing.start()
        seen = set[str]()
        while len(seen) < 5:
            seen |= {path.name for path in (tmp_path / "s").glob("snapshot-*[0-9]")}
            time.sleep(0.005)
        done.set()
        for thread in threads:
            thread.join()
        expected, _report = copy(server, tmp_path / "s", tmp_path / "newest")
    shutil.copytree(tmp_path / "newest", older)
    sorted(older.glob("snapshot-*[0-9]"))[-1].unlink()
    for folder in (tmp_path / "newest", older):
        assert digest(recovered(folder, settings)) == expected


def test_a_snapshot_takes_the_room_of_spare_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept for speed alone."""
    folder, real = tmp_path / "s", SystemDisk.create

    def create(system: SystemDisk, path: Path, nbytes: int = 0) -> Any:
        if path.name.startswith("snapshot-") and list(folder.glob("spare-*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(system, path, nbytes)

    with ServerThread(policy="asgd", state=folder) as server:
        train(server.url, PLAIN, 1, 3)
        (folder / "spare-7").write_bytes(bytes(4096))
        monkeypatch.setattr(SystemDisk, "create", create)
    assert len(list(folder.glob("snapshot-*[0-9]"))) == 1
    assert not list(folder.glob("spare-*"))


def test_queued_pushes_that_were_lost_with_the_power_come_again(tmp_path: Path) -> None:
    """A snapshot is synced, but the rows that its queue refers to may not be."""
    case = Case("fasgd")
    run = Recorded(case, 1).run(60)
    while not any(needed_rows(found.owners) for found in run.kept.snapshots.values()):
        run.time += 0.01
        run._any()
    row, found = next(
        (row, found) for row, found in run.kept.snapshots.items() if needed_rows(found.owners)
    )
    engine = case.engine()
    files = StateFiles(tmp_path / "s", SystemDisk(), "a test", "0" * 16, lambda: 1)
    begun = files.begin(engine, "fasgd", None, 0.0, Acks.WRITTEN, pytest.fail)
    assert begun is not None
    begun.end()
    header = SnapshotHeader(row, 1, files.run, [1], found.settings, {}, found.owners)
    SnapshotWriter(files.disk, files.folder, files.segments).write(found, header)
    recovered = files.recover(case.engine(), "fasgd")
    files.close()
    assert recovered is not None
    assert recovered.row == recovered.snapshot == row


@pytest.mark.parametrize("damaged", [False, True])
def test_applied_keeps_snapshots_and_no_journal(damaged: bool, tmp_path: Path) -> None:
    """After a crash it goes on from the last snapshot; what is not in it is forgotten."""
    folder = tmp_path / "s"
    settings = {"policy": "fasgd", "acks": "applied"}
    with (
        ServerThread(state=folder, snapshot_every=0.02, **settings) as server,
        aiops.Worker(server.url, PLAIN) as worker,
    ):
        gradient = {"w": np.ones(64, np.float32)}
        for _ in range(3):
            worker.step(gradient)
        while server.call(lambda running: running.run_state.kept.report()["snapshot"]) < 4:
            worker.step(gradient)
        copy(server, folder, tmp_path / "copy")  # as after a kill
        version = worker.version
    snapshots = sorted((tmp_path / "copy").glob("snapshot-*"))
    assert len(snapshots) == 2
    assert not list((tmp_path / "copy").glob("journal-*"))
    if damaged:
        data = bytearray(snapshots[1].read_bytes())
        data[len(data) // 2] ^= 1
        snapshots[1].write_bytes(data)
    with ServerThread(state=tmp_path / "copy", **settings) as server:
        assert server.call(lambda running: running.engine.version) <= version
        assert snapshots[1].exists() != damaged
        train(server.url, PLAIN, 1, 2)
    assert len(list((tmp_path / "copy").glob("snapshot-*"))) == 2


def test_from_a_journal_to_snapshots_alone_and_back(tmp_path: Path) -> None:
    """The level may change at each start; segments that are not needed go."""
    for times, acks in enumerate(("written", "applied", "applied", "applied", "written"), 1):
        with ServerThread(policy="fasgd", state=tmp_path / "s", acks=acks) as server:
            assert server.call(lambda running: running.engine.version) == 2 * (times - 1)
            train(server.url, PLAIN, times, 2)
        segments = list((tmp_path / "s").glob("journal-*"))
        assert len(segments) > 0 or acks == "applied"
        assert len(segments) == 0 or times not in (3, 4)
    assert recovered(tmp_path / "s", {"policy": "fasgd"}).version == 10


def test_if_no_snapshot_is_whole_and_there_is_no_journal(tmp_path: Path) -> None:
    settings = {"policy": "fasgd", "acks": "applied", "state": tmp_path / "s"}
    with ServerThread(**settings) as server:
        train(server.url, PLAIN, 1, 2)
    for snapshot in (tmp_path / "s").glob("snapshot-*"):
        snapshot.write_bytes(snapshot.read_bytes()[:-9])
    with pytest.raises(AiopsError, match="no snapshot in it is whole"), ServerThread(**settings):
        pass
    assert snapshot.exists()


def test_the_memory_of_a_capture_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiops.server")
    with ServerThread(policy="fasgd", state=tmp_path / "s", snapshot_every=0.02) as server:
        train(server.url, PLAIN, 1, 3)
        while not server.call(lambda running: running.run_state.kept.report()["capture_bytes"]):
            time.sleep(0.01)
        nbytes = server.call(lambda running: running.run_state.kept.report()["capture_bytes"])
        store = server.call(lambda running: running.engine.defined_store)
    state = sum(array.nbytes for arrays in store.state for array in arrays)
    assert nbytes == state + store.layout.nbytes
    assert caplog.text.count("the first snapshot") == 1


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
    with ServerThread(policy="asgd", acks="durable", state=tmp_path / "once") as server:
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


def test_rows_that_a_loss_of_power_took_are_lost_with_all_that_follow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `written` a segment is not synced before the next one begins."""
    wide = {"w": np.zeros(2048, np.float32)}
    with ServerThread(policy="asgd", acks="written", state=tmp_path / "s") as server:
        train(server.url, wide, 1, 90)
        copy(server, tmp_path / "s", tmp_path / "state")
    whole = recovered(tmp_path / "state", {"policy": "asgd"}).version
    _first, second, third, *_others = sorted((tmp_path / "state").glob("journal-*"))
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 1
    second.write_bytes(data)
    with ServerThread(policy="asgd", acks="written", state=tmp_path / "state") as server:
        left = server.call(lambda running: running.engine.version)
        train(server.url, wide, 2, 3)
        copy(server, tmp_path / "state", tmp_path / "again")
    assert 0 < left < whole
    assert "rows are lost, as they were not written to the disk before" in caplog.text
    assert f"from {third.name} on, which follow them, are removed" in caplog.text
    assert recovered(tmp_path / "again", {"policy": "asgd"}).version == left + 3


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


async def test_a_server_whose_closing_is_cancelled_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that cancels its server goes on, perhaps with another one on the same state."""
    draining = asyncio.Event()

    async def drain(_draining: Draining) -> None:
        draining.set()
        await asyncio.Event().wait()

    async def serve() -> None:
        async with (
            aiops.serve(port=0, policy="asgd", state=tmp_path / "s") as server,
            aiops.AsyncWorker(server.url, PLAIN) as worker,
        ):
            for _ in range(3):
                await worker.step({"w": np.ones(64, np.float32)})

    with monkeypatch.context() as patch:
        patch.setattr(Draining, "answered", drain)
        serving = asyncio.ensure_future(serve())
        await asyncio.wait_for(draining.wait(), PATIENCE)
        while not serving.done():
            serving.cancel()
            await asyncio.wait([serving], timeout=0.01)
    async with (
        aiops.serve(port=0, policy="asgd", state=tmp_path / "s") as server,
        aiops.AsyncClient(server.url) as client,
    ):
        assert (await client.fetch()).version == 3
