"""``--state`` with ``--shards``: real processes that are killed, and go on where they were."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aiops.cli.state import app
from aiops.cli.state_folder import StateFolder
from aiops.cli.state_replay import engine_at
from aiops.client import Client
from aiops.client.params import Params
from aiops.engine.events import JournalEnded
from aiops.errors import AiopsError, ConnectionLost, UsageError
from aiops.net import disk
from aiops.net.disk import SystemDisk
from aiops.serving.embedded import config_of, serve
from aiops.serving.safetensors_io import read_model
from aiops.serving.server import Server
from aiops.serving.shard_links import ShardLinks
from aiops.serving.state import kept_state
from aiops.state.directory import StateListing, snapshot_name
from tests.shards.world import Actor, World
from tests.stats_text import shown
from tests.support import PATIENCE, Process, ServerThread, assert_same
from tests.zygote import NESTED

FORKED = {NESTED: "1"}  # the shards of a process, too
FLAGS = ("--policy", "fasgd", "--lr", "0.01", "--kernels", "numpy", "--shard-bytes", "1")
MODEL = {
    "w": np.linspace(-1, 1, 60).astype(np.float32).reshape(20, 3),
    "b": np.linspace(0, 1, 7),
}


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=a.shape).astype(a.dtype) for name, a in MODEL.items()}


def undisturbed(steps: int, policy: str = "fasgd", shards: int = 3) -> tuple[Any, Any]:
    """Return the parameters and the statistics of a run in which nothing is killed."""
    running = ServerThread(policy=policy, lr=0.01, kernels="numpy", shards=shards)
    with running as server, Client(server.url, role="worker", name="w") as client:
        params = client.define(MODEL)
        for step in range(steps):
            client.exchange(params, gradients(step))
        return params.numpy(), client.stats()


class Log:
    """What a process writes on stderr, as it comes."""

    def __init__(self, process: Process) -> None:
        self.text, self._process = "", process
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.popen.stderr is not None
        for line in self._process.popen.stderr:
            with self._more:
                self.text += line
                self._more.notify_all()

    def pid(self, shard: int) -> int:
        """Return the process of the last start of a shard, when there is one."""
        return int(self._started(shard)[0])

    def url(self, shard: int) -> str:
        """Return the address that it had, when there is one."""
        return self._started(shard)[1]

    def _started(self, shard: int) -> tuple[str, str]:
        pattern = re.compile(rf"shard {shard} of \d is process (\d+) at (\S+)")
        with self._more:
            assert self._more.wait_for(lambda: pattern.search(self.text) is not None, PATIENCE)
            pid, url = pattern.findall(self.text)[-1]
            return pid, url


Kill = Callable[[Process, Log], bool]


def kill_lead(server: Process, log: Log) -> bool:
    server.signal(signal.SIGKILL)
    return True


def kill_follower(server: Process, log: Log) -> bool:
    os.kill(log.pid(2), signal.SIGKILL)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("acks", ["written", "durable"])
@pytest.mark.parametrize("kills", [(kill_lead,), (kill_follower,), (kill_follower, kill_lead)])
def test_killed_it_goes_on_to_the_last_bit(
    kills: tuple[Kill, ...], acks: str, tmp_path: Path
) -> None:
    """Killing the lead ends all: followers on the same machine end with it."""
    steps = 4
    expected, report = undisturbed(steps * (len(kills) + 1))
    flags = (*FLAGS, "--shards", "3", "--state", str(tmp_path / "state"), "--acks", acks)
    flags += ("--snapshot-every", "0.01")  # so that most are killed with some, and rows since
    done, params, server, client = 0, None, None, None
    try:
        for kill in (*kills, None):
            if server is None:
                server = Process("-m", "aiops.server", "--port", "0", *flags, env=FORKED)
                server.url, log = server.line(), Log(server)
                client = Client(server.url, role="worker", name="w", timeout=PATIENCE)
                params = client.define(MODEL)
                if done:
                    params = client.fetch()
            assert client is not None
            for step in range(done, done + steps):
                client.exchange(params, gradients(step))
            done += steps
            if kill is not None and kill(server, log):
                client.close()
                server.popen.wait()
                server.popen.communicate()
                server = None
        assert_same(params.numpy(), expected)
        stats = client.stats()
        for name in ("version", "staleness", "refused", "ignored", "vbar"):
            assert stats.get(name) == report.get(name), name
        assert [line["version"] for line in stats["shards"]] == [done] * 3
        client.close()
    finally:
        if server is not None:
            server.kill()


@pytest.mark.slow
def test_followers_elsewhere_keep_their_own_state(tmp_path: Path) -> None:
    """A follower waits for its lead, and is waited for by it."""

    def follower(number: int, port: str = "0") -> Process:
        state = "--state", str(tmp_path / f"follower-{number}")
        process = Process("-m", "aiops.server", "--port", port, "--follower", *FLAGS, *state)
        process.url = process.line().removeprefix("aiops://")
        return process

    expected, _report = undisturbed(9)
    processes = [follower(1), follower(2)]
    urls = ",".join(process.url for process in processes)
    flags = (*FLAGS, "--followers", urls, "--state", str(tmp_path / "lead"))
    flags += ("--snapshot-every", "0.01")
    lead = Process("-m", "aiops.server", "--port", "0", *flags, env=FORKED)
    try:
        with Client(lead.line(), role="worker", name="w", timeout=PATIENCE) as client:
            params = client.define(MODEL)
            for step in range(3):
                client.exchange(params, gradients(step))
            port = processes[0].url.rpartition(":")[2]
            processes[0].signal(signal.SIGKILL)
            processes[0].kill()
            processes[0] = follower(1, port)
            for step in range(3, 6):
                client.exchange(params, gradients(step))
        lead.kill()
        lead = Process("-m", "aiops.server", "--port", "0", *flags, env=FORKED)
        with Client(lead.line(), role="worker", name="w", timeout=PATIENCE) as client:
            params = client.fetch()
            for step in range(6, 9):
                client.exchange(params, gradients(step))
        assert_same(params.numpy(), expected)
        lead.signal(signal.SIGTERM)
        assert lead.end()[0] == 0
        assert [process.end()[0] for process in processes] == [0, 0]
    finally:
        for process in (lead, *processes):
            process.kill()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 16)


def rows(state: Mapping[str, Any]) -> list[int]:
    """The rows that each shard has recorded."""
    return [each["row"] for each in (state, *state["shards"])]


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("fasgd", {}),
        ("schedule-free", {"set": {"orthogonal": False}}),
        ("schedule-free", {"set": {"orthogonal": False, "collect": 2}}),
        ("softsync", {"workers": 4, "set": {"n": 2, "optimizer": "adam"}}),
        ("asgd", {"fetch_codec": ("int8",)}),
    ],
    ids=["fasgd", "evaluated-elsewhere", "amid-a-sum", "softsync", "coded"],
)
@pytest.mark.usefixtures("small_segments")
def test_it_ends_and_goes_on_within_a_process(
    policy: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Twice: what the end leaves in the journal is repeated from the snapshot that it takes."""
    settings = {"policy": policy, "lr": 0.01, "kernels": "numpy", "shards": 3, **more}
    with ServerThread(**settings) as server, Client(server.url, role="worker", name="w") as client:
        params = client.define(MODEL)
        for step in range(9):
            client.exchange(params, gradients(step))
        expected = params.numpy(), client.fetch(evaluation=True).numpy()
    for start in (0, 3, 6):
        running = ServerThread(**settings, state=tmp_path / "state")
        with running as server, Client(server.url, role="worker", name="w") as client:
            params = client.define(MODEL) if not start else client.fetch()
            before = rows(client.stats()["state"])
            for step in range(start, start + 3):
                client.exchange(params, gradients(step))
            state = client.stats()["state"]
            assert [each["acks"] for each in (state, *state["shards"])] == ["written"] * 3
            assert all(now >= old + 3 for now, old in zip(rows(state), before, strict=True))
            assert {each["run"] for each in state["shards"]} == {state["run"]}
            evaluated = client.fetch(evaluation=True).numpy()
    assert_same(params.numpy(), expected[0])
    assert_same(evaluated, expected[1])


