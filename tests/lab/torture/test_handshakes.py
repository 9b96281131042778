"""Strangers at a real server of mutual TLS, some of each kind: none gets a byte, no exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiops.lab.torture.handshakes import AFTER, KINDS, run
from tests.seeds import seeds


@pytest.mark.slow
def test_strangers_get_nothing_and_a_worker_trains(tmp_path: Path) -> None:
    rounds = len(seeds(2))
    found = run(rounds * len(KINDS), 0, tmp_path)
    assert found.right, found.faults
    assert found.counts == dict.fromkeys(KINDS, rounds)


@pytest.mark.slow
def test_a_server_that_logs_an_exception_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiops.lab.torture.handshakes._EXCEPTION", b"")
    assert any("the server logged" in fault for fault in run(len(AFTER), 0, tmp_path).faults)
