"""A small exchange on the server, counted in Python calls: a ratchet, which may only go down.

The bytes of a push with fetch are handed to the server's side of a connection, and its answer is
taken from the transport; no socket, no clock and no other thread takes part, so the count is exact.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.compiled.loading import COMPILED, core
from aiops.engine.engine import Engine
from aiops.filters.screen import LEARNT, SEEDING
from aiops.model.parts import Part
from aiops.net import mapped_file
from aiops.serving.server import Server
from aiops.wire import messages
from tests.calls import Calls, calls
from tests.peers import define, frame
from tests.pipes import Piped

pytestmark = pytest.mark.usefixtures("none_pending")

GENERAL = 62
"""Calls from the arrival of a push to its answer's departure, through the general code."""

STEADY = 19
"""The same by the short way (`aiops.engine.steady`)."""

STEADY_JOURNALLED = 27
"""The same with ``--state``, and the row written to the file."""

STEADY_COMPILED = {"ringmaster": 2, "record": 7, "state": 2}
"""The same in compiled code, with a policy that is asked, and with a journal; of others it is 1."""

STEADY_CODED = 18
"""The same in compiled code, with an answer for which the delta replica takes a step."""

STEADY_FILTERED = 24
"""The same with ``--filter``, of which the decision is one compiled call."""

SIZE = 1024  # float32


class Line(Piped):
    """A worker's connection, which counts."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.busy_poll = server.connections.busy_poll
        self.seq = 0

    def push(self, size: int = SIZE, unused: int = 0, **fields: Any) -> bytes:
        """Return the bytes of the next push, of the version that the last answer brought.

        ``unused``: of the pushes before it, those that made no version.
        """
        self.seq += 1
        nbytes, version = 4 * size, max(self.seq - 1 - unused, 0)
        part = Part(0, nbytes, "raw", nbytes, version)
        message = messages.Push(self.seq, self.seq, True, version, (part,), **fields)
        return frame(message, np.full(size, 0.5, np.float32).tobytes())

    def exchange(self, data: bytes) -> Calls:
        """Have a push arrive all at once; return the calls until its answer had left."""
        room = self.protocol.get_buffer(-1)
        assert len(room) >= len(data)
        room[: len(data)] = data
        self.pipe.written.clear()
        self.busy_poll.idle = False  # whether a poll begins depends on how busy the machine is
        found = calls(lambda: self.protocol.buffer_updated(len(data)))
        assert self.pipe.written, "it was not answered at once"
        return found


async def serving(policy: str, **settings: Any) -> tuple[Any, Server, Line]:
    """Start a server, have its kernels made ready, and define the model."""
    running = aiops.serve(policy=policy, port=0, **settings)
    server = await running.__aenter__()
    line = Line(server)
    line.feed(define({"w": np.zeros(SIZE, np.float32)}))
    while not server.warm:  # noqa: ASYNC110  (it is made so on a thread, which sets no event)
        await asyncio.sleep(0.002)
    assert server.engine.store is not None
    assert server.engine.store.backend == "numba"
    return running, server, line


POLICIES = ["asgd", "sasgd", "fasgd", "exponential", "downpour", "ringmaster"]


async def least(policy: str, pushed: dict[str, Any] | None = None, **settings: Any) -> Calls:
    """Return the calls of an exchange, the median of several; ``pushed``: fields of pushes."""
    running, _server, line = await serving(policy, **settings)
    try:
        found = [line.exchange(line.push(**(pushed or {}))) for _ in range(9)][4:]
    finally:
        await running.__aexit__(None, None, None)
    return sorted(found, key=lambda each: each.count)[len(found) // 2]


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_short_way(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv(COMPILED, "0")
    found = await least(policy)
    assert "engine/steady.py" in found.files
    assert found.count <= STEADY, str(found)


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_short_way_in_compiled_code(policy: str) -> None:
    pytest.importorskip("numba")
    if core() is None:
        pytest.skip("there was no C compiler")
    found = await least(policy)
    assert "engine/steady.py" not in found.files
    assert found.count <= STEADY_COMPILED.get(policy, 1), str(found)


async def test_coded_answers_in_compiled_code() -> None:
    pytest.importorskip("numba")
    if core() is None:
        pytest.skip("there was no C compiler")
    found = await least("asgd", {"coded": True}, fetch_codec=["int8"])
    assert "engine/steady.py" not in found.files
    assert "engine/replies.py" not in found.files
    assert found.count <= STEADY_CODED, str(found)


@pytest.mark.parametrize("kept", ["state", "record"])
async def test_a_journal_in_compiled_code(kept: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    if core() is None:
        pytest.skip("there was no C compiler")
    found = await least("asgd", **{kept: tmp_path / kept})
    assert "engine/steady.py" not in found.files
    assert found.count <= STEADY_COMPILED.get(kept, 1), str(found)


@pytest.mark.parametrize("kept", ["state", "record"])
async def test_the_short_way_with_a_journal(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv(COMPILED, "0")
    monkeypatch.setattr(mapped_file, "LENT", 60.0)  # on a busy machine nine exchanges take longer
    found = await least("asgd", **{kept: tmp_path / kept})
    assert "engine/steady.py" in found.files
    assert found.count <= STEADY_JOURNALLED, str(found)


@pytest.mark.parametrize("policy", ["asgd", "fasgd"])
async def test_the_short_way_with_filters(policy: str) -> None:
    pytest.importorskip("numba")
    running, _server, line = await serving(policy, filter="robust")
    try:
        taught = SEEDING + LEARNT
        for _ in range(taught + 3):
            line.exchange(line.push(unused=taught))
        found = line.exchange(line.push(unused=taught))
    finally:
        await running.__aexit__(None, None, None)
    assert "engine/steady.py" in found.files
    assert "filters/compiled_screen.py" in found.files
    assert found.count <= STEADY_FILTERED, str(found)


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_general_way(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(Engine, "steady", lambda *_arguments: None)
    found = await least(policy)
    assert "engine/steady.py" not in found.files
    assert found.count <= GENERAL, str(found)
