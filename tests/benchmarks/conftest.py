"""Benchmarks whose processes are forked: what they measure is no test's concern."""

import pytest

from aiops.lab import processes
from tests.zygote import NESTED, ForkingModule


@pytest.fixture(autouse=True)
def _forked(monkeypatch, request):
    if request.path.name in ("test_peers.py", "test_exchange.py"):
        return  # they look for processes by the environment that these were started with
    monkeypatch.setattr(processes, "subprocess", ForkingModule())
    monkeypatch.setenv(NESTED, "1")  # the process of a team's server starts the server
