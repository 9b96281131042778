"""The ways in which a client may reach a server, for suites that hold over all of them."""

from __future__ import annotations

import pytest

from aiops.client import outbox
from aiops.compiled import COMPILED
from aiops.model import shared_memory
from aiops.serving import effects
from tests import support

TRANSPORTS = ("tcp", "near", "lent", "shards")
"""Over TCP; on the same machine; there with memory shared however small the model is; and with the
model spread over three servers.

A blocking client makes steady exchanges in compiled code, and near the server in Python; in other
suites near it in compiled code, too (`tests/client/test_client_calls.py` has all four)."""


def choose(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers and clients made from here on use a transport."""
    if transport == "tcp":
        monkeypatch.setenv("AIOPS_NO_SHM", "1")
    elif transport == "near":
        monkeypatch.setenv(COMPILED, "0")
    elif transport == "shards":
        monkeypatch.setattr(support, "SHARDS", 3)
    elif transport == "lent":
        monkeypatch.setattr(shared_memory, "_SMALL", 1)
        monkeypatch.setattr(outbox, "SMALL", 0)
        monkeypatch.setattr(effects, "SMALL", 0)
