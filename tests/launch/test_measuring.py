"""What `aiops doctor` measures, on this machine and against real servers."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np

import aiops
from aiops._version import __version__
from aiops.common.urls import parse_all
from aiops.launch import measuring
from aiops.launch.findings import Reach
from tests.support import ServerThread


def reach(url: str, token: str | None = None, timeout: float = 10.0) -> Reach:
    return measuring.reach(parse_all(url)[0], token, timeout)


def test_a_server_stage_by_stage() -> None:
    with ServerThread(policy="asgd", token="secret") as server:
        params = {"w": np.zeros(3, np.float32)}
        with aiops.Worker(server.url, params, token="secret"):
            found = reach(server.url, "secret")
        assert not found.error
        assert list(found.stages) == ["address", "connect", "welcome"]
        assert found.ip == "127.0.0.1"
        assert found.near
        assert found.round_trip is not None
        assert found.clock is not None
        assert abs(found.clock) < 1
        assert found.report is not None
        assert found.report["aiops"] == __version__
        wrong = reach(server.url, "other")
        assert wrong.refused
        assert list(wrong.stages) == ["address", "connect"]


def test_how_far_it_goes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = reach(f"aiops://127.0.0.1:{port}", timeout=0.5)
        assert found.error
        assert list(found.stages) == ["address", "connect"]
    found = reach(f"aiops://127.0.0.1:{port}")
    assert "127.0.0.1 cannot be connected to: Connection refused" in found.error
    assert list(found.stages) == ["address"]


def test_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = measuring.machine({"OMP_NUM_THREADS": "3"}, None, port)
        assert (found.port, found.port_free) == (port, False)
    assert measuring.machine({"AIOPS_PORT": str(port)}, "x", None).port == port
    assert found.math_threads == {"OMP_NUM_THREADS": "3"}
    assert found.processors >= 1
    assert found.memory > 1 << 20
    assert "numpy" in found.packages
    assert found.version == __version__


def test_a_disk(tmp_path: Path) -> None:
    found = measuring.state_disk(tmp_path / "state")
    assert not found.error
    assert found.free > 0
    assert found.sync > 0
    assert not list((tmp_path / "state").iterdir())  # nothing is left
    (tmp_path / "file").touch()
    assert measuring.state_disk(tmp_path / "file" / "state").error == "Not a directory"
