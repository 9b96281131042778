"""CRC-32, the one of zlib, ten times as fast where the processor can multiply without carries.

A CRC is the remainder of the bytes, read as a polynomial. A block can be replaced by its product
with a constant that has the same remainder a block further on, where it is added to the bytes
there. So a loop of carry-less multiplications folds all blocks into one, and zlib does the rest.
After V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction" (Intel, 2009).

`Seal` takes the three checksums of a journal's frame in one call. Zlib's tables alone take as much
of the processor's nearest cache as the frame of a small model.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from aiops.kernels.backend import resolve
from aiops.kernels.lazy_numba import NumbaWord, helper

__all__ = ["LARGE", "crc32", "seal", "warm_crc32"]

LARGE = 8192
"""Bytes from which the loop is worth its call."""

fold_crc, fold_crc_further = NumbaWord("fold_crc"), NumbaWord("fold_crc_further")
FOLDED: Any = NumbaWord("FOLDED")

_ready: list[tuple[Any, int]] = []  # the loop and the bytes of a block, once it is compiled
_sealing: list[Any] = []  # the loop of `seal`, once it is compiled

_ONES = np.uint32(0xFFFF_FFFF)
_HEAD, _ROW_CRC, _PAYLOAD_CRC = 48, 32, 36  # of a frame: its length, places of checksums


def _remainders() -> npt.NDArray[np.uint32]:
    """Return the remainder of each byte."""
    found = np.arange(256, dtype=np.uint32)
    for _bit in range(8):
        found = found >> np.uint32(1) ^ (found & np.uint32(1)) * np.uint32(0xEDB8_8320)
    return found


_TABLE = _remainders()


def crc32(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of contiguous bytes, as `zlib.crc32`; the GIL is free meanwhile."""
    length = len(data)
    if length < LARGE or not _ready:
        return zlib.crc32(data)
    fold, block = _ready[0]
    whole = length - length % block
    folded = np.empty(block, np.uint8)
    fold(np.frombuffer(data, np.uint8, whole), folded)
    found = zlib.crc32(folded.data, 0xFFFFFFFF)  # from a state of 0: the block has the first state
    return zlib.crc32(memoryview(data)[whole:], found) if whole < length else found


def seal(
    into: npt.NDArray[np.uint8], at: int, row: int, payload: npt.NDArray[np.uint8], salted: int
) -> int:
    """Complete a frame of a journal: add its payload and its checksums; return its end.

    Parameters
    ----------
    into
        Where it is, with room for all of it and 8 bytes more, which become zeros.
    at
        Where it begins: its head, then its row, are there already.
    row
        The bytes of the row.
    payload
        What is copied behind it, of any length.
    salted
        The CRC-32 of the segment's salt.
    """
    if _sealing:
        found: int = _sealing[0](into, at, row, payload, salted)
        return found
    start = at + _HEAD + row + -row % 8
    end = start + len(payload)
    into[start:end] = payload
    after = end + -end % 8
    into[end : after + 8] = 0
    view = into.data
    rows = zlib.crc32(view[at + _HEAD : at + _HEAD + row])
    view[at + _ROW_CRC : at + _ROW_CRC + 4] = rows.to_bytes(4, "little")
    payloads = zlib.crc32(payload.data)
    view[at + _PAYLOAD_CRC : at + _PAYLOAD_CRC + 4] = payloads.to_bytes(4, "little")
    view[at : at + 4] = zlib.crc32(view[at + 4 : at + _HEAD], salted).to_bytes(4, "little")
    return after


def warm_crc32(backend: str = "auto") -> None:
    """Compile the loops, or read them from the cache folder; until then zlib does all."""
    if _ready or resolve(backend) == "numpy":
        return
    from numba import types

    from aiops.kernels.numba_jit import FOLDED, array_of, compile_loop

    if FOLDED:
        bytes_, writable = array_of("uint8"), array_of("uint8", writable=True)
        sealed = types.int64(writable, types.int64, types.int64, bytes_, types.uint32)
        _sealing.append(compile_loop(_seal_loop, sealed))
        signature = types.int64(bytes_, writable)
        _ready.append((compile_loop(_fold_loop, signature), FOLDED))


def _fold_loop(data: Any, into: Any) -> Any:
    fold_crc(data, into)
    return 0


def _seal_loop(into: Any, at: Any, row: Any, payload: Any, salted: Any) -> Any:
    room = np.empty(FOLDED, np.uint8)
    begin = at + _HEAD
    start = begin + row + (-row) % 8
    end = start + payload.size
    for i in range(np.uintp(payload.size)):
        into[np.uintp(start) + i] = payload[i]
    after = end + (-end) % 8
    for i in range(np.uintp(end), np.uintp(after + 8)):
        into[i] = np.uint8(0)
    _put(into, at + _ROW_CRC, _state_after(into[begin : begin + row], _ONES, room))
    whole = payload.size - payload.size % FOLDED
    state = _ONES
    if whole:
        fold_crc(payload[:whole], room)
        state = _state_after(room, np.uint32(0), np.empty(16, np.uint8))
    _put(into, at + _PAYLOAD_CRC, _state_after(payload[whole:], state, room))
    _put(into, at, _state_after(into[at + 4 : begin], np.uint32(salted) ^ _ONES, room))
    return after


@helper()
def _state_after(data: Any, state: Any, room: Any) -> Any:
    """Return the state of a checksum after further bytes: its complement is the CRC-32."""
    whole = data.size - data.size % 16
    if whole:
        folded = room[:16]
        fold_crc_further(data[:whole], folded, state)
        state = _stepped(folded, np.uint32(0))
    return _stepped(data[whole:], state)


@helper()
def _stepped(data: Any, state: Any) -> Any:
    for i in range(data.size):
        state = _TABLE[(state ^ np.uint32(data[i])) & np.uint32(255)] ^ (state >> np.uint32(8))
    return np.uint32(state)


@helper()
def _put(into: Any, at: Any, state: Any) -> Any:
    for i in range(4):
        into[at + i] = np.uint8((state ^ _ONES) >> np.uint32(8 * i) & np.uint32(255))
