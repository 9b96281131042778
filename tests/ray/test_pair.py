"""The choice between the states of a server and its standby; Ray is not needed to make it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiops.state.directory import GENERATION_FILE, GenerationFile

pytest.importorskip("ray")

from aiops.ray.servers import newest


def begin(folder: Path, generation: int) -> Path:
    folder.mkdir(parents=True)
    (folder / GENERATION_FILE).write_bytes(GenerationFile(generation).pack())
    return folder


def test_the_later_generation_is_the_newest(tmp_path: Path) -> None:
    first, second, last = tmp_path / "first", tmp_path / "second", tmp_path / "last"
    assert newest(last, [first, second]) == first  # nothing has served
    begin(first, 1)
    assert newest(last, [second, first]) == first
    begin(second / "shard-0", 2)
    last.write_text(str(first))
    assert newest(last, [first, second]) == second


def test_of_the_same_generation_it_is_the_one_that_has_served_last(tmp_path: Path) -> None:
    first, second = begin(tmp_path / "first", 3), begin(tmp_path / "second", 3)
    last = tmp_path / "last"
    for served in (first, second):
        last.write_text(str(served))
        assert newest(last, [first, second]) == newest(last, [second, first]) == served
