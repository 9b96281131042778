"""Connecting that is given up leaves no socket open."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from aiops.client.sync.dialling import Dialler
from aiops.common.urls import ServerAddress
from aiops.errors import DeadlineExceeded
from aiops.net.environment import CURRENT_ENVIRONMENT


def test_a_deadline_that_has_passed_closes_the_socket() -> None:
    """The time is up after the server on this machine was found, before its welcome."""
    ours, theirs = socket.socketpair()

    def left(until: float) -> float:
        raise DeadlineExceeded("too late")

    env = dataclasses.replace(CURRENT_ENVIRONMENT.get(), connect_unix=lambda host, port: ours)
    token = CURRENT_ENVIRONMENT.set(env)
    try:
        dialler = Dialler("aiops://127.0.0.1:1", left)
    finally:
        CURRENT_ENVIRONMENT.reset(token)
    with theirs, pytest.raises(DeadlineExceeded):
        dialler.connect_to_server(ServerAddress("127.0.0.1", 1), until=0.0, patience=1.0)
    assert ours.fileno() == -1
    assert dialler.socket is None
