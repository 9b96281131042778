"""Where a server's time goes: each moment counts once, and the file says so."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import aiops
from aiops.cli import stats
from aiops.errors import UsageError
from aiops.serving.profiling import WHAT, Profile
from tests.support import PATIENCE, ServerThread


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_what_is_called_from_within_counts_for_itself(tmp_path: Path) -> None:
    clock = Clock()
    profile = Profile(tmp_path / "p.json", clock)
    kernel = profile.measure("kernel", clock.spend)

    def decide(seconds: float) -> str:
        clock.spend(1)
        kernel(seconds)
        clock.spend(2)
        kernel(seconds)
        return "decided"

    policy = profile.measure("policy", decide)
    receive = profile.measure("receive", lambda: (clock.spend(4), policy(8)))
    assert receive() == (None, "decided")
    assert policy(16) == "decided"
    clock.spend(5)
    report = profile.report()
    assert report["seconds"] == 4 + 3 + 16 + 3 + 32 + 5
    spent = {what: (report[what]["seconds"], report[what]["calls"]) for what in WHAT}
    assert spent == {
        "receive": (4, 1),
        "decode": (0, 0),
        "policy": (6, 2),
        "upload": (0, 0),
        "download": (0, 0),
        "kernel": (48, 4),
        "send": (0, 0),
    }
    assert report["kernel"]["share"] == round(48 / 63, 4)


def test_what_fails_counts_too(tmp_path: Path) -> None:
    clock = Clock()
    profile = Profile(tmp_path / "p.json", clock)

    def fail() -> None:
        clock.spend(3)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        profile.measure("send", fail)()
    assert profile.report()["send"]["seconds"] == 3


def test_threads_add_up(tmp_path: Path) -> None:
    clock = Clock()
    profile = Profile(tmp_path / "p.json", clock)
    inner = profile.measure("kernel", clock.spend)

    def beside() -> None:
        thread = threading.Thread(target=inner, args=(7,))
        thread.start()
        thread.join(PATIENCE)
        clock.spend(1)

    profile.measure("policy", beside)()
    report = profile.report()
    assert report["kernel"]["seconds"] == 7
    assert report["policy"]["seconds"] == 8, "it was here for as long, too"


def test_a_file_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match=r"--profile /nowhere/p\.json: No such file"):
        Profile(Path("/nowhere/p.json"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    Profile(Path("/dev/full")).write()
    assert "--profile /dev/full: No space left" in caplog.text
    assert Path("/dev/full").exists()


@pytest.mark.parametrize("settings", [{}, {"no_shm": True}, {"push_codec": "topk:0.5"}])
def test_a_server_counts(tmp_path: Path, settings: dict[str, object]) -> None:
    path = tmp_path / "profile.json"
    with ServerThread(policy="softsync", set={"n": 1}, workers=1, profile=path, **settings) as s:
        params = {"w": np.ones(1 << 16, np.float32)}
        with aiops.Worker(s.url, params) as worker:
            for _ in range(10):
                worker.step(params)
            report = worker.stats()
    shown = report["profile"]
    assert all(
        shown[what]["calls"] >= 10 for what in WHAT if what not in ("decode", "upload", "download")
    )
    assert (shown["decode"]["calls"] > 0) == ("push_codec" in settings)
    assert 0 < sum(shown[what]["share"] for what in WHAT) <= 2, "two threads at most"
    written = json.loads(path.read_text())
    assert set(written) == {"seconds", *WHAT}
    assert written["kernel"]["calls"] >= shown["kernel"]["calls"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(stats.tables("aiops://here", report))
    assert f"kernel {shown['kernel']['share']:.1%}" in console.export_text()
    with ServerThread(policy="asgd") as plain, aiops.Client(plain.url) as client:
        assert client.stats()["profile"] is None
