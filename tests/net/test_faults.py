"""How a program or a process gets a disk with faults."""

from __future__ import annotations

import doctest

import pytest

from aiops.errors import UsageError
from aiops.net import faults
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faults import crash_at, from_text
from aiops.net.faulty_disk import FaultyDisk
from tests.rows import each_row


def test_what_the_docstrings_show() -> None:
    context = CURRENT_ENVIRONMENT.get()
    token = CURRENT_ENVIRONMENT.set(context)
    try:
        failed, run = doctest.testmod(faults)
    finally:
        CURRENT_ENVIRONMENT.reset(token)
    assert run
    assert not failed


@each_row(
    ("text", "says"),
    [
        ("crush=journal.written:2", "no fault is called 'crush'; did you mean 'crash'"),
        ("crash=journal.writen", "no point is called 'journal.writen'; did you mean"),
        ("crash=journal.written:0", "the first time"),
        ("crash=journal.written:soon", "AIOPS_FAULTS='crash=journal.written:soon': invalid"),
        ("full=much", "AIOPS_FAULTS: full= is followed by a whole number, not 'much'"),
        ("slow=", "AIOPS_FAULTS: slow= is followed by a number, not ''"),
    ],
)
def test_a_text_that_makes_no_sense(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        from_text(text)


def test_a_text_gives_every_fault() -> None:
    disk = from_text("power=journal.synced:3 full=10 slow=0.5 sync_fails=7 tear flip=0.1 seed=4")
    assert (disk.full_at, disk.slow, disk.sync_fails_at) == (10, 0.5, 7)
    assert (disk.lose_unsynced, disk.tear, disk.flip) == (True, True, 0.1)
    assert disk._crash[:2] == ("journal.synced", 3)


def test_servers_get_the_disk_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CURRENT_ENVIRONMENT.get()
    token = CURRENT_ENVIRONMENT.set(before)
    try:
        disk = crash_at("segment.named")
        assert CURRENT_ENVIRONMENT.get().disk is disk
        monkeypatch.setenv(faults.VARIABLE, "slow=0.1")
        faults.use_environment_variable()
        found = CURRENT_ENVIRONMENT.get().disk
        assert isinstance(found, FaultyDisk)
        assert found.slow == 0.1
        monkeypatch.setenv(faults.VARIABLE, "")
        faults.use_environment_variable()
        assert CURRENT_ENVIRONMENT.get().disk is found
    finally:
        CURRENT_ENVIRONMENT.reset(token)
