"""A standby takes its primary's place: real processes, killed and promoted."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.common import urls
from aiops.common.generations import generation_text, term
from aiops.errors import AiopsError
from aiops.model.layout import Array
from aiops.net import disk
from aiops.serving.state import kept_state
from tests import zygote
from tests.certificates import ours
from tests.proxy import Proxy
from tests.support import PATIENCE, Process, ServerThread

ONES: Mapping[str, Array] = {"w": np.ones(64, np.float32)}
ZEROS: Mapping[str, Array] = {"w": np.zeros(64, np.float32)}

PLAIN = ("--policy", "asgd", "--set", "lr=1", "--kernels", "numpy")


class Servers:
    """Servers with states, as processes that end with their test."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder, self._flags = folder, flags
        self._stack = contextlib.ExitStack()

    def serve(self, state: str, *flags: str, port: str = "0") -> tuple[Process, str]:
        """Start a server on a state; return it with its URL."""
        given = *self._flags, "--state", str(self._folder / state), "--port", port, *flags
        process = Process("-m", "aiops.server", *given)
        self._stack.callback(process.kill)
        url = process.line()
        assert url, process.end()
        return process, url

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


class Pair(Servers):
    """A primary and its standby."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, *flags)
        self.primary, self.url = self.serve("a")
        self.standby, self.other = self.serve("b", "--standby", self.url)

    @property
    def both(self) -> str:
        """The URL of both, for a worker."""
        return urls.write_all([*urls.parse_all(self.url), *urls.parse_all(self.other)])


Start = Callable[..., Pair]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Start]:
    made: list[Pair] = []

    def start(*flags: str) -> Pair:
        made.append(Pair(tmp_path, *flags))
        return made[-1]

    yield start
    for each in made:
        each.close()


def promote(url: str) -> str:
    """Run ``aiops promote``; return what it prints."""
    done = zygote.run("-m", "aiops", "promote", url)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stats(url: str) -> dict[str, Any]:
    with aiops.Client(url, timeout=PATIENCE) as client:
        return dict(client.stats())


def until(url: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a server's statistics once they are as they should be."""
    end = time.monotonic() + PATIENCE
    with aiops.Client(url, timeout=PATIENCE) as client:
        while not true(found := client.stats()):
            assert time.monotonic() < end, found["state"]
            time.sleep(0.02)
        return dict(found)


def caught_up(primary: str, standby: str) -> None:
    """Wait until a standby has all rows."""
    row = stats(primary)["state"]["row"]
    until(standby, lambda found: found["state"]["synced"] >= row <= found["state"]["applied"])


@pytest.mark.slow
@pytest.mark.parametrize("acks", ["written", "durable", "replicated"])
def test_a_worker_goes_on_with_the_standby(acks: str, pair: Start) -> None:
    """Each step adds -1 to every parameter, exactly once, before and after."""
    servers = pair(*PLAIN, "--acks", acks)
    with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
        for step in range(1, 31):
            if step == 20:
                if acks != "replicated":
                    caught_up(servers.url, servers.other)
                servers.primary.kill()
                said = promote(servers.other)
                assert "version 19" in said
            receipt = worker.step(ONES)
            assert receipt.used
            assert receipt.version == step
            assert (worker.params["w"] == -step).all()
        report = worker.stats()["state"]
        assert f"generation {generation_text(report['generation'])}," in said
        assert term(report["generation"]) == 1
        assert report["acks"] == ("durable" if acks == "replicated" else acks)


