"""The codec benchmark runs and reports every contender of every codec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import codecs


@pytest.mark.slow
def test_it_reports_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "codecs.json"
    codecs.main(["--size", "5000", "--repeats", "2", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["shape"] == [70, 71]
    assert list(found["applied"]) == ["sgd", "fasgd"]
    assert found["machine"]["cores"] >= 1
    assert tuple(found["codecs"]) == codecs.SPECS
    shown = capsys.readouterr().out
    for spec, each in found["codecs"].items():
        assert spec in shown
        assert 0 < each["bytes_per_element"] < 4
        assert tuple(each["gb_per_s"]["aiops"]) == codecs.WAYS
        assert tuple(each["gb_per_s"]["NumPy"]) == ("encode", "decode")
        assert all(speed > 0 for speeds in each["gb_per_s"].values() for speed in speeds.values())
