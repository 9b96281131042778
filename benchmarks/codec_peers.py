"""The codecs' mathematics as one would write them down in NumPy and in PyTorch, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from aiops.codecs import Codec
from aiops.kernels.vocabulary import Array

__all__ = ["Pair", "peers"]

Pair: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
"""What encodes, and what decodes what that made."""


def peers(codec: Codec, tensor: Array) -> dict[str, Pair]:
    """Return the codec's mathematics as one would write them down elsewhere."""
    numpy_made = {
        "fp16": _numpy_fp16,
        "bf16": _numpy_bf16,
        "int8": _numpy_int8,
        "onebit": _numpy_onebit,
        "topk": _numpy_topk,
        "lowrank": _numpy_lowrank,
    }
    found = {"NumPy": numpy_made[codec.name](codec, tensor)}
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(1)
    made = _torch(torch, codec, torch.from_numpy(tensor))
    return found if made is None else {**found, "PyTorch": made}


def _numpy_fp16(codec: Codec, tensor: Array) -> Pair:
    sent = tensor.astype(np.float16)
    return lambda: tensor.astype(np.float16), lambda: sent.astype(np.float32)


def _numpy_bf16(codec: Codec, tensor: Array) -> Pair:
    def encode() -> Array:
        bits = tensor.view(np.uint32)
        return ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype(np.uint16)

    sent = encode()
    return encode, lambda: (sent.astype(np.uint32) << 16).view(np.float32)


def _numpy_int8(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    blocks = flat[: flat.size // 256 * 256].reshape(-1, 256)

    def encode() -> tuple[Array, Array]:
        scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
        return scales, np.rint(blocks / scales).astype(np.int8)

    scales, codes = encode()
    return encode, lambda: codes * scales


def _numpy_onebit(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    blocks = flat[: flat.size // 1024 * 1024].reshape(-1, 1024)

    def encode() -> tuple[Array, Array]:
        return np.abs(blocks).mean(axis=1, keepdims=True), np.packbits(blocks < 0, axis=1)

    scales, signs = encode()
    return encode, lambda: np.where(np.unpackbits(signs, axis=1), -scales, scales)


def _numpy_topk(codec: Codec, tensor: Array) -> Pair:
    flat = tensor.reshape(-1)
    kept = max(1, round(getattr(codec, "fraction") * flat.size))  # noqa: B009

    def encode() -> tuple[Array, Array]:
        indices = np.argpartition(np.abs(flat), -kept)[-kept:]
        return indices, flat[indices]

    def decode() -> Array:
        out = np.zeros_like(flat)
        out[indices] = values
        return out

    indices, values = encode()
    return encode, decode


def _numpy_lowrank(codec: Codec, tensor: Array) -> Pair:
    rank = getattr(codec, "rank")  # noqa: B009
    first = np.random.default_rng(1).standard_normal((tensor.shape[1], rank), np.float32)

    def encode() -> tuple[Array, Array]:
        p, _ = np.linalg.qr(tensor @ first)
        return p, tensor.T @ p

    p, q = encode()
    return encode, lambda: p @ q.T


def _torch(torch: Any, codec: Codec, tensor: Any) -> Pair | None:
    """Return what PyTorch has, by name; there is nothing like ``onebit`` in it."""
    flat = tensor.reshape(-1)
    if codec.name in ("fp16", "bf16"):
        dtype = torch.float16 if codec.name == "fp16" else torch.bfloat16
        sent = tensor.to(dtype)
        return lambda: tensor.to(dtype), lambda: sent.to(torch.float32)
    if codec.name == "int8":
        blocks = flat[: flat.numel() // 256 * 256].reshape(-1, 256)

        def quantise() -> tuple[Any, Any]:
            scales = blocks.abs().amax(dim=1, keepdim=True) / 127
            return scales, (blocks / scales).round().to(torch.int8)

        scales, codes = quantise()
        return quantise, lambda: codes * scales
    if codec.name == "topk":
        kept = max(1, round(getattr(codec, "fraction") * flat.numel()))  # noqa: B009

        def largest() -> tuple[Any, Any]:
            _, indices = flat.abs().topk(kept, sorted=False)
            return indices, flat[indices]

        indices, values = largest()
        return largest, lambda: torch.zeros_like(flat).index_put_((indices,), values)
    if codec.name == "lowrank":
        first = torch.randn(tensor.shape[1], getattr(codec, "rank"))  # noqa: B009

        def factors() -> tuple[Any, Any]:
            p, _ = torch.linalg.qr(tensor @ first)
            return p, tensor.T @ p

        p, q = factors()
        return factors, lambda: p @ q.T
    return None
