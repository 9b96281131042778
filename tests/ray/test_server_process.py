"""A server's folder that a machine has still, of which nothing is heard; Ray is not needed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.net.disk import SystemDisk
from aiops.ray.server_process import wait_until_free
from aiops.state.directory import LOCK
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
