"""Encode and decode one tensor with a codec of a user's, before a run depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from aiops.codecs.base import LIMIT, Codec, Encoder, Floats
from aiops.common.load import described
from aiops.errors import UsageError

_SHAPES = ((16, 32), (128, 128), (512,))
"""The first that a codec makes smaller is tried; of others it need not have an encoder."""


def try_codec(codec: Codec) -> None:
    """Refuse a codec that lacks a method, or does not decode what its encoder writes.

    Raises
    ------
    UsageError
        It names the codec, the method, and what that must do.
    """
    kind = type(codec)
    what = f"codec {codec.name!r} ({kind.__module__}:{kind.__qualname__})"
    for method in ("most", "encoder", "check"):
        _require(what, kind, Codec, method)
    if _inherits(kind, Codec, "pieces"):
        _require(what, kind, Codec, "decode")
    smaller = (shape for shape in _SHAPES if _makes_smaller(what, codec, shape))
    shape = next(smaller, None)
    if shape is None:
        return
    values = np.sin(np.arange(math.prod(shape), dtype=np.float64)).astype(np.float32)
    for feedback in (False, True):
        make = partial(codec.encoder, shape, feedback=feedback, backend="numpy")
        encoder = _attempt(f"{what}: encoder() fails", make)
        if not isinstance(encoder, Encoder):
            raise UsageError(
                f"{what}: encoder() returned {encoder!r}, and it must return an"
                " aiops.codecs.Encoder"
            )
        if _inherits(type(encoder), Encoder, "encode"):
            _require(what, type(encoder), Encoder, "write")
        for _step in range(2):
            _try_step(what, kind, encoder, values.reshape(shape))


def _makes_smaller(what: str, codec: Codec, shape: tuple[int, ...]) -> bool:
    """Return whether a run would encode a tensor of a shape, as `CodecChoice` decides."""
    most = _attempt(f"{what}: most() fails", partial(codec.most, shape))
    return bool(most < 4 * math.prod(shape))


def _try_step(what: str, kind: type[Codec], encoder: Encoder, values: Floats) -> None:
    """Encode the tensor, and decode it in each way."""
    shape, flat = values.shape, values.reshape(-1)
    written = _attempt(f"{what}: its encoder fails", partial(encoder.encode, flat.copy()))
    payload = np.frombuffer(bytes(written), np.uint8)
    fault = _attempt(f"{what}: check() fails", partial(kind.check, payload, shape, "numpy"))
    if fault is not None:
        raise UsageError(
            f"{what}: check() refuses what its own encoder wrote of a tensor of {list(shape)}: it"
            f" {fault}; check() must return None for a payload that decode() can read"
        )

    def decoded(start: float, add: bool) -> Floats:
        out = np.full(flat.size, start, np.float32)
        kind.decode(payload, shape, out, add=add, backend="numpy")
        return out

    plain, again, added = (
        _attempt(f"{what}: decode() fails", partial(decoded, start, add))
        for start, add in ((0.0, False), (1.0, False), (1.0, True))
    )
    if not (np.abs(plain) < LIMIT).all():
        raise UsageError(
            f"{what}: decode() gives {plain[~(np.abs(plain) < LIMIT)][0]} for a tensor of numbers"
            " from -1 to 1: its values must be finite and below 1e18 in magnitude"
        )
    if not np.array_equal(plain, again):
        raise UsageError(
            f"{what}: decode() without add=True goes by what is in out: it must overwrite that"
        )
    if not np.allclose(added, plain + np.float32(1), rtol=1e-5, atol=1e-5):
        raise UsageError(f"{what}: decode() with add=True does not add to what is in out")


def _require(what: str, kind: type, base: type, method: str) -> None:
    """Refuse a class that has only the method of its base, which does nothing."""
    if _inherits(kind, base, method):
        raise UsageError(f"{what}: {kind.__name__} has no method {method}(): write it")


def _inherits(kind: type, base: type, method: str) -> bool:
    mine = getattr(kind, method)
    return getattr(mine, "__func__", mine) is getattr(
        getattr(base, method), "__func__", getattr(base, method)
    )


def _attempt(what: str, call: Callable[[], Any]) -> Any:
    """Return what a user's method returns; an error of it is told in one line."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} with {described(error, skipped=1)}") from error