@pytest.mark.slow
def test_all_servers_of_a_sharded_model_are_killed_while_workers_push(pair: Start) -> None:
    """The lead is killed, its follower ends with it; each push counts once."""
    servers = pair(*PLAIN, "--shards", "2", "--shard-bytes", "1", "--acks", "replicated")
    steps, begun = 40, threading.Semaphore(0)

    def push(worker: aiops.Worker) -> None:
        for _ in range(steps):
            assert worker.step(ONES).used
            begun.release()

    with (
        aiops.Worker(servers.both, ZEROS, timeout=2 * PATIENCE) as one,
        aiops.Worker(servers.both, ZEROS, timeout=2 * PATIENCE) as other,
    ):

        def replicated(found: dict[str, Any]) -> bool:
            states = found["state"], *found["state"]["shards"]
            return all(state["acks"] == "replicated" for state in states)

        until(servers.url, replicated)
        threads = [threading.Thread(target=push, args=(worker,)) for worker in (one, other)]
        for thread in threads:
            thread.start()
        for _ in range(steps // 2):
            begun.acquire()
        servers.primary.kill()
        promote(servers.other)
        for thread in threads:
            thread.join()
        with aiops.Client(servers.other, timeout=PATIENCE) as client:
            params = client.fetch()
        assert params.version == 2 * steps
        assert (params["w"] == -2 * steps).all()
        assert (one.rolled_back, other.rolled_back) == (0, 0)


@pytest.mark.slow
def test_all_of_it_over_tls(pair: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standby's link, the worker, the command: each shows a certificate, and asks for one."""
    monkeypatch.setenv("AIOPS_NO_SHM", "1")
    for name, file in {"CA": ours().ca, "CERT": ours().client}.items():
        monkeypatch.setenv(f"AIOPS_TLS_{name}", str(file))
    files = [f"--{name.replace('_', '-')}={file}" for name, file in ours().settings().items()]
    servers = pair(*PLAIN, "--acks", "replicated", *files)
    assert servers.both.startswith("aiops+tls://")
    with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
        for step in range(1, 9):
            if step == 5:
                servers.primary.kill()
                assert "version 4" in promote(servers.other)
            assert worker.step(ONES).version == step
        assert (worker.params["w"] == -8).all()


@pytest.mark.slow
def test_a_supervisor_promotes_by_a_signal(pair: Start) -> None:
    servers = pair(*PLAIN)
    with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        caught_up(servers.url, servers.other)
        servers.primary.kill()
        servers.standby.signal(signal.SIGUSR1)
        assert worker.step(ONES).version == 2


@pytest.mark.slow
def test_the_old_primary_is_fenced(pair: Start, tmp_path: Path) -> None:
    """It lives while the standby is promoted: it is told, ends with status 3, and follows."""
    servers = pair(*PLAIN)
    with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
        for _ in range(5):
            worker.step(ONES)
        caught_up(servers.url, servers.other)
        promote(servers.other)
        status, _out, err = servers.primary.end()
        assert status == 3, err
        generation = stats(servers.other)["state"]["generation"]
        assert (
            f"superseded by {servers.other} of its run (generation {generation_text(generation)})"
            in err
        )
        assert "Traceback" not in err
        again = Process("-m", "aiops.server", *PLAIN, "--state", str(tmp_path / "a"), "--port=0")
        status, _out, err = again.end()
        assert status == 3
        assert f"start it with --standby {servers.other}; if that" in err
        for step in range(6, 11):
            assert worker.step(ONES).version == step
        _process, again = servers.serve("a", "--standby", servers.other)
        row = stats(servers.other)["state"]["row"]
        found = until(again, lambda found: found["state"]["applied"] >= row)
        assert found["version"] == 10
        assert found["state"]["generation"] == generation


@pytest.mark.slow
def test_a_standby_serves_no_worker(pair: Start) -> None:
    servers = pair(*PLAIN)
    with aiops.Worker(servers.url, ZEROS) as worker:
        worker.step(ONES)
        with pytest.raises(AiopsError, match=f"a standby of {servers.url}"):
            aiops.Worker(servers.other, ZEROS, timeout=1.0)
        with aiops.Client(servers.other) as client:
            assert client.ping() > 0
        rows = until(servers.url, lambda found: not found["state"]["standbys"][0]["behind_rows"])[
            "state"
        ]["standbys"]
        assert [row["name"] for row in rows] == [servers.other.removeprefix("aiops://")]
    servers.standby.signal(signal.SIGTERM)
    _status, _out, log = servers.standby.end()
    assert "joined from" not in log, "workers of a lost primary ask again and again"


@pytest.mark.slow
def test_a_standby_with_other_settings_ends(pair: Start, tmp_path: Path) -> None:
    servers = pair(*PLAIN)
    with aiops.Worker(servers.url, ZEROS) as worker:
        worker.step(ONES)
        flags = "--policy", "asgd", "--set", "lr=0.5", "--standby", servers.url, "--port", "0"
        other = Process("-m", "aiops.server", *flags, "--state", str(tmp_path / "c"))
        try:
            other.line()
            status, _out, err = other.end()
            assert status == 64
            assert "lr" in err
            assert "Traceback" not in err
        finally:
            other.kill()


@pytest.mark.slow
def test_a_standby_that_was_away_goes_on(pair: Start) -> None:
    servers = pair(*PLAIN)
    with aiops.Worker(servers.url, ZEROS) as worker:
        worker.step(ONES)
        caught_up(servers.url, servers.other)
        servers.standby.kill()
        for _ in range(10):
            worker.step(ONES)
        _process, again = servers.serve("b", "--standby", servers.url)
        row = stats(servers.url)["state"]["row"]
        assert until(again, lambda found: found["state"]["applied"] >= row)["version"] == 11


@pytest.mark.slow
def test_replicated_means_durable_while_there_is_no_standby(tmp_path: Path) -> None:
    servers = Pair(tmp_path, *PLAIN, "--acks=replicated", "--standby-deadline=0.5")
    try:
        with aiops.Worker(servers.url, ZEROS) as worker:
            worker.step(ONES)
            until(servers.url, lambda found: found["state"]["acks"] == "replicated")
            servers.standby.kill()
            assert worker.step(ONES).version == 2
            assert worker.stats()["state"]["acks"] == "durable"
            servers.serve("b", "--standby", servers.url)
            until(servers.url, lambda found: found["state"]["acks"] == "replicated")
            assert worker.step(ONES).version == 3
    finally:
        servers.close()


def test_nothing_is_promoted_before_it_has_a_state(tmp_path: Path) -> None:
    flags = *PLAIN, "--state", str(tmp_path / "b"), "--standby", "aiops://127.0.0.1:1"
    standby = Process("-m", "aiops.server", "--port", "0", *flags)
    try:
        url = standby.line()
        done = zygote.run("-m", "aiops", "promote", url)
        assert done.returncode == 75
        assert "has no whole state" in done.stderr
        standby.signal(signal.SIGTERM)
        status, _out, err = standby.end()
        assert status == 0, err
    finally:
        standby.kill()


@pytest.mark.slow
def test_a_new_standby_of_an_old_primary_gets_a_snapshot(tmp_path: Path) -> None:
    """The first rows are gone; the old primary, with rows of its own, is sent one too."""
    servers = Servers(tmp_path, *PLAIN)
    try:
        for start in range(3):
            primary, url = servers.serve("a")
            with aiops.Worker(url, ZEROS) as worker:
                for step in range(1, 6):
                    assert worker.step(ONES).version == 5 * start + step
            primary.signal(signal.SIGTERM)
            assert primary.end()[0] == 0
        assert not (tmp_path / "a" / "journal-00000000000000000001").exists()
        primary, url = servers.serve("a")
        _standby, other = servers.serve("b", "--standby", url)
        with aiops.Worker(url, ZEROS) as worker:
            assert worker.step(ONES).version == 16
        caught_up(url, other)
        assert stats(other)["version"] == 16
        assert [*(tmp_path / "b").glob("snapshot-*")]
        primary.kill()
        promote(other)
        primary, url = servers.serve("a")  # it is not told yet, and writes rows of its own
        with aiops.Worker(url, ZEROS) as worker:
            assert worker.step(ONES).version == 17
            assert worker.step(ONES).version == 18
        primary.kill()
        with aiops.Worker(other, ZEROS) as worker:
            assert worker.step(ONES).version == 17
        _primary, url = servers.serve("a", "--standby", other)
        caught_up(other, url)
        found = stats(url)
        assert found["version"] == 17
        assert found["state"]["generation"] == stats(other)["state"]["generation"]
    finally:
        servers.close()


@pytest.mark.slow
def test_a_standby_makes_its_own_snapshots(pair: Start, tmp_path: Path) -> None:
    """They are of the same rows; with one, a standby that is killed goes on where it was."""
    servers = pair(*PLAIN, "--snapshot-every", "0.2")
    with aiops.Worker(servers.url, ZEROS) as worker:
        end = time.monotonic() + PATIENCE
        while len([*(tmp_path / "b").glob("snapshot-*")]) < 2:
            worker.step(ONES)
            assert time.monotonic() < end
        caught_up(servers.url, servers.other)
        servers.standby.kill()
        version = worker.step(ONES).version
        _process, again = servers.serve("b", "--standby", servers.url)
        caught_up(servers.url, again)
        assert stats(again)["version"] == version
        servers.primary.kill()
        promote(again)
    with aiops.Client(again) as client:
        assert (client.fetch()["w"] == -version).all()


@pytest.mark.slow
@pytest.mark.parametrize("near", [False, True], ids=["tcp", "memory"])
def test_no_push_is_lost_or_counts_twice(near: bool, pair: Start) -> None:
    """Three workers add 1 to a cell of their own while the primary is killed."""
    servers = pair(*PLAIN, "--acks", "replicated", *([] if near else ["--no-shm"]))
    steps, counts, killed = 60, [0] * 3, threading.Event()
    made = aiops.Worker  # imported once, not by each thread

    def work(cell: int) -> None:
        gradient = {"w": np.zeros(64, np.float32)}
        gradient["w"][cell] = -1
        with made(servers.both, ZEROS, timeout=60) as worker:
            for step in range(steps):
                counts[cell] += worker.step(gradient).used
                if step == 20:
                    killed.wait(PATIENCE)

    threads = [threading.Thread(target=work, args=(cell,)) for cell in range(3)]
    for thread in threads:
        thread.start()
    until(servers.other, lambda found: found["version"] >= 40)
    killed.set()
    servers.primary.kill()
    promote(servers.other)
    for thread in threads:
        thread.join(60)
    assert counts == [steps] * 3
    with aiops.Client(servers.other) as client:
        assert client.fetch()["w"][:3].tolist() == counts
        assert client.stats()["version"] == sum(counts)


@pytest.mark.slow
def test_a_primary_that_ends_in_good_order_leaves_the_standby_all_rows(pair: Start) -> None:
    servers = pair(*PLAIN)
    caught_up(servers.url, servers.other)
    with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
        for step in range(1, 201):
            assert worker.step(ONES).version == step
        servers.primary.signal(signal.SIGTERM)
        assert servers.primary.end()[0] == 0
        assert "version 200" in promote(servers.other)
        assert worker.step(ONES).version == 201


@pytest.mark.slow
def test_a_silent_standby_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    servers = Pair(tmp_path, *PLAIN, "--acks=replicated", "--standby-deadline=1")
    try:
        with aiops.Worker(servers.both, ZEROS, timeout=30) as worker:
            worker.step(ONES)
            until(servers.url, lambda found: found["state"]["acks"] == "replicated")
            servers.standby.signal(signal.SIGSTOP)
            assert worker.step(ONES).version == 2
            assert worker.stats()["state"]["acks"] == "durable"
            servers.standby.signal(signal.SIGCONT)
            until(servers.url, lambda found: found["state"]["acks"] == "replicated")
            assert worker.step(ONES).version == 3
    finally:
        servers.close()


@pytest.mark.slow
def test_a_journal_that_ended_and_began_again_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows between are in no journal, so the standby is sent the snapshot behind them."""
    monkeypatch.setattr(kept_state, "_RETRY", 0.02)
    servers = Servers(tmp_path, "--policy", "asgd", "--kernels", "numpy")
    try:
        with ServerThread(policy="asgd", kernels="numpy", state=tmp_path / "a") as server:
            _standby, other = servers.serve("b", "--standby", server.url)

            def full(*_given: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with aiops.Worker(server.url, ZEROS) as worker:
                worker.step(ONES)
                caught_up(server.url, other)
                with monkeypatch.context() as patch:
                    patch.setattr(disk._SystemFile, "write", full)
                    patch.setattr(disk.SystemDisk, "free", lambda *_given: 0)
                    for _ in range(5):
                        worker.step(ONES)
                    assert worker.stats()["state"]["acks"] == "applied"
                until(server.url, lambda found: found["state"]["acks"] == "written")
                for _ in range(5):
                    worker.step(ONES)
                caught_up(server.url, other)
                assert stats(other)["version"] == 11
                assert "no_feed" in stats(other)["state"]
        promote(other)
        with aiops.Client(other) as client:
            assert (client.fetch()["w"] == worker.params["w"]).all()
    finally:
        servers.close()


@pytest.mark.slow
def test_a_primary_that_is_cut_off_lives_on(tmp_path: Path) -> None:
    """What it acknowledges after the promotion is lost, and told; it ends when it is reached."""
    servers = Servers(tmp_path, *PLAIN)
    primary, url = servers.serve("a")
    try:
        with Proxy(url) as between, Proxy(url) as way:
            _standby, other = servers.serve("b", "--standby", between.url)
            both = f"{way.url},{other.removeprefix('aiops://')}"
            with aiops.Worker(both, ZEROS, timeout=30) as worker:
                for _ in range(5):
                    worker.step(ONES)
                caught_up(url, other)
                between.refuse()
                assert "version 5" in promote(other)
                for step in range(6, 9):  # it is cut off together with the old primary
                    assert worker.step(ONES).version == step
                way.refuse()
                used = sum(worker.step(ONES).used for _ in range(4))
                assert worker.rolled_back == 3
                report = worker.stats()
                assert report["version"] == 5 + used
                assert term(report["state"]["generation"]) == 1
                assert (worker.params["w"] == -5 - used).all()
                between.accept()
                status, _out, err = primary.end(60)
                assert status == 3, err
                way.accept()
                assert worker.step(ONES).version == 6 + used
    finally:
        servers.close()