@pytest.mark.usefixtures("small_segments")
def test_a_start_replays_from_a_snapshot_and_folders_are_bounded(tmp_path: Path) -> None:
    """Each server removes its journal's beginning once a set of snapshots is whole."""
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "snapshot_every": 0.01}
    folders, before = [tmp_path / "lead" / "shard-0", tmp_path / "follower"], None

    def bounded() -> bool:
        found = [StateListing(path.name for path in folder.iterdir()) for folder in folders]
        return all(each.snapshots and each.segments[0] > 1 for each in found)

    for _start in range(2):
        follower = ServerThread(**settings, shards=1, follower=True, state=folders[1])
        with follower:
            given = {**settings, "shards": 2, "followers": [follower.url.removeprefix("aiops://")]}
            lead = ServerThread(**given, state=tmp_path / "lead")
            with lead, Client(lead.url, role="worker", name="w", timeout=PATIENCE) as client:
                if before is None:
                    params = client.define(MODEL)
                    for step in range(5_000):
                        client.exchange(params, gradients(step % 7))
                        if step % 50 == 0 and bounded():
                            break
                    before = params
                params = client.fetch()
                assert_same(params.numpy(), before.numpy())
                assert params.version == before.version
                state = client.stats()["state"]
                assert all(each["snapshot"] > 0 for each in (state, *state["shards"]))
    assert bounded()
    for folder in folders:
        found = StateListing(path.name for path in folder.iterdir())
        assert len(found.snapshots) <= 4, "two sets, one that was not whole, and the newest"


