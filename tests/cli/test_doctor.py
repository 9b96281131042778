"""``aiops doctor``: its report and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from aiops.cli.doctor import doctor
from tests.common.test_launchers import OPEN_MPI
from tests.support import ServerThread


def status(**settings: object) -> int:
    with pytest.raises(typer.Exit) as ended:
        doctor(**settings)  # type: ignore[arg-type]
    return ended.value.exit_code


def test_a_launcher_and_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no line is broken
    for name, text in OPEN_MPI.items():
        monkeypatch.setenv(name, text)
    with ServerThread(policy="asgd") as server:
        monkeypatch.setenv("AIOPS_URL", server.url)
        assert status(state=tmp_path) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("launcher: Open MPI\n")
        assert "from OMPI_COMM_WORLD_RANK" in shown
        assert f"{server.url} at 127.0.0.1: address" in shown
        assert " free" in shown
        assert status(as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["place"]["rank"] == {"value": 1, "from": "OMPI_COMM_WORLD_RANK"}
        assert {row["state"] for row in told["findings"]} <= {"good", "note"}
        gone = "aiops://127.0.0.1:1"
        assert status(url=gone) == 1
        assert "cannot be connected to" in capsys.readouterr().out
        assert status(url=f"{gone},{server.url.removeprefix('aiops://')}") == 0  # one is enough
        assert "another one answers" in capsys.readouterr().out
