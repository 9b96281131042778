"""The states of a run's servers: the newest of a pair, one that is missing, one that is in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.net.disk import SystemDisk
from aiops.ray.server_states import check_there, newest, wait_until_free
from aiops.state.directory import GENERATION_FILE, IDENTITY_FILE, LOCK, GenerationFile
from tests.peers import eventually
from tests.support import PATIENCE


def test_a_folder_that_is_free_is_not_waited_for(tmp_path: Path) -> None:
    wait_until_free(tmp_path, 0.0)
    wait_until_free(tmp_path / "none", 0.0)
    (tmp_path / LOCK).touch()
    wait_until_free(tmp_path, 0.0)


@pytest.mark.parametrize("place", [".", "shard-1"])
def test_one_that_is_in_use_is_waited_for(
    tmp_path: Path, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    held = SystemDisk().lock(tmp_path / place / LOCK, "process 7")
    assert not isinstance(held, str)
    with pytest.raises(UsageError, match=r"still in use by process 7 of .*, after 0 s: end that"):
        wait_until_free(tmp_path, 0.0)
    waiting = threading.Thread(target=wait_until_free, args=[tmp_path, PATIENCE])
    waiting.start()
    eventually(lambda: "the server waits" in capfd.readouterr().err, "it waits")
    assert waiting.is_alive()
    held.release()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_server_that_is_started_again_needs_its_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"started again on 10\.0\.0\.1, where .* holds no state"):
        check_there(tmp_path, None, "the server", "10.0.0.1")
    with pytest.raises(UsageError, match="before there was any copy of its state in s3://b/run:"):
        check_there(tmp_path, "s3://b/run?scheme=http", "the server", "10.0.0.1")
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / IDENTITY_FILE).touch()
    check_there(tmp_path, None, "the server", "10.0.0.1")


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