@pytest.mark.usefixtures("small_segments")
def test_the_lead_keeps_its_snapshots_while_no_set_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower's disk refuses snapshots, so the lead has those of no set; all of them stay."""
    create = SystemDisk.create

    def refused(disk: SystemDisk, path: Path, nbytes: int = 0) -> Any:
        if path.parent.name == "shard-1" and path.name.startswith("snapshot"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path, nbytes)

    monkeypatch.setattr(SystemDisk, "create", refused)
    settings = {"policy": "asgd", "kernels": "numpy", "snapshot_every": 0.01, "shards": 2}
    with (
        ServerThread(**settings, state=tmp_path) as lead,
        Client(lead.url, role="worker") as client,
    ):
        params = client.define(MODEL)
        for step in range(300):
            client.exchange(params, gradients(step % 7))
            found = StateListing(path.name for path in (tmp_path / "shard-0").iterdir())
            if len(found.snapshots) > 3:
                break
    assert len(found.snapshots) > 3
    assert found.segments[0] == 1


@pytest.mark.usefixtures("small_segments")
def test_the_end_of_one_followers_journal_is_that_of_the_models(tmp_path: Path) -> None:
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy"}
    with ServerThread(**settings, shards=1, follower=True, state=tmp_path / "follower") as follower:
        urls = [follower.url.removeprefix("aiops://")]
        with (
            ServerThread(**settings, shards=2, followers=urls, state=tmp_path / "lead") as lead,
            Client(lead.url, role="worker", timeout=PATIENCE) as client,
        ):
            client.exchange(client.define(MODEL), gradients(0))
            before = client.stats()["state"]
            follower.call(lambda server: server.post(JournalEnded(0.0, "the disk is full")))
            state = client.stats()["state"]
    assert (before["acks"], before["ended"]) == ("written", "")
    assert (state["acks"], state["ended"]) == ("applied", "shard 1: the disk is full")


