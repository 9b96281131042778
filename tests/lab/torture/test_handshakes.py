"""Strangers at a real server of mutual TLS, some of each kind: none gets a byte, no exception."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiops.lab.torture.handshakes import AFTER, KINDS, Strangers, _make_certificates, run
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


def test_a_server_that_closes_amid_a_right_handshake(tmp_path: Path) -> None:
    """A stranger that waited for the rest of it would never come back."""
    _make_certificates(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        trial = pool.submit(Strangers(listener.getsockname(), tmp_path).one, KINDS.index(AFTER[0]))
        sock, _address = listener.accept()
        with sock:
            sock.recv(1 << 16)
        assert trial.result(30) == (AFTER[0], b"", 0, "")
