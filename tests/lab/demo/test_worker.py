"""A worker's command line; that it trains is seen in test_demo."""

from __future__ import annotations

import pytest

from aiops.lab.demo.worker import Task

TASK = Task(
    url="aiops://[::1]:7171",
    index=2,
    workers=3,
    dataset="digits",
    hidden=64,
    steps=1000,
    batch_size=32,
    seed=0,
)


def test_the_flags_say_it_all() -> None:
    assert Task.parse(TASK.flags()) == TASK


def test_no_flag_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Task.parse(TASK.flags()[1:])
    assert "--url" in capsys.readouterr().err