@pytest.mark.parametrize("acks", ["written", "durable"])
def test_the_better_promise_is_taken_up_again_when_there_is_room(
    acks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_state, "_RETRY", 0.01)
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "snapshot_every": 0.01}
    follower = ServerThread(
        **settings, acks=acks, shards=1, follower=True, state=tmp_path / "follower"
    )

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def given() -> dict[str, Any]:
        urls = [follower.url.removeprefix("aiops://")]
        return {**settings, "acks": acks, "shards": 2, "followers": urls, "state": tmp_path / "s"}

    def promises(client: Client) -> set[str]:
        state = client.stats()["state"]
        return {each["acks"] for each in (state, *state["shards"])}

    with (
        follower,
        ServerThread(**given()) as lead,
        Client(lead.url, role="worker", name="w", timeout=PATIENCE) as client,
    ):
        params = client.define(MODEL)
        client.exchange(params, gradients(0))
        with monkeypatch.context() as patch:
            patch.setattr(disk._SystemFile, "write" if acks == "written" else "sync", full)
            for step in range(5_000):
                client.exchange(params, gradients(step % 7))
                if promises(client) == {"applied"}:
                    break
            text = shown(client.stats())
            assert f"acknowledgements mean 'applied', and not '{acks}'" in text
            assert "No space left on device" in text
        for step in range(5_000):
            client.exchange(params, gradients(step % 7))
            if promises(client) == {acks}:
                break
        assert promises(client) == {acks}
        assert "acknowledgements" not in shown(client.stats())
        client.exchange(params, gradients(1))
    follower = ServerThread(
        **settings, acks=acks, shards=1, follower=True, state=tmp_path / "follower"
    )
    with (
        follower,
        ServerThread(**given()) as lead,
        Client(lead.url, role="worker", name="w", timeout=PATIENCE) as client,
    ):
        assert_same(client.fetch().numpy(), params.numpy())


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"shards": 2}, "holds shard 0 of 3, and this server is to be shard 0 of 2"),
        ({"shards": 1}, "holds the states of a model on shards"),
        ({"shards": 3, "shard_bytes": 64}, "shard_bytes=1"),
        (
            {"shards": 3, "lr": 0.02},
            "a server with lr=0.01, and this one has lr=0.02: give the same",
        ),
    ],
)
def test_a_state_goes_on_as_it_was_begun(second: dict[str, Any], text: str, tmp_path: Path) -> None:
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "state": tmp_path / "state"}
    first = ServerThread(**settings, shards=3)
    with first as server, Client(server.url, role="worker") as client:
        client.exchange(client.define(MODEL), gradients(0))
    with pytest.raises(UsageError, match=text), ServerThread(**{**settings, **second}):
        pass


