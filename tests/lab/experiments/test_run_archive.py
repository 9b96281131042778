"""Runs in one file: `aiops.lab.experiments.run_archive`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.lab.experiments import run_archive
from aiops.lab.experiments.runs import RunFolder
from aiops.lab.experiments.scheduler import ExperimentScheduler
from tests.lab.experiments.small_experiment import SMALL, Here, Seen, here


@pytest.fixture
def kept(tmp_path: Path) -> RunFolder:
    """The folder of an experiment that has been run."""
    made = RunFolder(tmp_path / "kept", "small")
    ExperimentScheduler(SMALL, SMALL.quick, made, Seen()).run(1, here(Here()))
    return made


@pytest.fixture
def archive(kept: RunFolder, tmp_path: Path) -> Path:
    """An archive of all its runs."""
    path = tmp_path / run_archive.NAME
    kept.archive(path, kept.versions)
    return path


def test_another_folder_goes_on_from_it(kept: RunFolder, archive: Path, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other", "small", archives=[archive])
    assert other.versions == kept.versions != {}
    assert other.machines == kept.machines
    done = Here()
    ExperimentScheduler(SMALL, SMALL.quick, other, Seen()).run(1, here(done))
    assert done.ran == []
    files = {path.name: path.read_bytes() for path in (kept.path / "runs").iterdir()}
    assert {path.name: path.read_bytes() for path in (other.path / "runs").iterdir()} == files
    again = tmp_path / "again.gz"
    other.archive(again, reversed([*other.versions]))
    assert again.read_bytes() == archive.read_bytes()


def test_a_run_that_is_there_stays(kept: RunFolder, archive: Path) -> None:
    path = min((kept.path / "runs").iterdir())
    row = {**json.loads(path.read_text()), "name": "own"}
    path.write_text(json.dumps(row))
    RunFolder(kept.path, "small", archives=[archive])
    assert json.loads(path.read_text())["name"] == "own"


RUN = b'{"key": "a", "result": {}, "versions": {}}\n'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no gzip", "it is not compressed by gzip; give a runs.jsonl.gz, which experiments write"),
        (gzip.compress(RUN + b"hello\n"), "line 2 of it, unpacked, is not JSON; give a"),
        (gzip.compress(b"\xff\n"), "line 1 of it, unpacked, is not JSON"),
        (gzip.compress(b"[]\n"), "line 1 of it, unpacked, is no JSON object"),
        (gzip.compress(b"{}\n"), 'has no "key" of letters and digits'),
        (gzip.compress(b'{"key": "../over"}\n'), 'has no "key" of letters and digits'),
        (gzip.compress(b'{"key": 7}\n'), 'has no "key" of letters and digits'),
        (gzip.compress(b'{"key": "a"}\n'), 'line 1 of it, unpacked, has no "result" with values'),
        (gzip.compress(RUN + b'{"key":"b","result":{}}\n'), 'line 2 .* has no "versions" with'),
        (gzip.compress(b"[" * 100_000 + b"\n"), "line 1 of it, unpacked, is not JSON"),
        (gzip.compress(RUN * 99)[:-9], "ends in the midst of its data: copy it"),
        (gzip.compress(RUN)[:-8] + bytes(8), "its checksum does not match"),
        (gzip.compress(b"x")[:10] + b"\xff" * 20, "its compressed data is damaged"),
    ],
    ids=[
        *("no gzip", "no JSON", "no UTF-8", "a list", "no key", "a path", "a number"),
        *("no result", "no versions", "deep", "cut", "checksum", "damaged"),
    ],
)
def test_what_is_no_archive_is_told_and_leaves_nothing(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"is no archive of runs: .*{why}"):
        RunFolder(tmp_path / "new", "small", archives=[path])
    assert not (tmp_path / "new").exists()


def test_an_archive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        RunFolder(tmp_path / "new", "small", archives=[tmp_path / "gone"])
