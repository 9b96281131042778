"""Coding that several threads share: the bytes of one that does it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from aiops.codecs import NotFinite, block_codec, find, lowrank, topk
from aiops.kernels import parallel
from tests.rows import each_row

SPECS = ("fp16", "bf16", "int8", "onebit", "topk:0.05", "lowrank:2", "raw")
SHAPE = (5, 1 << 16)
SHARED = ("fp16", "bf16", "int8", "onebit")


class Backwards:
    """Runs the pieces in reverse order; ``most``: the largest number of pieces of a call."""

    most = 0

    def __call__(self, pieces: Sequence[Callable[[], Any]]) -> None:
        self.most = max(self.most, len(pieces))
        for piece in reversed(pieces):
            piece()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_codec, lowrank, parallel, topk):
        monkeypatch.setattr(module, "LARGE", 1 << 10)
    for module in (block_codec, lowrank):
        monkeypatch.setattr(module, "PIECE", 4 * block_codec.CHUNK)


@each_row("backend", ["numpy", "numba"])
@each_row("spec", SPECS)
@each_row("feedback", [False, True])
def test_the_payload_and_the_rest(spec: str, feedback: bool, backend: str) -> None:
    random, found = np.random.default_rng(2), []
    tensors = [random.normal(size=SHAPE).astype(np.float32) for _ in range(2)]
    shared = Backwards()
    for parallel_map in (parallel.serial_map, shared):
        encoder = find(spec).encoder(SHAPE, feedback=feedback, backend=backend)
        encoder.parallel_map = parallel_map
        payloads = [bytes(encoder.encode(tensor)) for tensor in tensors]
        found.append((payloads, None if encoder.rest is None else encoder.rest.tobytes()))
    assert found[0] == found[1]
    if spec in SHARED or (backend == "numba" and spec != "raw"):
        assert shared.most == 5


@each_row("spec", ["int8", "topk:0.05"])
@each_row("feedback", [False, True])
def test_the_first_unfit_element_is_named(feedback: bool, spec: str) -> None:
    tensor = np.ones(SHAPE, np.float32)
    tensor.reshape(-1)[[70_000, 200_000, 300_000]] = np.nan
    encoder = find(spec).encoder(SHAPE, feedback=feedback)
    encoder.parallel_map = Backwards()
    with pytest.raises(NotFinite, match="element 70000 "):
        encoder.encode(tensor)
    if encoder.rest is not None:
        assert not encoder.rest.any()


@each_row("backend", ["numpy", "numba"])
@each_row("add", [False, True])
@each_row("size", [0, 1, 1023, 70_000, 4 * 65_536 + 1025])
@each_row("spec", SPECS)
def test_pieces_are_decoding(spec: str, size: int, add: bool, backend: str) -> None:
    codec, random = find(spec), np.random.default_rng(3)
    tensor = random.normal(size=size).astype(np.float32)
    payload = np.frombuffer(bytes(codec.encoder((size,), feedback=False).encode(tensor)), np.uint8)
    begun = random.normal(size=size).astype(np.float32)
    whole, pieced = begun.copy(), begun.copy()
    codec.decode(payload, (size,), whole, add=add, backend=backend)
    pieces = codec.pieces(payload, (size,), pieced, add=add, backend=backend)
    Backwards()(pieces)
    assert whole.tobytes() == pieced.tobytes()
    if spec in SHARED:
        assert len(pieces) == -(-size // 65_536)