@pytest.mark.usefixtures("small_segments")
def test_lead_and_followers_keep_states_or_none_does(tmp_path: Path) -> None:
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy"}
    alone = ServerThread(**settings, shards=1, follower=True)

    def begin(url: str) -> None:
        given = {**settings, "shards": 2, "followers": [url.removeprefix("aiops://")]}
        with ServerThread(**given, state=tmp_path / "state"):
            pass

    lost = pytest.raises(ConnectionLost, match="its lead is gone")
    refused = pytest.raises(UsageError, match=r"keeps a state and .* does not")
    with lost, alone as follower:
        with refused:
            begin(follower.url)
        follower.wait()


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("comes", [True, False])
def test_a_lead_that_starts_waits_for_its_followers(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been killed together. One that is asked to end waits for none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy"}
    followers = {"shards": 2, "followers": [f"127.0.0.1:{port}"], "state": tmp_path / "lead"}

    async def main() -> None:
        refused, real = asyncio.Event(), ShardLinks._pause

        async def pause(links: ShardLinks, seconds: float) -> None:
            refused.set()
            await real(links, seconds)

        monkeypatch.setattr(ShardLinks, "_pause", pause)
        lead = Server(config_of({**settings, **followers, "port": 0}))
        starting = asyncio.ensure_future(lead.start())
        await refused.wait()
        if not comes:
            lead.stop()
            with pytest.raises(ConnectionLost, match="asked to end while it waited for shard 1"):
                await starting
            return
        given = {**settings, "follower": True, "state": tmp_path / "follower", "port": port}
        async with serve(**given):
            await starting
            lead.stop()
            await lead.serve()

    asyncio.run(main())


def test_a_lead_that_is_asked_to_end_while_it_waits_ends_with_status_0(tmp_path: Path) -> None:
    """A service manager takes any other for a failure, and may start it again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # at which no server listens
        flags = ["--shards", "2", "--followers", f"127.0.0.1:{port}", "--state", str(tmp_path)]
        lead = Process("-m", "aiops.server", "--port", "0", "--policy", "asgd", *flags, env=FORKED)
        try:
            assert lead.popen.stderr is not None
            while "it is waited for" not in (line := lead.popen.stderr.readline()):
                assert line, "it has ended"
            lead.signal(signal.SIGTERM)
            status, _out, err = lead.end()
        finally:
            lead.kill()
    assert (status, "Traceback" in err) == (0, False)
    assert "asked to end while it waited for shard 1 of 2" in err


@pytest.mark.usefixtures("small_segments")
def test_the_state_of_one_server_is_not_that_of_a_lead(tmp_path: Path) -> None:
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "state": tmp_path}
    with ServerThread(**settings, shards=1):
        pass
    with pytest.raises(UsageError, match="holds a whole model"), ServerThread(**settings, shards=2):
        pass


@pytest.mark.usefixtures("small_segments")
def test_the_model_of_all_shards_is_exported(tmp_path: Path) -> None:
    """As a restart would have it: of the newest snapshots that all servers have of one moment."""
    run, out, state = CliRunner(), tmp_path / "m.safetensors", tmp_path / "lead"
    settings: dict[str, Any] = {"policy": "asgd", "lr": 1.0, "kernels": "numpy"}
    model = {"a": np.arange(30, dtype=np.float32), "b": np.zeros((7, 3), np.float32)}

    def export(*flags: str) -> Any:
        result = run.invoke(app, ["export", str(state), "--out", str(out), "--json", *flags])
        if isinstance(result.exception, AiopsError):
            raise result.exception
        return json.loads(result.stdout)

    for steps in (3, 5):
        with (
            ServerThread(**settings, shards=3, shard_bytes=1, state=state) as lead,
            Client(lead.url, role="worker") as client,
        ):
            params = client.define(model)
            for _ in range(steps - params.version):
                client.exchange(params, {name: np.ones_like(model[name]) for name in model})
        found = export()
        assert found["version"] == steps
        assert_same(dict(read_model(out)), {name: model[name] - steps for name in model})
    [newest, earlier, *_] = StateListing(os.listdir(state / "shard-0")).snapshots
    assert export("--snapshot", str(earlier))["version"] == 3
    assert export("--at", str(earlier))["version"] == 3
    [last, *_] = StateListing(os.listdir(state / "shard-2")).snapshots
    (state / "shard-2" / snapshot_name(last)).unlink()
    assert (export()["version"], newest > earlier) == (3, True)
    for path in (state / "shard-2").glob("snapshot-*"):
        path.unlink()
    with pytest.raises(UsageError, match="no snapshots of one moment on all servers"):
        export()
    shutil.rmtree(state / "shard-2")
    with pytest.raises(UsageError, match="lacks the folder of shard 2 of 3"):
        export()
    state = state / "shard-0"
    with pytest.raises(UsageError, match="of shard 0 of 3: give the folder"):
        export()


def test_one_shard_alone_is_not_replayed(tmp_path: Path) -> None:
    running = ServerThread(policy="fasgd", lr=0.01, kernels="numpy", shards=2, state=tmp_path)
    with running as server, Client(server.url, role="worker") as client:
        client.exchange(client.define(MODEL), gradients(0))
    with pytest.raises(UsageError, match="holds shard 0 of 2: only all servers together"):
        engine_at(StateFolder(tmp_path / "shard-0"), 3)


def test_a_lead_does_not_wait_for_an_update_that_a_lost_shard_has_not_done() -> None:
    world = World(0, 2)
    actor = Actor(world, "worker", lambda actor: None)
    actor.done, world.actors = True, [actor]
    actor.connect()
    world.settle()
    actor.ask(actor.requests.define(MODEL))
    world.settle()
    actor.ask(actor.requests.push(gradients(0), Params(actor.session.info.layout), None))
    while world.lead_brain.idle:
        world.step()
    world.lead.orders[0].lost()
    assert not world.engine.idle
    assert world.lead_brain.idle


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("kind", ["journal", "snapshot"])
def test_the_file_of_another_shard_is_refused(kind: str, tmp_path: Path) -> None:
    """Followers of one run have rows of the same numbers, which could be taken for one's own."""
    settings = {"policy": "fasgd", "lr": 0.01, "kernels": "numpy", "shards": 3}
    settings |= {"state": tmp_path, "snapshot_every": 0.01 if kind == "snapshot" else 30.0}
    folders = [tmp_path / f"shard-{shard}" for shard in (1, 2)]

    def both() -> set[str]:
        found = [{path.name for path in each.iterdir()} for each in folders]
        return {name for name in found[0] & found[1] if re.fullmatch(rf"{kind}-\d+", name)}

    with ServerThread(**settings) as server, Client(server.url, role="worker") as client:
        params = client.define(MODEL)
        for step in range(5_000):
            client.exchange(params, gradients(step % 7))
            if both():
                break
    name = max(both())
    (folders[1] / name).write_bytes((folders[0] / name).read_bytes())
    found = {each.name: each.why for each in StateFolder(folders[1]).files(thorough=True)}
    assert re.search(r"is of shard 1 of 3 of run \w+, and not of shard 2 of 3", found[name])
    refused = pytest.raises(UsageError, match=rf"{name} is of shard 1 of 3 .* put back the file")
    with refused, ServerThread(**settings):
        pass
