"""The kernel benchmark runs and reports every contender of every rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kernels


@pytest.mark.slow
def test_it_reports_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    kernels.main(["--size", "5000", "--repeats", "2", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["size"] == 5000
    assert found["machine"]["cores"] >= 1
    assert {name: rule["streams"] for name, rule in found["rules"].items()} == {
        "sgd": 3,
        "fasgd": 9,
    }
    shown = capsys.readouterr().out
    for rule in found["rules"].values():
        assert rule["bytes"] == rule["streams"] * 5000 * 4
        assert rule["results"]["limit, in place"]["of_limit"] == 1.0
        assert rule["results"]["plain NumPy"]["times_plain"] == 1.0
        for contender, figures in rule["results"].items():
            assert figures["ms"]["min"] <= figures["ms"]["median"] <= figures["ms"]["max"]
            assert contender in shown
