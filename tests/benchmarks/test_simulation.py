"""The simulation benchmark: what it times, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks.simulation import Options, main, run

SMALL: dict[str, Any] = {"dataset": "digits", "hidden": 8, "clients": 3, "rounds": 2}


def test_times_the_parts_and_the_whole() -> None:
    said: list[str] = []
    result = run(Options(**SMALL, iterations=5), said.append)
    assert len(said) == len(result["rounds"]) == 2
    assert set(result["microseconds"]) == {"gradient", "kernel", "both", "simulation"}
    for row in result["rounds"]:
        assert all(value > 0 for value in row.values())
    first = result["rounds"][0]
    assert min(result["of_both"]["min"], result["of_the_sum"]["min"]) > 0
    assert result["of_both"]["max"] >= first["both"] / first["simulation"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    flags = "--dataset digits --hidden 8 --clients 3 --rounds 1 --iterations 5 --policy asgd"
    main([*flags.split(), "--json", str(path)])
    assert "asgd, 3 clients, batches of 8, digits" in capsys.readouterr().out
    assert json.loads(path.read_text())["options"]["policy"] == "asgd"


def test_refused() -> None:
    with pytest.raises(UsageError, match="hardsync takes fewer steps than it is given gradients"):
        run(Options(**SMALL, policy="hardsync"))
    with pytest.raises(UsageError, match="positive"):
        run(Options(**{**SMALL, "rounds": 0}))
    with pytest.raises(SystemExit):
        main(["--clients", "0"])
