"""The record of a run: its shape, its versions, and its file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiops.lab.run_record import describe, machine, record, sources, versions, write_rows


@dataclass
class Options:
    rounds: int = 2


def test_a_record_is_its_name_the_machine_the_options_and_the_results() -> None:
    about = machine(["numpy"])
    found = record("benchmark", "nothing", Options(), {"cells": [1]}, about)
    assert found == {
        "benchmark": "nothing",
        "machine": about,
        "options": {"rounds": 2},
        "cells": [1],
    }
    assert json.loads(json.dumps(found)) == found
    assert record("demo", "x", {"a": 1}, {})["options"] == {"a": 1}


def test_the_machine_names_the_revision_and_the_packages() -> None:
    about = machine(["numpy", "no-such-package"])
    assert about["revision"] is None or len(about["revision"].rstrip("+")) == 12
    assert about["packages"].keys() == {"aiops-ps", "numpy"}
    assert f"numpy {about['packages']['numpy']}" in describe(about)


def test_rows_have_lines_of_their_own_in_the_file(tmp_path: Path) -> None:
    content = {"benchmark": "x", "rows": [{"a": 1}, {"a": "µ"}], "none": []}
    path = tmp_path / "new" / "results.json"
    write_rows(path, {"benchmark": "an older one"})
    write_rows(path, content)
    assert json.loads(path.read_text()) == content
    assert '    {"a": 1},\n    {"a": "µ"}\n' in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        write_rows(tmp_path / "file" / "results.json", content)


class TestVersions:
    def test_a_change_of_any_module_is_another_version(self, tmp_path: Path) -> None:
        package = tmp_path / "package"
        (package / "part").mkdir(parents=True)
        (package / "part" / "one.py").write_text("x = 1")
        before = sources(package)
        assert sources(package) == before
        (package / "notes.txt").write_text("no module")
        assert sources(package) == before
        (package / "part" / "one.py").write_text("x = 2")
        assert sources(package) != before

    def test_everything_has_one(self) -> None:
        assert versions().keys() == {"aiops", "sources", "python", "numpy", "numba", "torch"}
