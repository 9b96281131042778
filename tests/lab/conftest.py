"""Experiments and campaigns whose processes are forked."""

import pytest

from aiops.lab import processes
from tests.zygote import ForkingModule


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.path.name != "test_processes.py":  # which is about them
        monkeypatch.setattr(processes, "subprocess", ForkingModule())
